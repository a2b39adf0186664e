"""Folders come back bit for bit, and a folder that does not fit is named, never half loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaslide.errors import InputError
from megaslide.models.dit import VideoDiT, VideoDiTConfig

WEIGHTS = "diffusion_pytorch_model.safetensors"


def make(**fields: int) -> VideoDiT:
    base = {"in_channels": 3, "text_dim": 10, "hidden_size": 24, "num_attention_heads": 2}
    return VideoDiT(VideoDiTConfig(**{**base, "num_layers": 2, **fields}))


def assert_same_bits(a: VideoDiT, b: VideoDiT) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert right[name].dtype == tensor.dtype, name
        assert torch.equal(right[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make(num_register_tokens=2).to(dtype)
    model.final.float()  # mixed dtypes survive too
    with torch.no_grad():
        model.registers[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    model.save_pretrained(tmp_path / "a" / "transformer")
    loaded = VideoDiT.from_pretrained(tmp_path / "a" / "transformer")
    assert_same_bits(model, loaded)
    assert loaded.config == model.config
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_layout_is_that_of_diffusers(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", WEIGHTS]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["_class_name"] == "VideoDiT"
    assert config["patch_size"] == [1, 2, 2]
    assert set(load_file(tmp_path / WEIGHTS)) == set(make().state_dict())


def test_sharded_round_trip_and_replacement(tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path, max_shard_bytes=50_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert files[0].name == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(path).values()) <= 50_000 for path in files)
    index = json.loads((tmp_path / f"{WEIGHTS}.index.json").read_text())
    total = sum(p.nbytes for p in model.parameters())
    assert index["metadata"]["total_size"] == total
    assert_same_bits(model, VideoDiT.from_pretrained(tmp_path))
    other = make()  # a later save leaves nothing of the earlier one
    other.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", WEIGHTS]
    assert_same_bits(other, VideoDiT.from_pretrained(tmp_path))


def test_same_prediction_after_loading(tmp_path: Path) -> None:
    model = make()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    batch = (torch.randn(1, 3, 2, 4, 4), torch.ones(1), torch.randn(1, 3, 10))
    assert torch.equal(model(*batch), VideoDiT.from_pretrained(tmp_path)(*batch))


def refused(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        VideoDiT.from_pretrained(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_folder_of_another_model_names_both_classes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    message = refused(tmp_path)
    assert "WanTransformer3DModel" in message
    assert "VideoDiT" in message


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    del state["time_proj.bias"]
    save_file(state, tmp_path / WEIGHTS)
    assert "1 (time_proj.bias) missing, none unexpected" in refused(tmp_path)


def test_weights_of_another_model_name_the_keys(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    save_file({"blocks.0.attn.qkv": torch.zeros(2)}, tmp_path / WEIGHTS)
    message = refused(tmp_path)
    assert "blocks.0.attn.qkv" in message
    assert "missing" in message


def test_shape_that_config_does_not_ask_for_is_named(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    state["final.proj.bias"] = torch.zeros(7)
    save_file(state, tmp_path / WEIGHTS)
    message = refused(tmp_path)
    assert "final.proj.bias is [7]" in message
    assert "[12]" in message


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("config.json", None, "No such file"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[1]", "is a list"),
        (WEIGHTS, None, "index.json"),
        (WEIGHTS, "cut short", "damaged"),
    ],
)
def test_missing_and_damaged_files(
    tmp_path: Path, name: str, content: str | None, part: str
) -> None:
    make().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    assert part in refused(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path, max_shard_bytes=50_000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden_size": 25}, "hidden_size=25 is not divisible"),
        ({"hidden_size": "wide"}, "wrong type"),
        ({"heads": 2}, "unknown keys ['heads']"),
    ],
)
def test_config_values_that_do_not_fit(
    tmp_path: Path, change: dict[str, object], part: str
) -> None:
    make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    assert part in refused(tmp_path)
