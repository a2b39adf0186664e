"""A block computed in chunks of frames is the block: outputs and all gradients, borders included.

The oracle is the block on the whole clip. In fp64, but for a few sums in fp32, only a wrong halo, a
window that is clamped to the chunk instead of the clip, or a gradient counted twice can make a
difference.
"""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor, nn

from megaslide.models.chunks import frame_chunks
from megaslide.models.dit import VideoDiT, VideoDiTBlock, VideoDiTConfig
from megaslide.models.layers import rope_tables

DIM, HEADS, HEIGHT, WIDTH = 12, 2, 2, 3
Given = tuple[list[Tensor], list[Tensor]]


def block_of(**fields: Any) -> VideoDiTBlock:
    """A block of which nothing is zero any more: offsets move taps as far as they can."""
    torch.manual_seed(0)
    config = VideoDiTConfig(
        in_channels=2, text_dim=4, hidden_size=DIM, num_attention_heads=HEADS, num_layers=1,
        **fields,
    )  # fmt: skip
    block = VideoDiT(config).blocks[0]
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    assert isinstance(block, VideoDiTBlock)
    return block


def inputs(frames: int, dtype: torch.dtype) -> list[Tensor]:
    """hidden, text, modulation, registers; two samples."""
    g = torch.Generator().manual_seed(frames)
    shapes = ((2, frames * HEIGHT * WIDTH, DIM), (2, 3, DIM), (2, 6, DIM), (1, 2, DIM))
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]


def run(block: VideoDiTBlock, frames: int, per_chunk: int, dtype: torch.dtype) -> Given:
    """Outputs by chunk, joined; and gradients of inputs and parameters from weighted outputs."""
    grid = (frames, HEIGHT, WIDTH)
    given = inputs(frames, dtype)
    hidden, text, modulation, registers = given
    rope, outputs = rope_tables(grid, DIM // HEADS), []
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5), dtype=dtype)
    for chunk in block.chunks(per_chunk, {"grid": grid}):
        part = hidden[:, chunk.reach]
        tables = tuple(table[:, chunk.reach] for table in rope)
        out = block(part, text, None, modulation, tables, registers, **chunk.arguments)
        (out * weight[:, chunk.own]).sum().backward()
        outputs.append(out.detach())
    grads = [t.grad for t in [*given, *block.parameters()]]
    block.zero_grad()
    return outputs, [torch.zeros(1) if g is None else g for g in grads]


def largest_difference(block: VideoDiTBlock, frames: int, per_chunk: int, dtype: Any) -> float:
    (whole,), expected = run(block, frames, frames, dtype)
    outputs, grads = run(block, frames, per_chunk, dtype)
    assert len(outputs) == -(-frames // per_chunk)
    pairs = [(torch.cat(outputs, 1), whole), *zip(grads, expected, strict=True)]
    floor = 1e-3 * max(g.abs().max() for g in expected)  # some are zero but for rounding
    return max(((a - b).abs().max() / b.abs().max().clamp_min(floor)).item() for a, b in pairs)


KINDS = st.one_of(
    st.just({"attention_kind": "neighborhood"}),
    st.fixed_dictionaries({
        "offset_kind": st.sampled_from(["shift", "affine", "tap"]),
        "offset_range": st.sampled_from([(frames, 1.0, 0.5) for frames in (0.0, 0.4, 1.0, 2.5)]),
    }),
)  # fmt: skip


@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(
    kind=KINDS, window=st.integers(1, 9), frames=st.integers(1, 12), per_chunk=st.integers(1, 12),
    conv_branch=st.booleans(),
)  # fmt: skip
def test_chunks_are_the_whole(
    kind: dict[str, Any], window: int, frames: int, per_chunk: int, conv_branch: bool
) -> None:
    block = block_of(window=(window, 2, 3), conv_branch=conv_branch, **kind).double()
    assert largest_difference(block, frames, min(per_chunk, frames), torch.float64) < 1e-6


@pytest.mark.parametrize("window", [2, 3, 5])
@pytest.mark.parametrize("offset_kind", ["shift", "affine", "tap"])
def test_chunks_are_the_whole_in_fp32_by_the_default_kernels(offset_kind: str, window: int) -> None:
    block = block_of(window=(window, 3, 3), offset_kind=offset_kind)
    assert largest_difference(block, 11, 2, torch.float32) < 2e-5


@pytest.mark.parametrize("seed", range(3))
def test_reach_is_exact(seed: int) -> None:
    """Not a frame less: what is outside has no influence, and what is just inside has some."""
    torch.manual_seed(seed)
    frames, own = 16, (7, 9)
    block = block_of(window=(3, 2, 2), offset_kind="shift", offset_range=(1.0, 1.0, 1.0)).double()
    (hidden, text, modulation, registers), grid = inputs(frames, torch.float64), (frames, 2, 3)
    out = block(hidden, text, None, modulation, rope_tables(grid, 6), registers, grid=grid, own=own)
    assert out.shape == (2, 2 * 6, DIM)
    (grad,) = torch.autograd.grad(out.square().sum(), hidden)
    felt = grad.unflatten(1, grid).abs().amax((0, 2, 3, 4)) > 0
    first, stop = block.attn1.reach(own, frames)
    assert (first, stop) == (5, 11)
    assert not felt[:first].any()
    assert not felt[stop:].any()
    assert felt[first]
    assert felt[stop - 1]


def test_chunks_are_as_equal_as_they_can_be() -> None:
    chunks = frame_chunks(4, (9, 2, 5), lambda own, frames: (max(0, own[0] - 1), own[1]))
    assert [(c.own.stop - c.own.start) // 10 for c in chunks] == [3, 3, 3]
    assert chunks[1].reach == slice(20, 60)
    assert chunks[1].arguments == {"grid": (4, 2, 5), "own": (1, 4)}


@pytest.mark.parametrize("kind", ["dense", "swin"])
def test_attention_to_all_frames_cannot_be_cut(kind: str) -> None:
    assert "all frames" in (block_of(attention_kind=kind).why_whole() or "")
    assert block_of(attention_kind="neighborhood").why_whole() is None
