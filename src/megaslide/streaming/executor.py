"""Runs a model's blocks on weights that are on the device only while they are needed.

A wrapped block's forward is one autograd function: wait for its slot, run without grad, release
the slot, keep only the inputs (boundary activations). Its backward waits for the slot again,
recomputes with grad, accumulates into a flat fp32 gradient buffer and hands that to the D2H lane.
The batch is split into micro-batches *inside* the block (layer-major accumulation), so weights
cross the link twice per step and gradients once, however many micro-batches there are.

Nothing here knows a model: arguments and results are pytrees, and a tensor is part of the batch
when its first dimension has the batch's size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megaslide.streaming.gradients import GradientBuffers
from megaslide.streaming.layout import Unit
from megaslide.streaming.slots import SlotCache

Tensor = torch.Tensor


@dataclass(kw_only=True, slots=True)
class BlockCall:
    """One call of one block: everything its recomputation needs besides the tensors."""

    unit: int
    index: int
    """Position of this call in the forward pass."""
    leaves: list[Any]
    """Flattened arguments; tensors are None here and travel through autograd."""
    spec: TreeSpec
    batch: int
    micro_batch: int
    num_inputs: int
    rng: list[Tensor] = field(default_factory=list)
    """CPU RNG state before each micro-batch, so that dropout recomputes alike."""
    autocast: tuple[bool, torch.dtype] = (False, torch.float32)
    out_spec: TreeSpec | None = None
    out_leaves: list[Any] = field(default_factory=list)

    def pieces(self) -> Iterator[slice]:
        for start in range(0, self.batch, self.micro_batch):
            yield slice(start, min(start + self.micro_batch, self.batch))

    def is_split(self, tensor: Tensor) -> bool:
        return self.micro_batch < self.batch and tensor.dim() > 0 and len(tensor) == self.batch

    def piece_of(self, grad: Tensor | None, number: int, piece: slice) -> Tensor | None:
        """The part of an output's gradient that micro-batch `number` receives."""
        if grad is None or self.is_split(grad):
            return None if grad is None else grad[piece]
        return grad if number == 0 else None  # a shared output came from the first micro-batch


