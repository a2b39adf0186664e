"""One forward and backward of a model whose tensors have shapes and no data.

The model's own forward runs, as it does when it streams: each block is replaced by one autograd
function, which here counts what the block costs and hands on outputs of the right shapes. A block
that was seen before (same class and settings, same parameters, same inputs) is not run again, so a
hundred blocks take the time of one.

Tensors are torch's fake tensors on the CPU, not meta tensors: they may meet the real tables that
models make at construction, and fused attention stays one operator, which keeps no scores for its
backward, as on every device that matters.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from megaslide.ops.library import counting_only
from megaslide.planning.fakes import (
    Saved,
    fake_buffers,
    fake_like,
    fake_parameters,
    geometry_of,
    parameter_at,
    placed,
    plain,
    settings_of,
    storage_of,
)
from megaslide.planning.flops import FlopCounter
from megaslide.streaming.chunks import Cuttable, chunks_of, cut_arguments
from megaslide.streaming.layout import Unit

Tensor = torch.Tensor
_TENSOR = object()
"""Stands for a tensor in flattened results."""


@dataclass(kw_only=True, slots=True)
class Work:
    """What one pass through a unit takes; the backward is filled in when it runs, if it does."""

    forward_flop: int
    backward_flop: int = 0
    """Without the recompute of the forward."""
    recompute_flop: int = 0
    working_bytes: int = 0
    """What autograd keeps for the backward; parameters, buffers and blocks' inputs left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a block in the forward pass."""

    unit: int
    """Index among the units; the resident one is 0."""
    work: Work
    inputs: Mapping[int, int]
    """Bytes of every storage that it receives, by the storage's identity; no parameters. Empty if
    nothing before it and in it learns, as then they need not wait for a backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A forward and backward of the whole model."""

    resident: Work
    calls: tuple[Call, ...]


