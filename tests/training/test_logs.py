"""The run log: what is written, what is refused, and that a resumed run leaves one history."""

import json
import struct
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import pytest

from megaslide.config import Config
from megaslide.errors import InputError
from megaslide.training.logs import KEYS, LOG_NAME, RunLog, read_log

CONFIG = Config()


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / LOG_NAME).read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def write_losses(folder: Path, steps: range, offset: float, start_step: int = 0) -> None:
    with RunLog(folder, "none", CONFIG, start_step=start_step) as log:
        for step in steps:
            log.log(step, {"train/loss": step + offset})


def png(width: int, height: int) -> bytes:
    """A grey PNG written by hand, so that no imaging package decides what is valid."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\x80" * width) * height)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def test_every_key_is_accepted_and_written_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "none", CONFIG)
    log.log(3, dict.fromkeys(KEYS, 0.5))
    line = json.loads((tmp_path / "run" / LOG_NAME).read_text().splitlines()[-1])
    log.close()
    assert line.pop("time") > 1e9
    assert line == {"step": 3, **dict.fromkeys(KEYS, 0.5)}


def test_the_keys_are_these() -> None:
    assert " ".join(KEYS) == (
        "train/loss train/grad_norm train/lr eval/loss perf/step_time_s perf/tokens_per_s "
        "mem/device_peak_gb mem/host_rss_gb offload/h2d_gb offload/d2h_gb offload/wait_s "
        "offload/compute_s offload/h2d_s offload/d2h_s offload/adamw_s offload/overlap"
    )


def test_unknown_key_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    log = RunLog(tmp_path, "none", CONFIG)
    with pytest.raises(ValueError, match=r"train/los.*accepted: train/loss"):
        log.log(1, {"train/los": 1.0, "train/lr": 1.0})
    log.close()
    assert all("train/lr" not in record for record in read_log(tmp_path))


def test_each_start_records_its_machine(tmp_path: Path) -> None:
    write_losses(tmp_path, range(1, 3), 0.0)
    write_losses(tmp_path, range(3, 4), 0.0, start_step=2)
    starts = [record for record in read_log(tmp_path) if "machine" in record]
    assert [record["step"] for record in starts] == [0, 2]
    assert starts[0]["machine"]["cores_usable"] >= 1


def test_resume_drops_what_is_about_to_happen_again(tmp_path: Path) -> None:
    write_losses(tmp_path, range(1, 8), 0.0)
    write_losses(tmp_path, range(5, 7), 0.5, start_step=4)
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.5), (6, 6.5)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [LOG_NAME]


def test_new_run_in_a_used_folder_starts_a_new_history(tmp_path: Path) -> None:
    write_losses(tmp_path, range(4), 0.0)  # step 0 is evaluated before the first update
    write_losses(tmp_path, range(3), 0.5)
    assert losses(tmp_path) == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert sum("machine" in record for record in read_log(tmp_path)) == 1


def test_line_torn_by_a_crash_is_left_out(tmp_path: Path) -> None:
    write_losses(tmp_path, range(1, 4), 0.0)
    whole = (tmp_path / LOG_NAME).read_text()
    (tmp_path / LOG_NAME).write_text(whole + '{"step": 4, "train/lo')
    assert [r["step"] for r in read_log(tmp_path)] == [0, 1, 2, 3]
    write_losses(tmp_path, range(4, 5), 0.0, start_step=3)
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"log\.jsonl, line 2: not JSON"):
        read_log(tmp_path)


def test_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"log\.jsonl: no such file"):
        read_log(tmp_path)


def test_value_that_is_not_finite_becomes_null_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunLog(tmp_path, "none", CONFIG) as log:
        log.log(7, {"train/loss": float("nan"), "train/lr": 1.0})
    record = read_log(tmp_path)[-1]
    assert (record["train/loss"], record["train/lr"]) == (None, 1.0)
    assert "train/loss is nan at step 7" in caplog.text


def test_samples_are_recorded_relative_to_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunLog(run, "none", CONFIG) as log:
        log.sample(2, [run / "samples" / "a.mp4", Path("/elsewhere/b.png")])
    assert read_log(run)[-1]["samples"] == ["samples/a.mp4", "/elsewhere/b.png"]


def test_tensorboard_reads_back_scalars_and_images_of_a_resumed_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sheet = tmp_path / "sheet.png"
    sheet.write_bytes(png(6, 4))
    with RunLog(tmp_path, "tensorboard", CONFIG) as log:
        for step in (1, 2, 3):
            log.log(step, {"train/loss": float(step)})
        log.sample(3, [sheet, tmp_path / "clip.mp4"])
    with RunLog(tmp_path, "tensorboard", CONFIG, start_step=2) as log:
        log.log(3, {"train/loss": 3.5})
        log.sample(3, [sheet])
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 3.5)]
    image = events.Images("samples/sheet")[-1]
    assert (image.width, image.height, image.encoded_image_string) == (6, 4, png(6, 4))


def test_tensorboard_shows_a_new_run_alone(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):
        with RunLog(tmp_path, "tensorboard", CONFIG) as log:
            log.log(0, {"eval/loss": value})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("eval/loss")] == [2.0]


class FakeWandb(types.ModuleType):
    """Records what a W&B run would receive."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.Image = self.Video = lambda path: ("media", Path(path).name)

    def init(self, **options: Any) -> "FakeWandb":
        self.calls.append(("init", options["id"]))
        self.id = options["id"] or f"new-{len(self.calls)}"
        return self

    def define_metric(self, *names: str, step_metric: str) -> None:
        self.calls.append(("axis", step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.calls.append(("log", values))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_wandb_run_is_continued_on_resume_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for start_step in (0, 1, 0):
        RunLog(tmp_path, "wandb", CONFIG, start_step=start_step).close()
    assert [value for call, value in wandb.calls if call == "init"] == [None, "new-1", None]


def test_wandb_receives_the_step_as_its_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with RunLog(tmp_path, "wandb", CONFIG) as log:
        log.log(4, {"train/loss": 0.25})
        log.sample(4, [tmp_path / "a.mp4", tmp_path / "a.txt"])
    assert ("axis", "step") in wandb.calls
    assert ("log", {"step": 4, "train/loss": 0.25}) in wandb.calls
    assert ("log", {"step": 4, "samples/a": ("media", "a.mp4")}) in wandb.calls
    assert wandb.calls[-1] == ("finish", None)


@pytest.mark.parametrize(
    ("report_to", "module"),
    [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")],
)
def test_missing_package_names_the_install_command(
    report_to: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_losses(tmp_path, range(1, 4), 0.0)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {report_to}"):
        RunLog(tmp_path, report_to, CONFIG)
    assert len(losses(tmp_path)) == 3, "an old log must survive a start that failed"


def test_unknown_destination_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="report_to='mlflow'; accepted: tensorboard"):
        RunLog(tmp_path, "mlflow", CONFIG)
