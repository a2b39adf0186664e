"""How much memory the device holds: exact for arenas, observed for activations.

On a GPU the allocator knows. On the CPU nothing does, because host and "device" share one heap;
so arenas are registered as they are allocated, and while `observing` every storage that torch
creates or touches in the computing thread is followed until it is freed. The observed peak counts
what a device would hold: arenas, inputs, boundary activations and temporaries between operations.
Scratch inside one operation (a few rows per thread) is not seen.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceMemory:
    """Bytes on the device now and at the peak."""

    def __init__(self) -> None:
        self.arenas: defaultdict[str, int] = defaultdict(int)
        """Bytes of registered arenas by kind (slots, gradients, resident)."""
        self.peak_activations = 0
        """Largest total of observed storages that are not arenas, in bytes."""
        self._known: set[int] = set()

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
