"""A run's promises: it resumes bit-exactly, saves whole checkpoints, and stops with a reason."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from megaslide import cli, runs, sampling
from megaslide.config import Config, OffloadConfig, load_config, save_config
from megaslide.data.prepare import prepare
from megaslide.data.sprites import write_sprites
from megaslide.errors import InputError
from megaslide.evaluation.checkpoint import checkpoint_figures
from megaslide.evaluation.definitions import OF_CHECKPOINT
from megaslide.evaluation.results import Missing
from megaslide.models.dit import VideoDiT
from megaslide.models.network import saved_network
from megaslide.planning.run import plan_run
from megaslide.sampling import forward_only, sample_run
from megaslide.training.loop import TrainResult, train, train_planned
from megaslide.training.trainer import NonFiniteLossError, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*smaller than the batch.*")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_sprites(root / "clips", count=14, frames=4, size=(32, 32), seed=3)
    prepare(configure(root / "run", root).data, patch_size=(1, 1, 1))
    return root


def configure(run: Path, root: Path, **changes: Any) -> Config:
    values = {
        "output_dir": run,
        "data.path": root / "clips",
        "data.cache_dir": root / "cache",
        "data.buckets": "[4x32x32]",
        "data.validation_split": 0.2,
        "data.codec.channels": 6,
        "data.text.dim": 16,
        "data.text.max_length": 8,
        "model.hidden_size": 32,
        "model.num_layers": 2,
        "model.num_attention_heads": 2,
        "model.patch_size": "[1, 1, 1]",
        "optim.learning_rate": 2e-3,
        "optim.lr_scheduler": "cosine",
        "optim.lr_warmup_steps": 3,
        "train.max_train_steps": 20,
        "train.train_batch_size": 2,
        "train.gradient_accumulation_steps": 2,
        "train.checkpointing_steps": 100,
        "train.validation_steps": 10,
        "train.validation_batches": 2,
        "train.use_ema": "true",
        "log.log_every": 1,
        "log.report_to": "none",
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(None, [f"{key}={value}" for key, value in values.items()])


def losses(run: Path) -> dict[int, tuple[float, float]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {r["step"]: (r["train/loss"], r["train/grad_norm"]) for r in lines if "train/loss" in r}


def eval_losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["eval/loss"] for line in lines if "eval/loss" in line]


def files(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{f.relative_to(checkpoint)}:{k}": v for f in found for k, v in load_file(f).items()}


def assert_equal(a: Path, b: Path) -> None:
    left, right = files(a), files(b)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture(scope="module")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """Twenty steps in one go."""
    return train(configure(tmp_path_factory.mktemp("whole"), cache))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_ten_and_ten_equal_twenty_bit_for_bit(cache: Path, tmp_path: Path, precision: str) -> None:
    options = {"train__mixed_precision": precision, "train__checkpointing_steps": 10}
    through = train(configure(tmp_path / "a", cache, **options))
    half = train(configure(tmp_path / "b", cache, **options), stop_after(10))
    assert half.step == 10
    assert half.interrupted
    torch.manual_seed(12345)  # a new process has another RNG state
    resumed = configure(tmp_path / "b", cache, train__resume_from_checkpoint="latest", **options)
    rest = train(resumed)
    assert rest.step == through.step == 20
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert eval_losses(tmp_path / "a") == eval_losses(tmp_path / "b")
    assert_equal(through.checkpoint, rest.checkpoint)


def test_what_the_plan_decides_is_what_trains_and_what_is_saved(
    cache: Path, tmp_path: Path
) -> None:
    names = ("slots", "tier", "state_format", "gradient_tier", "activations")
    options = {f"offload__{name}": "auto" for name in names} | {
        "train__max_train_steps": 2, "optim__lr_scheduler": "constant", "model__num_layers": 4,
    }  # fmt: skip
    roomy = plan_run(configure(tmp_path / "run", cache, **options)).plan
    assert roomy is not None
    budget = (sum(roomy.device.values()) - 8) / 1e9
    config = configure(tmp_path / "run", cache, offload__device_budget_gb=budget, **options)
    planned = plan_run(config)
    plan = planned.plan
    assert plan is not None
    assert planned.choice.activations == "host"
    result = train_planned(planned)
    arenas = {k: n for k, n in result.device_bytes.items() if k != "activations"}
    assert arenas == {k: plan.device[k] for k in arenas}
    assert result.state_bytes == plan.to_dict()["state_bytes"]
    assert result.d2h_bytes == plan.to_dict()["d2h_bytes_per_step"]
    # Planned are what autograd keeps; temporaries of single operations come on top.
    activations = plan.device["inputs"] + plan.device["working"]
    assert activations <= result.device_bytes["activations"] < 1.6 * activations
    for folder in (tmp_path / "run", result.checkpoint):
        saved = load_config(folder / runs.CONFIG).offload
        assert {n: getattr(saved, n) for n in names} == planned.engine_options


def stop_after(step: int) -> Any:
    """A progress callback that presses Ctrl-C after the given step."""

    def on_progress(done: int, total: int, values: Any) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGINT)

    return on_progress


def test_checkpoint_has_the_promised_layout(whole: TrainResult) -> None:
    names = {p.name for p in whole.checkpoint.iterdir()}
    expected = {"transformer", "optimizer", "ema", "trainer_state.json", "config.yaml", "COMPLETE"}
    assert names == expected
    state = runs.read_state(whole.checkpoint)
    assert state["global_step"] == 20
    model = VideoDiT.from_pretrained(whole.checkpoint / "transformer")
    assert model.config.hidden_size == 32
    averaged = VideoDiT.from_pretrained(whole.checkpoint / "ema")
    assert not torch.equal(averaged.final.proj.weight, model.final.proj.weight)


def test_log_reports_every_promised_key(whole: TrainResult) -> None:
    lines = (whole.checkpoint.parent / "log.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    keys = {
        "train/loss", "train/grad_norm", "train/lr", "eval/loss", "perf/step_time_s",
        "perf/tokens_per_s", "mem/device_peak_gb", "mem/host_rss_gb", "offload/h2d_gb",
        "offload/d2h_gb", "offload/wait_s", "offload/compute_s", "offload/h2d_s", "offload/d2h_s",
        "offload/adamw_s", "offload/overlap",
    }  # fmt: skip
    assert keys <= last.keys()
    assert all(last[key] is not None for key in keys)
    # Of all steps: a load ahead counts for the step in which it ends, which may be either.
    for key in ("offload/h2d_gb", "offload/d2h_gb"):
        assert sum(json.loads(line).get(key, 0.0) for line in lines) > 0
    assert 0 < last["offload/overlap"] <= 1


def test_validating_and_saving_do_not_touch_training(
    cache: Path, tmp_path: Path, whole: TrainResult
) -> None:
    options = {"train__validation_steps": 3, "train__checkpointing_steps": 4}
    other = train(configure(tmp_path, cache, train__checkpoints_total_limit=2, **options))
    assert losses(tmp_path) == losses(whole.checkpoint.parent)
    assert_equal(other.checkpoint, whole.checkpoint)
    assert [c.name for c in runs.checkpoints(tmp_path)] == ["checkpoint-16", "checkpoint-20"]


def test_training_learns(whole: TrainResult) -> None:
    curve = [loss for loss, _ in losses(whole.checkpoint.parent).values()]
    assert sum(curve[-5:]) < sum(curve[:5])


def test_divergence_names_step_and_samples_and_keeps_the_checkpoint(
    cache: Path, tmp_path: Path
) -> None:
    good = train(configure(tmp_path, cache, train__max_train_steps=2))
    options = {"train__resume_from_checkpoint": "latest", "optim__learning_rate": 1e25}
    with pytest.raises(NonFiniteLossError, match=r"step \d+: .*(digit|sprite|clip).*checkpoint-2"):
        train(configure(tmp_path, cache, train__max_train_steps=9, **options))
    assert runs.find_checkpoint(tmp_path) == good.checkpoint


def test_sampling_during_training(cache: Path, tmp_path: Path) -> None:
    options = {
        "sample__prompts": '["digit 3 moving right", "digit 7 moving up"]',
        "sample__every_steps": 2,
        "sample__num_inference_steps": 2,
        "train__max_train_steps": 2,
    }
    train(configure(tmp_path, cache, **options))
    folder = tmp_path / "samples" / "step-000002"
    assert len(list(folder.glob("*.mp4"))) == 2
    assert (folder / "contact_sheet.png").exists()


def test_an_old_run_is_not_overwritten(cache: Path, whole: TrainResult) -> None:
    with pytest.raises(InputError, match="holds checkpoint-20 of an earlier run"):
        train(configure(whole.checkpoint.parent, cache))


def test_a_folder_holds_one_history(cache: Path, tmp_path: Path, whole: TrainResult) -> None:
    """Beside a later checkpoint, a new one would be deleted as the oldest."""
    train(configure(tmp_path, cache, train__max_train_steps=2, train__checkpointing_steps=1))
    for source in (tmp_path / "checkpoint-1", whole.checkpoint):
        options = {"train__resume_from_checkpoint": source, "train__checkpoints_total_limit": 1}
        with pytest.raises(InputError, match="holds checkpoint-2 of an earlier run"):
            train(configure(tmp_path, cache, train__max_train_steps=3, **options))
    for source in (tmp_path, tmp_path / "checkpoint-2"):
        before = (tmp_path / "checkpoint-2").stat().st_ino
        options = {"train__resume_from_checkpoint": source, "train__max_train_steps": 2}
        result = train(configure(tmp_path, cache, **options))
        assert result.checkpoint.samefile(tmp_path / "checkpoint-2")
        assert (tmp_path / "checkpoint-2").stat().st_ino == before  # not written again


def test_resume_refuses_unfinished_and_foreign_checkpoints(
    cache: Path, tmp_path: Path, whole: TrainResult
) -> None:
    (tmp_path / "checkpoint-5" / "transformer").mkdir(parents=True)
    source = {"train__resume_from_checkpoint": tmp_path / "checkpoint-5"}
    with pytest.raises(InputError, match="no COMPLETE"):
        train(configure(tmp_path / "x", cache, **source))
    source = {"train__resume_from_checkpoint": whole.checkpoint}
    with pytest.raises(InputError, match=r"model\.num_layers=2, this run has 3"):
        train(configure(tmp_path / "x", cache, model__num_layers=3, **source))
    with pytest.raises(InputError, match=r"attention\.kind='auto', this run has 'dense'"):
        train(configure(tmp_path / "x", cache, attention__kind="dense", **source))
    bf16 = {"train__mixed_precision": "bf16", "train__max_train_steps": 1}
    source = {"train__resume_from_checkpoint": train(configure(tmp_path, cache, **bf16)).checkpoint}
    with pytest.raises(InputError, match=r"train\.mixed_precision='bf16', this run has 'no'"):
        train(configure(tmp_path / "x", cache, train__mixed_precision="no", **source))


def test_disk_full_is_said_before_training(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "checkpoint_bytes", 10**18)
    with pytest.raises(InputError, match="one checkpoint needs"):
        train(configure(tmp_path, cache))


def test_sampling_a_run_streams_its_latest_checkpoint(
    whole: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []  # frames, not files: x264 does not always write the same bytes for them
    save = sampling.save_samples

    def remember(frames: Any, *rest: Any) -> list[Path]:
        drawn.append(np.stack(frames))
        return save(frames, *rest)

    monkeypatch.setattr(sampling, "save_samples", remember)
    run, prompts, fast = whole.checkpoint.parent, ("digit 3", "digit 7"), {"num_inference_steps": 2}
    paths = sample_run(run, prompts=prompts, out=tmp_path / "a", settings=fast)
    assert [p.name for p in paths] == ["00_digit-3.mp4", "01_digit-7.mp4"]
    sample_run(whole.checkpoint, prompts=prompts, out=tmp_path / "b", settings=fast)
    sample_run(run, prompts=prompts, out=tmp_path / "c", settings=fast, ema=False)
    first, again, plain = drawn
    assert (again == first).all()
    assert (plain[0] != first[0]).any()
    with pytest.raises(InputError, match=r"has no sample\.prompts"):
        sample_run(run)
    with pytest.raises(InputError, match="smaller than one patch"):
        sample_run(run, prompts=prompts, settings={"bucket": "1x1x1"})
    monkeypatch.setattr(sampling, "generate", None)
    with pytest.raises(FileExistsError):
        sample_run(run, prompts=prompts, out=paths[0])


def test_eval_gives_the_loss_that_training_logged(
    cache: Path, whole: TrainResult, tmp_path: Path
) -> None:
    run = whole.checkpoint.parent
    found = checkpoint_figures(run)
    assert found["eval/loss"] == pytest.approx(eval_losses(run)[-1], rel=1e-6)
    assert whole.validation is not None
    assert found["eval/loss_of_zero"] == pytest.approx(whole.validation.zero_loss, rel=1e-6)
    assert found["eval/samples"] == 4
    assert str(checkpoint_figures(None)["eval/loss"]) == "not measured: no --checkpoint"

    clip = next((cache / "clips").glob("*.mp4"))
    command = ["eval", str(clip), "--checkpoint", str(run), "--json", str(tmp_path / "e.json")]
    result = CliRunner().invoke(cli.app, [*command, "--html", str(tmp_path / "e.html")])
    assert result.exit_code == 0, result.output
    assert f"eval/loss: {found['eval/loss']:.4f}" in result.output
    assert f"{found['eval/loss']:.4f}" in (tmp_path / "e.html").read_text()
    assert json.loads((tmp_path / "e.json").read_text())["checkpoint"]["eval/loss"] == {
        "value": found["eval/loss"],
        "definition": OF_CHECKPOINT["eval/loss"].text,
        "source": OF_CHECKPOINT["eval/loss"].source,
        "better": "low",
    }


def test_eval_of_a_checkpoint_needs_no_clips(whole: TrainResult, tmp_path: Path) -> None:
    run = whole.checkpoint.parent
    command = ["eval", "--checkpoint", str(run), "--json", str(tmp_path / "e.json")]
    result = CliRunner().invoke(cli.app, [*command, "--html", str(tmp_path / "e.html")])
    assert result.exit_code == 0, result.output
    assert f"eval/loss: {eval_losses(run)[-1]:.4f}" in result.stdout
    assert "missing" not in result.stdout
    assert "flickering" not in result.stdout
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["checkpoint"]["eval/loss"]["value"] == pytest.approx(eval_losses(run)[-1])
    assert found["clips"] == []
    assert found["summary"] == {}
    page = (tmp_path / "e.html").read_text()
    assert f"{eval_losses(run)[-1]:.4f}" in page
    assert "<h2>Means" not in page
    assert "<h2>Clips" not in page


def test_eval_without_clips_and_without_loss_is_refused(
    cache: Path, whole: TrainResult, tmp_path: Path
) -> None:
    moved = tmp_path / "checkpoint-20"
    shutil.copytree(whole.checkpoint, moved)
    save_config(
        configure(tmp_path, cache, data__cache_dir=tmp_path / "gone"), moved / "config.yaml"
    )
    result = CliRunner().invoke(cli.app, ["eval", "--checkpoint", str(moved)])
    assert result.exit_code == 2, result.output
    assert "its loss is not measured" in result.stderr
    assert "fix:" in result.stderr


def test_eval_says_why_a_checkpoint_has_no_loss(
    cache: Path, whole: TrainResult, tmp_path: Path
) -> None:
    moved = tmp_path / "checkpoint-20"
    shutil.copytree(whole.checkpoint, moved)
    for changes, reason in (
        ({"data__cache_dir": tmp_path / "gone"}, "gone"),
        ({"data__codec__channels": 5}, "channels"),
    ):
        save_config(configure(tmp_path, cache, **changes), moved / "config.yaml")
        missing = checkpoint_figures(moved)["eval/loss"]
        assert isinstance(missing, Missing)
        assert reason in missing.reason
    with pytest.raises(InputError, match="no such folder"):
        checkpoint_figures(tmp_path / "nothing")


def test_sampling_holds_weights_only(whole: TrainResult) -> None:
    weights = whole.checkpoint / "transformer"
    network = saved_network(weights, load_config(whole.checkpoint / "config.yaml"))
    model = forward_only(network, torch.float32, OffloadConfig())
    assert set(model.store.nbytes) == {"weights"}
    expected = VideoDiT.from_pretrained(weights).state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    model.close()
