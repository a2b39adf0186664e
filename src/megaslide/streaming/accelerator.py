"""A GPU as the device: copies on two streams beside compute, from page-locked memory.

The lanes are the same threads as on the CPU. One waits for the host's events, says to its stream
what to copy, and looks after it until it is done; so a copy's span is the copy, errors come out of
its event, and a region that the store lends is given back in time. Compute does not wait for the
thread: a load is `issued` with an event of the device, and the compute stream waits for that, so
that Python runs ahead of the device. Nobody else waits on a stream, and all streams are made at the
start.

Everything passes through `Runtime`, the few calls that the backend makes to the device's own
library. torch has them for CUDA, ROCm and XPU alike; a test gives others, which run on any machine.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from megaslide.streaming.lanes import Event, Lane, Lanes
from megaslide.streaming.memory import AcceleratorMemory, DeviceMemory, host_memory
from megaslide.streaming.options import StreamOptions
from megaslide.streaming.transfer import CpuTransfer, Land, Reasons, Transfer, TransferHooks
from megaslide.tracing import Trace

log = logging.getLogger(__name__)

MOST_PENDING = 256
"""Spans that may wait for the device; Python that is further ahead of it waits too."""
ZERO_S = 60.0
"""Age at which the clock's zero is replaced: times since then are floats of 24 bits."""
CLOCK_TRIES = 5
"""Comparisons of the device's clock with the host's, of which the quickest is taken."""


class Runtime(Protocol):
    """The device's own streams and events, and page-locked host memory."""

    device: torch.device

    def stream(self) -> Any:
        """A new ordered queue of the device's work; it has `wait_event(event)`."""
        ...

    def current_stream(self) -> Any:
        """The stream of this thread's compute."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within, this thread's work goes to the stream."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Give a copy between host and device to the stream."""
        ...

    def event(self) -> Any:
        """With `record(stream)`, `synchronize()`, `query()`, and `elapsed_time(later)` in ms."""
        ...

    def page_lock(self, region: torch.Tensor) -> bool:
        """Lock host memory so that copies are asynchronous; whether that is possible here."""
        ...

    def unlock(self, region: torch.Tensor) -> None: ...
    def reset_peak(self) -> None:
        """Begin to measure the peak of device memory anew."""
        ...

    def peak(self) -> int:
        """Bytes that the device's allocator has handed out, at most."""
        ...

    def free(self) -> int:
        """Bytes of the device that nobody holds."""
        ...


class TorchRuntime:
    """torch's module of the device: `torch.cuda`, which is ROCm's too, or `torch.xpu`.

    Raises:
        RuntimeError: torch finds no such device.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._module = torch.get_device_module(device)
        except RuntimeError as error:
            raise RuntimeError(
                f"device {str(device)!r} is none that torch knows: {error}"
            ) from error
        if not self._module.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} finds no device {str(device)!r} on this machine; use "
                f"device='cpu', or install a torch build and a driver for it"
            )
        if not hasattr(self._module, "Stream"):
            raise RuntimeError(
                f"device {str(device)!r} has no streams to copy on; use device='cpu'"
            )
        index = self._module.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        # A waiting lane must not spin on a core that AdamW could use; only CUDA's has the choice.
        self._event_options = {"blocking": True} if device.type == "cuda" else {}

    def stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._module.stream(stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with self.on(stream):
            target.copy_(source, non_blocking=True)

    def event(self) -> Any:
        return self._module.Event(enable_timing=True, **self._event_options)

    def page_lock(self, region: torch.Tensor) -> bool:
        if self.device.type != "cuda":
            return False
        with self._module.device(self.device):
            # Portable and not mapped. Registering costs no more than the region; torch's own
            # pin_memory would take the next power of two.
            code = self._module.cudart().cudaHostRegister(region.data_ptr(), region.nbytes, 1)
        if int(code) != 0:
            raise RuntimeError(
                f"page-locking {region.nbytes} bytes of host memory failed with CUDA error "
                f"{int(code)}: free RAM, or take a smaller offload.state_format"
            )
        return True

    def unlock(self, region: torch.Tensor) -> None:
        self._module.cudart().cudaHostUnregister(region.data_ptr())

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return int(self._module.max_memory_allocated(self.device))

    def free(self) -> int:
        return int(self._module.mem_get_info(self.device)[0])


class DeviceEvent(Event):
    """A place in a stream: done when the device has come there."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self.place = place

    def done(self) -> bool:
        return bool(self.place.query())

    def settle(self, why: str) -> None:
        self.place.synchronize()


