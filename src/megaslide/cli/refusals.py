"""What a refused input looks like, for every verb alike.

A user's mistake gets one message that names the thing and the fix, and exit code 2; a bug keeps
its traceback. A full disk is a user's problem too, but it surfaces as whatever error the library
that was writing chose, so it is recognised here.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from megaslide.cli.display import size
from megaslide.errors import InputError, is_disk_full

DISK_REFUSES = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,  # a file where a folder should be made
)


class Verbs(TyperGroup):
    """Gives every verb the same exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            fail(str(error))
        except ImportError as error:
            if "pip install" not in str(error):
                raise
            fail(str(error))
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


def fail(message: str, *, code: int = 2) -> NoReturn:
    """End the process with one message on standard error."""
    typer.echo(typer.style("error: ", fg="red", bold=True) + message, err=True)
    raise typer.Exit(code)


def require_no_folder(path: Path | None, example: str) -> None:
    """Refuse a folder where a file is to be written, before the work whose result it is."""
    if path is not None and path.is_dir():
        raise InputError(f"{path}: a folder, not a file", f"name a file, such as {example}")


@contextmanager
def writes_to(folder: Path) -> Iterator[None]:
    """Turn what the disk refuses into an InputError that names the path and the space left."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if is_disk_full(error):
            from megaslide.planning.hardware import disk_free

            path = _path_of(error) or folder
            free = size(disk_free(Path(path)))
            problem = f"{path}: the disk is full ({free} free)"
            raise InputError(problem, "free space, or write to another disk") from error
        if isinstance(error, OSError) and error.errno in DISK_REFUSES and error.filename:
            raise InputError(f"{error.filename}: {error.strerror}", "use another path") from error
        raise


def _path_of(error: BaseException | None) -> str | None:
    while error is not None:
        if isinstance(error, OSError) and isinstance(error.filename, str):
            return error.filename
        error = error.__cause__ or error.__context__
    return None
