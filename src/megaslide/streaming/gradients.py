"""Gradients on their way from the device to the store.

While a block runs backward its parameter gradients are added in fp32, micro-batch after
micro-batch, into one flat device buffer, each parameter's the moment autograd has it, so that no
second copy of the block's gradients ever exists. The buffer then leaves in the weights' dtypes and
lands in the store, where its per-parameter norms are taken at once for exact clipping.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megaslide.streaming.lanes import Event, copy_bytes
from megaslide.streaming.layout import ParameterSlice, Unit, UnitLayout
from megaslide.streaming.store import Store
from megaslide.streaming.transfer import Transfer


@dataclass(slots=True)
class _Buffer:
    """fp32 accumulator, and the outbound region if the gradient leaves in other dtypes."""

    elements: torch.Tensor
    outbound: torch.Tensor
    landed: Event = field(default_factory=Event.completed)


class GradientBuffers:
    """Two buffers shared by all blocks, one accumulating while the other leaves."""

    def __init__(self, transfer: Transfer, store: Store, units: Sequence[Unit]) -> None:
        self._transfer, self._store, self._units = transfer, store, units
        blocks = [u.layout for u in units[1:]]
        self._ring = [self._allocate(blocks) for _ in range(2)] if blocks else []
        self._resident = self._allocate([units[0].layout])
        self._pending: list[Event] = []
        self.landed: list[dict[str, torch.Tensor]] = [{} for _ in units]
        """Per unit: norm (0-dim) of each parameter's gradient that arrived this step."""
        self._collected: list[set[str]] = [set() for _ in units]

    @contextmanager
    def collecting(self, unit: int, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Accumulate the gradients that `leaves` receive within, then send them to the store."""
        buffer = self._ring[0]
        self._ring.reverse()
        self._transfer.wait(buffer.landed)
        parameters = self._units[unit].layout.parameters
        present = self._watch(buffer, list(zip(parameters, leaves, strict=True)))
        yield
        self._send(unit, buffer, present)

    def watch_resident(self, leaves: Sequence[torch.Tensor]) -> None:
        """Accumulate the resident unit's gradients from now on; `send_resident` ships them."""
        parameters = self._units[0].layout.parameters
        self._collected[0] = self._watch(self._resident, list(zip(parameters, leaves, strict=True)))

    def send_resident(self) -> None:
        present = self._collected[0]
        if present:
            self._send(0, self._resident, set(present))
            self._resident.landed.wait()
            self._resident.elements.zero_()
            present.clear()

    def finish(self) -> None:
        """Wait until every gradient sent so far is in the store."""
        pending, self._pending = self._pending, []
        for event in pending:
            self._transfer.wait(event)

    def clear(self) -> None:
        """Forget this step's gradients."""
        self.finish()
        self._collected[0].clear()
        self._resident.elements.zero_()
        for norms in self.landed:
            norms.clear()

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
        layout = self._units[unit].layout
        outbound = self._outbound(layout, buffer)
        buffer.landed = self._transfer.d2h(
            outbound, outbound, [self._transfer.record()], layout.name,
            land=lambda _, arrived: self._land(unit, arrived, present),
        )  # fmt: skip
        self._pending.append(buffer.landed)

    def _outbound(self, layout: UnitLayout, buffer: _Buffer) -> torch.Tensor:
        if not buffer.outbound.numel():
            return buffer.elements[: layout.num_elements].view(torch.uint8)
        region = buffer.outbound[: layout.gradient_nbytes]
        for segment in layout.segments:
            segment.weight(region).copy_(segment.element(buffer.elements))
        return region

    def _land(self, unit: int, arrived: torch.Tensor, present: set[str]) -> None:
        """Host side: store or add the region, then take the norms of what it holds."""
        layout, norms = self._units[unit].layout, self.landed[unit]
        with self._store.landing(unit, keep=bool(norms)) as target:
            if not norms:
                copy_bytes(target, arrived)
            else:  # a block used twice, or a second backward before the step
                for segment in layout.segments:
                    segment.weight(target).add_(segment.weight(arrived))
            for parameter in layout.trainable:
                if parameter.name in present or parameter.name in norms:
                    gradient = parameter.weight(target).float()
                    norms[parameter.name] = torch.linalg.vector_norm(gradient)

    def _allocate(self, layouts: Sequence[UnitLayout]) -> _Buffer:
        elements = max((u.num_elements for u in layouts), default=0)
        mixed = any(s.dtype != torch.float32 for u in layouts for s in u.segments)
        outbound = max((u.gradient_nbytes for u in layouts), default=0) if mixed else 0
        return _Buffer(
            self._transfer.allocate(4 * elements, "gradients").view(torch.float32),
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
