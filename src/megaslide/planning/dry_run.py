"""One forward and backward of a model whose tensors have shapes and no data.

The model's own forward runs, as it does when it streams: each block is replaced by one autograd
function, which here counts what the block costs and hands on outputs of the right shapes. A block
that was seen before (same class and settings, same parameters, same inputs) is not run again, so a
hundred blocks take the time of one.

Tensors are torch's fake tensors on the CPU, not meta tensors: they may meet the real tables that
models make at construction, and fused attention stays one operator, which keeps no scores for its
backward, as on every device that matters.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from megaslide.ops.library import assumed_present
from megaslide.planning.flops import FlopCounter
from megaslide.streaming.layout import ParameterUse, Unit

Tensor = torch.Tensor
_TENSOR = object()
"""Stands for a tensor in flattened results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one pass through a unit takes."""

    forward_flop: int
    backward_flop: int
    """Without the recompute of the forward."""
    working_bytes: int
    """What autograd keeps for the backward, parameters and the blocks' inputs left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a block in the forward pass."""

    unit: int
    """Index among the units; the resident one is 0."""
    work: Work
    inputs: Mapping[int, int]
    """Bytes of every storage that it receives, by the storage's identity; no parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A forward and backward of the whole model."""

    resident: Work
    calls: tuple[Call, ...]


def dry_run(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    model: nn.Module, units: Sequence[Unit],
) -> Pass:  # fmt: skip
    """Run `call`, which runs `model`, on tensors like those given, then backward from its outputs.

    Args:
        call: the model itself, or what stands around it.
        args, kwargs: pytrees of its arguments; of tensors only shapes, strides and dtypes count.
        units: of `plan_units`; the model is as it was when this returns.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _EverythingKept(), assumed_present(), FlopCounter() as counter:
        run = _DryRun(units, counter)
        with run.in_place(model):
            return run(call, tree_map(_fake, tuple(args)), tree_map(_fake, dict(kwargs)))


class _DryRun:
    """Holds everything that has an identity (storages) until the pass is over."""

    def __init__(self, units: Sequence[Unit], counter: FlopCounter) -> None:
        self._units, self._counter = units, counter
        self._parameters = [_fake_parameters(unit) for unit in units]
        self._own = {_storage(p) for unit in self._parameters for p in unit.values()}
        self._seen: dict[Hashable, _Trace] = {}
        self._calls: list[Call] = []
        self._held: list[Tensor] = []
        # Blocks whose inputs need no gradient (after frozen embeddings) have a backward too.
        self._anchor = torch.zeros((), requires_grad=True)
        self._flop_of_blocks = 0

    def __call__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Pass:
        saved = Saved(self._parameters[0].values())
        with torch.enable_grad(), saved.collecting():
            outputs = tree_leaves(call(*args, **kwargs))
        forward = self._counter.total - self._flop_of_blocks
        before = self._counter.total
        _backward(outputs, [p for p in self._parameters[0].values() if p.requires_grad])
        inside = {storage for call_ in self._calls for storage in call_.inputs}
        resident = Work(
            forward_flop=forward, backward_flop=self._counter.total - before,
            working_bytes=saved.nbytes(without=inside),
        )  # fmt: skip
        return Pass(resident=resident, calls=tuple(self._calls))

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Within, the resident parameters are fake and the blocks are counted when called."""
        resident = self._parameters[0]
        places = [(use, resident[piece.name]) for use, piece in self._units[0].uses]
        blocks = [unit.module for unit in self._units[1:]]
        before = [vars(block).get("forward") for block in blocks]
        with _placed(places), _fake_buffers(model):
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
        def forward(*args: Any, **kwargs: Any) -> Any:
            flat, spec = tree_flatten((args, kwargs))
            external = [_at(use) for use in self._units[unit].external]
            inputs = [*(leaf for leaf in flat if isinstance(leaf, Tensor)), *external]
            trace = self._trace(unit, original, flat, spec, inputs)
            self._calls.append(Call(unit=unit, work=trace.work, inputs=self._storages(inputs)))
            outputs = _OpaqueBlock.apply(trace, self._anchor, *inputs)
            return trace.result(outputs)

        return forward

    def _storages(self, inputs: Sequence[Tensor]) -> dict[int, int]:
        self._held += inputs
        storages = {_storage(t): t.untyped_storage().nbytes() for t in inputs}
        return {key: nbytes for key, nbytes in storages.items() if key not in self._own}

    def _trace(
        self, unit: int, original: Callable[..., Any], flat: list[Any], spec: TreeSpec,
        inputs: list[Tensor],
    ) -> "_Trace":  # fmt: skip
        weights = self._parameters[unit]
        rest = tuple(_plain(leaf) for leaf in flat if not isinstance(leaf, Tensor))
        tensors = tuple(_geometry(t) for t in [*inputs, *weights.values()])
        key = (_settings_of(self._units[unit].module), spec, rest, tensors)
        if key not in self._seen:
            start = self._counter.total
            self._seen[key] = self._run_block(unit, original, flat, spec, inputs)
            self._flop_of_blocks += self._counter.total - start
        return self._seen[key]

    def _run_block(
        self, unit: int, original: Callable[..., Any], flat: list[Any], spec: TreeSpec,
        inputs: list[Tensor],
    ) -> "_Trace":  # fmt: skip
        """As the engine does in backward: recompute with grad from detached inputs, then back."""
        weights, counter = self._parameters[unit], self._counter
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        rest = iter(leaves)
        arguments = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        args, kwargs = tree_unflatten(arguments, spec)
        places = [(use, weights[piece.name]) for use, piece in self._units[unit].uses]
        places += zip(self._units[unit].external, rest, strict=True)
        saved = Saved([*leaves, *weights.values()])
        start = counter.total
        with torch.enable_grad(), _placed(places), saved.collecting():
            result = original(*args, **kwargs)
        forward = counter.total - start
        trace = _Trace(result, leaves)
        _backward(tree_leaves(result), [t for t in [*leaves, *weights.values()] if t.requires_grad])
        trace.work = Work(
            forward_flop=forward, backward_flop=counter.total - start - forward,
            working_bytes=saved.nbytes(),
        )  # fmt: skip
        return trace


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