class Executor:
    """Wraps blocks and runs them; owns the order of calls from which slots are prefetched."""

    def __init__(
        self,
        units: Sequence[Unit],
        slots: SlotCache,
        gradients: GradientBuffers,
        micro_batch_size: int | None,
        device_type: str = "cpu",
    ) -> None:
        self._units = units
        self._device_type = device_type
        self._slots = slots
        self._gradients = gradients
        self._micro_batch_size = micro_batch_size
        self.order = list(range(1, len(units)))
        """Units in the order of the last forward pass; definition order before the first."""
        self._calls: list[int] = []
        # Blocks whose inputs need no gradient (after frozen embeddings) must still be recorded.
        self._anchor = torch.zeros((), requires_grad=True)

    def wrap(self, unit: int) -> None:
        """Replace the block's forward by its streamed form."""
        block = self._units[unit].module
        original = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(unit, original, args, kwargs)

        block.forward = forward

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Encloses the model's own forward; learns the order of its blocks."""
        self._calls = []
        yield
        self.order = list(self._calls)

    def _call(
        self, unit: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        call = self._describe(unit, flat, spec, tensors)
        self._calls.append(unit)
        inputs = [*tensors, *(_external(use) for use in self._units[unit].external)]
        if torch.is_grad_enabled() and self._wants_grad(unit, inputs):
            outputs = _StreamedBlock.apply(self, call, original, self._anchor, *inputs)
        else:
            outputs = self.run_forward(call, original, inputs, training=False)
        assert call.out_spec is not None
        outputs = iter(outputs)
        leaves = [next(outputs) if leaf is _TENSOR else leaf for leaf in call.out_leaves]
        return tree_unflatten(leaves, call.out_spec)

    def _describe(
        self, unit: int, flat: list[Any], spec: TreeSpec, tensors: list[Tensor]
    ) -> BlockCall:
        batch = next((len(t) for t in tensors if t.dim() > 0), 1)
        return BlockCall(
            unit=unit,
            index=len(self._calls),
            leaves=[_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat],
            spec=spec,
            batch=batch,
            micro_batch=min(self._micro_batch_size or batch, batch),
            num_inputs=len(tensors),
            autocast=(
                torch.is_autocast_enabled(self._device_type),
                torch.get_autocast_dtype(self._device_type),
            ),
        )

    def _wants_grad(self, unit: int, inputs: Sequence[Tensor]) -> bool:
        return bool(self._units[unit].layout.segments) or any(t.requires_grad for t in inputs)

    def run_forward(
        self, call: BlockCall, original: Callable[..., Any], inputs: Sequence[Tensor], *,
        training: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The block's output tensors, computed without grad, micro-batch by micro-batch."""
        after = self.order[call.index + 1 :]
        upcoming = after + (self.order[::-1] if training else self.order)
        pieces: list[list[Tensor]] = []
        with self._weights(call.unit, upcoming, "forward") as weights, torch.no_grad():
            for piece in call.pieces():
                if training:
                    call.rng.append(torch.get_rng_state())
                arguments = [t.detach()[piece] if call.is_split(t) else t.detach() for t in inputs]
                outputs = self._run(call, original, weights, arguments)
                pieces.append(outputs)
        return tuple(_join(parts, call) for parts in zip(*pieces, strict=True))

    def run_backward(
        self,
        call: BlockCall,
        original: Callable[..., Any],
        inputs: Sequence[Tensor],
        out_grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Gradients of `inputs`; those of the block's parameters go to its gradient buffer."""
        upcoming = self.order[: call.index][::-1]
        input_grads = _InputGradients(call, inputs, needed)
        with (
            self._weights(call.unit, upcoming, "backward") as weights,
            self._gradients.collecting(call.unit, weights),
            torch.random.fork_rng(devices=[]),
        ):
            for number, piece in enumerate(call.pieces()):
                torch.set_rng_state(call.rng[number])
                arguments = input_grads.leaves(piece)
                with torch.enable_grad():
                    outputs = self._run(call, original, weights, arguments)
                grads = [call.piece_of(grad, number, piece) for grad in out_grads]
                _backward(outputs, grads, [*arguments, *weights])
                input_grads.collect(piece, arguments)
        return input_grads.result

    def _run(
        self,
        call: BlockCall,
        original: Callable[..., Any],
        weights: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> list[Tensor]:
        tensors = iter(inputs[: call.num_inputs])
        flat = [next(tensors) if leaf is _TENSOR else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(flat, call.spec)
        enabled, dtype = call.autocast
        with (
            _placed(self._units[call.unit], weights, inputs[call.num_inputs :]),
            torch.autocast(self._device_type, dtype=dtype, enabled=enabled),
        ):
            result = original(*args, **kwargs)
        leaves, call.out_spec = tree_flatten(result)
        call.out_leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @contextmanager
    def _weights(self, unit: int, upcoming: list[int], phase: str) -> Iterator[list[Tensor]]:
        """The unit's parameters as fresh leaves on its slot, in the layout's order."""
        region = self._slots.acquire(unit, upcoming)
        layout = self._units[unit].layout
        leaves = [p.weight(region).requires_grad_(p.trainable) for p in layout.parameters]
        try:
            with self._slots.trace.span("compute", f"{phase} {layout.name}"):
                yield leaves
        finally:
            self._slots.release(unit)


class _StreamedBlock(torch.autograd.Function):
    """Autograd's view of one streamed block call; saves the block's inputs and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        executor: Executor,
        call: BlockCall,
        original: Callable[..., Any],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.executor, ctx.call, ctx.original = executor, call, original
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        outputs = executor.run_forward(call, original, inputs, training=True)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *out_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        grads = ctx.executor.run_backward(
            ctx.call, ctx.original, ctx.saved_tensors, out_grads, needed
        )
        return None, None, None, None, *grads


class _InputGradients:
    """Gradients of a call's inputs: written per slice for batch tensors, summed for shared ones."""

    def __init__(self, call: BlockCall, inputs: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self._call, self._inputs, self._needed = call, inputs, needed
        self.result: list[Tensor | None] = [None] * len(inputs)

    def leaves(self, piece: slice) -> list[Tensor]:
        """The micro-batch's inputs, detached, requiring grad where the originals need it."""
        cut = [t[piece] if self._call.is_split(t) else t for t in self._inputs]
        return [t.detach().requires_grad_(need) for t, need in zip(cut, self._needed, strict=True)]

    def collect(self, piece: slice, leaves: Sequence[Tensor]) -> None:
        for i, leaf in enumerate(leaves):
            if leaf.grad is None:
                continue
            if self._call.is_split(self._inputs[i]):
                self._full(i)[piece] = leaf.grad
            else:
                summed = self.result[i]
                self.result[i] = leaf.grad if summed is None else summed + leaf.grad

    def _full(self, i: int) -> Tensor:
        if self.result[i] is None:
            self.result[i] = torch.zeros_like(self._inputs[i])
        full = self.result[i]
        assert full is not None
        return full


class _TensorMarker:
    """Stands for a tensor in flattened arguments."""


_TENSOR = _TensorMarker()


def _external(use: Any) -> nn.Parameter:
    return use.owner._parameters[use.key]


@contextmanager
def _placed(unit: Unit, weights: Sequence[Tensor], external: Sequence[Tensor]) -> Iterator[None]:
    """Put tensors where the block's modules look for their parameters."""
    by_slice = dict(zip((p.name for p in unit.layout.parameters), weights, strict=True))
    places = [(use, by_slice[p.name]) for use, p in unit.uses]
    places += list(zip(unit.external, external, strict=True))
    before = [use.owner._parameters[use.key] for use, _ in places]
    for use, tensor in places:
        parameters: dict[str, Any] = use.owner._parameters
        parameters[use.key] = tensor
    try:
        yield
    finally:
        for (use, _), parameter in zip(places, before, strict=True):
            use.owner._parameters[use.key] = parameter


def _join(parts: tuple[Tensor, ...], call: BlockCall) -> Tensor:
    """One output from its micro-batches; an output without the batch dimension is shared."""
    if len(parts) == 1:
        return parts[0]
    sizes = [min(call.micro_batch, call.batch - i * call.micro_batch) for i in range(len(parts))]
    if all(p.dim() > 0 and len(p) == n for p, n in zip(parts, sizes, strict=True)):
        return torch.cat(parts)
    return parts[0]


def _backward(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> None:
    pairs = [
        (out, grad)
        for out, grad in zip(outputs, grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if pairs and wanted:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], inputs=wanted)
