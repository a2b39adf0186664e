"""Cutting a block's tokens into chunks of frames, each with the frames that it depends on.

The streaming engine computes a block chunk by chunk where its whole would not fit. Local attention
makes that exact: what a frame depends on is a few frames around it, and no more.

Shapes: N = T·H·W tokens, t-major, so that frames are runs of rows.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from megaslide.models.attention import Frames
from megaslide.models.layers import Grid


class FrameChunk(NamedTuple):
    """One chunk, as the engine asks for it."""

    own: slice
    """Rows of the output that it gives."""
    reach: slice
    """Rows of the input that it is given."""
    arguments: dict[str, Any]
    """`grid` and `own` of the part."""


def frame_chunks(
    frames: int, grid: Grid, reach: Callable[[Frames, int], Frames]
) -> list[FrameChunk]:
    """Chunks of at most `frames` frames, as equal as they can be.

    Args:
        frames: 1 or more.
        grid: (T, H, W).
        reach: the frames, of so many, that some of them depend on.
    """
    count = -(-grid[0] // frames)
    borders = [grid[0] * number // count for number in range(count + 1)]
    return [_chunk(own, grid, reach) for own in pairwise(borders)]


def rows_of(frames: Frames, grid: Grid) -> slice:
    """Of N tokens, those of some frames."""
    rows = grid[1] * grid[2]
    return slice(frames[0] * rows, frames[1] * rows)


def _chunk(own: Frames, grid: Grid, reach: Callable[[Frames, int], Frames]) -> FrameChunk:
    t, h, w = grid
    first, stop = reach(own, t)
    given = {"grid": (stop - first, h, w), "own": (own[0] - first, own[1] - first)}
    return FrameChunk(rows_of(own, grid), rows_of((first, stop), grid), given)
