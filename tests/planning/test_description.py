"""`megaslide info PATH` against the real classes: torch's own counts, and what streaming takes."""

import json
from pathlib import Path

import pytest
import tiny_diffusers as tiny
import torch
from typer.testing import CliRunner

from megaslide.cli import app
from megaslide.config import AttentionConfig, ModelConfig
from megaslide.models.dit import build_model
from megaslide.models.pretrained import build_on_meta, find_source
from megaslide.models.pretrained.converted_folder import write_converted
from megaslide.planning.description import describe
from megaslide.streaming import stream

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
CASES = {  # family, convertible modules, blocks
    "wan": ("Wan", 2, {"blocks": 2}),
    "hunyuan": ("HunyuanVideo", 4, {"transformer_blocks": 2, "single_transformer_blocks": 2}),
    "sana": (None, 0, {"transformer_blocks": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_described_as_it_streams(name: str, tmp_path: Path) -> None:
    family, convertible, blocks = CASES[name]
    model = tiny.write_pipeline(tmp_path, name)
    found = describe(str(tmp_path))
    assert found.class_name == type(model).__name__
    assert (found.family, found.convertible, found.blocks) == (family, convertible, blocks)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.attention == {"kind": "dense"}
    for state_format, nbytes in found.state_bytes.items():
        meta = build_on_meta(find_source(str(tmp_path)), torch.bfloat16)
        streamed = stream(meta, state_format=state_format)
        assert streamed.state_bytes == nbytes
        arenas = streamed.device_bytes
        assert sum(arenas.values()) - arenas["activations"] == found.device_bytes
        assert max(u.weight_nbytes for u in streamed.store.units[1:]) == found.largest_block_bytes
        streamed.close()


def test_converted_and_own_models_are_described(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path / "dense", "wan")
    settings = AttentionConfig(kind="deformable", window=(2, 3, 3))
    write_converted(find_source(str(tmp_path / "dense")), tmp_path / "local", settings)
    found = describe(str(tmp_path / "local"))
    assert found.attention["kind"] == "deformable"
    assert found.convertible == 0
    assert found.parameters > describe(str(tmp_path / "dense")).parameters
    own = build_model(ModelConfig(preset="tiny"), AttentionConfig(), in_channels=16, text_dim=64)
    own.save_pretrained(tmp_path / "own" / "transformer")
    found = describe(str(tmp_path / "own"))
    assert (found.family, found.class_name) == ("VideoDiT", "VideoDiT")
    assert found.attention == {"kind": "deformable", "window": [3, 3, 3]}
    assert found.parameters == sum(p.numel() for p in own.parameters())


def test_the_command_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tiny.write_pipeline(tmp_path / "wan", "wan")
    tiny.write_pipeline(tmp_path / "i2v", "hunyuan-i2v")
    run = CliRunner()
    shown = run.invoke(app, ["info", str(tmp_path / "wan")])
    assert shown.exit_code == 0, shown.output
    assert "WanTransformer3DModel" in shown.output
    assert "2 in blocks" in shown.output
    assert "makes 2 modules" in " ".join(shown.output.split())
    assert max(map(len, shown.output.splitlines())) <= 80
    record = json.loads(run.invoke(app, ["info", str(tmp_path / "wan"), "--json"]).stdout)
    assert record == describe(str(tmp_path / "wan")).to_dict()
    shown = run.invoke(app, ["info", str(tmp_path / "i2v")])
    assert "HunyuanVideo, but: HunyuanVideo with in_channels=9" in " ".join(shown.output.split())
    shown = run.invoke(app, ["info", str(tmp_path)])
    assert (shown.exit_code, "set model.subfolder to one of" in shown.output) == (2, False)
    assert "config.json: no such file" in " ".join(shown.output.split())
