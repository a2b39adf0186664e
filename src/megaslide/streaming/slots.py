"""Device-side slots: who is on the device now, who comes next, who must go.

A slot holds one block's weight region. The executor says which units come next; the cache keeps
the next `count` distinct ones on the device or on their way and evicts what is needed last. At the
turn from forward to backward the last blocks are therefore still there and are not loaded again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megaslide.streaming.lanes import Event
from megaslide.streaming.store import Store
from megaslide.streaming.transfer import Transfer


@dataclass(slots=True)
class Slot:
    """One buffer and the unit whose weights it holds or awaits."""

    buffer: torch.Tensor
    unit: int | None = None
    loaded: Event = field(default_factory=Event.completed)
    free: Event = field(default_factory=Event.completed)
    """Done when the last computation that read the buffer is."""
    pinned: bool = False


class SlotCache:
    """`count` slots, each large enough for the largest block."""

    def __init__(
        self, transfer: Transfer, store: Store, blocks: list[int], count: int,
        updated: Callable[[int], Event],
    ) -> None:  # fmt: skip
        self._transfer, self._store, self._updated = transfer, store, updated
        size = max(store.units[b].weight_nbytes for b in blocks)
        count = min(count, len(blocks))
        buffers = [transfer.allocate(size, "slots") for _ in range(count)]
        self._slots = [Slot(buffer, free=transfer.record()) for buffer in buffers]

    def acquire(self, unit: int, upcoming: list[int]) -> torch.Tensor:
        """The unit's weight region on the device, loaded; it stays until `release`.

        `upcoming` lists the units needed after this one, soonest first; the loads that fit are
        started before waiting.
        """
        self.prefetch([unit, *upcoming])
        slot = self._find(unit)
        if slot is None:
            raise RuntimeError(f"no slot for {self._store.units[unit].name}: all are in use")
        slot.pinned = True
        self._transfer.wait(slot.loaded, "slot loaded")
        return slot.buffer[: self._store.units[unit].weight_nbytes]

    def release(self, unit: int) -> None:
        slot = self._find(unit)
        assert slot is not None
        slot.pinned = False
        slot.free = self._transfer.record()

    def prefetch(self, upcoming: list[int]) -> None:
        """Start loading the next units, soonest first, in slots that hold none of them."""
        absent = [u for u in dict.fromkeys(upcoming) if self._find(u) is None]
        self._store.read_ahead(absent, self._updated)
        wanted = list(dict.fromkeys(upcoming))[: len(self._slots)]
        for unit in wanted:
            if self._find(unit) is not None:
                continue
            victim = next((s for s in self._slots if not s.pinned and s.unit not in wanted), None)
            if victim is None:
                return
            self._load(victim, unit)

    def invalidate(self) -> None:
        """Forget all contents: the weights change, or another set of them is served."""
        for slot in self._slots:
            if slot.pinned:
                raise RuntimeError("weights changed while a block is computing")
            # A prefetch that nobody used may still be reading what is about to change.
            self._transfer.join(slot.loaded, "prefetch before the weights change")
            slot.unit = None

    def _load(self, slot: Slot, unit: int) -> None:
        layout = self._store.units[unit]
        target = slot.buffer[: layout.weight_nbytes]
        after = {"slot free": slot.free, "weights updated": self._updated(unit)}
        # A load of the unit that was here before may be in flight: the lane keeps their order.
        slot.unit = unit
        slot.loaded = self._transfer.h2d(
            target, lambda: self._store.weights(unit), after, layout.name
        )

    def _find(self, unit: int) -> Slot | None:
        return next((s for s in self._slots if s.unit == unit), None)
