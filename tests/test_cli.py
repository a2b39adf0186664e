"""The verbs, their refusals and their exit codes.

What the verbs call is replaced here, so that these tests show the glue alone: what is asked of the
library, what a person sees, and with which code the process ends.
"""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from megaslide import cli
from megaslide.cli import display
from megaslide.errors import InputError

SOURCE = Path(__file__).parent.parent / "src"
PATIENCE_S = 600
"""Until a process counts as stuck: others may have the machine for minutes."""


class Library:
    """Stands in for the library below the command line and records what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.training: Callable[..., Any] = self._train
        self.config: Any = None
        self.sample_request: dict[str, Any] = {}
        modules = {
            "megaslide.data.prepare": {"prepare": self._prepare},
            "megaslide.data.latents": {"LatentDataset": self._dataset},
            "megaslide.training.loop": {
                "train_planned": lambda planned, **k: self.training(planned.config, **k)
            },
            "megaslide.training.trainer": {"NonFiniteLossError": FloatingPointError},
            "megaslide.sampling": {"sample_run": self._sample},
            "megaslide.demo.run": {"run_demo": self._demo},
            "megaslide.demo.report": {"summary_table": lambda summary: f"loss {summary['loss']}"},
        }
        for name, contents in modules.items():
            module = types.ModuleType(name)
            module.__dict__.update(contents)
            monkeypatch.setitem(sys.modules, name, module)

    def _prepare(self, data: Any, *, patch_size: Any, place: Any, progress: Any) -> Any:
        self.calls.append(f"prepare {data.path} patch {patch_size}")
        Path(data.cache_dir).mkdir(parents=True, exist_ok=True)
        (Path(data.cache_dir) / "index.json").write_text('{"complete": true}')
        progress(1, 2, "a.mp4")
        progress(2, 2, "b.mp4")
        reason = "truncated after 3 frames"
        return SimpleNamespace(
            cache_dir=Path(data.cache_dir),
            clips=2,
            reused=1,
            train_samples=2,
            validation_samples=0,
            buckets={"8x64x64": 2},
            notes=["1 clip is shorter"],
            skipped=[SimpleNamespace(path=f"bad{i}.mp4", reason=reason) for i in range(12)],
        )

    def _dataset(self, cache: Path, split: str, expect: Any, *, patch_size: Any) -> list[int]:
        assert expect.cache_dir == str(cache)
        assert patch_size == (1, 2, 2)
        return [0] * {"train": 40, "validation": 2}[split]

    def _train(self, config: Any, on_progress: Any) -> Any:
        self.calls.append("train")
        self.config = config
        for step in (1, 2):
            on_progress(step, 2, {"train/loss": 0.5 / step, "perf/step_time_s": 0.25})
        return SimpleNamespace(interrupted=False, step=2, checkpoint=Path("run/checkpoint-2"))

    def _sample(self, source: Path, **request: Any) -> list[Path]:
        request.pop("progress")(1, 1, "denoising")
        self.sample_request = {"source": source, **request}
        return [Path("samples/a.mp4"), Path("samples/sheet.png")]

    def _demo(self, out: Path, *, phase: Any) -> dict[str, Any]:
        with phase("train") as progress:
            progress(1, 1, f"writing {out}")
        return {"loss": 0.25}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(monkeypatch)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    values = {
        "output_dir": str(tmp_path / "run"),
        "data": {"path": "clips", "cache_dir": str(tmp_path / "cache")},
        "train": {"max_train_steps": 2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def run_process(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "megaslide"]), *arguments]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S
    )


# -- help and version -----------------------------------------------------------------------------


def test_help_lists_every_verb_within_80_columns() -> None:
    result = run_process("--help")
    assert result.returncode == 0, result.stderr
    for verb in ("demo", "prepare", "train", "sample", "eval", "info"):
        assert f"\n  {verb} " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "..." not in result.stdout.partition("Commands:")[2], "a description is cut off"


def test_help_answers_at_once() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        run_process("--help")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("verb", ["demo", "prepare", "train", "sample", "eval", "info"])
def test_each_verb_has_help(verb: str) -> None:
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_version_is_one_line() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("megaslide ")
    assert result.stdout.count("\n") == 1


# -- train ----------------------------------------------------------------------------------------


def test_train_prepares_what_is_missing_then_summarises_then_trains(
    library: Library, config_file: Path, tmp_path: Path
) -> None:
    batch = ("train.train_batch_size=3", "train.gradient_accumulation_steps=2")
    result = run("train", config_file, "optim.learning_rate=1e-5", *batch)
    assert result.exit_code == 0, result.output
    assert library.calls == [
        "prepare clips patch (1, 2, 2)",
        "train",
    ]
    assert library.config.optim.learning_rate == 1e-5
    shown = " ".join(result.stdout.split())
    parameters = re.search(r"tiny, ([\d.]+) M parameters", shown)
    state = re.search(r"([\d.]+) MB of state \(12 bytes per parameter\)", shown)
    assert parameters, shown
    assert state, shown
    assert float(state[1]) == pytest.approx(12 * float(parameters[1]), rel=0.02)
    for fact in (
        "6 clips per step, micro-batches of 3",
        "40 samples, 2 held out",
        "finished at step 2; checkpoint run/checkpoint-2",
    ):
        assert fact in shown
    assert str(tmp_path / "run") in result.stdout.replace("\n", "")


def test_average_of_the_weights_is_part_of_the_state(library: Library, config_file: Path) -> None:
    shown = run("train", config_file, "train.use_ema=true").stdout
    assert "(16 bytes per parameter)" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("complete", "calls"),
    [(True, ["train"]), (False, ["prepare clips patch (1, 2, 2)", "train"])],
)
def test_train_prepares_only_a_cache_that_is_not_finished(
    complete: bool, calls: list[str], library: Library, config_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "index.json").write_text(json.dumps({"format": 1, "complete": complete}))
    assert run("train", config_file).exit_code == 0
    assert library.calls == calls


def test_train_refuses_a_used_folder_before_it_prepares(
    library: Library, config_file: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "run" / "checkpoint-3" / "COMPLETE"
    whole.parent.mkdir(parents=True)
    whole.touch()
    result = run("train", config_file, f"output_dir={tmp_path / 'run'}")
    assert result.exit_code == 2
    assert "checkpoint-3 of an earlier run" in " ".join(result.stderr.split())
    assert library.calls == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_that_is_not_there_is_refused(library: Library, config_file: Path) -> None:
    result = run("train", config_file, "offload.device=cuda")
    assert result.exit_code == 2
    assert "offload.device=cuda" in result.stderr
    assert "train" not in library.calls


def test_what_does_not_fit_is_refused_before_clips_are_read(
    library: Library, config_file: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    result = run("train", config_file, "offload.device_budget_gb=0.001")
    assert result.exit_code == 2
    assert "the run does not fit: device lacks" in result.stderr
    assert "fix: " in result.stderr
    assert library.calls == []
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("changes", [("attention.kind=dense",), ("attention.kind=swin",)])
def test_blocks_that_cannot_be_cut_are_refused(
    library: Library, config_file: Path, changes: tuple[str, ...]
) -> None:
    result = run("train", config_file, "offload.frames_per_chunk=2", *changes)
    assert result.exit_code == 2
    assert "frames_per_chunk: blocks.0 cannot be computed in chunks of frames" in result.stderr
    assert "fix: leave frames_per_chunk out" in result.stderr
    assert library.calls == []
    result = run("train", config_file, "offload.frames_per_chunk=0")
    assert result.exit_code == 2
    assert "frames_per_chunk" in result.stderr


def test_interrupted_training_tells_how_to_go_on(library: Library, config_file: Path) -> None:
    library.training = lambda config, on_progress: SimpleNamespace(
        interrupted=True, step=7, checkpoint=Path("run/checkpoint-7")
    )
    result = run("train", config_file, "sample.prompts=[a b]")
    assert result.exit_code == 130
    assert "interrupted at step 7; saved run/checkpoint-7" in result.stderr
    resume = "'sample.prompts=[a b]' train.resume_from_checkpoint=latest"
    assert f"continue: megaslide train {config_file} {resume}" in result.stderr
    assert "finished" not in result.output


# -- prepare, sample, demo ------------------------------------------------------------------------


def test_prepare_reports_what_it_took_and_what_it_left(library: Library, config_file: Path) -> None:
    result = run("prepare", config_file)
    assert result.exit_code == 0, result.output
    assert "prepared 2 clips, 1 of them known: 2 of 8x64x64" in result.stdout
    assert "2 for training, 0 held out" in result.stdout
    assert "note: 1 clip is shorter" in result.stdout
    assert "skipped bad0.mp4: truncated after 3 frames" in result.stdout
    assert result.stdout.count("truncated") == 10
    assert "skipped 2 more: see `skipped` in " in result.stdout


def test_sample_passes_on_only_what_was_given(library: Library) -> None:
    result = run("sample", "run", "--prompt", "a", "--prompt", "b", "--steps", 5, "--no-ema")
    assert result.exit_code == 0, result.output
    assert library.sample_request == {
        "source": Path("run"),
        "prompts": ("a", "b"),
        "out": None,
        "settings": {"num_inference_steps": 5},
        "ema": False,
        "second": None,
    }
    assert result.stdout.splitlines() == ["samples/a.mp4", "samples/sheet.png"]


def test_sample_options_reach_the_settings(library: Library) -> None:
    options = ["--guidance", "2.5", "--seed", "7", "--bucket", "8x32x32", "--out", "there"]
    options += ["--image", "a.png", "--second", "other"]
    assert run("sample", "run", *options).exit_code == 0
    assert library.sample_request["settings"] == {
        "guidance_scale": 2.5,
        "seed": 7,
        "bucket": "8x32x32",
        "images": ("a.png",),
    }
    assert library.sample_request["second"] == Path("other")
    assert library.sample_request["out"] == Path("there")
    assert library.sample_request["ema"] is None


@pytest.mark.parametrize(
    ("option", "value"), [("--steps", "0"), ("--guidance", "-1"), ("--bucket", "8x32")]
)
def test_sample_refuses_impossible_settings(library: Library, option: str, value: str) -> None:
    result = run("sample", "run", option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr
    assert library.sample_request == {}


def test_demo_shows_its_summary(library: Library, tmp_path: Path) -> None:
    result = run("demo", "--out", tmp_path / "d")
    assert result.exit_code == 0, result.output
    assert "loss 0.25" in result.stdout
    assert result.stdout.endswith(f"report: {tmp_path / 'd' / 'report.html'}\n")
    assert "train 1/1 writing" in result.stderr


# -- info -----------------------------------------------------------------------------------------


def test_info_as_json_is_the_machine_record() -> None:
    record = json.loads(run("info", "--json").stdout)
    assert record["cores_usable"] >= 1
    assert record["packages"]["torch"]


def test_info_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("info")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for name in ("megaslide", "cpu", "memory", "disk", "gpu", "native"):
        assert any(line.startswith(name) for line in result.stdout.splitlines())


def test_info_schema_describes_every_key() -> None:
    schema = json.loads(run("info", "--schema").stdout)
    fields = [
        (section, name, field)
        for section, definition in schema["$defs"].items()
        for name, field in definition["properties"].items()
    ]
    assert len(fields) > 40
    silent = [(section, name) for section, name, field in fields if "description" not in field]
    assert not [s for s in silent if s[1] not in ("codec", "image", "text")]


def test_presets_are_named_after_their_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = {row["preset"]: row for row in json.loads(run("info", "--presets", "--json").stdout)}
    assert rows["105b"]["parameters"] == pytest.approx(105e9, rel=0.02)
    assert rows["105b"]["state_bytes"] == 12 * rows["105b"]["parameters"]
    table = run("info", "--presets").stdout
    assert "1.26 TB" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands for the measurement; holds the folders that were asked for."""
    from megaslide.planning import rates

    folders: list[Path] = []

    def measure_rates(folder: Path, progress: Any) -> rates.Rates:
        folders.append(folder)
        progress(0, 1, "matrix products")
        progress(1, 1, "")
        disk = rates.DiskRates(read_bytes_s=2e9, write_bytes_s=1.5e9, both_bytes_s=2.5e9)
        return rates.Rates(
            threads=2, gemm_fp32_flop_s=1.23e11, gemm_bf16_flop_s=4e12, triad_bytes_s=3e10,
            adamw_parameters_s=1e9, adamw_bytes_s=2.6e10, adamw_lane_parameters_s=5e8,
            adamw_lane_bytes_s=1.3e10, copy_bytes_s=8e9, disk=disk,
        )  # fmt: skip

    monkeypatch.setattr(rates, "measure_rates", measure_rates)
    return folders


