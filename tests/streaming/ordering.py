"""Holds a backend to its promise: whoever touches memory that another lane touches, waits.

`OrderedTransfer` wraps any `Transfer`. It keeps a vector clock per lane (host, compute, h2d, d2h,
adamw), as race detectors do: a lane learns of another's work only through an event that it waits
for. Every access to memory is recorded with its clock, those of compute as torch dispatches them;
afterwards each pair of accesses to the same bytes, one of them a write, must be ordered. Whether
the timing of this run happened to be lucky does not matter, and neither does it that compute on
the CPU is synchronous: the wrapper takes `record` at its word, as a GPU would.

`skip` removes one wait by its reason, in the clocks and in fact.
"""

import bisect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaslide.streaming import lanes, model, optimizer
from megaslide.streaming.lanes import NOTHING, Event, Lane

Clock = Counter[str]


@dataclass(frozen=True)
class Access:
    lane: str
    tick: int
    clock: Clock
    start: int
    stop: int
    write: bool
    what: str

    def before(self, other: "Access") -> bool:
        return other.clock[self.lane] >= self.tick


class OrderLog:
    """Clocks of all lanes, and what they touched."""

    def __init__(self, skip: str | None = None) -> None:
        self.skip = skip
        self.reasons: set[str] = set()
        self.accesses: list[Access] = []
        self.arenas: list[torch.Tensor] = []
        self._clocks: dict[str, Clock] = {}
        self._events: dict[int, tuple[Event, Clock]] = {}
        self._host: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    # Order ------------------------------------------------------------------------------------

    def clock(self, lane: str) -> Clock:
        return self._clocks.setdefault(lane, Clock())

    def wait(self, lane: str, event: Event, why: str) -> None:
        self.reasons.add(why)
        if why != self.skip and id(event) in self._events:
            self._clocks[lane] = self.clock(lane) | self._events[id(event)][1]

    def issue(self, lane: str, after: dict[str, Event]) -> tuple[int, Clock]:
        """Work given to a lane by the host: after all the host knows, and the events named."""
        with self._lock:
            self._clocks[lane] = self.clock(lane) | self.clock("host")
            for why, event in after.items():
                self.wait(lane, event, why)
            self._clocks[lane][lane] += 1
            return self._clocks[lane][lane], self._clocks[lane].copy()

    def stamp(self, event: Event, clock: Clock) -> Event:
        self._events[id(event)] = (event, clock)  # holding the event keeps its id its own
        return event

    # Accesses ---------------------------------------------------------------------------------

    def add_host(self, region: torch.Tensor) -> None:
        self.arenas.append(region)
        self._host.append(_range(region))

    def is_host(self, region: torch.Tensor) -> bool:
        start, stop = _range(region)
        return any(a <= start and stop <= b for a, b in self._host)

    def touch(
        self, lane: str, op: tuple[int, Clock], region: torch.Tensor, write: bool, what: str
    ) -> None:
        start, stop = _range(region)
        if start < stop:
            with self._lock:
                self.accesses.append(Access(lane, *op, start, stop, write, what))

    def races(self) -> list[str]:
        """Unordered pairs of accesses, in words; empty when every wait is there."""
        main = [a for a in self.accesses if a.lane in ("compute", "host")]
        copies = [a for a in self.accesses if a.lane not in ("compute", "host")]
        ordered = sorted(self.accesses, key=lambda a: a.start)
        starts = [a.start for a in ordered]
        longest = max((a.stop - a.start for a in ordered), default=0)
        assert main, "nothing was recorded of compute"
        assert copies, "nothing was recorded of the copies"
        found = set()
        for one in copies:
            low = bisect.bisect_left(starts, one.start - longest)
            for other in ordered[low : bisect.bisect_left(starts, one.stop)]:
                overlap = other.stop > one.start and other.lane != one.lane
                ordered_pair = one.before(other) or other.before(one)
                if overlap and one.write | other.write and not ordered_pair:
                    found.add(f"{one.lane}: {one.what} | {other.lane}: {other.what}")
        return sorted(found)


