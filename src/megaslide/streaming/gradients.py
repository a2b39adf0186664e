"""Gradients on their way from the device to the store.

While a block runs backward its parameter gradients are added in fp32, micro-batch after
micro-batch, into one flat device buffer, each parameter's the moment autograd has it, so that no
second copy of the block's gradients ever exists. The buffer then leaves in the weights' dtypes and
lands in the store, where its per-parameter norms are taken at once for exact clipping.

A second gradient of a unit before the step (several backwards, a block used twice) is added in
fp32 on the host: bf16 sums of many backwards would stall.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megaslide.streaming.lanes import Event, copy_bytes
from megaslide.streaming.layout import ParameterSlice, Unit, UnitLayout
from megaslide.streaming.memory import gradient_buffer_sizes
from megaslide.streaming.store import Store
from megaslide.streaming.transfer import Transfer


@dataclass(slots=True)
class _Buffer:
    """fp32 accumulator, and the outbound region if the gradient leaves in other dtypes."""

    elements: torch.Tensor
    outbound: torch.Tensor
    landed: Event = field(default_factory=Event.completed)


@dataclass(slots=True)
class Landed:
    """What arrived of one unit since the last step; complete once its copies are."""

    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Norm (0-dim fp32) of each parameter's gradient, by name."""
    total: torch.Tensor | None = None
    """fp32 `[num_elements]` sum, where several bf16 gradients came; else the store has it."""
    sent: bool = False
    """Whether any has left the device, if only just."""

    def gradient(self, first: int, stored: torch.Tensor) -> torch.Tensor:
        """The gradient of elements that begin with the unit's `first`, given what the store has."""
        return stored if self.total is None else self.total[first:][: stored.numel()]


