"""One large file with direct I/O: what the disk tier reads and writes.

Measured on a cloud disk with ext4, in pieces of 64 MB: direct reads and writes 2 to 3 GB/s at a
tenth of a core, the same through the page cache 0.1 to 0.4 GB/s, mapped 0.3 to 0.7 GB/s. The page
cache would also grow by the whole state. So I/O is direct where the file system allows it, and
elsewhere buffered with the cached pages given back at once.

The file has no name (it is unlinked when it is opened): however the process ends, the space is
free again. What must last is in checkpoints.
"""

import errno
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from megaslide.errors import InputError
from megaslide.streaming.layout import PAGE
from megaslide.streaming.memory import host_memory

_DIRECT = getattr(os, "O_DIRECT", 0)


class DiskError(RuntimeError):
    """Reading or writing the training state failed; the state is lost, checkpoints are not."""


class Pace:
    """A rate that all transfers share, one after another: a slower disk in front of the real one.

    Raises:
        ValueError: a rate that is not above 0.
    """

    def __init__(self, gb_per_s: float) -> None:
        if gb_per_s <= 0:
            raise ValueError(f"disk_gb_s={gb_per_s} is not above 0")
        self._bytes_per_s, self._free_at, self._lock = 1e9 * gb_per_s, 0.0, threading.Lock()

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """Around a transfer: lasts until its turn is over, or as long as it takes."""
        with self._lock:
            begin = max(self._free_at, time.perf_counter())
            end = self._free_at = begin + nbytes / self._bytes_per_s
        yield
        time.sleep(max(0.0, end - time.perf_counter()))


class RecordFile:
    """`nbytes` zeroed bytes on the disk of `folder`, all reserved before the constructor returns.

    Args:
        gb_per_s: what its transfers are slowed to, together.

    Raises:
        InputError: the folder cannot be used or its disk has less space.
    """

    def __init__(self, folder: Path, nbytes: int, *, gb_per_s: float | None = None) -> None:
        self.folder, self.nbytes = folder, nbytes
        self._pace = None if gb_per_s is None else Pace(gb_per_s)
        self._fd, self.direct = _open(folder)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # lanes may still be reading; the system closes it
        try:
            _reserve(self._fd, nbytes)
        except OSError as error:
            self.close()
            raise InputError(
                f"{folder}: reserving {nbytes / 1e9:.2f} GB failed: {error.strerror}",
                "free space there or set offload.disk_path to another disk",
            ) from error

    def read(self, target: torch.Tensor, offset: int) -> None:
        """Fill page-aligned uint8 `target` from `offset`; sizes are multiples of PAGE.

        Raises:
            DiskError: naming the folder, the place and the system's reason.
        """
        with self._paced(target):
            self._transfer(os.preadv, "reading", target, offset)

    def write(self, source: torch.Tensor, offset: int) -> None:
        """Write page-aligned uint8 `source` at `offset`; otherwise as `read`."""
        with self._paced(source):
            self._transfer(os.pwritev, "writing", source, offset)

    def close(self) -> None:
        self._close()

    def _paced(self, memory: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext() if self._pace is None else self._pace.moving(memory.nbytes)

    def _transfer(
        self, call: Callable[..., int], verb: str, memory: torch.Tensor, offset: int
    ) -> None:
        buffer = memory.numpy().data
        done = 0
        try:
            while done < len(buffer):
                moved = call(self._fd, [buffer[done:]], offset + done)
                if moved <= 0:
                    raise OSError(errno.EIO, "the file ends early")
                done += moved
        except OSError as error:
            raise DiskError(
                f"{self.folder}: {verb} {len(buffer)} bytes at {offset} of the training state "
                f"failed: {error.strerror}; the state is incomplete, checkpoints are untouched.\n"
                "  fix: mend or free the disk, then resume from the latest checkpoint"
            ) from error
        if not self.direct:
            self._drop_cached(offset, len(buffer), written=call is os.pwritev)

    def _drop_cached(self, offset: int, nbytes: int, *, written: bool) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        if written:
            os.fdatasync(self._fd)  # dirty pages cannot be dropped
        os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _open(folder: Path) -> tuple[int, bool]:
    """(descriptor, whether I/O is direct) of a new file that no longer has a name."""
    try:
        fd, name = tempfile.mkstemp(prefix="megaslide-state-", dir=folder)
    except OSError as error:
        raise InputError(
            f"{folder}: {error.strerror}", "set offload.disk_path to a folder on a local disk"
        ) from error
    try:
        direct = os.open(name, os.O_RDWR | _DIRECT) if _DIRECT else None
    except OSError:  # this file system has no direct I/O
        direct = None
    os.unlink(name)
    if direct is not None and _accepts(direct):
        os.close(fd)
        return direct, True
    if direct is not None:
        os.close(direct)
    return fd, False


def _accepts(fd: int) -> bool:
    """Whether a page can be written; some systems refuse only at the first transfer."""
    try:
        return os.pwritev(fd, [host_memory(PAGE).numpy().data], 0) == PAGE
    except OSError:
        return False


def _reserve(fd: int, nbytes: int) -> None:
    if nbytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)