class Saved:
    """The storages that autograd keeps for its backward.

    Args:
        known: tensors whose storages are there anyway and do not count.
    """

    def __init__(self, known: "Iterator[Tensor] | Sequence[Tensor] | Any") -> None:
        self._known = {_storage(t) for t in known}
        self._held: dict[int, Tensor] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        def pack(tensor: Tensor) -> Tensor:
            self._held.setdefault(_storage(tensor), tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def nbytes(self, without: "set[int] | frozenset[int]" = frozenset()) -> int:
        """Bytes of the storages kept, each once."""
        left = self._known | without
        kept = [t for key, t in self._held.items() if key not in left]
        return sum(t.untyped_storage().nbytes() for t in kept)


class _Trace:
    """A block's work, and outputs like its own: shapes, and which of them share memory."""

    work: Work

    def __init__(self, result: Any, inputs: Sequence[Tensor]) -> None:
        leaves, self._spec = tree_flatten(result)
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given = {_storage(t): number for number, t in enumerate(inputs)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        made = [t for t in tensors if _storage(t) not in given]
        self._made = {_storage(t): (t.untyped_storage().nbytes(), t.dtype) for t in made}
        self._views = [
            (given.get(_storage(t)), _storage(t), t.dtype, t.shape, t.stride(), t.storage_offset())
            for t in tensors
        ]

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


class _OpaqueBlock(torch.autograd.Function):
    """A block from outside: outputs of its shapes, gradients of its inputs' shapes."""

    @staticmethod
    def forward(ctx: Any, trace: _Trace, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.shapes = [(t.shape, t.dtype) for t in inputs]
        outputs = trace.outputs(inputs)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(torch.empty(s, dtype=d) if need else None for (s, d), need in needed)


def _backward(outputs: Sequence[Any], wanted: Sequence[Tensor]) -> None:
    ends = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    if ends and wanted:
        grads = [torch.empty_like(end) for end in ends]
        torch.autograd.backward(ends, grads, inputs=wanted)


def _fake_parameters(unit: Unit) -> dict[str, Tensor]:
    """By name, as the engine has them on the device: in their compute dtypes."""
    return {
        p.name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.trainable)
        for p in unit.layout.parameters
    }


def _fake(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)


@contextmanager
def _placed(places: Sequence[tuple[ParameterUse, Tensor]]) -> Iterator[None]:
    before = [(use, use.owner._parameters[use.key]) for use, _ in places]
    for use, tensor in places:
        parameters: dict[str, Any] = use.owner._parameters
        parameters[use.key] = tensor
    try:
        yield
    finally:
        for use, parameter in before:
            use.owner._parameters[use.key] = parameter


@contextmanager
def _fake_buffers(model: nn.Module) -> Iterator[None]:
    before = [(m._buffers, key, b) for m in model.modules() for key, b in m._buffers.items()]
    for buffers, key, buffer in before:
        buffers[key] = _fake(buffer)
    try:
        yield
    finally:
        for buffers, key, buffer in before:
            buffers[key] = buffer


def _at(use: ParameterUse) -> Tensor:
    parameter = use.owner._parameters[use.key]
    assert parameter is not None
    return parameter


def _storage(tensor: Tensor) -> int:
    """Identity of its memory, valid while some tensor on it lives."""
    return tensor.untyped_storage()._cdata


def _geometry(tensor: Tensor) -> Hashable:
    offset, needs = tensor.storage_offset(), tensor.requires_grad
    return tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, needs


def _settings_of(block: nn.Module) -> Hashable:
    """Classes and plain attributes of a block's modules: what its forward may depend on."""
    return tuple(
        (path, type(module), _plain({k: v for k, v in vars(module).items() if k[0] != "_"}))
        for path, module in block.named_modules()
    )


def _plain(value: Any) -> Hashable:
    """Something hashable that differs where the values do, or the type where none can tell."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((str(k), _plain(v)) for k, v in value.items())
    if isinstance(value, functools.partial):
        return _plain((value.func, value.args, value.keywords))
    if dataclasses.is_dataclass(value):
        return repr(value)
    return type(value), getattr(value, "__qualname__", None)
