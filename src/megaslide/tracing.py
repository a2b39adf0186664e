"""What ran where and when: spans per lane and byte counters, cheap enough to stay on.

One `Trace` is shared by the streaming engine and the trainer. Lanes are the hardware units of the
design (`compute`, `h2d`, `d2h`, `adamw`); counters accumulate bytes and waits. The report's
timeline, the log keys `offload/*` and the tests on traffic all read from here, so there is one
source for what happened.
"""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one lane; times in seconds of `time.perf_counter`."""

    lane: str
    name: str
    start: float
    end: float
    nbytes: int = 0


class Trace:
    """Thread-safe record of the most recent `capacity` spans, and of counters since the start."""

    def __init__(self, capacity: int = 20_000) -> None:
        self.spans: deque[Span] = deque(maxlen=capacity)
        self.counters: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def span(self, lane: str, name: str, nbytes: int = 0) -> Iterator[None]:
        """Time the enclosed work; `nbytes` is also added to the counter `{lane}_bytes`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self.spans.append(Span(lane, name, start, end, nbytes))
                self.counters[f"{lane}_s"] += end - start
                self.counters[f"{lane}_bytes"] += nbytes

    def count(self, key: str, amount: float) -> None:
        with self._lock:
            self.counters[key] += amount

    def snapshot(self) -> dict[str, float]:
        """The counters now; subtract two snapshots to get what one step did."""
        with self._lock:
            return dict(self.counters)

    def between(self, start: float, end: float) -> list[Span]:
        """Spans that overlap the interval, oldest first."""
        with self._lock:
            return [s for s in self.spans if s.end > start and s.start < end]

    def save_chrome(self, path: Path) -> None:
        """Write the spans in the Trace Event Format that chrome://tracing and Perfetto open."""
        lanes = sorted({s.lane for s in self.spans})
        events = [
            {
                "name": s.name,
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(s.lane),
                "ts": s.start * 1e6,
                "dur": (s.end - s.start) * 1e6,
                "args": {"bytes": s.nbytes},
            }
            for s in self.spans
        ]
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(lanes)
        ]
        path.write_text(json.dumps({"traceEvents": names + events}))