def test_probe_shows_rates_with_their_units(
    probed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("info", "--probe", "--disk", "/somewhere")
    assert result.exit_code == 0, result.output
    assert probed == [Path("/somewhere")]
    assert "123 GFLOP/s in fp32, 4 TFLOP/s in bf16" in result.stdout
    assert "500 M parameters/s, 13 GB/s" in result.stdout
    assert "read 2 GB/s, write 1.5 GB/s, both 2.5 GB/s" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "probe 0/1 matrix products" in result.stderr


def test_probe_writes_a_record_that_reads_back(probed: list[Path], tmp_path: Path) -> None:
    from megaslide.planning.rates import Rates

    file = tmp_path / "rates.json"
    result = run("info", "--probe", "--json", file)
    assert result.exit_code == 0, result.output
    assert Rates.from_json(file).to_dict() == json.loads(run("info", "--probe", "--json").stdout)


def test_info_refuses_what_it_cannot_do(probed: list[Path], tmp_path: Path) -> None:
    for arguments, words in (
        (["--probe", "--schema"], "ask for one of them"),
        (["rates.json"], "--json rates.json"),
        (["--probe", "--json", tmp_path / "no" / "file"], f"{tmp_path / 'no' / 'file'}"),
        (["--probe", "--json", tmp_path], f"{tmp_path}: Is a directory"),
    ):
        result = run("info", *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
    assert len(probed) == 1  # refused before anything was measured, where that could be seen


def test_model_that_cannot_be_built_is_refused_before_preparing(
    library: Library, config_file: Path
) -> None:
    result = run("train", config_file, "model.num_attention_heads=7")
    assert result.exit_code == 2
    assert "num_attention_heads=7" in result.stderr
    assert library.calls == []


# -- refusals -------------------------------------------------------------------------------------


def test_misspelt_key_is_one_message_without_traceback(config_file: Path) -> None:
    result = run_process("train", str(config_file), "optim.learning_rat=1")
    assert result.returncode == 2
    assert "unknown key 'optim.learning_rat'; did you mean 'optim.learning_rate'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_missing_config_is_named(tmp_path: Path) -> None:
    result = run("train", tmp_path / "absent.yaml")
    assert result.exit_code == 2
    assert f"{tmp_path / 'absent.yaml'}: No such file or directory\n  fix: " in result.stderr


def raising(error: BaseException) -> Callable[..., Any]:
    def training(config: Any, on_progress: Any) -> Any:
        raise error

    return training


def test_input_error_from_below_is_shown_once(library: Library, config_file: Path) -> None:
    library.training = raising(InputError("clip.mp4: 3 frames", "use longer clips"))
    result = run("train", config_file)
    assert result.exit_code == 2
    assert result.stderr.endswith("error: clip.mp4: 3 frames\n  fix: use longer clips\n")


def wrapped(cause: BaseException) -> RuntimeError:
    error = RuntimeError("a worker failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/data/run/weights.bin"),
        wrapped(OSError(errno.EDQUOT, "Disk quota exceeded", "/data/run/weights.bin")),
    ],
)
def test_full_disk_names_the_file_and_the_space(
    error: Exception, library: Library, config_file: Path
) -> None:
    library.training = raising(error)
    result = run("train", config_file)
    assert result.exit_code == 2
    assert "/data/run/weights.bin: the disk is full (" in result.stderr
    assert "B free)\n  fix: free space" in result.stderr


