"""What a training step takes: the engine itself, run on a clock instead of on a machine.

A second description of the schedule would drift away from the engine. So there is none: a skeleton
model, one parameter per block, is trained by the real executor, slots, gradient buffers and
optimizer. Only its lanes (`streaming.lanes`) and its trace are virtual: work on a lane is done at
once, and instead of the time it took, the time that the real unit's work takes passes on that
lane's clock. What waits for an event goes to the event's time. Since everything runs in the order
in which it was given, a lane is busy exactly when the engine's would be.

Time is in seconds and bytes are bytes. Compute is the calling thread's lane, as on the CPU.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaslide.streaming.lanes import NOTHING, Event, Lane, Lanes
from megaslide.streaming.model import StreamedModel, build
from megaslide.streaming.options import StreamOptions
from megaslide.streaming.staging import READ_LANE, WEIGHTS_LANE, WRITE_LANE
from megaslide.streaming.store import Tier
from megaslide.streaming.transfer import CpuTransfer, TransferHooks
from megaslide.tracing import Span, Trace, TraceSummary, summarize

WARM_UP, STEPS = 2, 2
COMPUTE = "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one lane does for one unit, once."""

    seconds: float
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitLoad:
    """The work that one unit causes, by lane; the first unit is what stays on the device."""

    forward_s: float
    """Forward of one micro-batch."""
    recompute_s: float = 0.0
    """The same with what backward needs saved; nothing for the resident unit."""
    backward_s: float
    """Backward of one micro-batch."""
    clear_s: float = 0.0
    """Clearing the gradient buffer before backward."""
    round_s: float = 0.0
    """Rounding gradients to the weights' dtype after it."""
    h2d: Load
    d2h: Load
    adamw: Load
    activation: Load | None = None
    """One direction of the unit's inputs, all micro-batches together, where they leave."""
    disk_weights: Load | None = None
    """Reading the weights for one H2D copy, on the disk tier; the next three belong to it too."""
    disk_read: Load | None = None
    """Reading the state for AdamW."""
    disk_write: Load | None = None
    """Writing the state after AdamW."""
    disk_gradients: Load | None = None
    """Writing the gradients, where they are on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The engine's options that decide what happens when."""

    slots: int = 2
    micro_batches: int = 1
    clip: bool = True
    activations: str = "device"
    tier: Tier = "ram"
    gradient_tier: Tier = "ram"
    synchronous: bool = False
    """Wait for every copy where it is started: what overlap is compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """A step in steady state."""

    step_s: float
    lanes: TraceSummary
    """Of `STEPS` steps."""
    spans: list[Span]
    """When what ran, of the same steps; the first begins at about 0."""

    @property
    def bound(self) -> str:
        """The lane that works longest."""
        return max(self.lanes.busy_s, key=lambda lane: self.lanes.busy_s[lane])


def simulate(units: Sequence[UnitLoad], schedule: Schedule) -> Simulated:
    """Train a skeleton of these units, the resident one first, for a few steps of virtual time."""
    clock = Clock(_table(units, schedule.micro_batches))
    options = StreamOptions(
        slots=schedule.slots, micro_batch_size=1, activations=schedule.activations,
        max_grad_norm=1.0 if schedule.clip else None, tier=schedule.tier,
        gradient_tier=schedule.gradient_tier, disk_path=tempfile.gettempdir(),
    )  # fmt: skip
    hooks = TransferHooks(synchronous=schedule.synchronous)
    skeleton = Skeleton(clock, len(units) - 1)
    model = build(skeleton, options, CpuTransfer(VirtualLanes(clock), hooks))
    with torch.enable_grad():
        for _ in range(WARM_UP):
            _step(model, schedule)
        start, before = clock.now, model.trace.snapshot()
        for _ in range(STEPS):
            _step(model, schedule)
    end, after = clock.now, model.trace.snapshot()
    model.close()
    spans = [
        Span(s.lane, s.name, s.start - start, s.end - start, s.nbytes)
        for s in model.trace.between(start, end)
    ]
    return Simulated(step_s=(end - start) / STEPS, lanes=summarize(before, after), spans=spans)


def _step(model: StreamedModel, schedule: Schedule) -> None:
    loss = model(torch.ones(schedule.micro_batches, 1)).mean()
    with model.final_backward():
        loss.backward()
    model.step()


# ---- virtual time --------------------------------------------------------------------------------

Table = Mapping[tuple[str, str], Load]
"""What a lane's work of a name takes; nothing where it is not listed."""


