"""The streaming engine's own tests on the device, in a process of pytest's own."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_check.session import Row, Session

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (
    sys.executable, "-m", "pytest", "tests/streaming", "-m", "gpu", "--tb=short",
    "--maxfail=40", "-p", "no:cacheprovider",
    # Needs pydantic, which such a machine lacks; a file that cannot be imported stops all others.
    "--ignore=tests/streaming/test_placement.py",
    # Warnings of the versions that happen to be installed there are not what is tested.
    "-o", "filterwarnings=default", "-W", "default",
)  # fmt: skip
WORKERS = "8"
"""Processes, where pytest-xdist is installed: one after another, tests may outlast the part."""


def run(session: Session) -> None:
    """One row: how many passed. What failed, and why, is in `engine.log`."""
    session.row("pytest tests/streaming -m gpu", lambda: _pytest(session))


def _pytest(session: Session) -> Row:
    how = ["-n", WORKERS] if find_spec("xdist") else []
    how = how if session.chip.is_gpu else ["--collect-only"]
    log = session.out / "engine.log"
    with log.open("w") as said:
        done = subprocess.run(
            [*COMMAND, *how], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT,
            timeout=max(1.0, session.left_s),
        )  # fmt: skip
    text = log.read_text(errors="replace")
    counts = re.findall(r"(\d+)(?:/\d+)? (passed|failed|errors?|skipped|tests)\b", text)
    found = {word: int(number) for number, word in counts}
    if done.returncode or not found:
        raise RuntimeError(f"pytest: exit code {done.returncode}: {text.strip()[-400:]}")
    return found