@pytest.mark.parametrize(
    "message", ["No space left on device (os error 28)", "IoError(Error { kind: StorageFull })"]
)
def test_full_disk_without_a_file_names_the_output(
    message: str, library: Library, config_file: Path
) -> None:
    library.training = raising(RuntimeError(message))
    result = run("train", config_file)
    assert result.exit_code == 2
    assert f"{config_file.parent / 'run'}: the disk is full (" in result.stderr


def test_output_that_cannot_be_written_is_named(library: Library, config_file: Path) -> None:
    library.training = raising(PermissionError(errno.EACCES, "Permission denied", "/data/run"))
    result = run("train", config_file)
    assert result.exit_code == 2
    assert "error: /data/run: Permission denied\n" in result.stderr


def test_diverged_training_says_what_to_do(library: Library, config_file: Path) -> None:
    library.training = raising(FloatingPointError("step 3: the loss is not finite"))
    result = run("train", config_file)
    assert result.exit_code == 1
    assert result.stderr.endswith("error: step 3: the loss is not finite\n")


def test_missing_package_shows_the_install_command(library: Library, config_file: Path) -> None:
    library.training = raising(ImportError("tensorboard is missing: pip install tensorboard"))
    result = run("train", config_file)
    assert result.exit_code == 2
    assert "error: tensorboard is missing: pip install tensorboard" in result.stderr


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ImportError("circular"), OSError(5, "x")])
def test_bug_keeps_its_traceback(error: Exception, library: Library, config_file: Path) -> None:
    library.training = raising(error)
    result = run("train", config_file)
    assert result.exit_code == 1
    assert result.exception is error


