"""Pretrained text encoders give exactly what the pipelines of diffusers give their transformers.

The oracle is each pipeline's own method, run on the same tokenizer and encoder.
"""

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_diffusers as tiny
import tiny_pipelines
import torch
from torch import Tensor

from megaslide.config import TextConfig
from megaslide.data.text import build_text_encoder
from megaslide.data.text_encoders import PretrainedTextEncoder
from megaslide.errors import InputError

CAPTIONS = ["a red kite over  the sea &amp; up", "digit 3", "", " ".join(["fast"] * 300)]
FAMILIES = {
    "WanTransformer3DModel": ("WanPipeline", "UMT5", 512),
    "SkyReelsV2Transformer3DModel": ("SkyReelsV2Pipeline", "UMT5", 512),
    "CosmosTransformer3DModel": ("Cosmos2TextToImagePipeline", "T5", 512),
    "LTXVideoTransformer3DModel": ("LTXPipeline", "T5", 128),
    "CogVideoXTransformer3DModel": ("CogVideoXPipeline", "T5", 226),
    "MochiTransformer3DModel": ("MochiPipeline", "T5", 256),
}


def write_transformer(root: Path, name: str) -> None:
    (root / "transformer").mkdir(parents=True)
    (root / "transformer" / "config.json").write_text(json.dumps({"_class_name": name}))


def write(root: Path, transformer: str, kind: str) -> tuple[Any, Any]:
    write_transformer(root, transformer)
    return tiny_pipelines.write_text(root, kind=kind)


def encoder_of(root: Path, **values: Any) -> PretrainedTextEncoder:
    encoder = build_text_encoder(
        TextConfig(name="encoder", pretrained_model_name_or_path=str(root), **values)
    )
    assert isinstance(encoder, PretrainedTextEncoder)
    return encoder


@pytest.mark.parametrize("transformer", FAMILIES)
@torch.no_grad()
def test_embeddings_are_those_of_the_pipeline(transformer: str, tmp_path: Path) -> None:
    import diffusers

    name, kind, length = FAMILIES[transformer]
    tokenizer, model = write(tmp_path, transformer, kind)
    pipeline = SimpleNamespace(
        tokenizer=tokenizer, text_encoder=model, _execution_device=torch.device("cpu"),
        config=SimpleNamespace(force_zeros_for_empty_prompt=False),
    )  # fmt: skip
    embed = getattr(diffusers, name)._get_t5_prompt_embeds
    result = embed(pipeline, CAPTIONS, max_sequence_length=length)
    text, mask = encoder_of(tmp_path).encode(CAPTIONS)
    expected, attended = result if isinstance(result, tuple) else (result, None)
    assert text.shape == (4, length, tiny.TEXT)
    if attended is not None:  # the transformer masks what is beyond, so it may be anything there
        assert torch.equal(mask, attended)
        expected = expected * attended[..., None]
    torch.testing.assert_close(text, expected, rtol=1e-5, atol=1e-6)
    assert mask[2].any(), "the empty caption has a token"
    assert not text[~mask].any()


@torch.no_grad()
def test_hunyuan_embeddings_are_those_of_the_pipeline(tmp_path: Path) -> None:
    import diffusers

    write_transformer(tmp_path, "HunyuanVideoTransformer3DModel")
    tokenizer, llama, tokenizer_2, clip = tiny_pipelines.write_hunyuan_text(tmp_path)
    stock = diffusers.HunyuanVideoPipeline(
        text_encoder=llama, tokenizer=tokenizer, text_encoder_2=clip, tokenizer_2=tokenizer_2,
        transformer=None, vae=None, scheduler=None,
    )  # fmt: skip
    expected, expected_pooled, attended = stock.encode_prompt(CAPTIONS)
    encoder = encoder_of(tmp_path)
    text, mask = encoder.encode(CAPTIONS)
    pooled = encoder.pooled(CAPTIONS)
    assert (encoder.dim, encoder.pooled_dim) == (tiny.TEXT, tiny.POOLED)
    assert text.shape == (4, 256, tiny.TEXT)
    assert torch.equal(mask, attended.bool())
    assert mask.sum(1).tolist() == [11, 3, 1, 256], "words, and the token that ends the template"
    assert encoder.count_tokens(CAPTIONS[1]) == 3
    torch.testing.assert_close(text, expected * attended[..., None], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pooled, expected_pooled, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(pooled[0], pooled[1])
    settings = encoder.settings()
    assert json.loads(json.dumps(settings)) == settings


@torch.no_grad()
def test_hunyuan15s_text_is_its_pipelines(tmp_path: Path) -> None:
    from diffusers import HunyuanVideo15Pipeline

    tokenizer, model = tiny_pipelines.write_hunyuan15_text(tmp_path)
    write_transformer(tmp_path, "HunyuanVideo15Transformer3DModel")
    expected, attended = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        model, tokenizer, CAPTIONS, torch.device("cpu")
    )
    encoder = encoder_of(tmp_path)
    text, mask = encoder.encode(CAPTIONS)
    assert text.shape == (4, 1000, tiny.TEXT)
    assert torch.equal(mask, attended.bool())
    assert mask.sum(1).tolist() == [12, 4, 2, 302], "words, and two that end the user's message"
    assert encoder.count_tokens(CAPTIONS[1]) == 4
    torch.testing.assert_close(text, expected * attended[..., None], rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match=r"caption 'a “red” kite': what stands in quotation"):
        encoder.encode(["a kite", "a “red” kite"])


