"""One call of one block: its arguments, how they split into micro-batches, what a recompute needs.

Arguments and results are pytrees. A tensor belongs to the batch when its first dimension has the
size of the batch, which is that of the first tensor the block receives; everything else is shared
by all micro-batches. Where chance could make the two look alike, `shared_inputs` says so by the
names of the block's arguments, and what cannot be told apart is an error, never a guess.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from megaslide.streaming.chunks import Chunk, Cuttable, Part, chunks_of

Tensor = torch.Tensor


class _TensorMarker:
    """Stands for a tensor in flattened arguments."""


TENSOR = _TensorMarker()


@dataclass(kw_only=True, slots=True)
class BlockCall:
    """Everything a recomputation needs besides the tensors, which travel through autograd."""

    unit: int
    index: int
    """Position of this call in the forward pass."""
    leaves: list[Any]
    """Flattened arguments; `TENSOR` where a tensor was."""
    spec: TreeSpec
    batch: int
    micro_batch: int
    num_tensors: int
    """Tensors among the arguments; parameters of the resident unit follow them as inputs."""
    split: list[bool]
    """Per input: whether a micro-batch takes its part of it."""
    rows: list[bool]
    """Per input: whether a chunk takes its rows of it."""
    chunks: Sequence[Chunk]
    """Parts that each micro-batch is computed in; none where it is computed whole."""
    signature: inspect.Signature
    """Of the block's own forward."""
    autocast: tuple[bool, torch.dtype]
    rng: list[list[Tensor]] = field(default_factory=list)
    """RNG states before each part, so that dropout recomputes alike."""
    buffers: list[list[Tensor]] = field(default_factory=list)
    """The block's buffers before each part, where its forward changes them."""
    out_spec: TreeSpec | None = None
    out_leaves: list[Any] = field(default_factory=list)
    out_split: list[bool] = field(default_factory=list)
    previous: "BlockCall | None" = None
    """The call before it in the same pass, whose inputs backward needs next."""
    kept: list[Any] = field(default_factory=list)
    """Weak references to its boundary activations, where they may leave the device."""

    def parts(self) -> Iterator[Part]:
        """What is computed at once: micro-batches, each whole or chunk by chunk."""
        for start in range(0, self.batch, self.micro_batch):
            batch = slice(start, min(start + self.micro_batch, self.batch))
            if not self.chunks:
                yield Part(batch)
            for chunk, following in zip_longest(self.chunks, self.chunks[1:]):
                again = chunk.reach.stop if following is None else following.reach.start
                yield Part(batch, chunk, again)

    def arguments(
        self, tensors: Sequence[Tensor], part: Part
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with these tensors, the part's, in their places."""
        rest = iter(tensors)
        flat = [next(rest) if leaf is TENSOR else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(flat, self.spec)
        if part.chunk is None:
            return args, kwargs
        bound = self.signature.bind(*args, **kwargs)
        bound.arguments.update(part.chunk.arguments)
        return bound.args, bound.kwargs

    def cut(self, inputs: Sequence[Tensor], part: Part) -> list[Tensor]:
        """One part's inputs."""
        cuts = zip(inputs, self.split, self.rows, strict=True)
        return [part.of(t, split=split, rows=rows) for t, split, rows in cuts]

    def take_outputs(self, result: Any) -> list[Tensor]:
        """The tensors of the block's result, whose structure is remembered."""
        leaves, self.out_spec = tree_flatten(result)
        self.out_leaves = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """The block's result with these tensors in their places."""
        assert self.out_spec is not None
        rest = iter(outputs)
        leaves = [next(rest) if leaf is TENSOR else leaf for leaf in self.out_leaves]
        return tree_unflatten(leaves, self.out_spec)

    def output_grads(
        self, grads: Sequence[Tensor | None], number: int, part: Part
    ) -> list[Tensor | None]:
        """The parts of the outputs' gradients that part `number` receives."""
        return [
            part.own(grad) if grad is not None and split
            else grad if number == 0  # a shared output came from the first micro-batch
            else None
            for grad, split in zip(grads, self.out_split, strict=True)
        ]  # fmt: skip


class CallReader:
    """Describes the calls of the blocks, remembering what it has learned of their arguments."""

    def __init__(
        self, blocks: dict[int, nn.Module], micro_batch_size: int | None,
        shared_inputs: Sequence[str], device_type: str, frames_per_chunk: int | None,
    ) -> None:  # fmt: skip
        self._blocks, self._frames_per_chunk = blocks, frames_per_chunk
        self._signatures = {unit: inspect.signature(b.forward) for unit, b in blocks.items()}
        self._micro_batch_size, self._device_type = micro_batch_size, device_type
        self._shared_inputs = frozenset(shared_inputs)
        self._names = {u: type(b).__name__ for u, b in blocks.items()}
        self._seen_shared: set[tuple[int, int]] = set()
        """(unit, position) of tensor arguments whose first dimension was not the batch once."""
        self._require_known_names()

    def read(
        self, unit: int, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], externals: int
    ) -> tuple[BlockCall, list[Tensor]]:
        """The call and the tensors among its arguments.

        Raises:
            ValueError: a tensor that may or may not belong to the batch.
        """
        flat, spec = tree_flatten((args, kwargs))
        names = self._leaf_names(unit, args, kwargs)
        named = [(n, t) for n, t in zip(names, flat, strict=True) if isinstance(t, Tensor)]
        own = [t for n, t in named if n not in self._shared_inputs and t.dim() > 0]
        batch = len(own[0]) if own else 1
        micro_batch = min(self._micro_batch_size or batch, batch)
        split = [
            self._belongs(unit, position, name, tensor, batch, micro_batch)
            for position, (name, tensor) in enumerate(named)
        ]
        chunks, in_rows = self._in_chunks(unit, args, kwargs)
        autocast = torch.is_autocast_enabled(self._device_type)
        call = BlockCall(
            unit=unit, index=index, spec=spec, batch=batch, micro_batch=max(micro_batch, 1),
            leaves=[TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat],
            num_tensors=len(named), split=split + [False] * externals,
            signature=self._signatures[unit],
            rows=[name in in_rows for name, _ in named] + [False] * externals, chunks=chunks,
            autocast=(autocast, torch.get_autocast_dtype(self._device_type)),
        )  # fmt: skip
        return call, [tensor for _, tensor in named]

    def _in_chunks(
        self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Chunk], Sequence[str]]:
        """A call's chunks, and the names of the arguments that they cut."""
        block = self._blocks[unit]
        if self._frames_per_chunk is None or not isinstance(block, Cuttable):
            return (), ()
        call = self._signatures[unit].bind(*args, **kwargs)
        return chunks_of(block, self._frames_per_chunk, call), block.row_arguments

    def _belongs(
        self, unit: int, position: int, name: str, tensor: Tensor, batch: int, micro_batch: int
    ) -> bool:
        if name in self._shared_inputs or tensor.dim() == 0:
            return False
        if len(tensor) != batch:
            if len(tensor) != 1:  # 1 may be a batch that broadcasts
                self._seen_shared.add((unit, position))
            return False
        if micro_batch == batch:
            return False
        if (unit, position) in self._seen_shared:
            raise ValueError(
                f"{self._names[unit]}: argument {name!r} of shape {tuple(tensor.shape)} looks like "
                f"part of the batch of {batch}, but an earlier call had it shared by the batch; "
                f"pass shared_inputs=[{name!r}] to megaslide.stream if it always is, "
                f"or leave micro_batch_size out"
            )
        return True

    def _leaf_names(
        self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[str]:  # fmt: skip
        """The argument's name for every leaf of `(args, kwargs)`."""
        parameters = list(self._signatures[unit].parameters.values())
        variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
        plain = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        keys = [plain[i] if i < len(plain) else variadic for i in range(len(args))]
        values = [*zip(keys, args, strict=True), *kwargs.items()]
        return [key for key, value in values for _ in tree_leaves(value)]

    def _require_known_names(self) -> None:
        signatures = [s.parameters.values() for s in self._signatures.values()]
        known = {p.name for parameters in signatures for p in parameters}
        catch_all = any(p.kind is p.VAR_KEYWORD for ps in signatures for p in ps)
        unknown = sorted(self._shared_inputs - known)
        if unknown and not catch_all:
            raise ValueError(
                f"shared_inputs={unknown} are no arguments of the blocks' forward; "
                f"accepted: {sorted(known)}"
            )