def test_ctrl_c_in_a_real_process_ends_with_130(config_file: Path) -> None:
    code = (
        "import sys, time, megaslide.config as c\n"
        "def load(*a):\n    print('ready', flush=True)\n    time.sleep(3600)\n"
        "c.load_config = load\n"
        "from megaslide.cli import main\nmain()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "prepare", str(config_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr == "interrupted\n"


# -- progress -------------------------------------------------------------------------------------


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 0.0, 3.0, 11.0, 11.0, 12.0, 13.0, 13.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    with display.Meter("train") as meter:
        for step in range(1, 6):
            meter(step, 5, {"mem/host_rss_gb": 1.0, "train/loss": 1 / step, "train/lr": 0.5})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "train 1/5 loss 1  lr 0.5",
        "train 3/5 loss 0.3333  lr 0.5",
        "train 5/5 loss 0.2  lr 0.5",
    ]


@pytest.mark.parametrize("width", [80, 60])
def test_on_a_terminal_the_bar_keeps_to_its_line(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    screen = io.StringIO()
    terminal = Console(file=screen, width=width, force_terminal=True, _environ={})
    monkeypatch.setattr(display, "console", lambda **_: terminal)
    with display.Meter("prepare") as meter:
        meter(99_999, 100_000, "a [very] long name of a clip " * 5)
    final = [line for line in terminal_text(screen.getvalue()).splitlines() if line.strip()][-1]
    assert len(final) <= width
    assert "99999/100000" in final
    assert "prepare" in final
    assert "a [very]" in final


def terminal_text(output: str) -> str:
    """What is left of terminal output without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "\n")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (1000, "1 kB"), (1.47e12, "1.47 TB")],
)
def test_sizes_have_three_digits(number: float, text: str) -> None:
    assert display.size(number) == text


def test_counts_speak_of_billions() -> None:
    assert display.count(1.3e9) == "1.3 B"


def test_bench_runs_a_script_with_its_options_and_names_the_known_ones() -> None:
    run = CliRunner()
    unknown = run.invoke(cli.app, ["bench", "nothing"])
    assert unknown.exit_code == 2
    assert "adamw, adaptation, attention, disk, loading, memory, plan, streaming" in " ".join(
        unknown.output.split()
    )
    command = [sys.executable, "-m", "megaslide", "bench", "streaming", "--unknown"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert "bench_streaming.py: error: unrecognized arguments: --unknown" in shown.stderr


# -- plan -----------------------------------------------------------------------------------------


def test_plan_tells_a_known_accelerator_within_80_columns() -> None:
    small = ("--gpu", "h200", "--ram", "64GB", "--frames", "9", "--height", "64", "--width", "64")
    figures = json.loads(run("plan", "tiny", *small, "--json").stdout)
    assert figures["fits"] is True
    assert figures["params"] > 0
    result = run("plan", "tiny", *small)
    assert result.exit_code == 0
    assert "verdict" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_plan_writes_a_page_beside_its_figures(tmp_path: Path) -> None:
    small = ("--gpu", "h200", "--frames", "9", "--height", "64", "--width", "64")
    page = tmp_path / "plan.html"
    figures = json.loads(run("plan", "tiny", *small, "--json", "--html", page).stdout)
    assert figures["choice"]["slots"] == 2
    assert "megaslide: plan of tiny on h200" in page.read_text()
    refused = run("plan", "tiny", *small, "--html", tmp_path)
    assert refused.exit_code == 2
    assert str(tmp_path) in refused.stderr


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_eval_refuses_a_folder_before_it_measures(tmp_path: Path, option: str) -> None:
    refused = run("eval", tmp_path / "no-such-clip.mp4", option, tmp_path)
    assert refused.exit_code == 2
    assert f"{tmp_path}: a folder, not a file" in refused.stderr
    assert not list(tmp_path.parent.glob(f".partial-{tmp_path.name}"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tiny", "--gpu", "h20"), "h200"),
        (("tiny", "--gpu", "h200", "--ram", "much"), "512GB"),
        (("tiny", "--gpu", "h200", "--ram", "1536"), "no unit"),
        (("tiny", "--efficiency", "0.5"), "--gpu"),
        (("huge", "--gpu", "h200"), "105b"),
    ],
)
def test_plan_refuses_what_it_cannot_read(arguments: tuple[str, ...], told: str) -> None:
    done = run_process("plan", *arguments)
    assert done.returncode == 2
    assert told in done.stderr
