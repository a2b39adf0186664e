"""Finds and loads the shared library of native kernels, once per process.

The package works without it: callers ask `why_absent()` and take their reference. Loading through
ctypes keeps the library free of Python and torch, and releases the GIL during every call.
"""

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

__all__ = [
    "ABI_VERSION",
    "BUILD_COMMAND",
    "check_status",
    "counting_only",
    "is_counting_only",
    "load",
    "why_absent",
]

ABI_VERSION = 4
"""MEGASLIDE_ABI_VERSION of csrc/include/megaslide.h that this package is written for."""

BUILD_COMMAND = "pip install --no-deps -e ."
"""Builds the library, run in the source folder; needs g++ 11, clang++ 14 or later."""

PATH_VARIABLE = "MEGASLIDE_NATIVE_LIBRARY"
"""Environment variable with the path of a library to load instead of the package's own."""

logger = logging.getLogger(__name__)
Constant = TypeVar("Constant", bound=Callable[..., object])

_counting: ContextVar[bool] = ContextVar("counting", default=False)


def load() -> ctypes.CDLL:
    """The native library.

    Raises:
        RuntimeError: it is absent, cannot be loaded, or is of another version; says which.
    """
    library, reason = _open()
    if library is None:
        raise RuntimeError(reason)
    return library


def constant_when_compiled(function: Constant) -> Constant:
    """`torch.compiler.assume_constant_result` without its price: it imports the whole compiler.

    That takes longer than all of this package, at each start of the command line. Tests hold that
    the compiler still heeds the mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def why_absent() -> str | None:
    """Why `load()` would fail, or None. The first failure of a process is logged as a warning."""
    return _open()[1]


@contextmanager
def counting_only() -> Iterator[None]:
    """Within, operators take their native kernels, whatever there is: nothing runs.

    For tensors without data. What a model costs must not depend on whether the machine that counts
    has a compiler, and the references would be counted by the million of their small steps.
    """
    token = _counting.set(True)
    try:
        yield
    finally:
        _counting.reset(token)


@constant_when_compiled
def is_counting_only() -> bool:
    """Whether the caller is within `counting_only`."""
    return _counting.get()


def check_status(status: int) -> None:
    """Raise RuntimeError for a megaslide_status other than MEGASLIDE_OK."""
    if status != 0:
        describe = load().megaslide_status_string
        describe.restype = ctypes.c_char_p
        raise RuntimeError(f"native kernel failed: {describe(status).decode()} (status {status})")


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return _load_checked(_find()), None
    except OSError as error:
        reason = f"no native kernels: {error}; to build them with a C++ compiler: {BUILD_COMMAND}"
        logger.warning("%s (until then the slower reference code runs)", reason)
        return None, reason


def _find() -> Path:
    override = os.environ.get(PATH_VARIABLE)
    if override:
        return Path(override)
    name = "libmegaslide_native" + (".dylib" if sys.platform == "darwin" else ".so")
    # An editable install keeps built files in another folder than the sources; both are listed.
    folders = [Path(folder) for folder in sys.modules["megaslide"].__path__]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"no {name} in {', '.join(map(str, folders))}")


def _load_checked(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "megaslide_abi_version"):
        raise OSError(f"{path} is not a megaslide library")
    version = library.megaslide_abi_version()
    if version != ABI_VERSION:
        raise OSError(f"{path} has interface version {version}, this package needs {ABI_VERSION}")
    return library
