"""How much memory the device holds: exact for arenas, observed for activations.

On a GPU the allocator knows. On the CPU nothing does, because host and "device" share one heap;
so arenas are registered as they are allocated, and while `observing` every storage that torch
creates or touches in the computing thread is followed until it is freed. The observed peak counts
what a device would hold: arenas, inputs, boundary activations and temporaries between operations.
Scratch inside one operation (a few rows per thread) is not seen.
"""

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaslide.errors import InputError
from megaslide.streaming.layout import UnitLayout
from megaslide.streaming.numa import interleave, online_nodes


def host_memory(nbytes: int) -> torch.Tensor:
    """uint8 `[nbytes]` outside of torch's heap, so that it goes back to the system when freed.

    Where memory has several nodes, its pages are spread over all of them.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    region = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    if len(nodes := online_nodes()) > 1:
        interleave(region, nodes)
    return region


def planned_device_bytes(units: Sequence[UnitLayout], slots: int) -> dict[str, int]:
    """Bytes of the device's arenas by kind: what a step needs besides activations.

    `units` are the resident unit and the blocks, as the store has them.
    """
    resident, blocks = units[0], units[1:]
    weights = max(u.weight_nbytes for u in blocks)
    return {
        "slots": min(slots, len(blocks)) * weights,
        "gradients": gradient_buffer_bytes([resident]) + 2 * gradient_buffer_bytes(blocks),
        "resident": resident.weight_nbytes,
    }


def gradient_buffer_bytes(units: Sequence[UnitLayout]) -> int:
    """Bytes of a buffer for the gradient of any of the units: fp32, and as it leaves if not so."""
    return sum(gradient_buffer_sizes(units))


def gradient_buffer_sizes(units: Sequence[UnitLayout]) -> tuple[int, int]:
    """Bytes of the fp32 accumulator, and of the outbound copy in the weights' dtypes if needed."""
    elements = max((u.num_elements for u in units), default=0)
    mixed = any(s.dtype != torch.float32 for u in units for s in u.segments)
    return 4 * elements, max((u.gradient_nbytes for u in units), default=0) if mixed else 0


def require_budget(units: Sequence[UnitLayout], slots: int, budget: int) -> None:
    """Refuse, before anything is allocated, a device on which one block does not fit.

    Raises:
        InputError: names the largest block, what it takes, and the budget.
    """
    planned = planned_device_bytes(units, slots)
    total = sum(planned.values())
    if total <= budget:
        return
    largest = max(units[1:], key=lambda u: u.weight_nbytes)
    parts = ", ".join(f"{kind} {n}" for kind, n in planned.items())
    least = sum(planned_device_bytes(units, 2).values())
    advice = f"give {total} bytes or more"
    if least <= budget:
        advice += f", or fewer slots ({least} bytes with 2)"
    raise InputError(
        f"the device budget of {budget} bytes is too small: block {largest.name!r} takes "
        f"{largest.weight_nbytes} bytes of weights per slot and "
        f"{gradient_buffer_bytes([largest])} per gradient buffer; in all {total} bytes ({parts})",
        advice,
    )


class DeviceMemory:
    """Bytes on the device now and at the peak."""

    def __init__(self) -> None:
        self.arenas: defaultdict[str, int] = defaultdict(int)
        """Bytes of registered arenas by kind (slots, gradients, resident)."""
        self.peak_activations = 0
        """Largest total of observed storages that are not arenas, in bytes."""
        self._known: set[int] = set()
        self.advice = ""
        """What to change where memory is too small, in the words of the options."""

    def free_bytes(self) -> int | None:
        """What the device could still give; None where nobody knows."""
        return None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Within, running out of memory says what holds it and what to change.

        Raises:
            InputError: instead of torch.OutOfMemoryError, which is its cause.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            held = ", ".join(f"{kind} {n}" for kind, n in self.arenas.items())
            free = "unknown" if (n := self.free_bytes()) is None else f"{n} bytes"
            raise InputError(
                f"the device is out of memory: the plan's arenas hold {sum(self.arenas.values())} "
                f"bytes ({held}), activations are on top; free: {free}; {error}",
                self.advice,
            ) from error

    @property
    def peak_bytes(self) -> int:
        return sum(self.arenas.values()) + self.peak_activations

    def add_arena(self, region: torch.Tensor, kind: str) -> None:
        self.arenas[kind] += region.nbytes
        self._known.add(region.untyped_storage().data_ptr())

    def exclude(self, region: torch.Tensor) -> None:
        """Declare host memory, which must not count when a copy's target is named from compute."""
        self._known.add(region.untyped_storage().data_ptr())

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Follow every storage of the enclosed computation in this thread."""
        follower = _StorageFollower(self._known)
        try:
            with follower:
                yield
        finally:
            self.peak_activations = max(self.peak_activations, follower.peak)


class AcceleratorMemory(DeviceMemory):
    """The same of a device whose allocator counts for itself.

    Args:
        reset: lets the allocator forget its peak.
        peak: the allocator's peak, in bytes.
        free: bytes of the device that nobody holds.
    """

    def __init__(
        self, reset: Callable[[], None], peak: Callable[[], int], free: Callable[[], int]
    ) -> None:
        super().__init__()
        self._reset, self._peak, self._free = reset, peak, free

    def free_bytes(self) -> int:
        return self._free()

    @contextmanager
    def observing(self) -> Iterator[None]:
        self._reset()
        try:
            yield
        finally:
            activations = self._peak() - sum(self.arenas.values())
            self.peak_activations = max(self.peak_activations, activations)


class _StorageFollower(TorchDispatchMode):
    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self._ignored = ignored
        self._live: dict[int, int] = {}
        self._total = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or storage.data_ptr() in self._ignored or tensor.device.type == "meta":
            return
        self._live[key] = storage.nbytes()
        self._total += self._live[key]
        self.peak = max(self.peak, self._total)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self._total -= self._live.pop(key, 0)
