"""Whether the state fits, asked before anything is allocated.

A machine that starts to swap, or a disk that is full after an hour, is a worse answer than a
sentence with the shortfall and what would fit.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

from megaslide.errors import InputError

CGROUP = Path("/sys/fs/cgroup")


def available_ram() -> int:
    """Bytes that this process can still allocate, a container's limit counted."""
    available = psutil.virtual_memory().available
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2 here, or its limit is "max"
        return available
    return min(available, max(0, limit - used))


def available_disk(folder: Path) -> int:
    """Bytes that can still be written to the disk of `folder`, which is made.

    Raises:
        InputError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: {error.strerror}", "set offload.disk_path to a folder on a local disk"
        ) from error
    return shutil.disk_usage(folder).free


def require_room(
    what: str, available: int, needs: Mapping[str, int], chosen: str, otherwise: str
) -> None:
    """InputError with the shortfall if the chosen format of the state does not fit.

    Args:
        what: where the bytes are, such as `RAM`.
        available: bytes there.
        needs: bytes by format; those that would fit are named.
        chosen: the format asked for, a key of `needs`.
        otherwise: what to do if no format fits.
    """
    needed = needs[chosen]
    if needed <= available:
        return
    fitting = [f"{name} ({_gb(n)})" for name, n in needs.items() if n <= available]
    fix = f"set offload.state_format to {' or '.join(fitting)}, or " if fitting else ""
    raise InputError(
        f"{what}: the training state in format {chosen} needs {_gb(needed)}, {_gb(available)} are "
        f"available: {_gb(needed - available)} too little",
        (fix or "no format fits; ") + otherwise,
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