class CopyEvent(Event):
    """A copy: given to its stream at some time, and done at a later one."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self.place = place
        """Recorded behind the copy; means something once it is issued."""
        self._issued = threading.Event()

    def set(self, error: BaseException | None = None) -> None:
        super().set(error)
        self._issued.set()

    def issue(self) -> None:
        self._issued.set()

    def wait_issued(self, why: str) -> None:
        """Block until the copy is in its stream; RuntimeError if it failed before."""
        self._issued.wait()
        if self._error is not None:
            self.wait(why)


class AcceleratorTransfer:
    """A device with streams: see the module's text, and `transfer.Transfer` for the contract.

    Args:
        synchronous: copy while nothing computes, and compute while nothing is copied, as an engine
            without overlap would.
    """

    def __init__(self, lanes: Lanes, runtime: Runtime, *, synchronous: bool = False) -> None:
        self.device, self.trace, self.lanes = runtime.device, lanes.trace, lanes
        self._synchronous = synchronous
        self.memory: DeviceMemory = AcceleratorMemory(
            runtime.reset_peak, runtime.peak, runtime.free
        )
        self._runtime = runtime
        self._h2d, self._d2h = lanes.open("h2d"), lanes.open("d2h")
        self._down, self._up = runtime.stream(), runtime.stream()
        self._staging = torch.empty(0, dtype=torch.uint8)
        """Where a D2H copy arrives that was given no place, used by that lane only."""
        self._locked: list[torch.Tensor] = []
        weakref.finalize(self, _unlock_all, runtime, self._locked).atexit = False
        self._clock = DeviceClock(runtime, self.trace)
        self.trace.before_reading.append(self._clock.collect)

    def allocate(self, nbytes: int, kind: str) -> torch.Tensor:
        region = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        self.memory.add_arena(region, kind)
        return region

    def adopt(self, region: torch.Tensor) -> None:
        if region.nbytes == 0:
            return
        if self._runtime.page_lock(region):
            self._locked.append(region)
        elif not self._locked:
            log.info("host memory is not page-locked for %s: copies are slower", self.device)

    def host(self, nbytes: int) -> torch.Tensor:
        region = host_memory(nbytes)
        self.adopt(region)
        return region

    def h2d(
        self, target: torch.Tensor, source: Callable[[], torch.Tensor], after: Reasons, name: str
    ) -> Event:
        event = CopyEvent(self._runtime.event())

        def copy() -> None:
            region = source()
            self._runtime.copy(target, region, self._down)
            event.place.record(self._down)
            event.issue()
            event.place.synchronize()  # the region is the store's, and lent until now

        return self._submit(self._h2d, copy, name, after, target.nbytes, event)

    def d2h(
        self, target: torch.Tensor, source: torch.Tensor, after: Reasons, name: str, *,
        land: Land | None = None,
    ) -> Event:  # fmt: skip
        place = self._runtime.event()

        def copy() -> None:
            arrived = target if target.nbytes else self._staged(source.nbytes)
            self._runtime.copy(arrived, source, self._up)
            place.record(self._up)
            place.synchronize()
            if land is not None:
                with self._runtime.on(self._up):
                    land(arrived)

        return self._submit(self._d2h, copy, name, after, source.nbytes, Event())

    def computing(self, name: str) -> AbstractContextManager[None]:
        return self._clock.span("compute", name)

    def record(self) -> Event:
        place = self._runtime.event()
        place.record(self._runtime.current_stream())
        return DeviceEvent(place)

    def wait(self, event: Event, why: str) -> None:
        if event.done() or not isinstance(event, CopyEvent):
            self.join(event, why)
            return
        with self._clock.span("wait", why):
            event.wait_issued(why)
            self._runtime.current_stream().wait_event(event.place)

    def join(self, event: Event, why: str) -> None:
        if event.done():
            event.wait(why)  # raises if the work failed
            return
        # By the device's clock: while this thread waits, the device may have plenty to compute.
        with self._clock.span("wait", why):
            event.wait(why)

    def close(self) -> None:
        self._h2d.close()
        self._d2h.close()
        self._clock.collect(keep=0)
        self.trace.before_reading.remove(self._clock.collect)
        _unlock_all(self._runtime, self._locked)

    def _submit(
        self, lane: Lane, copy: Callable[[], None], name: str, after: Reasons, nbytes: int,
        done: Event,
    ) -> Event:  # fmt: skip
        if self._synchronous:
            self.join(self.record(), "synchronous")
        lane.submit(copy, name, after=after, nbytes=nbytes, done=done)
        if self._synchronous:
            self.join(done, "synchronous")
        return done

    def _staged(self, nbytes: int) -> torch.Tensor:
        if self._staging.nbytes < nbytes:
            self._staging = self.host(nbytes)
        return self._staging[:nbytes]


class DeviceClock:
    """Times work on the compute stream where it runs, not where Python issues it."""

    def __init__(self, runtime: Runtime, trace: Trace) -> None:
        self._runtime, self._trace = runtime, trace
        self._pending: deque[tuple[str, str, Any, Any]] = deque()
        self._lock = threading.Lock()
        tries = [self._same_instant() for _ in range(CLOCK_TRIES)]
        _, self._zero, self._zero_s = min(tries, key=lambda found: found[0])

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Around issued work: a span of the lane, from when the device begins until it is done."""
        start = self._mark()
        try:
            yield
        finally:
            with self._lock:
                self._pending.append((lane, name, start, self._mark()))
            if len(self._pending) > MOST_PENDING:
                self.collect(keep=MOST_PENDING)

    def collect(self, *, keep: int | None = None) -> None:
        """Hand over the spans of what the device has done; wait until no more than `keep` stay."""
        with self._lock:
            while self._pending and (
                (keep is not None and len(self._pending) > keep) or self._pending[0][3].query()
            ):
                lane, name, start, end = self._pending.popleft()
                end.synchronize()
                begin_s = self._zero_s + self._zero.elapsed_time(start) / 1e3
                end_s = begin_s + start.elapsed_time(end) / 1e3
                self._trace.add(lane, name, begin_s, end_s)
                if end_s - self._zero_s > ZERO_S:
                    self._zero, self._zero_s = end, end_s

    def _same_instant(self) -> tuple[float, Any, float]:
        """A mark and its time by the host's clock, which is at most half the first number off."""
        before = time.perf_counter()
        mark = self._mark()
        mark.synchronize()
        after = time.perf_counter()
        return after - before, mark, (before + after) / 2

    def _mark(self) -> Any:
        event = self._runtime.event()
        event.record(self._runtime.current_stream())
        return event


def open_transfer(options: StreamOptions) -> Transfer:
    """The backend of the options' device.

    Raises:
        RuntimeError: torch finds no such device.
        ValueError: an emulated link or injected faults on a real one.
    """
    lanes, device = Lanes(options.trace or Trace()), torch.device(options.device)
    if device.type == "cpu":
        return CpuTransfer(lanes, options.hooks, link_gb_s=options.link_gb_s)
    hooks = options.hooks or TransferHooks()
    if options.link_gb_s is not None or hooks.max_delay_s or hooks.poison:
        raise ValueError(f"an emulated link, delays and poison need device='cpu', not {device}")
    return AcceleratorTransfer(lanes, TorchRuntime(device), synchronous=hooks.synchronous)


def _unlock_all(runtime: Runtime, locked: list[torch.Tensor]) -> None:
    while locked:
        runtime.unlock(locked.pop())
