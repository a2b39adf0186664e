"""Runs a model's blocks on weights that are on the device only while they are needed.

A wrapped block's forward is one autograd function: wait for its slot, run without grad, release
the slot, keep only the inputs (boundary activations). Its backward waits for the slot again,
recomputes with grad, accumulates into a flat fp32 gradient buffer and hands that to the D2H lane.
The batch is split into micro-batches *inside* the block (layer-major accumulation), and a
micro-batch into chunks of rows where the block offers them (`chunks`), so weights cross the link
twice per step and gradients once, however many parts there are.

Nothing here knows a model; `calls` reads the arguments, `results` puts together what parts give.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megaslide.streaming.activations import Activations
from megaslide.streaming.calls import BlockCall, CallReader
from megaslide.streaming.chunks import Part
from megaslide.streaming.gradients import GradientBuffers
from megaslide.streaming.layout import Unit
from megaslide.streaming.ownership import counts_of_unshared, overwritable
from megaslide.streaming.results import InputGradients, Outputs
from megaslide.streaming.slots import SlotCache
from megaslide.streaming.transfer import Transfer

Tensor = torch.Tensor


class Executor:
    """Wraps blocks and runs them; owns the order of calls from which slots are prefetched."""

    def __init__(
        self,
        transfer: Transfer,
        units: Sequence[Unit],
        slots: SlotCache,
        gradients: GradientBuffers,
        activations: Activations,
        micro_batch_size: int | None,
        shared_inputs: Sequence[str] = (),
        frames_per_chunk: int | None = None,
    ) -> None:
        self._transfer, self._units, self._slots = transfer, units, slots
        self.explained = transfer.memory.explained
        self._gradients, self._activations = gradients, activations
        self._random = RandomState(transfer.device)
        self.unshared = counts_of_unshared(transfer.device) if frames_per_chunk else None
        device_type = transfer.device.type
        blocks = {unit: units[unit].module for unit in range(1, len(units))}
        self._reader = CallReader(
            blocks, micro_batch_size, shared_inputs, device_type, frames_per_chunk
        )
        self._buffers = {unit: BlockBuffers(block) for unit, block in blocks.items()}
        self.order = list(blocks)
        """Units in the order of the last forward pass; definition order before the first."""
        self._calls: list[int] = []
        self._last_call: BlockCall | None = None
        # Blocks whose inputs need no gradient (after frozen embeddings) must still be recorded.
        self._anchor = torch.zeros((), requires_grad=True)
        for unit in blocks:
            self._wrap(unit)

    def _wrap(self, unit: int) -> None:
        """Replace the block's forward by its streamed form."""
        block = self._units[unit].module
        original = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(unit, original, args, kwargs)

        block.forward = forward

    def close(self) -> None:
        """Let go of the blocks, whose forwards hold all of the engine until the collector comes."""
        for unit in self._buffers:
            vars(self._units[unit].module).pop("forward", None)

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Encloses the model's own forward; learns the order of its blocks."""
        self._calls, self._last_call = [], None
        yield
        self.order, self._last_call = list(self._calls), None

    def _call(
        self, unit: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        externals = [_external(use) for use in self._units[unit].external]
        call, tensors = self._reader.read(unit, len(self._calls), args, kwargs, len(externals))
        self._calls.append(unit)
        inputs = [*tensors, *externals]
        if torch.is_grad_enabled() and self._wants_grad(unit, inputs):
            outputs = self._record(call, original, inputs)
        else:
            outputs = self.run_forward(call, original, inputs, training=False)
        return call.result(outputs)

    def _wants_grad(self, unit: int, inputs: Sequence[Tensor]) -> bool:
        return bool(self._units[unit].layout.segments) or any(t.requires_grad for t in inputs)

    def _record(
        self, call: BlockCall, original: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> Any:
        call.previous, self._last_call = self._last_call, call
        self._activations.leave_before(call, inputs)
        with self._activations.keeping(call):
            outputs = _StreamedBlock.apply(self, call, original, self._anchor, *inputs)
        self._gradients.expect(call.unit)
        return outputs

    def run_forward(
        self, call: BlockCall, original: Callable[..., Any], inputs: Sequence[Tensor], *,
        training: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The block's output tensors, computed without grad, part by part."""
        after, name = self.order[call.index + 1 :], self._units[call.unit].layout.name
        upcoming = after + (self.order[::-1] if training else self.order)
        results = Outputs(call, name)
        with (
            self._weights(call.unit, upcoming) as weights,
            self._transfer.computing(f"forward {name}"),
            torch.no_grad(),
        ):
            for part in call.parts():
                if training:
                    call.rng.append(self._random.capture())
                arguments = [t.detach() for t in call.cut(inputs, part)]
                with self._buffers[call.unit].observed(call if training else None):
                    outputs = self._run(call, original, weights, arguments, part)
                results.add(part, outputs, arguments)
                del outputs  # of a chunk: copied, and not to be there beside the next one's
            return results.joined()

    def run_backward(
        self,
        call: BlockCall,
        original: Callable[..., Any],
        inputs: Sequence[Tensor],
        out_grads: Sequence[Tensor | None],
        needed: Sequence[bool],
        spare: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """Gradients of `inputs`; those of the block's parameters go to its gradient buffer.

        `spare` are those of `out_grads` that may be overwritten: with chunks, the input's gradient
        takes the output's place.
        """
        upcoming = self.order[: call.index][::-1]
        input_grads = InputGradients(call, inputs, needed, spare)
        with (
            self._weights(call.unit, upcoming) as weights,
            self._gradients.collecting(call.unit, weights),
            self._random.kept(),
        ):
            for number, part in enumerate(call.parts()):
                self._differentiate(call, original, weights, input_grads, out_grads, number, part)
        return input_grads.result

    def _differentiate(
        self,
        call: BlockCall,
        original: Callable[..., Any],
        weights: Sequence[Tensor],
        input_grads: InputGradients,
        out_grads: Sequence[Tensor | None],
        number: int,
        part: Part,
    ) -> None:
        """Recompute part `number` with grad, then backward; nothing of it is left after."""
        name = self._units[call.unit].layout.name
        with self._transfer.computing(f"recompute {name}"):
            self._random.restore(call.rng[number])
            arguments = input_grads.leaves(part)
            with torch.enable_grad(), self._buffers[call.unit].rewound(call, number):
                outputs = self._run(call, original, weights, arguments, part)
        with self._transfer.computing(f"backward {name}"):
            grads = call.output_grads(out_grads, number, part)
            _backward(outputs, grads, [*arguments, *weights])
            del outputs, grads
            input_grads.collect(part, arguments)

    def saved_inputs(self, call: BlockCall, ctx: Any) -> Sequence[Tensor]:
        """The call's inputs, back on the device; those that backward needs next are on their way"""
        self._activations.return_for(call)
        inputs: Sequence[Tensor] = ctx.saved_tensors
        return inputs

    def _run(
        self,
        call: BlockCall,
        original: Callable[..., Any],
        weights: Sequence[Tensor],
        inputs: Sequence[Tensor],
        part: Part,
    ) -> list[Tensor]:
        args, kwargs = call.arguments(inputs[: call.num_tensors], part)
        enabled, dtype = call.autocast
        with (
            _placed(self._units[call.unit], weights, inputs[call.num_tensors :]),
            torch.autocast(self._transfer.device.type, dtype=dtype, enabled=enabled),
        ):
            return call.take_outputs(original(*args, **kwargs))

    @contextmanager
    def _weights(self, unit: int, upcoming: list[int]) -> Iterator[list[Tensor]]:
        """The unit's parameters as fresh leaves on its slot, in the layout's order."""
        region = self._slots.acquire(unit, upcoming)
        layout = self._units[unit].layout
        try:
            yield [p.weight(region).requires_grad_(p.trainable) for p in layout.parameters]
        finally:
            self._slots.release(unit)


class RandomState:
    """What dropout draws from: torch's generator of the host, and of the device if that differs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def capture(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return (
            states if self._module is None else [*states, self._module.get_rng_state(self._device)]
        )

    def restore(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._module is not None:
            self._module.set_rng_state(states[1], self._device)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards the generators are as they were before."""
        states = self.capture()
        try:
            yield
        finally:
            self.restore(states)


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
        unseen = overwritable(out_grads, ctx.executor.unshared)
        spare = [g for g, alone in zip(out_grads, unseen, strict=True) if g is not None and alone]
        with ctx.executor.explained():
            inputs = ctx.executor.saved_inputs(ctx.call, ctx)
            grads = ctx.executor.run_backward(
                ctx.call, ctx.original, inputs, out_grads, needed, spare
            )
        return None, None, None, None, *grads


class BlockBuffers:
    """A block's buffers: what its forward changes must change once, not again on recompute."""

    def __init__(self, block: nn.Module) -> None:
        self._places = [
            (module._buffers, key)
            for module in block.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._change = True  # until a forward has shown that they do not

    @contextmanager
    def observed(self, call: BlockCall | None) -> Iterator[None]:
        """Around a forward: remembers the buffers before it in `call`, if forward changes them."""
        if call is None or not self._places:
            yield
            return
        before = self._current()
        copies = [b.clone() for b in before] if self._change else before
        versions = [b._version for b in before]
        yield
        after = self._current()
        self._change = any(
            now is not old or now._version != version
            for now, old, version in zip(after, before, versions, strict=True)
        )
        call.buffers.append(copies if self._change else [])

    @contextmanager
    def rewound(self, call: BlockCall, number: int) -> Iterator[None]:
        """Around a recompute: the buffers as they were, and afterwards as they are now."""
        saved = call.buffers[number] if call.buffers else []
        if not saved:
            yield
            return
        current = self._current()
        self._place([b.clone() for b in saved])
        try:
            yield
        finally:
            self._place(current)

    def _current(self) -> list[Tensor]:
        held = [buffers[key] for buffers, key in self._places]
        return [b for b in held if b is not None]

    def _place(self, values: Sequence[Tensor]) -> None:
        for (buffers, key), value in zip(self._places, values, strict=True):
            buffers[key] = value


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
