"""The demo with everything made small: it writes what it promises, and replaces only its own."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megaslide.config import Config, load_config
from megaslide.demo import run
from megaslide.errors import InputError
from megaslide.training.loop import TrainResult

TINY = [
    "data.buckets=[5x32x32]",
    "data.windows_per_clip=2",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_attention_heads=2",
    "train.max_train_steps=4",
    "train.validation_steps=2",
    "sample.num_inference_steps=2",
    "sample.prompts=[digit 3 moving right]",
]


def tiny_config(out: Path) -> Config:
    folders = {
        "output_dir": out / "run",
        "data.path": out / "clips",
        "data.cache_dir": out / "cache",
    }
    source = Path(run.__file__).with_name("demo.yaml")
    return load_config(source, [*TINY, *(f"{k}={v}" for k, v in folders.items())])


@pytest.mark.filterwarnings("ignore:.*smaller than the batch.*")
def test_demo_writes_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(run, "SPRITES", 12)
    monkeypatch.setattr(run, "demo_config", tiny_config)
    out = tmp_path / "demo"
    summary = run.run_demo(out)
    assert json.loads((out / "summary.json").read_text()) == summary
    promised = {"params", "state_bytes", "device_peak_bytes", "steps", "val_loss", "val_loss_zero"}
    assert promised | {"samples", "wall_s"} <= summary.keys()
    assert summary["steps"] == 4
    assert all((out / sample).exists() for sample in summary["samples"])
    page = (out / "report.html").read_text()
    assert page.count("data:video/mp4;base64,") == 1 + run.EXAMPLES_SHOWN
    run.run_demo(out)  # an earlier demo may be replaced


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_summary_names_the_device(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = SimpleNamespace(zero_loss=1.0)
    result = SimpleNamespace(
        validation=loss, parameters=1, state_bytes=1, device_bytes={}, step=1, step_time_s=1.0,
        h2d_bytes=1, d2h_bytes=1,
    )  # fmt: skip
    monkeypatch.setattr(run, "read_log", lambda _: [{"eval/loss": 1.0}] * 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    summary = run._summary(run.demo_config(tmp_path), cast(TrainResult, result), [])
    assert summary["device"] == device


def test_an_earlier_demo_is_replaced_where_its_folder_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    for name in (Path(), tmp_path / "link"):
        (tmp_path / "real" / "DEMO").write_text("ours")
        (tmp_path / "real" / "run").mkdir(exist_ok=True)
        (tmp_path / "real" / "report.html").write_text("old")
        run._claim(name)
        assert [p.name for p in (tmp_path / "real").iterdir()] == ["DEMO"]


def test_demo_keeps_its_hands_off_other_folders(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not an earlier demo"):
        run.run_demo(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_the_demos_own_configuration_is_valid(tmp_path: Path) -> None:
    config = run.demo_config(tmp_path)
    assert config.output_dir == str(tmp_path / "run")
    assert len(config.sample.prompts) == 4
