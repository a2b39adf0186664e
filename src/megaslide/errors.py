"""Errors that a person can act on.

Every fault of the *input* (a file, a config value, a size) raises `InputError`, whose text names
the thing, the number and the fix; the command line prints it in one line and exits with code 2.
Everything else (a failed device, a bug) stays an ordinary exception with its traceback.
"""


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
