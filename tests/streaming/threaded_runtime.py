"""A GPU's streams without a GPU: copies run later, on threads, in the order of their stream.

`megaslide.streaming.accelerator` gives its copies to a `Runtime`. This one has the CPU's memory,
and a thread per stream that lets every copy wait at random (seeded), with the target poisoned until
it is done. Some of what is recorded on the compute stream is done late, too: compute is synchronous
here, but nobody may count on that. So a copy that is issued too early, or memory that is used
again too early, is a wrong number here, as it would be on the device, and more often.
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from megaslide.streaming.lanes import copy_bytes
from megaslide.streaming.transfer import NAN_BYTE

FREE_BYTES = 12345
RARE = 0.05
"""Part of the events on the compute stream that are late."""


class Place:
    """The runtime's event."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._time = 0.0

    def record(self, stream: "Stream") -> None:
        self._flag.clear()
        stream.reach(self._reach)

    def _reach(self) -> None:
        self._time = time.perf_counter()
        self._flag.set()

    def synchronize(self) -> None:
        assert self._flag.wait(timeout=60), "nothing will ever record this event"

    def query(self) -> bool:
        return self._flag.is_set()

    def elapsed_time(self, later: "Place") -> float:
        return (later._time - self._time) * 1e3


class Stream:
    """Runs what it is given in order, on its own thread."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while (task := self._tasks.get()) is not None:
            task()
            del task

    def enqueue(self, task: Callable[[], None], delay_s: float = 0.0) -> None:
        if delay_s:
            self._tasks.put(lambda: time.sleep(delay_s))
        self._tasks.put(task)

    def reach(self, mark: Callable[[], None]) -> None:
        self.enqueue(mark)

    def wait_event(self, event: Place) -> None:
        self.enqueue(event.synchronize)

    def close(self) -> None:
        self._tasks.put(None)


class ComputeStream(Stream):
    """Compute is done when Python is, so what waits in this stream makes Python wait."""

    def __init__(self, delay: Callable[[], float]) -> None:
        super().__init__()
        self._delay = delay

    def wait_event(self, event: Place) -> None:
        event.synchronize()

    def reach(self, mark: Callable[[], None]) -> None:
        self.enqueue(mark, self._delay())


class ThreadedRuntime:
    """See the module's text.

    Args:
        max_delay_s: any copy begins up to this much later.
    """

    def __init__(self, max_delay_s: float, seed: int) -> None:
        self.device = torch.device("cpu")
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._compute = ComputeStream(self._rare_delay)
        self.streams = [self._compute]
        self.locked: list[tuple[int, int]] = []
        """Address and bytes of what is page-locked now."""

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self._compute

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.fill_(NAN_BYTE)
        delay_s = self._random.uniform(0, self._max_delay_s)
        stream.enqueue(lambda: copy_bytes(target, source), delay_s)

    def event(self) -> Place:
        return Place()

    def page_lock(self, region: torch.Tensor) -> bool:
        assert region.data_ptr() % 4096 == 0, "page-locking takes whole pages"
        self.locked.append((region.data_ptr(), region.nbytes))
        return True

    def unlock(self, region: torch.Tensor) -> None:
        self.locked.remove((region.data_ptr(), region.nbytes))

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return 0

    def free(self) -> int:
        return FREE_BYTES

    def _rare_delay(self) -> float:
        return self._max_delay_s if self._random.random() < RARE else 0.0
