"""Folders that one process at a time may write: a cache of clips, a run.

The lock is the system's own on the open folder, so it leaves no file and ends with its process,
however that ends.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megaslide.errors import InputError

logger = logging.getLogger(__name__)


@contextmanager
def exclusive(folder: Path, taken: InputError) -> Iterator[bool]:
    """Make the folder and keep others out of it; False where its disk knows no locks.

    A folder that was not there and in which nothing came to be is removed again.

    Raises:
        InputError: `taken`, where another process is within.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(folder, handle, taken)
    finally:
        if new:
            with suppress(OSError):  # it holds something
                folder.rmdir()
        os.close(handle)  # and with it the lock


def _lock(folder: Path, handle: int, taken: InputError) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise taken from None
    except OSError as error:  # some network disks
        logger.warning("%s cannot be locked: %s", folder, error.strerror)
        return False
    return True