class Clock:
    """One time per lane. Who runs now is on top of the stack; the calling thread is at its foot."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._times: defaultdict[str, float] = defaultdict(float)
        self._running = [COMPUTE]
        self._disk = Shared()

    @property
    def now(self) -> float:
        return self._times[self._running[-1]]

    def pass_until(self, time: float) -> None:
        self._times[self._running[-1]] = max(self.now, time)

    def work(self, lane: str, name: str) -> None:
        """Spend what the table says; the disk's lanes share one disk."""
        seconds = self.table[lane, name].seconds if (lane, name) in self.table else 0.0
        on_disk = lane in (WEIGHTS_LANE, READ_LANE, WRITE_LANE)
        now = self.now
        self.pass_until(self._disk.take(now, seconds) if on_disk else now + seconds)

    @contextmanager
    def running(self, lane: str) -> Iterator[None]:
        """Within, the lane runs what was given to it just now."""
        given = self.now
        self._running.append(lane)
        self.pass_until(given)
        try:
            yield
        finally:
            self._running.pop()


class Shared:
    """What several lanes use, one at a time: whoever comes gets the time that is still free.

    Lanes run here one after another, not by time, so who asks later may come before.
    """

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def take(self, at: float, seconds: float) -> float:
        """Use it for so long from `at` on, in the gaps that others leave; when that ends."""
        later = [span for span in self._busy if span[1] > at]
        for start, end in [*later, (math.inf, math.inf)]:
            used = min(max(start - at, 0.0), seconds)
            if used > 0:
                self._busy.append((at, at + used))
            seconds, at = seconds - used, at + used
            if seconds <= 0:
                break
            at = max(at, end)
        self._busy.sort()
        return at


class VirtualEvent(Event):
    """Done at a time; whoever waits for it goes there."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.set()
        self._clock, self._time = clock, clock.now

    def done(self) -> bool:
        return self._time <= self._clock.now

    def settle(self, why: str) -> None:
        self._clock.pass_until(self._time)


class VirtualTrace(Trace):
    """Spans last as long as the table says, and what is done inside them besides."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(now=lambda: clock.now)
        self._clock = clock

    @contextmanager
    def span(self, lane: str, name: str, nbytes: int = 0) -> Iterator[None]:
        load = self._clock.table.get((lane, name))
        with super().span(lane, name, load.nbytes if load else 0):
            yield
            self._clock.work(lane, name)


class VirtualLane(Lane):
    """Does at once what it is given, in virtual time."""

    def __init__(self, name: str, clock: Clock, trace: Trace) -> None:
        self.name, self._clock, self._trace = name, clock, trace

    def submit(
        self, work: Callable[[], object], name: str, *,
        after: Mapping[str, Event] = NOTHING, nbytes: int = 0, done: Event | None = None,
    ) -> Event:  # fmt: skip
        if done is not None:
            raise NotImplementedError("an event of the virtual clock is made here")
        with self._clock.running(self.name):
            for why, event in after.items():
                event.wait(why)
            with self._trace.span(self.name, name), torch.no_grad():
                work()
            return VirtualEvent(self._clock)

    def close(self) -> None: ...


class VirtualLanes(Lanes):
    """Opens virtual lanes on one clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(VirtualTrace(clock))
        self._clock = clock

    def open(self, name: str) -> Lane:
        return VirtualLane(name, self._clock, self.trace)


# ---- the skeleton --------------------------------------------------------------------------------


class Skeleton(nn.Module):
    """A model whose blocks do nothing; the resident unit's work is spans of its own."""

    def __init__(self, clock: Clock, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(_Bone() for _ in range(depth))
        self._clock = clock

    def forward(self, x: Tensor) -> Tensor:  # [micro-batches, 1]
        hidden = _Resident.apply(x * self.scale, self._clock)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class _Bone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Resident(torch.autograd.Function):
    """All forward work of the resident unit before the blocks, all backward work after them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.work(COMPUTE, "resident forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.clock.work(COMPUTE, "resident backward")
        return grads[0], None


def _table(units: Sequence[UnitLoad], micro_batches: int) -> Table:
    """The work by lane and by the names that the engine gives it."""
    table: dict[tuple[str, str], Load] = {}
    for index, load in enumerate(units):
        name = "resident" if index == 0 else f"blocks.{index - 1}"
        table |= {("h2d", name): load.h2d, ("d2h", name): load.d2h, ("adamw", name): load.adamw}
        once = {
            f"forward {name}": load.forward_s * micro_batches,
            f"recompute {name}": load.recompute_s,
            f"backward {name}": load.backward_s,
            f"clear {name}": load.clear_s,
            f"round {name}": load.round_s,
        }
        table |= {(COMPUTE, what): Load(seconds=seconds) for what, seconds in once.items()}
        optional = {
            ("h2d", "activation"): load.activation, ("d2h", "activation"): load.activation,
            (WEIGHTS_LANE, name): load.disk_weights, (READ_LANE, name): load.disk_read,
            (WRITE_LANE, name): load.disk_write,
            (WRITE_LANE, f"gradients {name}"): load.disk_gradients,
        }  # fmt: skip
        table |= {key: load for key, load in optional.items() if load is not None}
    for pass_ in ("forward", "backward"):
        per_batch = getattr(units[0], f"{pass_}_s")
        table[COMPUTE, f"resident {pass_}"] = Load(seconds=per_batch * micro_batches)
    return table
