"""Pretrained folders: found or refused with a reason, built like diffusers does, kept bit for bit.

The oracle is diffusers itself: its loader, its dtypes, its forward.
"""

import json
from pathlib import Path

import pytest
import tiny_diffusers as tiny
import torch
from safetensors.torch import load_file

from megaslide.errors import InputError
from megaslide.models.pretrained import Source, build_on_meta, find_source
from megaslide.streaming import StreamedModel, stream

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
FAMILIES = ("wan", "ltx", "cosmos", "hunyuan", "cogvideox-learned", "mochi", "kandinsky5")


@pytest.fixture(autouse=True)
def _resize() -> None:
    tiny.install_resize()


def loaded(source: Source, dtype: torch.dtype) -> StreamedModel:
    model = stream(build_on_meta(source, dtype))
    model.load(source.folder)
    return model


def files(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_loaded_and_saved_again_is_the_same(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    original = tiny.write_pipeline(tmp_path, name, dtype=dtype, shard_size="20KB")
    model = loaded(find_source(str(tmp_path)), dtype)
    model.save_pretrained(tmp_path / "again" / "transformer")
    model.close()
    before, after = files(tmp_path / "transformer"), files(tmp_path / "again" / "transformer")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype, key
        assert torch.equal(tensor, after[key]), key
    again = type(original).from_pretrained(
        tmp_path / "again", subfolder="transformer", torch_dtype=dtype
    )
    assert (
        dict(again.config).items()
        >= {k: v for k, v in original.config.items() if not k.startswith("_")}.items()
    )
    assert again.state_dict().keys() == original.state_dict().keys()
    if dtype == torch.float32:
        inputs = tiny.MODELS[name].inputs()
        with torch.no_grad():
            assert torch.equal(tiny.loss(again, inputs), tiny.loss(original.eval(), inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_dtypes_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    original = tiny.write_pipeline(tmp_path, name, dtype=torch.bfloat16)
    built = build_on_meta(find_source(str(tmp_path)), torch.bfloat16)
    assert all(p.is_meta for p in built.parameters())
    assert not any(b.is_meta for b in built.buffers())
    expected = {k: (v.dtype, v.shape) for k, v in original.state_dict().items()}
    assert {k: (v.dtype, v.shape) for k, v in built.state_dict().items()} == expected
    kept = {d for d, _ in expected.values()}
    assert kept == {torch.bfloat16, torch.float32} or name not in ("wan", "cosmos", "kandinsky5")


def test_the_transformers_own_folder_will_do(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path, "wan")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"flow_shift": 3.0}')
    direct, inside = find_source(str(tmp_path / "transformer")), find_source(str(tmp_path))
    assert direct == inside
    assert inside.scheduler == {"flow_shift": 3.0}
    assert inside.pipeline is None
    assert inside.class_name == "WanTransformer3DModel"


def refusal(path: Path | str, **options: str) -> str:
    with pytest.raises(InputError) as error:
        find_source(str(path), **options)
    return str(error.value)


def test_what_is_no_such_folder_is_refused_by_name(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "absent")
    single = tmp_path / "model.safetensors"
    single.touch()
    assert "model.safetensors: a single file" in refusal(single)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "pytorch_lora_weights.safetensors").touch()
    assert "a LoRA" in refusal(tmp_path / "lora")
    assert "diffusers layout" in refusal(tmp_path / "lora" / "..")


def test_a_wrong_subfolder_names_those_that_are_there(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path, "wan")
    message = refusal(tmp_path, subfolder="transformer_2")
    assert "transformer_2/config.json: no such file" in message
    assert "['transformer']" in message


def test_missing_weights_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path, "wan", shard_size="20KB")
    shard = sorted((tmp_path / "transformer").glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tiny.write_pipeline(tmp_path, "wan")
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["blocks.1.attn1.to_q.weight"]
    save_file(tensors, file)
    source = find_source(str(tmp_path))
    model = stream(build_on_meta(source, torch.float32))
    with pytest.raises(InputError, match=r"blocks\.1\.attn1\.to_q\.weight"):
        model.load(source.folder)
    model.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_class_name": "NoSuchTransformer"}, "has no model NoSuchTransformer"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, "has no model FlowMatch"),
        ({"num_layers": "two"}, "cannot be built from it"),
    ],
)
def test_a_config_of_something_else_is_refused(
    change: dict[str, str], words: str, tmp_path: Path
) -> None:
    tiny.write_pipeline(tmp_path, "wan")
    path = tmp_path / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=words):
        build_on_meta(find_source(str(tmp_path)), torch.float32)


def test_a_config_without_a_class_is_refused(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path, "wan")
    (tmp_path / "transformer" / "config.json").write_text("{}")
    assert "names no _class_name" in refusal(tmp_path)


def test_without_a_network_the_hub_is_refused_with_a_fix() -> None:
    message = refusal("some-owner/some-model")
    assert "the hub cannot be reached" in message
    assert "give its folder" in message


@pytest.mark.parametrize("name", ["./missing", "../missing", "missing"])
def test_a_misspelt_folder_is_refused(name: str) -> None:
    assert f"{name}: no such folder" in refusal(name)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("GatedRepoError", "gated repository"),
        ("RepositoryNotFoundError", "no such repository on the hub"),
        ("RevisionNotFoundError", "no revision 'v9'"),
    ],
)
def test_the_hubs_refusals_are_explained(
    error: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*_: object, **__: object) -> None:
        kind = getattr(errors, error)
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert words in refusal("some-owner/some-model", revision="v9")


def test_a_downloaded_repository_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    tiny.write_pipeline(tmp_path, "ltx")
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = find_source("some-owner/some-model", revision="main")
    assert source.folder == tmp_path / "transformer"
    assert asked["name"] == "some-owner/some-model"
    assert asked["revision"] == "main"
    assert "transformer/*" in asked["allow_patterns"]  # type: ignore[operator]
    assert not any("vae" in pattern for pattern in asked["allow_patterns"])  # type: ignore[attr-defined]
