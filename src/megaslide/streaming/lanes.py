"""A lane: one worker thread that runs what it is given, in order, and says when each is done.

Copies in each direction and the optimizer are lanes. Errors do not vanish in the thread: they come
out of the event at whoever waits for the work.

Every wait says why it is there. The reasons are the list of what the engine's order rests on: a
test takes them away one by one, and each must be missed.
"""

import atexit
import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType

import threadpoolctl
import torch

from megaslide.tracing import Trace

Task = Callable[[], object]
NOTHING: "Mapping[str, Event]" = MappingProxyType({})


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between contiguous host tensors of equal size, without the GIL and on this thread.

    torch's own copy would split the work among OpenMP workers, one set per calling thread, which
    then spin on the cores that compute.
    """
    if target.nbytes != source.nbytes:
        raise ValueError(f"copying {source.nbytes} bytes into {target.nbytes}")
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


class Event:
    """Completion of one piece of asynchronous work, with the error if it failed."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._error: BaseException | None = None

    @classmethod
    def completed(cls) -> "Event":
        event = cls()
        event.set()
        return event

    def set(self, error: BaseException | None = None) -> None:
        self._error = error
        self._flag.set()

    def done(self) -> bool:
        return self._flag.is_set()

    def wait(self, why: str) -> None:
        """Block until the work is done, because of `why`; RuntimeError if it failed."""
        self.settle(why)
        if self._error is not None:
            raise RuntimeError(f"asynchronous work failed: {self._error}") from self._error

    def settle(self, why: str) -> None:
        """Block until the work has ended, well or not, because of `why`."""
        self._flag.wait()


class Lane:
    """Runs submitted work in order on its own thread, recording each piece as a span."""

    def __init__(self, name: str, trace: Trace) -> None:
        self.name = name
        self._trace = trace
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_drain, args=(self._tasks,), name=name, daemon=True)
        _running[self._thread] = self._tasks
        self._thread.start()
        # No join here: the collector may run on a lane that this one still waits for.
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def submit(
        self, work: Task, name: str, *, after: Mapping[str, Event] = NOTHING, nbytes: int = 0,
        done: Event | None = None,
    ) -> Event:  # fmt: skip
        """Queue `work`, to run once the events in `after`, by reason, are done.

        `done` is the event that tells of its end, where the caller has one.
        """
        done, trace, lane = done or Event(), self._trace, self.name

        def run() -> None:
            try:
                for why, event in after.items():
                    event.wait(why)
                with trace.span(lane, name, nbytes):
                    work()
            except BaseException as error:
                done.set(error)
            else:
                done.set()

        self._tasks.put(run)
        return done

    def close(self) -> None:
        """Finish what was submitted and stop the thread."""
        self._tasks.put(None)
        self._thread.join()


class Lanes:
    """Opens the engine's lanes; a simulation opens others, which take no time (`planning`)."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def open(self, name: str) -> Lane:
        return Lane(name, self.trace)


_running: "dict[threading.Thread, queue.SimpleQueue[Task | None]]" = {}
"""Threads that have not ended, with what to tell them."""


def _drain(tasks: "queue.SimpleQueue[Task | None]") -> None:
    # A function, not a method: the thread must not keep its lane, and so the engine, alive.
    torch.set_grad_enabled(False)
    _compute_alone()
    while (task := tasks.get()) is not None:
        task()
        del task  # holds the tensors of a copy, which must be gone when its event is long done
    _running.pop(threading.current_thread(), None)


@atexit.register
def _end_all() -> None:
    """At interpreter exit: a thread that is killed inside torch would abort the process.

    Youngest first, each to its end, because what a lane is doing may need an older one.
    """
    for thread, tasks in reversed(list(_running.items())):
        tasks.put(None)
        thread.join()


def _compute_alone() -> None:
    """Keep this thread's loops on this thread.

    Every thread that starts a parallel loop gets OpenMP workers of its own. As soon as there are
    more of them than cores, libgomp lets nobody wait actively any more, and every small operation
    of the model pays for waking a sleeping worker: blocks took twice their time on 2 cores.
    """
    torch.get_num_threads()  # torch sets the thread's number at its first use: before, not after us
    threadpoolctl.threadpool_limits(1, user_api="openmp")  # of the calling thread only
