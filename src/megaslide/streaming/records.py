"""What the state of a unit consists of, and where each byte of it lies: arithmetic only.

A unit's record is a list of regions, one per kind of state, each a whole number of pages; inside a
region the unit's segments follow one another, each on a page boundary. The tiers differ in where
the regions are kept (arenas in RAM, one record per unit on disk), not in what is in them, so sizes
are known before anything is allocated and are the same for both.

AdamW walks a unit in pieces: ranges of at most `PIECE` elements of one segment. A piece is whole
pages in every region, which bounds the memory that the disk tier needs, whatever a block's size.
Both tiers use the same pieces, so their results are the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from megaslide.ops.adamw import BLOCK8
from megaslide.streaming.layout import (
    ALIGN,
    PAGE,
    ParameterSlice,
    Segment,
    UnitLayout,
    find_blocks,
    plan_units,
    round_up,
)

StateFormat = Literal["master", "split", "split8"]
FORMATS: tuple[StateFormat, ...] = get_args(StateFormat)
PIECE = 1 << 22
"""Elements: 50 MB of state in `split`, long enough for full disk bandwidth."""

assert ALIGN % BLOCK8 == 0, "a scale must not serve two parameters"
assert PIECE * 4 // BLOCK8 % PAGE == 0, "the scales of a piece must be whole pages"


@dataclass(frozen=True, slots=True)
class Part:
    """One segment's entries inside a region."""

    dtype: torch.dtype
    start: int
    """First byte, from the region's start."""


@dataclass(frozen=True, slots=True)
class Region:
    """All entries of one kind in one unit."""

    kind: str
    nbytes: int
    """A multiple of PAGE."""
    parts: tuple[Part | None, ...]
    """Per segment of the unit; None where the segment has no such state."""
    per: int = 1
    """Elements that share one entry."""

    def span(self, segment: int, start: int, stop: int) -> tuple[int, int] | None:
        """Bytes [first, last) of elements [start, stop) of a segment, from the region's start."""
        part = self.parts[segment]
        if part is None:
            return None
        size = part.dtype.itemsize
        return part.start + start // self.per * size, part.start + -(-stop // self.per) * size

    def entries(
        self, memory: torch.Tensor, segment: int, start: int, stop: int
    ) -> torch.Tensor | None:
        """Elements [start, stop) of a segment as a typed 1-D view of the region's uint8 memory."""
        span, part = self.span(segment, start, stop), self.parts[segment]
        if span is None or part is None:
            return None
        return memory[span[0] : span[1]].view(part.dtype)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of one segment."""

    segment: int
    start: int
    stop: int


class Record:
    """The regions of one unit by kind, in the order in which a disk keeps them."""

    def __init__(self, layout: UnitLayout, state_format: StateFormat, *, ema: bool) -> None:
        self.layout = layout
        regions = _regions(layout, state_format, ema=ema)
        self.regions = {region.kind: region for region in regions if region.nbytes}

    def pieces(self) -> list[Piece]:
        """All trainable elements, each once, in order."""
        return [
            Piece(index, start, min(start + PIECE, segment.numel))
            for index, segment in enumerate(self.layout.segments)
            for start in range(0, segment.numel, PIECE)
        ]

    def locate(self, parameter: ParameterSlice) -> Piece:
        """Where a trainable parameter lies, padding left out.

        Raises:
            ValueError: it is frozen.
        """
        for index, segment in enumerate(self.layout.segments):
            start = parameter.element_offset - segment.element_offset
            if parameter.trainable and 0 <= start < segment.numel:
                return Piece(index, start, start + parameter.numel)
        raise ValueError(f"{parameter.name} is frozen; it has no state besides its weight")


def planned_bytes(
    units: Sequence[UnitLayout], *, state_format: StateFormat = "split", ema: bool = False
) -> dict[str, int]:
    """Bytes of each kind for these units, page padding included, before anything is allocated.

    `gradients` is the only kind that does not persist from step to step.
    """
    total: dict[str, int] = {}
    for layout in units:
        for kind, region in Record(layout, state_format, ema=ema).regions.items():
            total[kind] = total.get(kind, 0) + region.nbytes
    return total


def planned_state_bytes(
    model: nn.Module, *, dtype: torch.dtype | None = None, state_format: StateFormat = "split",
    ema: bool = False,
) -> int:  # fmt: skip
    """Bytes of persistent state that `megaslide.stream` would hold for a model, `meta` or not.

    Raises:
        ValueError: the model has no repeated blocks.
    """
    resident, blocks = plan_units(model, find_blocks(model), dtype)
    layouts = [unit.layout for unit in (resident, *blocks)]
    kinds = planned_bytes(layouts, state_format=state_format, ema=ema)
    return sum(nbytes for kind, nbytes in kinds.items() if kind != "gradients")


def _regions(layout: UnitLayout, state_format: StateFormat, *, ema: bool) -> Iterator[Region]:
    segments = layout.segments
    in_place = tuple(Part(s.dtype, s.byte_offset) for s in segments)
    yield Region("weights", round_up(layout.weight_nbytes, PAGE), in_place)
    bf16 = [s.dtype == torch.bfloat16 for s in segments]
    if state_format == "master":
        yield _region("master", segments, torch.float32, bf16)
    else:
        yield _region("residual", segments, torch.int16, bf16)
    everywhere = [True] * len(segments)
    for kind in ("exp_avg", "exp_avg_sq"):
        if state_format == "split8":
            yield _region(kind, segments, torch.uint8, everywhere)
            yield _region(f"{kind}_scale", segments, torch.float32, everywhere, per=BLOCK8)
        else:
            yield _region(kind, segments, torch.float32, everywhere)
    if ema:
        yield _region("ema", segments, torch.float32, everywhere)
    yield Region("gradients", round_up(layout.gradient_nbytes, PAGE), in_place)


def _region(
    kind: str, segments: Sequence[Segment], dtype: torch.dtype, has: Sequence[bool], per: int = 1
) -> Region:
    parts: list[Part | None] = []
    end = 0
    for segment, present in zip(segments, has, strict=True):
        parts.append(Part(dtype, end) if present else None)
        if present:
            end += round_up(segment.numel // per * dtype.itemsize, PAGE)
    return Region(kind, end, tuple(parts), per)
