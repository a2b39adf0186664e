"""What each unit's work takes on this machine, read off the engine's own trace.

A model of a few blocks takes some steps with nothing overlapped: every copy is waited for where it
starts (`TransferHooks(synchronous=True)`) and AdamW is finished before the next step. Its spans are
then the work alone, and `simulate` says what is left of their sum when they overlap.

Seconds and bytes.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from megaslide.planning.simulate import Load, UnitLoad
from megaslide.streaming import StreamedModel

WARM_UP, STEPS = 2, 7


def profile(model: StreamedModel, step: Callable[[], None]) -> list[UnitLoad]:
    """The loads of the model's units, the resident one first.

    Args:
        model: streamed with synchronous hooks and one micro-batch.
        step: one optimizer step of it.
    """
    walls, spent = [], []
    took: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(WARM_UP + STEPS):
        start = time.perf_counter()
        step()
        end = time.perf_counter()
        model.finish()
        if number >= WARM_UP:
            spans = [s for s in model.trace.between(start, time.perf_counter()) if s.start > start]
            walls.append(end - start)
            spent.append(sum(s.end - s.start for s in spans if s.lane in ("compute", "wait")))
            for span in spans:
                took[span.lane, span.name].append(span.end - span.start)
    medians = {key: statistics.median(seconds) for key, seconds in took.items()}
    loads = [_load(model, medians, unit) for unit in range(len(model.store.units))]
    rest = max(statistics.median(walls) - statistics.median(spent), 0.0)
    loads[0] = replace(loads[0], forward_s=rest / 3, backward_s=2 * rest / 3)
    return loads


def _load(model: StreamedModel, medians: dict[tuple[str, str], float], unit: int) -> UnitLoad:
    layout = model.store.units[unit]

    def seconds(lane: str, what: str = "{}") -> float:
        return medians.get((lane, what.format(layout.name)), 0.0)

    return UnitLoad(
        forward_s=seconds("compute", "forward {}"),
        recompute_s=seconds("compute", "recompute {}"),
        backward_s=seconds("compute", "backward {}"),
        clear_s=seconds("compute", "clear {}"),
        round_s=seconds("compute", "round {}"),
        h2d=Load(seconds=seconds("h2d"), nbytes=layout.weight_nbytes),
        d2h=Load(seconds=seconds("d2h"), nbytes=layout.gradient_nbytes),
        adamw=Load(seconds=seconds("adamw")),
    )
