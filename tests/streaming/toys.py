"""Small models with the shapes of trouble that real ones have, and a plain PyTorch loop."""

from typing import Any

import pytest
import torch
from plain_adamw import PlainAdamW
from torch import nn

Tensor = torch.Tensor
DEVICE = "cpu"
"""Where models of comparison and data are; the fixture `backend` sets it."""


class Block(nn.Module):
    """Attention-free block: batch and shared inputs, keyword and positional, dropout."""

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, shift: Tensor, *, table: Tensor) -> Tensor:
        inner = torch.tanh(self.up(self.norm(hidden) + shift[:, None] + table))
        return hidden + self.down(self.dropout(inner))


class Net(nn.Module):
    """embed -> blocks -> head, with a conditioning tensor and a table shared by all blocks."""

    def __init__(self, dim: int = 16, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(5, dim)
        self.condition = nn.Linear(3, dim)
        self.register_buffer("table", torch.linspace(-1, 1, 7 * dim).view(1, 7, dim))
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(depth))
        self.head = nn.Linear(dim, 2)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        hidden, shift = self.embed(x), self.condition(c)
        for block in self.blocks:
            hidden = block(hidden, shift, table=self.table)
        return self.head(hidden)


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).to(DEVICE)


def batches(count: int, size: int = 4, seed: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`count` batches of (x [B, 7, 5], c [B, 3], target [B, 7, 2])."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((size, 7, 5), (size, 3), (size, 7, 2))
    return [
        tuple(torch.randn(s, generator=g).to(DEVICE) for s in shapes)  # type: ignore[misc]
        for _ in range(count)
    ]


def train_plain(
    model: nn.Module, data: list[Any], *, max_grad_norm: float | None = 1.0, **adamw: Any
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the loop everybody writes; `model` is moved to the device."""
    model.to(DEVICE)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = PlainAdamW(parameters, **adamw)
    losses, norms = [], []
    for x, c, y in data:
        loss = (model(x, c) - y).square().mean()
        loss.backward()
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, limit).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train_streamed(streamed: Any, data: list[Any]) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for x, c, y in data:
        loss = (streamed(x, c) - y).square().mean()
        loss.backward()
        norms.append(streamed.step().grad_norm)
        losses.append(loss.item())
    return losses, norms


def largest_relative(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest over tensors of |a - b| / |b| in the maximum norm."""
    assert a.keys() == b.keys()
    return max(
        (
            (a[k].cpu().float() - b[k].cpu().float()).abs().max()
            / b[k].float().abs().max().cpu().clamp_min(1e-12)
        ).item()
        for k in b
    )


def within(bound: float, on_gpu: float) -> float:
    """A relative bound: `on_gpu` where plain PyTorch's AdamW and norms run on a GPU.

    Its arithmetic rounds otherwise than the CPU's, on which the engine's AdamW runs; and Adam's
    first steps turn a rounding of a small gradient into a part of lr.
    """
    return bound if DEVICE == "cpu" else max(bound, on_gpu)


def like(expected: Any) -> Any:
    """What equals losses or norms of plain PyTorch: themselves; on a GPU, what is near them."""
    if DEVICE == "cpu":
        return expected
    if isinstance(expected, tuple):
        return tuple(like(x) for x in expected)
    return pytest.approx(expected, rel=1e-4)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether values are those of plain PyTorch: equal bits; on a GPU, nearer than one update."""
    if DEVICE == "cpu":
        return torch.equal(ours, theirs)
    return torch.allclose(ours.cpu().float(), theirs.detach().cpu().float(), rtol=1e-3, atol=1e-3)


def loss_of(model: Any, item: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, c, y = item
    return (model(x, c).float() - y.float()).square().mean()


class Stack(nn.Module):
    """`blocks` one after another, called by a function of (block, hidden, conditioning)."""

    def __init__(self, blocks: list[nn.Module], call: Any, dim: int = 6) -> None:
        super().__init__()
        self.embed, self.condition = nn.Linear(5, dim), nn.Linear(3, dim)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(dim, 2)
        self.call = call

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        hidden, shift = self.embed(x), self.condition(c)
        for block in self.blocks:
            hidden = self.call(block, hidden, shift)
        return self.head(hidden)
