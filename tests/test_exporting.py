"""Exported folders load with stock diffusers and hold exactly what training held."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_diffusers as tiny
import tiny_pipelines
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import megaslide
from megaslide.cli import app
from megaslide.config import load_config
from megaslide.data.prepare import prepare
from megaslide.data.sprites import write_sprites
from megaslide.errors import InputError
from megaslide.exporting import export
from megaslide.training.loop import train

SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 5.0,
    "prediction_type": "flow_prediction",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips, and a tiny Wan whose folder has a scheduler."""
    root = tmp_path_factory.mktemp("export")
    write_sprites(root / "clips", count=4, frames=3, size=(64, 80), seed=3)
    tiny.write_pipeline(root / "pipeline", "wan")
    tiny_pipelines.write_scheduler(root / "pipeline", SCHEDULER)
    return root


def trained(root: Path, name: str, **changes: Any) -> Path:
    """A run of two steps; returns its checkpoint."""
    values = {
        "output_dir": root / name,
        "model.pretrained_model_name_or_path": root / "pipeline",
        "data.path": root / "clips",
        "data.cache_dir": root / "cache",
        "data.buckets": "[3x64x80]",
        "data.codec.channels": tiny.C,
        "data.text.dim": tiny.TEXT,
        "data.validation_split": 0,
        "train.max_train_steps": 2,
        "train.mixed_precision": "bf16",
        "optim.learning_rate": 1e-3,
        "log.report_to": "none",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    config = load_config(None, [f"{key}={value}" for key, value in values.items()])
    prepare(config.data)
    return train(config).checkpoint


def stock(folder: Path, dtype: torch.dtype | str = "auto", **options: Any) -> dict[str, Tensor]:
    import diffusers

    options = {"subfolder": "transformer"} | options
    loader = diffusers.WanTransformer3DModel
    return loader.from_pretrained(folder, torch_dtype=dtype, **options).state_dict()


def held(folder: Path) -> dict[str, Tensor]:
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


def test_diffusers_loads_what_was_saved(root: Path, tmp_path: Path) -> None:
    import diffusers

    checkpoint = trained(root, "raw")
    done = export(checkpoint.parent, tmp_path / "out", max_shard_bytes=20_000)
    assert (done.path, done.weights) == (tmp_path / "out" / "transformer", "raw")
    assert len(list(done.path.glob("*-of-*.safetensors"))) > 1
    found, saved = held(done.path), held(checkpoint / "transformer")
    assert found.keys() == saved.keys() == stock(tmp_path / "out").keys()
    assert {t.dtype for t in found.values()} == {torch.bfloat16, torch.float32}
    for key, tensor in saved.items():
        assert tensor.dtype == found[key].dtype
        assert torch.equal(tensor, found[key]), key
    scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(
        tmp_path / "out", subfolder="scheduler"
    )
    assert scheduler.config.flow_shift == 5.0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["scheduler", "transformer"]


def test_fp32_is_what_training_keeps(root: Path, tmp_path: Path) -> None:
    """Both formats of the state train alike; one has the masters as plain tensors in its files."""
    plain = trained(root, "master", offload__state_format="master")
    masters = {
        key.removeprefix("master."): tensor
        for key, tensor in held(plain / "optimizer").items()
        if key.startswith("master.")
    }
    assert masters
    for name in ("master", "split"):
        run = plain.parent if name == "master" else trained(root, "split").parent
        done = export(run, tmp_path / name, dtype="fp32")
        assert done.from_masters
        found = stock(tmp_path / name, torch.float32)
        assert {t.dtype for t in held(done.path).values()} == {torch.float32}
        for key, tensor in masters.items():
            assert torch.equal(found[key], tensor), key
        assert any((t != t.bfloat16()).any() for t in found.values())


def test_averaged_weights_are_the_default_where_they_are(root: Path, tmp_path: Path) -> None:
    checkpoint = trained(root, "ema", train__use_ema="true", train__ema_decay="0.5")
    averages = {
        key.removeprefix("ema."): tensor
        for key, tensor in held(checkpoint / "optimizer").items()
        if key.startswith("ema.")
    }
    assert export(checkpoint, tmp_path / "a").weights == "ema"
    assert export(checkpoint, tmp_path / "b", weights="raw").weights == "raw"
    export(checkpoint, tmp_path / "c", weights="ema", dtype="fp32")
    a, b, c = (held(tmp_path / name / "transformer") for name in "abc")
    for key, tensor in held(checkpoint / "ema").items():
        assert torch.equal(a[key], tensor), key
    assert any(not torch.equal(a[key], b[key]) for key in a)
    for key, tensor in averages.items():
        assert torch.equal(c[key].flatten(), tensor.flatten()), key


def test_bf16_keeps_the_parts_that_diffusers_keeps(root: Path, tmp_path: Path) -> None:
    checkpoint = trained(root, "fp32", train__mixed_precision="no")
    done = export(checkpoint, tmp_path / "out", dtype="bf16")
    expected = stock(checkpoint, torch.bfloat16)
    found = held(done.path)
    assert {t.dtype for t in expected.values()} == {torch.bfloat16, torch.float32}
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def test_the_second_expert_has_a_folder_of_its_own(root: Path, tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path / "pipeline", "wan")
    (tmp_path / "pipeline" / "transformer").rename(tmp_path / "pipeline" / "transformer_2")
    tiny_pipelines.write_scheduler(tmp_path / "pipeline", SCHEDULER)
    where = {"model__pretrained_model_name_or_path": tmp_path / "pipeline"}
    checkpoint = trained(root, "expert", model__subfolder="transformer_2", **where)
    export(checkpoint, tmp_path / "out")
    assert stock(tmp_path / "out", subfolder="transformer_2")


def test_converted_attention_is_exported_with_its_entry(root: Path, tmp_path: Path) -> None:
    local = {"attention__kind": "deformable", "attention__window": "[3,3,3]"}
    checkpoint = trained(root, "local", **local)
    done = export(checkpoint, tmp_path / "out", dtype="fp32")
    assert done.converted
    assert json.loads((done.path / "config.json").read_text())["attention"]
    model, again = megaslide.load(tmp_path / "out"), held(done.path)
    assert any(".dsa." in name for name in again)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again[key]), key


