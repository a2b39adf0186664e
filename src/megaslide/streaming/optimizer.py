"""The optimizer, on the host, hidden behind the next forward pass.

After backward the global norm is exact and the clip coefficient known; AdamW then walks the units
in forward order on its own thread while the next forward already streams. A unit is loaded only
after its own update (its `updated` event), so there is no staleness and nothing to roll back.
"""

from contextlib import closing
from functools import partial

import torch

from megaslide.ops.adamw import BLOCK8, AdamWSettings, AdamWState, adamw_
from megaslide.streaming.gradients import Landed
from megaslide.streaming.lanes import NOTHING, Event, Lanes
from megaslide.streaming.layout import UnitLayout
from megaslide.streaming.records import Piece
from megaslide.streaming.staging import Memory
from megaslide.streaming.store import Store
from megaslide.streaming.transfer import Reasons


class StreamedAdamW:
    """Updates the store; one thread, one unit at a time, in the order it is given."""

    def __init__(self, store: Store, lanes: Lanes, ema_decay: float | None) -> None:
        self._store, self._ema_decay = store, ema_decay
        self._updated = [Event.completed() for _ in store.units]
        self._lane = lanes.open("adamw")

    def updated(self, unit: int) -> Event:
        """Done when the unit's latest update is in the store."""
        return self._updated[unit]

    def launch(
        self, unit: int, landed: Landed, settings: AdamWSettings, grad_scale: float,
        after: Reasons = NOTHING, following: int | None = None,
    ) -> None:  # fmt: skip
        """Start the unit's update with what landed, which may still grow until `after` are done.

        `following` is the unit whose update will be launched next, if that is certain. Nothing
        changes if a norm is not finite by then; whoever launches reports it.
        """
        work = partial(self._update, unit, following, landed, settings, grad_scale)
        self._store.forget(unit)
        self._updated[unit] = self._lane.submit(work, self._store.units[unit].name, after=after)

    def finish(self) -> None:
        """Wait until every update launched so far is in the store."""
        for event in self._updated:
            event.wait("updates finished")
        self._store.finish()

    def close(self) -> None:
        self._lane.close()

    def _update(
        self, unit: int, following: int | None, landed: Landed, settings: AdamWSettings,
        scale: float,
    ) -> None:  # fmt: skip
        if not landed.norms or not all(torch.isfinite(norm) for norm in landed.norms.values()):
            return
        layout, present = self._store.units[unit], set(landed.norms)
        steps = self._store.steps[unit]
        for name in present:
            steps[name] += 1
        with closing(self._store.pieces(unit, following)) as pieces:
            for piece, memory in pieces:
                first = layout.segments[piece.segment].element_offset + piece.start
                gradient = landed.gradient(first, memory.pop("gradients"))
                for start, stop, step in _runs(layout, piece, present, steps):
                    adamw_(
                        _entries(memory, start, stop), gradient[start:stop], settings,
                        step=step, grad_scale=scale, ema_decay=self._ema_decay or 0.0,
                    )  # fmt: skip


def _entries(memory: Memory, start: int, stop: int) -> AdamWState:
    """State of elements [start, stop) of a piece, views.

    `start` is a multiple of ALIGN, so that every scale serves elements of one run only.
    """
    part = {kind: entries[start:stop] for kind, entries in memory.items()}
    for kind in ("exp_avg_scale", "exp_avg_sq_scale"):
        if kind in memory:
            part[kind] = memory[kind][start // BLOCK8 : -(-stop // BLOCK8)]
    weight = part.pop("weights")
    return AdamWState(weight=weight, **part)


def _runs(
    layout: UnitLayout, piece: Piece, present: set[str], steps: dict[str, int]
) -> list[tuple[int, int, int]]:
    """(start, stop, step) of maximal contiguous parts of the piece with one step count.

    A parameter without a gradient is skipped, as torch.optim does: its moments do not decay and
    its step does not advance. Usually the whole piece is one run.
    """
    segment = layout.segments[piece.segment]
    first, last = segment.element_offset + piece.start, segment.element_offset + piece.stop
    inside = [p for p in layout.trainable if segment.element_offset <= p.element_offset < last]
    stops = [*(p.element_offset for p in inside[1:]), last]
    runs: list[tuple[int, int, int]] = []
    for parameter, stop in zip(inside, stops, strict=True):
        if parameter.name not in present or stop <= first:
            continue
        start, stop = max(parameter.element_offset, first) - first, stop - first
        step = steps[parameter.name]
        if runs and runs[-1][1:] == (start, step):
            runs[-1] = (runs[-1][0], stop, step)
        else:
            runs.append((start, stop, step))
    return runs
