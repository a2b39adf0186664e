"""The optimizer, on the host, hidden behind the next forward pass.

After backward the global norm is exact and the clip coefficient known; AdamW then walks the units
in forward order on its own thread while the next forward already streams. A unit is loaded only
after its own update (its `updated` event), so there is no staleness and nothing to roll back.
"""

from functools import partial

import torch

from megaslide.ops.adamw import AdamWSettings, AdamWState, adamw_
from megaslide.streaming.gradients import Landed
from megaslide.streaming.lanes import NOTHING, Event, Lane
from megaslide.streaming.layout import Segment, UnitLayout
from megaslide.streaming.store import Store
from megaslide.streaming.transfer import Reasons
from megaslide.tracing import Trace


class StreamedAdamW:
    """Updates the store; one thread, one unit at a time, in the order it is given."""

    def __init__(self, store: Store, trace: Trace, ema_decay: float | None) -> None:
        self._store, self._ema_decay = store, ema_decay
        self._updated = [Event.completed() for _ in store.units]
        self._lane = Lane("adamw", trace)

    def updated(self, unit: int) -> Event:
        """Done when the unit's latest update is in the store."""
        return self._updated[unit]

    def launch(
        self, unit: int, landed: Landed, settings: AdamWSettings, grad_scale: float,
        after: Reasons = NOTHING,
    ) -> None:  # fmt: skip
        """Start the unit's update with what landed, which may still grow until `after` are done.

        Nothing changes if a norm is not finite by then; whoever launches reports it.
        """
        work = partial(self._update, unit, landed, settings, grad_scale)
        self._updated[unit] = self._lane.submit(work, self._store.units[unit].name, after=after)

    def finish(self) -> None:
        """Wait until every update launched so far is in the store."""
        for event in self._updated:
            event.wait("updates finished")

    def close(self) -> None:
        self._lane.close()

    def _update(self, unit: int, landed: Landed, settings: AdamWSettings, scale: float) -> None:
        if not all(torch.isfinite(norm) for norm in landed.norms.values()):
            return
        layout, present = self._store.units[unit], set(landed.norms)
        steps = self._store.steps[unit]
        for name in present:
            steps[name] += 1
        for segment in layout.segments:
            for start, stop, step in _runs(layout, segment, present, steps):
                part = slice(start, stop)
                self._update_run(unit, segment, part, landed, step, settings, scale)

    def _update_run(
        self, unit: int, segment: Segment, part: slice, landed: Landed, step: int,
        settings: AdamWSettings, scale: float,
    ) -> None:  # fmt: skip
        store = self._store
        residual = store.residual(unit, segment)
        ema = None
        if self._ema_decay is not None:
            ema = segment.element(store.moments(unit, "ema"))[part]
        state = AdamWState(
            weight=segment.weight(store.weights(unit))[part],
            residual=None if residual is None else residual[part],
            exp_avg=segment.element(store.moments(unit, "exp_avg"))[part],
            exp_avg_sq=segment.element(store.moments(unit, "exp_avg_sq"))[part],
            ema=ema,
        )
        grad = landed.gradient(segment, store.gradient(unit))[part]
        adamw_(state, grad, settings, step=step, grad_scale=scale, ema_decay=self._ema_decay or 0.0)


def _runs(
    layout: UnitLayout, segment: Segment, present: set[str], steps: dict[str, int]
) -> list[tuple[int, int, int]]:
    """(start, stop, step) of maximal contiguous parts of the segment with one step count.

    A parameter without a gradient is skipped, as torch.optim does: its moments do not decay and
    its step does not advance. Usually the whole segment is one run.
    """
    inside = [
        p for p in layout.trainable
        if segment.element_offset <= p.element_offset < segment.element_offset + segment.numel
    ]  # fmt: skip
    stops = [p.element_offset - segment.element_offset for p in inside[1:]] + [segment.numel]
    runs: list[tuple[int, int, int]] = []
    for parameter, stop in zip(inside, stops, strict=True):
        start = parameter.element_offset - segment.element_offset
        if parameter.name not in present:
            continue
        step = steps[parameter.name]
        if runs and runs[-1][1:] == (start, step):
            runs[-1] = (runs[-1][0], stop, step)
        else:
            runs.append((start, stop, step))
    return runs
