"""Blocks that can be computed in parts of their rows, where one block's workspace is too large.

The engine knows no model, so a block offers itself what is needed (`Cuttable`): into which parts
its rows can be cut, and which rows each part needs to be exact. Every part is then the block's own
forward on fewer rows, so that at any time only one part's intermediate tensors exist.

Shapes: rows are dimension 1 of the block's output and of its row arguments, such as tokens.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._pytree import tree_map

from megaslide.errors import InputError

Tensor = torch.Tensor


class Chunk(Protocol):
    """One part of a call."""

    @property
    def own(self) -> slice:
        """Rows of the output that the block returns for it, of all chunks in order without gaps."""
        ...

    @property
    def reach(self) -> slice:
        """Rows of the row arguments that it must be given: its own, and those they depend on."""
        ...

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments that replace those of the whole call, by name; none of them learns."""
        ...


@runtime_checkable
class Cuttable(Protocol):
    """A block whose forward can be called on part of its rows; its output is one tensor."""

    row_arguments: Sequence[str]
    """Arguments of forward whose tensors have the rows as dimension 1; the others are whole."""

    def why_whole(self) -> str | None:
        """Why this block cannot be cut after all, or None where it can."""
        ...

    def chunks(self, frames: int, arguments: Mapping[str, Any]) -> Sequence[Chunk]:
        """The chunks of a call, of at most so many frames each, in the order of their rows."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """What a block computes at once: a micro-batch, or a chunk of its rows."""

    batch: slice
    chunk: Chunk | None = None
    reached_again: int = 0
    """The first row that a later chunk of the micro-batch is given too."""

    def of(self, tensor: Tensor, *, split: bool, rows: bool) -> Tensor:
        """Its view of an input that may be split by the batch, and may have rows."""
        tensor = tensor[self.batch] if split else tensor
        return tensor[:, self.chunk.reach] if rows and self.chunk is not None else tensor

    def own(self, tensor: Tensor) -> Tensor:
        """Its view of the output `[B, rows, ...]`, or of that's gradient."""
        return tensor[self.batch] if self.chunk is None else tensor[self.batch, self.chunk.own]


def require_cuttable(blocks: Mapping[str, nn.Module]) -> None:
    """Refuse `frames_per_chunk` where a block cannot be cut.

    Args:
        blocks: by name.

    Raises:
        InputError: names the option, the block, the reason and the fix.
    """
    for name, block in blocks.items():
        reason = f"a {type(block).__name__} does not offer it"
        if isinstance(block, Cuttable):
            reason = block.why_whole() or ""
        if reason:
            raise InputError(
                f"frames_per_chunk: {name} cannot be computed in chunks of frames: {reason}",
                "leave frames_per_chunk out (null), which computes blocks whole",
            )


def chunks_of(block: Cuttable, frames: int, call: inspect.BoundArguments) -> Sequence[Chunk]:
    """The chunks of a call; none where it is computed whole.

    Raises:
        ValueError: they leave rows out, or do not cover their own.
    """
    chunks = block.chunks(frames, call.arguments)
    starts = [0, *(chunk.own.stop for chunk in chunks)]
    for chunk, start in zip(chunks, starts, strict=False):
        own, reach = chunk.own, chunk.reach
        if own.start != start or not reach.start <= own.start < own.stop <= reach.stop:
            raise ValueError(
                f"{type(block).__name__}: a chunk gives rows {own} from rows {reach}; it has to "
                f"begin at {start} and to be given all of its own"
            )
    return chunks if len(chunks) > 1 else ()


def cut_arguments(
    block: Cuttable, chunk: Chunk, call: inspect.BoundArguments
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the block's forward on one chunk."""

    def cut(leaf: Any) -> Any:
        return leaf[:, chunk.reach] if isinstance(leaf, Tensor) else leaf

    given = {
        name: tree_map(cut, value) if name in block.row_arguments else value
        for name, value in call.arguments.items()
    }
    bound = inspect.BoundArguments(call.signature, given | dict(chunk.arguments))
    return bound.args, bound.kwargs
