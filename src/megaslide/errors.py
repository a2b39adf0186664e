"""Errors that a person can act on.

Every fault of the *input* (a file, a config value, a size) raises `InputError`, whose text names
the thing, the number and the fix; the command line prints it in one line and exits with code 2.
Everything else (a failed device, a bug) stays an ordinary exception with its traceback.
"""

import errno

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_FULL_WORDS = ("No space left on device", "StorageFull")


class InputError(ValueError):
    """The input cannot be used as it is.

    Args:
        problem: what is wrong, naming the file or key and the offending value.
        fix: what to do about it, as an imperative sentence.
    """

    def __init__(self, problem: str, fix: str | None = None) -> None:
        super().__init__(problem if fix is None else f"{problem}\n  fix: {fix}")
        self.problem = problem
        self.fix = fix


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind an error, also where a library wrapped the system's own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        if any(words in str(error) for words in _DISK_FULL_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False
