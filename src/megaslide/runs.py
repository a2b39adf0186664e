"""The folder of a run: which checkpoints it holds, and how one comes to be there whole.

`checkpoint-N/` appears by one rename of a finished temporary folder that ends with a COMPLETE
marker, so whoever finds it can trust it. The same place answers "which checkpoint does the user
mean", for resuming and for sampling alike.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaslide.errors import InputError, is_disk_full
from megaslide.locks import exclusive

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
STATE = "trainer_state.json"
CONFIG = "config.yaml"
_PARTIAL = ".partial-"


@contextmanager
def occupied(run: Path) -> Iterator[None]:
    """Make the folder; within, no other process trains into it, where its disk knows locks.

    What a killed process left of an unfinished checkpoint is removed.

    Raises:
        InputError: another process is at it.
    """
    taken = InputError(
        f"{run}: another process is training into this folder",
        "wait until it ends, or set another output_dir",
    )
    with exclusive(run, taken) as alone:
        if alone:
            for partial in run.glob(f"{_PARTIAL}*"):
                shutil.rmtree(partial)
        yield


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = {}
    for folder in run.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and (folder / COMPLETE).exists():
            found[int(match[1])] = folder
    return [found[step] for step in sorted(found)]


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that a path names: itself, or the latest of a run.

    Raises:
        InputError: not a folder, no complete checkpoint in it, or one without its marker.
    """
    if not source.is_dir():
        raise InputError(f"{source}: no such folder", "give a run's folder or a checkpoint-N in it")
    if (source / COMPLETE).exists():
        return source
    if found := checkpoints(source):
        return found[-1]
    if (source / "transformer").is_dir() or source.name.startswith("checkpoint-"):
        raise InputError(
            f"{source}: no {COMPLETE} file, so saving it did not finish",
            "use an earlier checkpoint, or the run's folder for the latest complete one",
        )
    raise InputError(
        f"{source}: holds no complete checkpoint-N folder",
        "train first, or give another folder",
    )


def resume_source(run: Path, wanted: str | None) -> Path | None:
    """The checkpoint to train on from, none for None: if the run holds any, the latest of them.

    Beside a later checkpoint of another history, `latest` would name the wrong one, and the limit
    would delete the new one as the oldest.

    Raises:
        InputError: another is asked for, or none although there are some.
    """
    held = checkpoints(run)
    if wanted == "latest":
        return held[-1] if held else None
    source = None if wanted is None else find_checkpoint(Path(wanted))
    if held and (source is None or not source.samefile(held[-1])):
        raise InputError(
            f"{run}: holds {held[-1].name} of an earlier run",
            "set train.resume_from_checkpoint=latest to continue it, or another output_dir",
        )
    return source


def read_state(checkpoint: Path) -> dict[str, Any]:
    """trainer_state.json of a checkpoint."""
    return json.loads((checkpoint / STATE).read_text())


def weights_folder(checkpoint: Path, ema: bool | None) -> str:
    """The folder of a checkpoint's averaged weights or of the last ones; None: averaged if there.

    Raises:
        InputError: averaged ones are asked for and were not saved.
    """
    has_ema = (checkpoint / "ema").is_dir()
    if ema and not has_ema:
        raise InputError(f"{checkpoint}: no averaged weights", "train with train.use_ema=true")
    return "ema" if has_ema and ema is not False else "transformer"


def publish(
    run: Path, step: int, write: Callable[[Path], None], *, needed_bytes: int, limit: int | None
) -> Path:
    """Create `checkpoint-{step}` from what `write` puts into a folder, then drop the oldest.

    Args:
        needed_bytes: rough size of the checkpoint; refused beforehand if the disk has less.
        limit: complete checkpoints to keep, None for all.

    Raises:
        InputError: the disk is too full; earlier checkpoints are untouched.
    """
    target = run / f"checkpoint-{step}"
    partial = run / f"{_PARTIAL}{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    require_space(run, needed_bytes, f"saving {target.name}")
    partial.mkdir(parents=True)
    try:
        write(partial)
        (partial / COMPLETE).write_text("")
        _sync(partial)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
    except BaseException as error:  # a second Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        if is_disk_full(error):
            raise _disk_full(run, needed_bytes, f"saving {target.name}") from error
        raise
    _prune(run, limit)
    return target


def require_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """InputError if the disk of `folder` has less than `needed_bytes` free."""
    if shutil.disk_usage(folder).free < needed_bytes:
        raise _disk_full(folder, needed_bytes, purpose)


def _disk_full(folder: Path, needed: int, purpose: str) -> InputError:
    free = shutil.disk_usage(folder).free
    return InputError(
        f"{folder}: {purpose} needs {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB free; "
        "earlier checkpoints are untouched",
        "free some space or set train.checkpoints_total_limit, then resume from the latest one",
    )


def _sync(folder: Path) -> None:
    """Flush files to the disk before the rename, so that a power cut leaves no empty checkpoint."""
    for file in (f for f in folder.rglob("*") if f.is_file()):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _prune(run: Path, limit: int | None) -> None:
    if limit is None:
        return
    for folder in checkpoints(run)[:-limit]:
        logger.info("removing %s: checkpoints_total_limit is %d", folder, limit)
        (folder / COMPLETE).unlink()  # first: a kill on the way must not leave half of one as whole
        shutil.rmtree(folder)
