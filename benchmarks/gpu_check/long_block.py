"""One block on a clip that is as long as the paper's: 256 frames of 68x120 tokens, hidden 8192.

One activation of it is 34 GB. Beside the block's weights there may be two of them, its input and
one gradient, and what one chunk of frames is computed with. To have nothing else on the device, the
block stands between an input that is noise and a loss whose gradient is made when it is asked for.

Shapes: hidden [1, N, D], N = T·H·W tokens, text [1, L, D], d channels of a head.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_check.session import Row, Session
from megaslide.models.dit import VideoDiTBlock, VideoDiTConfig
from megaslide.models.layers import Grid, rope_tables
from megaslide.streaming import StreamedModel, stream

HEAD_DIM, TEXT = 128, 512
WINDOW = (3, 7, 7)
GRID = (256, 68, 120)
"""Tokens of 256 frames of 1088x1920 at 16 pixels."""
FRAMES = 2
"""Per chunk: the planner's working set of a block is then 19.4 GB."""
SHORT = 8
"""Frames that tell how long all would take."""
PEAK_BYTES = 115 * 10**9


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A block's width and the tokens it is given."""

    hidden_size: int
    grid: Grid
    window: Grid = WINDOW
    text: int = TEXT

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    def config(self) -> VideoDiTConfig:
        return VideoDiTConfig(
            in_channels=1, text_dim=1, hidden_size=self.hidden_size, num_layers=1,
            num_attention_heads=max(1, self.hidden_size // HEAD_DIM), window=self.window,
        )  # fmt: skip


LONG = Clip(hidden_size=8192, grid=GRID)
TOY = Clip(hidden_size=32, grid=(6, 3, 4), window=(3, 3, 3), text=3)
GATE = Clip(hidden_size=256, grid=(7, 8, 12), text=16)


class _Noise(torch.autograd.Function):
    """Noise of a seed, and a learned row added to it, [1, N, D]; it keeps nothing."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, tokens: int) -> Tensor:
        generator = torch.Generator(row.device).manual_seed(0)
        noise = torch.empty(1, tokens, len(row), dtype=row.dtype, device=row.device)
        return noise.normal_(generator=generator).add_(row)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].sum((0, 1)), None


class _Weighted(torch.autograd.Function):
    """Sum of x[n, d]·a[n]·b[d], fp32, whose gradient of x is made in the backward; nothing kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.new_empty(0), x.shape
        a, b = _weights(*ctx.like)
        return (x[0] @ b).float() @ a.float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        a, b = _weights(*ctx.like)
        return (a * grads[0].to(a.dtype))[None, :, None] * b  # no view: it may be overwritten


def _weights(like: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    a, b = (torch.arange(n, device=like.device) for n in shape[1:])
    scale = (shape[1] * shape[2]) ** -0.5
    return (scale * torch.cos(0.7 * a)).to(like.dtype), torch.cos(1.3 * b).to(like.dtype)


class OneBlock(nn.Module):
    """A VideoDiT's block between noise and a loss; forward gives the loss."""

    def __init__(self, clip: Clip) -> None:
        super().__init__()
        self.clip = clip
        self.row = nn.Parameter(torch.zeros(clip.hidden_size))
        self.modulation = nn.Parameter(torch.zeros(1, 6, clip.hidden_size))
        self.blocks = nn.ModuleList([VideoDiTBlock(clip.config(), 0)])

    def forward(self, text: Tensor) -> Tensor:
        clip, device = self.clip, self.row.device
        rope = rope_tables(
            clip.grid, clip.hidden_size // clip.config().num_attention_heads, device=device
        )
        hidden = _Noise.apply(self.row, clip.tokens)
        return _Weighted.apply(
            self.blocks[0](hidden, text, None, self.modulation, rope, None, grid=clip.grid)
        )


class SmallWeights:
    """Sets a module's own parameters: normal of deviation 0.02, gains of norms one."""

    def __call__(self, module: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, parameter in module.named_parameters(recurse=False):
            if name == "weight" and parameter.ndim == 1:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(std=0.02, generator=generator)


def streamed_block(
    clip: Clip, device: Any, dtype: torch.dtype, frames: int | None
) -> StreamedModel:
    with torch.device("meta"):
        model = OneBlock(clip)
    return stream(
        model, device=device, dtype=dtype, lr=1e-4, frames_per_chunk=frames,
        init_weights=SmallWeights(),
    )  # fmt: skip


def text_of(clip: Clip, device: Any, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, clip.text, clip.hidden_size, generator=generator).to(device, dtype)


# ---- the part ------------------------------------------------------------------------------------


def run(session: Session) -> None:
    """Whole and in chunks are the same where both fit; then one step of the long clip."""
    clip = TOY if session.smoke else GATE
    if session.passes("gate chunks", lambda: gate(session, clip)):
        session.row("long block", lambda: long_block(session, TOY if session.smoke else LONG))


def gate(session: Session, clip: Clip) -> Row:
    """Losses and gradient norms of three steps in fp32."""
    device, found = session.chip.device, []
    for frames in (None, FRAMES):
        model = streamed_block(clip, device, torch.float32, frames)
        text, steps = text_of(clip, device, torch.float32), []
        for _ in range(3):
            loss = model(text)
            loss.backward()
            steps += [loss.item(), model.step().grad_norm]
        model.close()
        found.append(steps)
    worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(*found, strict=True))
    if not worst <= 1e-3:
        raise RuntimeError(f"a block in chunks is not the block: {found}")
    return {"worst": worst, "bound": 1e-3}


def long_block(session: Session, clip: Clip) -> Row:
    """Seconds and peak bytes of one forward and backward in bf16, if memory and time allow."""
    chip, gradient = session.chip, {}
    free = torch.cuda.mem_get_info(chip.device)[0] if chip.is_gpu else None
    if free is not None and free < PEAK_BYTES:
        return {"skipped": f"{free} bytes of device memory are free, {PEAK_BYTES} needed"}
    short = Clip(
        hidden_size=clip.hidden_size, grid=(min(SHORT, clip.grid[0]), *clip.grid[1:]),
        window=clip.window, text=clip.text,
    )  # fmt: skip
    model = streamed_block(clip, chip.device, torch.bfloat16, FRAMES)
    text, module = text_of(clip, chip.device, torch.bfloat16), model.module

    def step() -> float:
        start = time.perf_counter()
        loss = model(text)
        loss.backward()
        gradient["norm"] = model.step().grad_norm
        chip.synchronize()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"loss {loss.item()} is not finite")
        return time.perf_counter() - start

    try:
        module.clip = short
        step()  # compiles and tunes
        expected_s = step() * clip.tokens / short.tokens
        if expected_s > session.left_s:
            return {
                "skipped": f"{expected_s:.0f} s expected from {SHORT} frames, "
                f"{session.left_s:.0f} s left"
            }
        module.clip = clip
        chip.release()
        with model.observing_memory():
            step_s = step()
    finally:
        model.close()
    return {
        "step_s": step_s, "tokens_s": clip.tokens / step_s, "tokens": clip.tokens,
        "peak_device_bytes": model.device_peak_bytes, "bound_bytes": PEAK_BYTES,
        "activation_bytes": 2 * clip.tokens * clip.hidden_size, "frames_per_chunk": FRAMES,
        "hidden_size": clip.hidden_size, "grad_norm": gradient["norm"], "expected_s": expected_s,
    }  # fmt: skip