class OrderedTransfer:
    """A `Transfer` that logs what `inner` is asked to do."""

    def __init__(self, inner: Any, log: OrderLog) -> None:
        self._inner, self._log = inner, log
        self.device, self.memory, self.lanes = inner.device, inner.memory, inner.lanes
        self.trace = inner.trace

    def allocate(self, nbytes: int, kind: str) -> torch.Tensor:
        region = self._inner.allocate(nbytes, kind)
        self._log.arenas.append(region)  # no later tensor takes its address
        return region

    def adopt(self, region: torch.Tensor) -> None:
        self._log.add_host(region)
        self._inner.adopt(region)

    def host(self, nbytes: int) -> torch.Tensor:
        region = self._inner.host(nbytes)
        self._log.add_host(region)
        return region

    def h2d(self, target: Any, source: Callable[[], Any], after: Any, name: str) -> Event:
        op = self._log.issue("h2d", after)
        self._log.touch("h2d", op, target, True, f"load {name}")

        def noticed() -> torch.Tensor:
            region = source()
            if self._log.is_host(region):
                self._log.touch("h2d", op, region, False, f"read {name}")
            return region

        return self._log.stamp(self._inner.h2d(target, noticed, after, name), op[1])

    def d2h(self, target: Any, source: Any, after: Any, name: str, *, land: Any = None) -> Event:
        op = self._log.issue("d2h", after)
        self._log.touch("d2h", op, source, False, f"fetch {name}")
        if target.nbytes and self._log.is_host(target):
            self._log.touch("d2h", op, target, True, f"land {name}")
        return self._log.stamp(self._inner.d2h(target, source, after, name, land=land), op[1])

    def computing(self, name: str) -> Any:
        return self._inner.computing(name)

    def record(self) -> Event:
        return self._log.stamp(self._inner.record(), self._log.issue("compute", {})[1])

    def wait(self, event: Event, why: str) -> None:
        self._log.wait("compute", event, why)
        with _not_the_host():
            self._inner.wait(event, why)

    def join(self, event: Event, why: str) -> None:
        self._log.wait("host", event, why)
        with _not_the_host():
            self._inner.join(event, why)

    def close(self) -> None:
        self._inner.close()


_thread = threading.local()


@contextmanager
def _not_the_host() -> Iterator[None]:
    _thread.counted = True
    try:
        yield
    finally:
        _thread.counted = False


class _Compute(TorchDispatchMode):
    """Records what torch touches in the main thread: host arenas as host, all else as compute."""

    def __init__(self, log: OrderLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name in ("aten::detach", "aten::empty_strided"):
            return result
        written = set()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {id(t) for t in tree_leaves(value)}
        seen = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = {id(t): t for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        for key, tensor in (seen | made).items():
            if tensor.device.type != "meta" and tensor.numel():
                lane = "host" if self._log.is_host(tensor) else "compute"
                write = key in written or key not in seen
                op = self._log.issue(lane, {})
                self._log.touch(lane, op, tensor, write, func._schema.name)
        return result


@contextmanager
def ordered(patch: pytest.MonkeyPatch, skip: str | None = None) -> Iterator[OrderLog]:
    """Within, `megaslide.stream` is watched; `skip` names the wait to leave out."""
    log = OrderLog(skip)
    original_wait, original_submit = Event.wait, Lane.submit
    main, opened, original_adamw = threading.main_thread(), model.open_transfer, optimizer.adamw_

    def wait(event: Event, why: str) -> None:
        if threading.current_thread() is main and not getattr(_thread, "counted", False):
            log.wait("host", event, why)
        if why != skip:
            original_wait(event, why)

    def submit(
        lane: Lane, work: Any, name: str, *, after: Any = NOTHING, nbytes: int = 0, done: Any = None
    ) -> Event:
        if lane.name in ("h2d", "d2h"):
            return original_submit(lane, work, name, after=after, nbytes=nbytes, done=done)
        op = log.issue(lane.name, after)

        def noticed() -> None:
            _thread.op = (lane.name, op, name)
            work()

        return log.stamp(original_submit(lane, noticed, name, after=after, nbytes=nbytes), op[1])

    def adamw(*args: Any, **kwargs: Any) -> None:
        lane, op, name = _thread.op
        for tensor in _tensors([*args, *kwargs.values()]):
            log.touch(lane, op, tensor, True, f"update {name}")
        original_adamw(*args, **kwargs)

    patch.setattr(lanes.Event, "wait", wait)
    patch.setattr(lanes.Lane, "submit", submit)
    patch.setattr(optimizer, "adamw_", adamw)
    patch.setattr(model, "open_transfer", lambda options: OrderedTransfer(opened(options), log))
    with _Compute(log):
        yield log
    patch.undo()


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif is_dataclass(value):
            found += _tensors(getattr(value, f.name) for f in fields(value))
    return found


def _range(region: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first to behind the last byte that the tensor can reach."""
    if not region.numel():
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(region.shape, region.stride(), strict=True))
    return region.data_ptr(), region.data_ptr() + (last + 1) * region.itemsize
