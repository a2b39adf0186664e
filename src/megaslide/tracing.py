"""What ran where and when: spans per lane and byte counters, cheap enough to stay on.

One `Trace` is shared by the streaming engine and the trainer. Lanes are the hardware units of the
design (`compute`, `h2d`, `d2h`, `adamw`) and `wait`, the time in which compute had nothing to
compute on; counters accumulate bytes and seconds. The report's timeline, the log keys `offload/*`
and the tests on traffic all read from here, so there is one source for what happened.
"""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLOCK = "clock"  # the snapshots' own time, kept among the counters


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one lane; times in seconds of the trace's clock."""

    lane: str
    name: str
    start: float
    end: float
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSummary:
    """What the lanes did in a stretch of time."""

    seconds: float
    busy_s: Mapping[str, float]
    """Seconds in which each lane worked; `wait` is not work and not among them."""
    nbytes: Mapping[str, int]
    """Bytes that each link moved."""
    wait_s: float

    @property
    def overlap(self) -> float:
        """Busy time of the busiest lane over the time in all: 1 when nothing but it took time."""
        return max(self.busy_s.values(), default=0.0) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [f"{self.seconds:.3f} s, overlap efficiency {self.overlap:.3f}"]
        for lane, busy in sorted(self.busy_s.items(), key=lambda item: -item[1]):
            line = f"{lane:8} busy {busy:8.3f} s {100 * busy / self.seconds:5.1f} %"
            moved = self.nbytes.get(lane, 0)
            lines.append(line + (f"  {moved / 1e9:.3f} GB" if moved else ""))
        return "\n".join([*lines, f"{'wait':8}      {self.wait_s:8.3f} s"])


def summarize(before: Mapping[str, float], after: Mapping[str, float]) -> TraceSummary:
    """What happened between two snapshots of one trace."""
    moved = {key: value - before.get(key, 0.0) for key, value in after.items()}
    lanes = {key.removesuffix("_s"): n for key, n in moved.items() if key.endswith("_s")}
    wait = lanes.pop("wait", 0.0)
    seconds = lanes.pop(CLOCK, 0.0)
    nbytes = {
        key.removesuffix("_bytes"): int(n) for key, n in moved.items() if key.endswith("_bytes")
    }
    return TraceSummary(seconds=seconds, busy_s=lanes, nbytes=nbytes, wait_s=wait)


class Trace:
    """Thread-safe record of the most recent `capacity` spans, and of counters since the start."""

    def __init__(
        self, capacity: int = 20_000, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        self.spans: deque[Span] = deque(maxlen=capacity)
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.before_reading: list[Callable[[], None]] = []
        """Called before anything is read: what a device has done is known only later."""
        self._lock = threading.Lock()

    @contextmanager
    def span(self, lane: str, name: str, nbytes: int = 0) -> Iterator[None]:
        """Time the enclosed work; `nbytes` is also added to the counter `{lane}_bytes`."""
        start = self._now()
        try:
            yield
        finally:
            self.add(lane, name, start, self._now(), nbytes)

    def add(self, lane: str, name: str, start: float, end: float, nbytes: int = 0) -> None:
        """Record a span whose times, of this trace's clock, somebody else has taken."""
        with self._lock:
            self.spans.append(Span(lane, name, start, end, nbytes))
            self.counters[f"{lane}_s"] += end - start
            self.counters[f"{lane}_bytes"] += nbytes

    def count(self, key: str, amount: float) -> None:
        with self._lock:
            self.counters[key] += amount

    def snapshot(self) -> dict[str, float]:
        """The counters and the time now; `summarize` two to get what happened between them."""
        self._ask()
        with self._lock:
            return {**self.counters, f"{CLOCK}_s": self._now()}

    def between(self, start: float, end: float) -> list[Span]:
        """Spans that overlap the interval, oldest first."""
        self._ask()
        with self._lock:
            return [s for s in self.spans if s.end > start and s.start < end]

    def save_chrome(self, path: Path) -> None:
        """Write the spans in the Trace Event Format that chrome://tracing and Perfetto open."""
        self._ask()
        with self._lock:
            spans = list(self.spans)
        lanes = sorted({s.lane for s in spans})
        start = min((s.start for s in spans), default=0.0)
        events = [
            {
                "name": s.name,
                "cat": s.lane,
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(s.lane),
                "ts": (s.start - start) * 1e6,
                "dur": (s.end - s.start) * 1e6,
                "args": {"bytes": s.nbytes},
            }
            for s in spans
        ]
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(lanes)
        ]
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": names + events}))

    def _ask(self) -> None:
        for collect in self.before_reading:
            collect()
