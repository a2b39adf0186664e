"""Checkpoints appear whole or not at all, and are found by the path a user would give."""

import errno
import shutil
from pathlib import Path

import pytest

from megaslide import runs
from megaslide.errors import InputError


def write(folder: Path) -> None:
    (folder / "transformer").mkdir()
    (folder / "transformer" / "weights").write_bytes(b"w" * 100)


def publish(run: Path, step: int, limit: int | None = None, **options: object) -> Path:
    options = {"write": write, "needed_bytes": 100, **options}
    return runs.publish(run, step, limit=limit, **options)  # type: ignore[arg-type]


def test_published_checkpoints_are_complete_and_ordered(tmp_path: Path) -> None:
    for step in (9, 10, 200):
        publish(tmp_path, step)
    assert [c.name for c in runs.checkpoints(tmp_path)] == [
        "checkpoint-9",
        "checkpoint-10",
        "checkpoint-200",
    ]
    assert runs.find_checkpoint(tmp_path).name == "checkpoint-200"
    assert runs.find_checkpoint(tmp_path / "checkpoint-9").name == "checkpoint-9"


def test_the_limit_drops_the_oldest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        publish(tmp_path, step, limit=2)
    assert [c.name for c in runs.checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-4"]


def test_a_failure_while_writing_leaves_only_what_was_there(tmp_path: Path) -> None:
    publish(tmp_path, 1)

    def fails(folder: Path) -> None:
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(InputError, match=r"saving checkpoint-2 needs .* earlier checkpoints are"):
        publish(tmp_path, 2, write=fails)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_safetensors_report_of_a_full_disk_is_recognised(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        raise RuntimeError('Io(Os { code: 28, kind: StorageFull, message: "No space left" })')

    with pytest.raises(InputError, match="GB free"):
        publish(tmp_path, 2, write=fails)


def test_refused_before_writing_when_the_disk_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs 1000000000\.00 GB"):
        publish(tmp_path, 1, needed_bytes=10**18)
    assert list(tmp_path.iterdir()) == []


def test_unfinished_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7" / "transformer").mkdir(parents=True)
    with pytest.raises(InputError, match="checkpoint-7: no COMPLETE file"):
        runs.find_checkpoint(tmp_path / "checkpoint-7")
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        runs.find_checkpoint(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        runs.find_checkpoint(tmp_path / "nowhere")


def test_a_model_beside_the_checkpoints_does_not_hide_them(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    (tmp_path / "transformer").mkdir()  # as `megaslide export RUN RUN` writes it
    assert runs.find_checkpoint(tmp_path).name == "checkpoint-3"


def test_only_one_process_trains_into_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with runs.occupied(run), pytest.raises(InputError, match="another process"), runs.occupied(run):
        pass
    with runs.occupied(run):
        pass


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    (tmp_path / ".partial-checkpoint-500").mkdir()
    write(tmp_path / ".partial-checkpoint-500")
    with runs.occupied(tmp_path):
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_second_ctrl_c_while_saving_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, 2, write=interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_half_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, 1)
    remove = shutil.rmtree

    def killed_on_the_way(folder: Path, ignore_errors: bool = False) -> None:
        if folder.name == "checkpoint-1":
            remove(folder / "transformer")
            raise SystemExit
        remove(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", killed_on_the_way)
    with pytest.raises(SystemExit):
        publish(tmp_path, 2, limit=1)
    assert [c.name for c in runs.checkpoints(tmp_path)] == ["checkpoint-2"]
