"""Copies between the store and the device, as ordered, asynchronous lanes.

Two lanes (`h2d`, `d2h`) each run their copies in the order given; every copy may wait for events
and returns one. That contract is the same on every device. Here is the CPU backend: a worker
thread per lane copies between separate arenas, so the streaming logic that a GPU needs is the
logic that runs, and a missing wait is a wrong number, not a harmless alias.

`TransferHooks` turn rare races into failing tests: any copy can be delayed at random (seeded), and
released memory is filled with NaN.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megaslide.streaming.lanes import Event, Lane, copy_bytes
from megaslide.streaming.memory import DeviceMemory
from megaslide.tracing import Trace

NAN_BYTE = 0xFF  # four of them are a float32 NaN, two a bfloat16 NaN


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferHooks:
    """What tests inject: up to `max_delay_s` before any copy, NaN in released memory."""

    max_delay_s: float = 0.0
    seed: int = 0
    poison: bool = False


class Transfer(Protocol):
    """What the executor needs of a device."""

    device: torch.device
    memory: DeviceMemory
    trace: Trace

    def allocate(self, nbytes: int, kind: str) -> torch.Tensor:
        """A uint8 device buffer `[nbytes]`, held until `close`."""
        ...

    def h2d(
        self, target: torch.Tensor, source: Callable[[], torch.Tensor], after: Sequence[Event],
        name: str,
    ) -> Event:  # fmt: skip
        """Copy a host region to the device once `after` are done; `source` is asked for then."""
        ...

    def d2h(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event], name: str, *,
        land: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> Event:  # fmt: skip
        """Bring a device region to the host; `land(target, arrived)` combines the two there."""
        ...

    def record(self) -> Event:
        """An event that is done when the compute issued so far is."""
        ...

    def wait(self, event: Event) -> None:
        """Make compute wait for the event, counting the time as `wait_s`."""
        ...

    def release(self, region: torch.Tensor) -> None:
        """Declare that nothing will read the region's present contents again."""
        ...

    def close(self) -> None:
        """Finish all copies and stop the lanes."""
        ...


class CpuTransfer:
    """The CPU as a device: its memory is whatever `allocate` gave, copies are worker threads."""

    def __init__(self, trace: Trace, hooks: TransferHooks | None = None) -> None:
        self.device = torch.device("cpu")
        self.trace = trace
        self.memory = DeviceMemory()
        self._hooks = hooks or TransferHooks()
        self._h2d, self._d2h = Lane("h2d", trace), Lane("d2h", trace)
        self._random = random.Random(self._hooks.seed)

    def allocate(self, nbytes: int, kind: str) -> torch.Tensor:
        region = torch.zeros(nbytes, dtype=torch.uint8)
        self.memory.add_arena(region, kind)
        return region

    def h2d(
        self, target: torch.Tensor, source: Callable[[], torch.Tensor], after: Sequence[Event],
        name: str,
    ) -> Event:  # fmt: skip
        return self._copy(
            self._h2d, lambda: copy_bytes(target, source()), after, name, target.nbytes
        )

    def d2h(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event], name: str, *,
        land: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> Event:  # fmt: skip
        return self._copy(self._d2h, lambda: land(target, source), after, name, source.nbytes)

    def record(self) -> Event:
        return Event.completed()  # CPU compute is synchronous

    def wait(self, event: Event) -> None:
        if not event.done():
            start = time.perf_counter()
            event.wait()
            self.trace.count("wait_s", time.perf_counter() - start)
        event.wait()

    def release(self, region: torch.Tensor) -> None:
        if self._hooks.poison:
            region.fill_(NAN_BYTE)

    def close(self) -> None:
        self._h2d.close()
        self._d2h.close()

    def _copy(
        self,
        lane: Lane,
        copy: Callable[[], object],
        after: Sequence[Event],
        name: str,
        nbytes: int,
    ) -> Event:
        delay = self._random.uniform(0, self._hooks.max_delay_s)

        def delayed() -> None:
            if delay:
                time.sleep(delay)
            copy()

        return lane.submit(delayed, name, after=after, nbytes=nbytes)