def test_our_own_model_is_exported_too(root: Path, tmp_path: Path) -> None:
    own = {"model__pretrained_model_name_or_path": "null", "data__cache_dir": tmp_path / "cache"}
    checkpoint = trained(root, "own", train__mixed_precision="no", **own)
    export(checkpoint, tmp_path / "out")
    model, saved = megaslide.load(tmp_path / "out"), held(checkpoint / "transformer")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[key]), key


def test_the_command_says_what_it_wrote_and_refuses_with_a_fix(root: Path, tmp_path: Path) -> None:
    run = str(trained(root, "command").parent)

    def called(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["export", *arguments])
        return result.exit_code, result.output

    out = str(tmp_path / "out")
    code, shown = called(run, out, "--weights", "raw", "--dtype", "fp32")
    assert code == 0, shown
    assert "exported the raw weights of" in shown
    assert "(WanTransformer3DModel)" in shown
    code, shown = called(run, out)
    assert (code, "holds a model already" in shown) == (2, True)
    code, shown = called(run, str(tmp_path / "other"), "--weights", "ema")
    assert (code, "train.use_ema=true" in shown) == (2, True)
    assert not (tmp_path / "other").exists()
    code, shown = called(str(tmp_path), out)
    assert (code, "no complete checkpoint" in shown) == (2, True)


def test_nothing_to_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        export(tmp_path / "nowhere", tmp_path / "out")


def test_the_original_layout_is_read_back_by_diffusers(root: Path, tmp_path: Path) -> None:
    import diffusers

    checkpoint = trained(root, "original")
    done = export(checkpoint, tmp_path / "out", layout="original", dtype="fp32")
    assert done.path == tmp_path / "out" / "transformer.safetensors"
    model = diffusers.WanTransformer3DModel.from_single_file(
        str(done.path), config=str(checkpoint), subfolder="transformer"
    )
    export(checkpoint, tmp_path / "plain", dtype="fp32")
    expected = stock(tmp_path / "plain", torch.float32)
    assert model.state_dict().keys() == expected.keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    with pytest.raises(InputError, match=r"transformer\.safetensors: exists already"):
        export(checkpoint, tmp_path / "out", layout="original")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["transformer.safetensors"]


def test_models_without_known_original_names_are_refused(root: Path, tmp_path: Path) -> None:
    local = {"attention__kind": "deformable", "attention__window": "[3,3,3]"}
    with pytest.raises(InputError, match=r"dsa\..*: converted attention has no name"):
        export(trained(root, "local-original", **local), tmp_path / "out", layout="original")
    own = {"model__pretrained_model_name_or_path": "null", "data__cache_dir": tmp_path / "cache"}
    with pytest.raises(InputError, match="VideoDiT: the names of its original repository"):
        export(trained(root, "own-original", **own), tmp_path / "out", layout="original")
    assert not list(tmp_path.glob("out/*"))