def test_captions_are_cut_and_counted(tmp_path: Path) -> None:
    write(tmp_path, "WanTransformer3DModel", "UMT5")
    encoder = encoder_of(tmp_path, max_length=8)
    assert encoder.count_tokens(CAPTIONS[3]) == 301
    assert encoder.count_tokens("") == 1
    text, mask = encoder.encode(CAPTIONS)
    assert text.shape == (4, 8, tiny.TEXT)
    assert mask.sum(1).tolist() == [8, 3, 1, 8]


def test_weights_are_given_back(tmp_path: Path) -> None:
    write(tmp_path, "WanTransformer3DModel", "UMT5")
    encoder = encoder_of(tmp_path)
    assert (encoder.dim, encoder._model) == (tiny.TEXT, None)
    first = encoder.encode(["digit 3"])[0]
    weights = weakref.ref(encoder._model.shared.weight)
    encoder.close()
    gc.collect()
    assert weights() is None
    assert torch.equal(encoder.encode(["digit 3"])[0], first)


def test_settings_follow_the_files(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / name, "WanTransformer3DModel", "UMT5")
    file = tmp_path / "c" / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace('"kite"', '"bird"'))
    a, b, c = (encoder_of(tmp_path / name).settings() for name in "abc")
    assert a == b
    assert {key for key in a if a[key] != c[key]} == {"tokenizer"}
    assert json.loads(json.dumps(a)) == a


def test_the_family_is_read_from_model_index_where_no_transformer_is(tmp_path: Path) -> None:
    tiny_pipelines.write_text(tmp_path)
    index = {"transformer": ["diffusers", "LTXVideoTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert encoder_of(tmp_path).max_length == 128


def refusal(root: Path, **values: Any) -> str:
    with pytest.raises(InputError) as caught:
        encoder_of(root, **values).encode(["a"])
    return str(caught.value)


def test_what_cannot_encode_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "LTXVideoTransformer3DModel", "T5")
    assert "takes exactly 128 tokens" in refusal(tmp_path, max_length=64)
    config = tmp_path / "text_encoder" / "config.json"
    text = config.read_text()
    config.write_text(text.replace("T5EncoderModel", "GPT2Model"))
    assert "GPT2Model is not a text encoder known here" in refusal(tmp_path)
    config.write_text(text)
    transformer = tmp_path / "transformer" / "config.json"
    transformer.write_text('{"_class_name": "Unheard"}')
    assert "how the pipeline of Unheard encodes text is not known" in refusal(tmp_path)
    transformer.unlink()
    assert "model_index.json: No such file" in refusal(tmp_path)
    transformer.write_text('{"_class_name": "HunyuanVideoTransformer3DModel"}')
    assert "text_encoder_2: no such folder" in refusal(tmp_path)
    (tmp_path / "text_encoder").rename(tmp_path / "elsewhere")
    absent = refusal(tmp_path)
    assert "text_encoder: no such folder" in absent
    assert "set data.text.pretrained_model_name_or_path" in absent


def test_missing_weights_and_tokenizers_are_named(tmp_path: Path) -> None:
    write(tmp_path, "WanTransformer3DModel", "UMT5")
    _drop(tmp_path / "text_encoder" / "model.safetensors", "encoder.final_layer_norm.weight")
    assert "first 'encoder.final_layer_norm.weight'" in refusal(tmp_path)
    for file in (tmp_path / "tokenizer").iterdir():
        file.unlink()
    assert "tokenizer: the tokenizer does not load" in refusal(tmp_path)


def _drop(path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Tensor] = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