class GradientBuffers:
    """Two buffers shared by all blocks, one accumulating while the other leaves."""

    def __init__(self, transfer: Transfer, store: Store, units: Sequence[Unit]) -> None:
        self._transfer, self._store, self._units = transfer, store, units
        blocks = [u.layout for u in units[1:]]
        self._ring = [self._allocate(blocks) for _ in range(2)] if blocks else []
        self._resident = self._allocate([units[0].layout])
        self._pending: list[Event] = []
        self.landed = [Landed() for _ in units]
        """Per unit what arrived since the last step."""
        self.on_complete: Callable[[int, Event], None] | None = None
        """Told of each unit whose last expected gradient leaves, and the event of its landing."""
        self._expected = [0 for _ in units]
        self._resident_present: set[str] = set()

    def expect(self, unit: int) -> None:
        """One more backward of the block will come, if its outputs are used at all."""
        self._expected[unit] += 1

    @contextmanager
    def collecting(self, unit: int, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Accumulate the gradients that `leaves` receive within, then send them to the store."""
        buffer = self._ring[0]
        self._ring.reverse()
        self._transfer.wait(buffer.landed, "gradient buffer landed")
        layout = self._units[unit].layout
        with self._transfer.computing(f"clear {layout.name}"):
            present = self._watch(buffer, list(zip(layout.parameters, leaves, strict=True)))
        yield
        self._expected[unit] -= 1
        self._send(unit, buffer, present)

    def watch_resident(self, leaves: Sequence[torch.Tensor]) -> None:
        """Accumulate the resident unit's gradients from now on; `send_resident` ships them."""
        parameters = self._units[0].layout.parameters
        pairs = list(zip(parameters, leaves, strict=True))
        self._resident_present = self._watch(self._resident, pairs)

    def send_resident(self) -> None:
        present = self._resident_present
        if present:
            self._send(0, self._resident, set(present))
            self._transfer.wait(self._resident.landed, "resident gradient landed")
            self._resident.elements.zero_()
            present.clear()

    def finish(self) -> None:
        """Wait until every gradient sent so far is in the store."""
        pending, self._pending = self._pending, []
        for event in pending:
            self._transfer.join(event, "gradients landed")

    def clear(self) -> None:
        """Forget this step's gradients; an update that was launched keeps what it was given."""
        self.finish()
        self._resident_present.clear()
        self._resident.elements.zero_()
        self.landed[:] = [Landed() for _ in self._units]
        self._expected[:] = [0 for _ in self._units]

    def _watch(self, buffer: _Buffer, pairs: list[tuple[ParameterSlice, torch.Tensor]]) -> set[str]:
        buffer.elements.zero_()
        present: set[str] = set()
        for parameter, leaf in pairs:
            if parameter.trainable:
                target = parameter.element(buffer.elements)
                leaf.register_post_accumulate_grad_hook(_Accumulate(target, parameter, present))
        return present

    def _send(self, unit: int, buffer: _Buffer, present: set[str]) -> None:
        if not present:
            return
        layout, landed = self._units[unit].layout, self.landed[unit]
        with self._transfer.computing(f"round {layout.name}"):
            outbound = self._outbound(layout, buffer)
        target = self._store.landing_memory(unit)[: 0 if landed.sent else None]
        landed.sent = True

        def land(arrived: torch.Tensor) -> None:
            with self._store.landing(unit, keep=bool(landed.norms)) as stored:
                _land(layout, landed, stored, arrived, outbound, present)

        buffer.landed = self._transfer.d2h(
            target, outbound, {"gradient computed": self._transfer.record()}, layout.name, land=land
        )
        self._pending.append(buffer.landed)
        if self.on_complete is not None and self._expected[unit] == 0:
            self.on_complete(unit, buffer.landed)

    def _outbound(self, layout: UnitLayout, buffer: _Buffer) -> torch.Tensor:
        if not buffer.outbound.numel():
            return buffer.elements[: layout.num_elements].view(torch.uint8)
        region = buffer.outbound[: layout.gradient_nbytes]
        for segment in layout.segments:
            segment.weight(region).copy_(segment.element(buffer.elements))
        return region

    def _allocate(self, layouts: Sequence[UnitLayout]) -> _Buffer:
        elements, outbound = gradient_buffer_sizes(layouts)
        return _Buffer(
            self._transfer.allocate(elements, "gradients").view(torch.float32),
            self._transfer.allocate(outbound, "gradients"),
        )


class _Accumulate:
    """Adds a leaf's fresh gradient to its place in the flat buffer and frees it."""

    def __init__(self, target: torch.Tensor, parameter: ParameterSlice, present: set[str]) -> None:
        self._target, self._name, self._present = target, parameter.name, present

    def __call__(self, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        self._target.add_(leaf.grad)
        self._present.add(self._name)
        leaf.grad = None


def _land(
    layout: UnitLayout, landed: Landed, stored: torch.Tensor, arrived: torch.Tensor,
    outbound: torch.Tensor, present: set[str],
) -> None:  # fmt: skip
    """Host side: store or add what arrived, then take the norms of what there is now.

    Those of a first gradient come from the device's copy of it, where a norm costs nothing.
    """
    if not landed.norms:
        if arrived.data_ptr() != stored.data_ptr():
            copy_bytes(stored, arrived)
        landed.norms = _norms({p.name: p.weight(outbound) for p in layout.trainable}, present)
        return
    if all(s.dtype == torch.float32 for s in layout.segments):
        for segment in layout.segments:
            segment.weight(stored).add_(segment.weight(arrived))
    else:
        landed.total = _added(layout, landed.total, stored, arrived)
    total = landed.total
    sums = {
        p.name: p.weight(stored) if total is None else p.element(total) for p in layout.trainable
    }
    landed.norms |= _norms(sums, present | set(landed.norms))


def _norms(gradients: dict[str, torch.Tensor], present: set[str]) -> dict[str, torch.Tensor]:
    """Norm (0-dim fp32, on the host) of each present parameter's gradient, by name."""
    names = [name for name in gradients if name in present]
    norm = torch.linalg.vector_norm
    each = [norm(gradients[name], dtype=torch.float32) for name in names]
    return dict(zip(names, torch.stack(each).cpu(), strict=True))  # one copy for all


def _added(
    layout: UnitLayout, total: torch.Tensor | None, first: torch.Tensor, arrived: torch.Tensor
) -> torch.Tensor:
    """fp32 `[num_elements]`: `total`, which begins as the gradient that came first, and more."""
    if total is None:
        total = torch.zeros(layout.num_elements)
        for segment in layout.segments:
            segment.element(total).copy_(segment.weight(first))
    for segment in layout.segments:
        segment.element(total).add_(segment.weight(arrived))
    return total
