"""Copies between the store and the device, as ordered, asynchronous lanes.

Two lanes (`h2d`, `d2h`) each run their copies in the order given; every copy may wait for events
and returns one. That contract is the same on every device. Here is the CPU backend: a worker
thread per lane copies between separate arenas, so the streaming logic that a GPU needs (see
`accelerator`) is the logic that runs, and a missing wait is a wrong number, not a harmless alias.

`TransferHooks` turn rare races into failing tests: any copy can be delayed at random (seeded), and
memory that is about to be overwritten is filled with NaN. An emulated link makes copies take the
time that a real one would need, asleep, so that overlap can be measured where there is no device.
"""

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from megaslide.streaming.lanes import Event, Lane, Lanes, copy_bytes
from megaslide.streaming.memory import DeviceMemory, host_memory
from megaslide.tracing import Trace

NAN_BYTE = 0xFF  # four of them are a float32 NaN, two a bfloat16 NaN

Reasons = Mapping[str, Event]
"""Events by why they are waited for."""
Land = Callable[[torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferHooks:
    """What tests and benchmarks inject."""

    max_delay_s: float = 0.0
    """Any copy sleeps up to this long before it begins."""
    seed: int = 0
    poison: bool = False
    """Device memory is NaN from the moment it may be overwritten until the copy is done."""
    synchronous: bool = False
    """Wait for every copy where it is started, as an engine without overlap would."""


class Transfer(Protocol):
    """What the executor needs of a device.

    Compute is one more ordered lane: `record` marks a place in it, `wait` makes it wait. The host
    thread does not stop in either, and what it may do itself after a copy needs `join`.
    """

    device: torch.device
    memory: DeviceMemory
    trace: Trace
    lanes: Lanes

    def allocate(self, nbytes: int, kind: str) -> torch.Tensor:
        """A uint8 device buffer `[nbytes]`, held until `close`."""
        ...

    def adopt(self, region: torch.Tensor) -> None:
        """Make host memory, which then lives as long as this, fit for copies."""
        ...

    def host(self, nbytes: int) -> torch.Tensor:
        """A uint8 host buffer `[nbytes]` that copies can use."""
        ...

    def h2d(
        self, target: torch.Tensor, source: Callable[[], torch.Tensor], after: Reasons, name: str
    ) -> Event:
        """Copy a host region to the device once `after` are done; `source` is asked for then."""
        ...

    def d2h(
        self, target: torch.Tensor, source: torch.Tensor, after: Reasons, name: str, *,
        land: Land | None = None,
    ) -> Event:  # fmt: skip
        """Bring a device region to the host: to `target`, or if that is empty to the lane's own.

        `land(arrived)` then uses what is there, on the lane, while `source` is still valid.
        """
        ...

    def computing(self, name: str) -> AbstractContextManager[None]:
        """Around work that is issued to the device: records its time there as a span."""
        ...

    def record(self) -> Event:
        """An event that is done when the compute issued so far is."""
        ...

    def wait(self, event: Event, why: str) -> None:
        """Make compute wait for the event, counting the time as `wait_s`."""
        ...

    def join(self, event: Event, why: str) -> None:
        """Make the host thread wait for the event, counting the time as `wait_s`."""
        ...

    def close(self) -> None:
        """Finish all copies and stop the lanes."""
        ...


class CpuTransfer:
    """The CPU as a device: its memory is whatever `allocate` gave, copies are worker threads.

    Args:
        link_gb_s: emulated bandwidth of each direction, in 1e9 bytes per second; None copies as
            fast as the machine can.
    """

    def __init__(
        self, lanes: Lanes, hooks: TransferHooks | None = None, *, link_gb_s: float | None = None
    ) -> None:
        if link_gb_s is not None and link_gb_s <= 0:
            raise ValueError(f"link_gb_s={link_gb_s} is not above 0")
        self.device = torch.device("cpu")
        self.trace, self.lanes = lanes.trace, lanes
        self.memory = DeviceMemory()
        self._hooks = hooks or TransferHooks()
        self._bytes_per_s = float("inf") if link_gb_s is None else link_gb_s * 1e9
        self._h2d, self._d2h = lanes.open("h2d"), lanes.open("d2h")
        self._random = random.Random(self._hooks.seed)

    def allocate(self, nbytes: int, kind: str) -> torch.Tensor:
        region = torch.full((nbytes,), NAN_BYTE if self._hooks.poison else 0, dtype=torch.uint8)
        self.memory.add_arena(region, kind)
        return region

    def adopt(self, region: torch.Tensor) -> None:
        self.memory.exclude(region)

    def host(self, nbytes: int) -> torch.Tensor:
        region = host_memory(nbytes)
        self.adopt(region)
        return region

    def h2d(
        self, target: torch.Tensor, source: Callable[[], torch.Tensor], after: Reasons, name: str
    ) -> Event:
        land = partial(copy_bytes, target)
        return self._copy(self._h2d, source, land, after, name, target.nbytes, overwrites=target)

    def d2h(
        self, target: torch.Tensor, source: torch.Tensor, after: Reasons, name: str, *,
        land: Land | None = None,
    ) -> Event:  # fmt: skip
        def arrive(region: torch.Tensor) -> None:
            if target.nbytes:
                copy_bytes(target, region)
            if land is not None:
                land(target if target.nbytes else region)

        return self._copy(self._d2h, lambda: source, arrive, after, name, source.nbytes)

    def computing(self, name: str) -> AbstractContextManager[None]:
        return self.trace.span("compute", name)

    def record(self) -> Event:
        return Event.completed()  # CPU compute is synchronous

    def wait(self, event: Event, why: str) -> None:
        if event.done():
            event.wait(why)  # raises if the work failed
        else:
            with self.trace.span("wait", why):
                event.wait(why)

    def join(self, event: Event, why: str) -> None:
        self.wait(event, why)  # host and compute are one thread here

    def close(self) -> None:
        self._h2d.close()
        self._d2h.close()

    def _copy(
        self, lane: Lane, source: Callable[[], torch.Tensor], land: Land, after: Reasons,
        name: str, nbytes: int, *, overwrites: torch.Tensor | None = None,
    ) -> Event:  # fmt: skip
        poisoned = overwrites if self._hooks.poison else None
        delay = self._random.uniform(0, self._hooks.max_delay_s)
        seconds = nbytes / self._bytes_per_s

        def timed() -> None:
            if poisoned is not None:
                poisoned.fill_(NAN_BYTE)
            if delay:
                time.sleep(delay)
            region = source()  # may wait for a disk, of which the link knows nothing
            start = time.perf_counter()
            land(region)
            left = start + seconds - time.perf_counter()
            if left > 0:
                time.sleep(left)

        event = lane.submit(timed, name, after=after, nbytes=nbytes)
        if self._hooks.synchronous:
            self.wait(event, "synchronous")
        return event