def dry_run(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    model: nn.Module, units: Sequence[Unit], frames_per_chunk: int | None = None,
) -> Pass:  # fmt: skip
    """Run `call`, which runs `model`, on tensors like those given, then backward from its outputs.

    Args:
        call: the model itself, or what stands around it.
        args, kwargs: pytrees of its arguments; of tensors only shapes, strides and dtypes count.
        units: of `plan_units`; the model is as it was when this returns.
        frames_per_chunk: of blocks that can be cut; None computes them whole.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _EverythingKept(), counting_only(), FlopCounter() as counter:
        run = _DryRun(units, counter, frames_per_chunk)
        with run.in_place(model):
            return run(call, tree_map(fake_like, tuple(args)), tree_map(fake_like, dict(kwargs)))


class _DryRun:
    """Holds everything that has an identity (storages) until the pass is over."""

    def __init__(
        self, units: Sequence[Unit], counter: FlopCounter, frames_per_chunk: int | None
    ) -> None:
        self._units, self._counter, self._frames = units, counter, frames_per_chunk
        self._parameters = [fake_parameters(unit) for unit in units]
        self._own = {storage_of(p) for unit in self._parameters for p in unit.values()}
        self._seen: dict[Hashable, _Trace] = {}
        self._seen_cut: dict[Hashable, _Trace | _CutTrace] = {}
        self._calls: list[Call] = []
        self._held: list[Tensor] = []
        # Blocks whose inputs need no gradient (after frozen embeddings) have a backward too.
        self._anchor = torch.zeros((), requires_grad=True)
        self._flop_of_blocks = 0

    def __call__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Pass:
        resident = self._units[0].module
        saved = Saved([*self._parameters[0].values(), *resident.buffers()])
        with torch.enable_grad(), saved.collecting():
            outputs = tree_leaves(call(*args, **kwargs))
        forward = self._counter.total - self._flop_of_blocks
        ends = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
        inside = {storage for call_ in self._calls for storage in call_.inputs}
        work = Work(
            forward_flop=forward,
            backward_flop=self._counter.total - self._flop_of_blocks - forward,
            working_bytes=saved.nbytes(without=inside),
        )
        return Pass(resident=work, calls=tuple(self._calls))

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Within, the resident parameters are fake and the blocks are counted when called."""
        resident = self._parameters[0]
        places = [(use, resident[piece.name]) for use, piece in self._units[0].uses]
        blocks = [unit.module for unit in self._units[1:]]
        before = [vars(block).get("forward") for block in blocks]
        with placed(places), fake_buffers(model):
            for number, block in enumerate(blocks, start=1):
                block.forward = self._counted(number, block.forward)
            try:
                yield
            finally:
                for block, forward in zip(blocks, before, strict=True):
                    del block.forward
                    if forward is not None:
                        block.forward = forward

    def _counted(self, unit: int, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = self._inputs(unit, args, kwargs)
            trace = self._trace_in_chunks(unit, original, signature, args, kwargs)
            learns = any(t.requires_grad for t in [*inputs, *self._parameters[unit].values()])
            work = Work(forward_flop=trace.forward_flop)
            kept = self._storages(inputs) if learns else {}
            self._calls.append(Call(unit=unit, work=work, inputs=kept))
            anchor = self._anchor if learns else self._anchor.detach()
            return trace.result(_OpaqueBlock.apply(self, trace, work, anchor, *inputs))

        return forward

    def backward_of(self, trace: "_Trace | _CutTrace", work: Work, given: tuple[bool, ...]) -> None:
        """Fill in the backward of a block whose outputs have gradients where `given`."""
        parts = trace.parts if isinstance(trace, _CutTrace) else [trace]
        for part in parts:
            before = self._counter.total
            if given not in part.backward_flop:
                part.run_backward(given)
                part.backward_flop[given] = self._counter.total - before
                self._flop_of_blocks += self._counter.total - before
        work.backward_flop = sum(part.backward_flop[given] for part in parts)
        work.recompute_flop, work.working_bytes = trace.forward_flop, trace.working_bytes

    def _storages(self, inputs: Sequence[Tensor]) -> dict[int, int]:
        self._held += inputs
        storages = {storage_of(t): t.untyped_storage().nbytes() for t in inputs}
        return {key: nbytes for key, nbytes in storages.items() if key not in self._own}

    def _inputs(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Tensors among the arguments, and parameters of the resident unit."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return given + [parameter_at(use) for use in self._units[unit].external]

    def _chunks(
        self, unit: int, signature: inspect.Signature, args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:  # fmt: skip
        """Arguments of each chunk, in memory of their own; none where the call is whole."""
        block = self._units[unit].module
        if self._frames is None or not isinstance(block, Cuttable):
            return []
        call = signature.bind(*args, **kwargs)
        chunks = chunks_of(block, self._frames, call)
        cut: list[Any] = [cut_arguments(block, chunk, call) for chunk in chunks]
        return tree_map(_separate, cut)

    def _trace_in_chunks(
        self, unit: int, original: Callable[..., Any], signature: inspect.Signature,
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> "_Trace | _CutTrace":  # fmt: skip
        if self._frames is None:
            return self._trace(unit, original, args, kwargs)
        key = self._key(unit, args, kwargs)
        if key not in self._seen_cut:
            chunks = self._chunks(unit, signature, args, kwargs)
            parts = [self._trace(unit, original, *chunk) for chunk in chunks]
            rows = self._inputs(unit, args, kwargs)[0]
            whole = _CutTrace(parts, rows) if parts else self._trace(unit, original, args, kwargs)
            self._seen_cut[key] = whole
        return self._seen_cut[key]

    def _trace(
        self, unit: int, original: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "_Trace":  # fmt: skip
        key = self._key(unit, args, kwargs)
        if key not in self._seen:
            start = self._counter.total
            flat, spec = tree_flatten((args, kwargs))
            inputs = self._inputs(unit, args, kwargs)
            self._seen[key] = self._run_block(unit, original, flat, spec, inputs)
            self._flop_of_blocks += self._counter.total - start
        return self._seen[key]

    def _key(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Equal for calls that cost the same."""
        flat, spec = tree_flatten((args, kwargs))
        tensors = [*self._inputs(unit, args, kwargs), *self._parameters[unit].values()]
        rest = tuple(plain(leaf) for leaf in flat if not isinstance(leaf, Tensor))
        geometry = tuple(geometry_of(t) for t in tensors)
        return settings_of(self._units[unit].module), spec, rest, geometry

    def _run_block(
        self, unit: int, original: Callable[..., Any], flat: list[Any], spec: TreeSpec,
        inputs: list[Tensor],
    ) -> "_Trace":  # fmt: skip
        """As the engine does in backward: the forward with grad, from detached inputs."""
        weights = self._parameters[unit]
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        rest = iter(leaves)
        arguments = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        args, kwargs = tree_unflatten(arguments, spec)
        places = [(use, weights[piece.name]) for use, piece in self._units[unit].uses]
        places += zip(self._units[unit].external, rest, strict=True)
        saved = Saved([*leaves, *weights.values(), *self._units[unit].module.buffers()])
        start = self._counter.total
        with torch.enable_grad(), placed(places), saved.collecting():
            result = original(*args, **kwargs)
        return _Trace(
            result, leaves, list(weights.values()), working_bytes=saved.nbytes(),
            forward_flop=self._counter.total - start,
        )  # fmt: skip


class _EverythingKept(TorchDispatchMode):
    """Within, a mask whose true positions are asked for has no others: the most it can cost."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.nonzero.default:
            mask = args[0]
            return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


class _Trace:
    """A block that has run: its costs, and outputs like its own, some of which may share memory."""

    def __init__(
        self, result: Any, inputs: Sequence[Tensor], weights: Sequence[Tensor], *,
        forward_flop: int, working_bytes: int,
    ) -> None:  # fmt: skip
        self.forward_flop, self.working_bytes = forward_flop, working_bytes
        self.backward_flop: dict[tuple[bool, ...], int] = {}
        """By which of the outputs have a gradient."""
        leaves, self._spec = tree_flatten(result)
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._ends = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._learning = [t for t in [*inputs, *weights] if t.requires_grad]
        given = {storage_of(t): number for number, t in enumerate(inputs)}
        made = [t for t in self._ends if storage_of(t) not in given]
        self._made = {storage_of(t): (t.untyped_storage().nbytes(), t.dtype) for t in made}
        self._views = [
            (
                given.get(storage_of(t)),
                storage_of(t),
                t.dtype,
                t.shape,
                t.stride(),
                t.storage_offset(),
            )
            for t in self._ends
        ]

    def run_backward(self, given: Sequence[bool]) -> None:
        """From the outputs that have a gradient to all that learns; it can run again."""
        ends = [t for t, has in zip(self._ends, given, strict=True) if has and t.requires_grad]
        if ends and self._learning:
            grads = [torch.empty_like(end) for end in ends]
            torch.autograd.grad(ends, self._learning, grads, retain_graph=True, allow_unused=True)

    def outputs(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        memory = {
            key: torch.empty(nbytes // dtype.itemsize, dtype=dtype)
            for key, (nbytes, dtype) in self._made.items()
        }
        return tuple(
            (memory[key] if number is None else inputs[number])
            .view(dtype)
            .as_strided(shape, stride, offset)
            for number, key, dtype, shape, stride, offset in self._views
        )

    def result(self, outputs: Sequence[Tensor]) -> Any:
        rest = iter(outputs)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)


class _CutTrace:
    """A block that has run in chunks of its rows: their costs, and an output of all rows."""

    def __init__(self, parts: Sequence[_Trace], like: Tensor) -> None:
        """`like` is the input that tells how many rows there are, `[B, rows, ...]`."""
        self.parts, self._shape = parts, like.shape[:2]
        self.forward_flop = sum(part.forward_flop for part in parts)
        self.working_bytes = max(part.working_bytes for part in parts)

    def outputs(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (part,) = self.parts[0].outputs(inputs)
        return (part.new_empty((*self._shape, *part.shape[2:])),)

    def result(self, outputs: Sequence[Tensor]) -> Any:
        return self.parts[0].result(outputs)


class _OpaqueBlock(torch.autograd.Function):
    """A block from outside: outputs of its shapes, gradients of its inputs' shapes."""

    @staticmethod
    def forward(
        ctx: Any, run: _DryRun, trace: "_Trace | _CutTrace", work: Work, anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.run, ctx.trace, ctx.work = run, trace, work
        ctx.shapes = [(t.shape, t.dtype) for t in inputs]
        outputs = trace.outputs(inputs)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.run.backward_of(ctx.trace, ctx.work, tuple(grad is not None for grad in grads))
        needed = zip(ctx.shapes, ctx.needs_input_grad[4:], strict=True)
        like = (
            torch.empty(shape, dtype=dtype) if need else None for (shape, dtype), need in needed
        )
        return None, None, None, None, *like


def _separate(leaf: Any) -> Any:
    """A tensor like it that is no view, as chunks of equal shape cost the same."""
    return fake_like(leaf).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
