"""Autoencoders of diffusers as codecs: latents are what the family's own pipeline would make.

The oracle is the class loaded by diffusers, and each pipeline's own arithmetic, written out.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny_diffusers as tiny
import tiny_pipelines
import torch
from torch import Tensor, nn

from megaslide.config import CodecConfig
from megaslide.data.buckets import fit_buckets
from megaslide.data.codecs import build_codec
from megaslide.data.vae import VaeCodec
from megaslide.errors import InputError

MEAN = torch.tensor(tiny_pipelines.MEAN).view(1, -1, 1, 1, 1)
STD = torch.tensor(tiny_pipelines.STD).view(1, -1, 1, 1, 1)
NORMALISED = {
    "AutoencoderKLWan": lambda z: (z - MEAN) / STD,
    "AutoencoderKLLTXVideo": lambda z: (z - MEAN) * 0.8 / STD,
    "AutoencoderKLCogVideoX": lambda z: z * 0.7,
    "AutoencoderKLHunyuanVideo": lambda z: z * 0.476986,
    "AutoencoderKLHunyuanVideo15": lambda z: z * 1.03682,
    "AutoencoderKLMochi": lambda z: (z - MEAN) * 0.9 / STD,
}
WHAT_THE_DECODER_GETS = {
    "AutoencoderKLWan": lambda x: x / (1 / STD) + MEAN,
    "AutoencoderKLLTXVideo": lambda x: x * STD / 0.8 + MEAN,
    "AutoencoderKLCogVideoX": lambda x: 1 / 0.7 * x,
    "AutoencoderKLHunyuanVideo": lambda x: x / 0.476986,
    "AutoencoderKLHunyuanVideo15": lambda x: x / 1.03682,
    "AutoencoderKLMochi": lambda x: x * STD / 0.9 + MEAN,
}
CLASSES = sorted(tiny_pipelines.VAES)


def codec_of(root: Path, **values: Any) -> VaeCodec:
    config = CodecConfig(name="vae", pretrained_model_name_or_path=str(root), **values)
    codec = build_codec(config)
    assert isinstance(codec, VaeCodec)
    return codec


def clip(class_name: str, seed: int = 0) -> Tensor:
    bt, bh, bw = tiny_pipelines.BLOCKS[class_name]
    return tiny_pipelines.frames(2 * bt + 1, 2 * bh, 3 * bw, batch=2, seed=seed)


@pytest.mark.parametrize("class_name", CLASSES)
@torch.no_grad()
def test_latents_and_pixels_are_those_of_the_pipeline(class_name: str, tmp_path: Path) -> None:
    vae: Any = tiny_pipelines.write_vae(tmp_path, class_name)
    codec, pixels = codec_of(tmp_path), clip(class_name)
    assert (codec.channels, codec.block) == (tiny.C, tiny_pipelines.BLOCKS[class_name])
    latents = codec.encode(pixels)
    # One by one: HunyuanVideo 1.5 in diffusers 0.42 fails on a batch that is not sliced.
    z = torch.cat([vae.encode(one).latent_dist.mode() for one in pixels.split(1)])
    expected = NORMALISED[class_name](z)
    torch.testing.assert_close(latents, expected, rtol=1e-5, atol=1e-5)
    decoded = codec.decode(latents, frames=pixels.shape[2])
    given = WHAT_THE_DECODER_GETS[class_name](expected)
    same = torch.cat([vae.decode(one).sample for one in given.split(1)])
    torch.testing.assert_close(decoded, same, rtol=1e-4, atol=1e-4)
    assert decoded.shape == pixels.shape
    assert tuple(latents.shape[2:]) == codec.latent_shape(tuple(pixels.shape[2:]))


@pytest.mark.parametrize("class_name", CLASSES)
def test_defaults_of_the_class_are_known_where_config_json_is_short(class_name: str) -> None:
    """Folders saved by older versions name fewer keys; the class then has its defaults."""
    import diffusers

    from megaslide.data.vae import KINDS

    with torch.device("meta"):
        vae = getattr(diffusers, class_name)()
    kind, config = KINDS[class_name], dict(vae.config)
    assert kind.block({}) == kind.block(config)
    assert kind.channels == config[kind.channels_key]
    _, side, _ = kind.block({})
    assert side == getattr(vae, "spatial_compression_ratio", side)


def test_tiles_and_slices_are_on(tmp_path: Path) -> None:
    tiny_pipelines.write_vae(tmp_path, "AutoencoderKLWan")
    vae = codec_of(tmp_path)._loaded()
    assert vae.use_tiling
    assert vae.use_slicing


def test_ltx_that_denoises_in_its_decoder_gets_time_zero(tmp_path: Path) -> None:
    vae: Any = _conditioned_ltx(tmp_path)
    latents = tiny.random(1, tiny.C, 2, 2, 2)
    with torch.no_grad():
        given = WHAT_THE_DECODER_GETS["AutoencoderKLLTXVideo"](latents)
        expected = vae.decode(given, torch.zeros(1)).sample
    torch.testing.assert_close(codec_of(tmp_path).decode(latents), expected, rtol=1e-4, atol=1e-4)


def test_a_draw_from_the_posterior_belongs_to_the_clip(tmp_path: Path) -> None:
    tiny_pipelines.write_vae(tmp_path, "AutoencoderKLWan")
    drawn = codec_of(tmp_path, posterior="sample")
    one, other = clip("AutoencoderKLWan"), clip("AutoencoderKLWan", seed=1)
    first = drawn.encode(one)
    drawn.encode(other)
    assert torch.equal(drawn.encode(one), first)
    assert not torch.equal(codec_of(tmp_path).encode(one), first)
    assert drawn.settings()["posterior"] == "sample"


def test_settings_follow_the_weights_and_not_the_path(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny_pipelines.write_vae(tmp_path / name, "AutoencoderKLWan", seed=seed)
    a, b, c = (codec_of(tmp_path / name).settings() for name in "abc")
    assert a == b
    assert {key for key in a if a[key] != c[key]} == {"files"}


def test_cogvideox_gets_frames_that_it_can_decode(tmp_path: Path) -> None:
    tiny_pipelines.write_vae(tmp_path, "AutoencoderKLCogVideoX")
    codec = codec_of(tmp_path)
    buckets, notes = fit_buckets(["16x32x48"], codec, (1, 2, 2))
    assert [bucket.size for bucket in buckets] == [(9, 32, 48)]
    assert "8n+1 frames" in notes[0]
    with pytest.raises(InputError, match="never fill the 1 \\+ 2n latent frames"):
        fit_buckets(["16x32x48"], codec, (2, 2, 2))


def test_frames_are_cropped_and_the_crop_is_said(tmp_path: Path) -> None:
    tiny_pipelines.write_vae(tmp_path, "AutoencoderKLWan")
    buckets, notes = fit_buckets(["12x36x50"], codec_of(tmp_path), (1, 2, 2))
    assert [bucket.size for bucket in buckets] == [(9, 32, 48)]
    assert "bucket 12x36x50 -> 9x32x48" in notes[0]
    assert "4n+1 frames" in notes[0]


def test_weights_are_read_at_the_first_use_and_given_back(tmp_path: Path) -> None:
    tiny_pipelines.write_vae(tmp_path, "AutoencoderKLWan")
    codec = codec_of(tmp_path)
    assert codec._model is None
    first = codec.encode(clip("AutoencoderKLWan"))
    codec.close()
    assert codec._model is None
    assert torch.equal(codec.encode(clip("AutoencoderKLWan")), first)


def refusal(root: Path, **values: Any) -> str:
    with pytest.raises(InputError) as caught:
        codec_of(root, **values).encode(clip("AutoencoderKLWan"))
    return str(caught.value)


def test_what_is_no_autoencoder_is_refused(tmp_path: Path) -> None:
    vae = tiny_pipelines.write_vae(tmp_path, "AutoencoderKLWan")
    assert f"{tmp_path / 'nowhere'}: no such folder" in refusal(tmp_path / "nowhere")
    absent = refusal(tmp_path, subfolder="vae_2")
    assert "vae_2: no such folder" in absent
    assert "has ['vae']" in absent
    _without_a_tensor(tmp_path / "vae", vae)
    assert "1 weights are missing, first 'encoder.conv_in.bias'" in refusal(tmp_path)
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderTiny"}')
    assert "latents of AutoencoderTiny are not known" in refusal(tmp_path)
    (tmp_path / "vae" / "config.json").unlink()
    assert "config.json: No such file" in refusal(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    tiny_pipelines.write_vae(tmp_path, "AutoencoderKLWan")
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"short")
    assert f"{tmp_path / 'vae'}: AutoencoderKLWan does not load" in refusal(tmp_path)


def _conditioned_ltx(root: Path) -> nn.Module:
    import diffusers

    torch.manual_seed(0)
    values = tiny_pipelines.VAES["AutoencoderKLLTXVideo"] | {"timestep_conditioning": True}
    vae = diffusers.AutoencoderKLLTXVideo(**values)
    vae.latents_mean, vae.latents_std = MEAN.flatten(), STD.flatten()
    vae.save_pretrained(root / "vae")
    return vae.eval()


def _without_a_tensor(folder: Path, vae: nn.Module) -> None:
    from safetensors.torch import save_file

    tensors = {k: v.clone() for k, v in vae.state_dict().items() if k != "encoder.conv_in.bias"}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
