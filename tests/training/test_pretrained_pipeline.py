"""A whole pipeline's folder: encoding, training and sampling, as diffusers does them.

Samples are compared with the stock pipeline of diffusers, loaded from the same folder with the
trained transformer in it, from the same noise.
"""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_diffusers as tiny
import tiny_pipelines
import torch
from tiny_pipelines import MEAN, STD
from typer.testing import CliRunner

from megaslide.cli import app
from megaslide.config import Config, load_config, save_config
from megaslide.data.latents import LatentDataset
from megaslide.data.prepare import prepare
from megaslide.data.sprites import write_sprites
from megaslide.data.video import read_windows
from megaslide.errors import InputError
from megaslide.sampling import prompt_generator, sample_run
from megaslide.training.loop import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*smaller than the batch.*"),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
]
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "wan": {
        "pipeline": "WanPipeline", "vae": "AutoencoderKLWan", "text": ("UMT5", tiny.TEXT),
        "scheduler": {
            "_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 5.0,
            "prediction_type": "flow_prediction",
        },
    },
    "ltx": {
        "pipeline": "LTXPipeline", "vae": "AutoencoderKLLTXVideo", "text": ("T5", tiny.TEXT),
        "scheduler": {**FLOW, "use_dynamic_shifting": True},
    },
    "cogvideox-rope": {
        "pipeline": "CogVideoXPipeline", "vae": "AutoencoderKLCogVideoX", "text": ("T5", 8),
        "scheduler": {
            "_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction",
            "snr_shift_scale": 1.0, "rescale_betas_zero_snr": True,
            "beta_schedule": "scaled_linear", "timestep_spacing": "trailing",
        },
    },
    "mochi": {
        "pipeline": "MochiPipeline", "vae": "AutoencoderKLMochi", "text": ("T5", tiny.TEXT),
        "scheduler": {**FLOW, "shift": 1.0, "invert_sigmas": True},
    },
    "hunyuan": {
        "pipeline": "HunyuanVideoPipeline", "vae": "AutoencoderKLHunyuanVideo",
        "text": ("Llama", tiny.TEXT), "scheduler": {**FLOW, "shift": 7.0},
    },
    "hunyuan1.5": {
        "pipeline": "HunyuanVideo15Pipeline", "vae": "AutoencoderKLHunyuanVideo15",
        "text": ("Qwen", tiny.TEXT), "scheduler": {**FLOW, "shift": 5.0},
    },
}  # fmt: skip
OWN_TEXT: dict[str, Any] = {
    "Llama": tiny_pipelines.write_hunyuan_text, "Qwen": tiny_pipelines.write_hunyuan15_text,
}  # fmt: skip
ENCODERS = {
    "Llama": {"": "LlamaModel", "_2": "CLIPTextModel"}, "Qwen": {"": "Qwen2_5_VLTextModel"},
}  # fmt: skip
PROMPT = "digit 3 moves left"


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "clips"
    write_sprites(root, count=4, frames=10, size=(32, 64), seed=3)
    return root


def write_pipeline(folder: Path, name: str) -> Path:
    family = FAMILIES[name]
    tiny.write_pipeline(folder, name)
    tiny_pipelines.write_vae(folder, family["vae"])
    kind, width = family["text"]
    if kind in OWN_TEXT:
        OWN_TEXT[kind](folder)
    else:
        tiny_pipelines.write_text(folder, kind=kind, width=width)
    tiny_pipelines.write_scheduler(folder, family["scheduler"])
    return folder


def configure(root: Path, clips: Path, **changes: Any) -> Config:
    values = {
        "output_dir": root / "run",
        "model.pretrained_model_name_or_path": root / "pipeline",
        "data.path": clips,
        "data.cache_dir": root / "cache",
        "data.codec.name": "vae",
        "data.text.name": "encoder",
        "data.buckets": "[9x32x64]",
        "data.validation_split": 0.3,
        "optim.learning_rate": 1e-3,
        "train.max_train_steps": 2,
        "train.train_batch_size": 2,
        "sample.num_inference_steps": 3,
        "sample.guidance_scale": 2.5,
        "model.guidance": 4.5,
        "log.log_every": 1,
        "log.report_to": "none",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(None, [f"{key}={value}" for key, value in values.items()])


def stock_sample(
    root: Path, name: str, checkpoint: Path, size: tuple[int, int, int], **parts: Any
) -> Any:
    """uint8 [T, H, W, 3] by diffusers alone."""
    import diffusers
    import transformers

    folder, family = root / "pipeline", FAMILIES[name]
    kind, _ = family["text"]
    transformer = getattr(diffusers, tiny.MODELS[name].class_name)
    scheduler = getattr(diffusers, family["scheduler"]["_class_name"])
    vae = getattr(diffusers, family["vae"]).from_pretrained(folder, subfolder="vae")
    text: dict[str, Any] = {}
    for suffix, cls in ENCODERS.get(kind, {"": f"{kind}EncoderModel"}).items():
        encoder, tokenizer = folder / f"text_encoder{suffix}", folder / f"tokenizer{suffix}"
        text[encoder.name] = getattr(transformers, cls).from_pretrained(encoder)
        text[tokenizer.name] = transformers.AutoTokenizer.from_pretrained(tokenizer)
    guidance = {"guidance_scale": 4.5 if name == "hunyuan" else 2.5}
    if kind == "Qwen":
        text |= {"guider": diffusers.ClassifierFreeGuidance(**guidance), **glyph_encoder()}
        guidance = {}
    pipeline = getattr(diffusers, family["pipeline"])(
        transformer=transformer.from_pretrained(checkpoint, subfolder="transformer"), vae=vae,
        scheduler=scheduler.from_pretrained(folder, subfolder="scheduler"), **text,
        **parts,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    frames, height, width = size
    bt, bh, bw = tiny_pipelines.BLOCKS[family["vae"]]
    shape = (1, tiny.C, (frames - 1) // bt + 1, height // bh, width // bw)
    noise = torch.randn(shape, generator=prompt_generator(0, 0))
    if name == "ltx":
        noise = noise.flatten(2).transpose(1, 2)
    if name.startswith("cogvideox"):
        noise = noise.transpose(1, 2)
    kind = "latent" if name == "mochi" else "np"
    video = pipeline(
        PROMPT, negative_prompt="", height=height, width=width, num_frames=frames, latents=noise,
        num_inference_steps=3, output_type=kind, return_dict=False, **guidance,
        **({"max_sequence_length": LENGTHS[name]} if name in LENGTHS else {}),
    )[0]  # fmt: skip
    if name == "mochi":  # its pipeline decodes 12 channels only
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (MEAN, STD))
        with torch.no_grad():
            pixels = vae.decode(video * std / vae.config.scaling_factor + mean).sample
        video = (pixels / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1).numpy()
    return np.round(video[0] * 255).astype(np.uint8)


def glyph_encoder() -> dict[str, Any]:
    """For text in quotation marks, of which there is none."""
    import transformers

    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return {
        "tokenizer_2": transformers.ByT5Tokenizer(),
        "text_encoder_2": transformers.T5EncoderModel(transformers.T5Config(**sizes)),
    }


LENGTHS = {
    "cogvideox-rope": tiny.MODELS["cogvideox-rope"].config.get("max_text_seq_length", 226),
    "mochi": tiny.MODELS["mochi"].config.get("max_sequence_length", 256),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_prepare_train_and_sample_as_the_stock_pipeline(
    name: str, clips: Path, tmp_path: Path, written: list[np.ndarray]
) -> None:
    write_pipeline(tmp_path / "pipeline", name)
    config = configure(tmp_path, clips)
    report = prepare(config.data)
    size = (7 if name == "mochi" else 9, 32, 64)
    assert list(report.buckets) == ["x".join(map(str, size))]
    result = train(config)
    assert result.step == config.train.max_train_steps
    paths = sample_run(result.checkpoint, prompts=(PROMPT,), out=tmp_path / "samples")
    assert [path.name for path in paths] == ["00_digit-3-moves-left.mp4"]
    expected = stock_sample(tmp_path, name, result.checkpoint, size)
    assert written[0].shape == expected.shape == (*size, 3)
    assert expected.std() > 1, "a grey clip would prove nothing"
    difference = np.abs(written[0].astype(int) - expected.astype(int))
    assert difference.max() <= 1


def test_two_experts_sample_as_the_stock_pipeline(
    clips: Path, tmp_path: Path, written: list[np.ndarray]
) -> None:
    """Each trained for itself, at noise levels of its own; a boundary that both see."""
    import diffusers

    folder = write_pipeline(tmp_path / "pipeline", "wan")
    tiny.build("wan", seed=1).save_pretrained(folder / "transformer_2")
    (folder / "model_index.json").write_text(json.dumps({"boundary_ratio": 0.875}))
    runs = {}
    for name in ("transformer", "transformer_2"):
        where = {"output_dir": tmp_path / name, "model__subfolder": name}
        config = configure(tmp_path, clips, optim__learning_rate=1e-2, **where)
        prepare(config.data)
        runs[name] = train(config).checkpoint

    load = diffusers.WanTransformer3DModel.from_pretrained
    for second in (None, runs["transformer_2"]):
        sample_run(runs["transformer"], prompts=(PROMPT,), out=tmp_path / "a", second=second)
        low = folder if second is None else second
        low_noise = load(low, subfolder="transformer_2" if second is None else "transformer")
        expected = stock_sample(
            tmp_path, "wan", runs["transformer"], (9, 32, 64), transformer_2=low_noise,
            boundary_ratio=0.875,
        )  # fmt: skip
        assert np.abs(written[-1].astype(int) - expected.astype(int)).max() <= 1
    sample_run(runs["transformer_2"], prompts=(PROMPT,), out=tmp_path / "b",
               second=runs["transformer"])  # fmt: skip
    assert np.array_equal(written[-1], written[-2]), "in either order"
    assert np.abs(written[0].astype(int) - written[1].astype(int)).max() > 1
    with pytest.raises(InputError, match="trained transformer"):
        sample_run(runs["transformer"], prompts=(PROMPT,), second=runs["transformer"])
    (folder / "transformer_2").rename(folder / "elsewhere")
    with pytest.raises(InputError, match=r"the other expert: .*transformer_2.*no such file"):
        sample_run(runs["transformer"], prompts=(PROMPT,))


def test_an_image_becomes_a_clip_as_the_stock_pipeline_makes_it(
    clips: Path, tmp_path: Path, written: list[np.ndarray]
) -> None:
    import diffusers
    import transformers
    from PIL import Image

    folder = write_pipeline(tmp_path / "pipeline", "ltx")
    # As the published one has it, 8x32x32 pixels to a voxel: positions are in pixels.
    steps = (True, True, True, False)
    scaling = {"spatio_temporal_scaling": steps, "decoder_spatio_temporal_scaling": steps}
    tiny_pipelines.write_vae(folder, "AutoencoderKLLTXVideo", patch_size=4, **scaling)
    config = configure(tmp_path, clips, train__first_frame="given")
    prepare(config.data, patch_size=(1, 1, 1))
    result = train(config)
    pixels = (127.5 * (tiny_pipelines.frames(1, 32, 64)[0, :, 0] + 1)).round().byte()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "first.png")
    given = {"images": (str(tmp_path / "first.png"),)}
    sample_run(result.checkpoint, prompts=(PROMPT,), out=tmp_path / "samples", settings=given)

    vae = diffusers.AutoencoderKLLTXVideo.from_pretrained(folder, subfolder="vae")
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (MEAN, STD))
    with torch.no_grad():
        z = vae.encode(pixels[None, :, None].float() / 127.5 - 1).latent_dist.mode()
    noise = torch.randn(1, tiny.C, 2, 1, 2, generator=prompt_generator(0, 0))
    noise[:, :, :1] = (z - mean) / std * vae.config.scaling_factor
    stock = diffusers.LTXImageToVideoPipeline(
        transformer=diffusers.LTXVideoTransformer3DModel.from_pretrained(
            result.checkpoint, subfolder="transformer"),
        vae=vae, text_encoder=transformers.T5EncoderModel.from_pretrained(folder / "text_encoder"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(
            folder, subfolder="scheduler"),
    )  # fmt: skip
    stock.set_progress_bar_config(disable=True)
    video = stock(
        prompt=PROMPT, negative_prompt="", height=32, width=64, num_frames=9,
        latents=noise.flatten(2).transpose(1, 2), num_inference_steps=3, guidance_scale=2.5,
        output_type="np", return_dict=False,
    )[0]  # fmt: skip
    expected = np.round(video[0] * 255).astype(np.uint8)
    assert expected.std() > 1
    assert np.abs(written[0].astype(int) - expected.astype(int)).max() <= 1
    other = {"images": given["images"] * 3}
    with pytest.raises(InputError, match="3 images for 1 prompts"):
        sample_run(result.checkpoint, prompts=(PROMPT,), out=tmp_path / "b", settings=other)
    other = {"images": (str(tmp_path / "pipeline/model_index.png"),)}
    with pytest.raises(InputError, match=r"model_index\.png: not an image"):
        sample_run(result.checkpoint, prompts=(PROMPT,), out=tmp_path / "b", settings=other)


def test_the_cache_holds_what_the_pipeline_would_feed_its_transformer(
    clips: Path, tmp_path: Path
) -> None:
    import diffusers

    write_pipeline(tmp_path / "pipeline", "wan")
    config = configure(tmp_path, clips, data__buckets="[10x40x70]")
    report = prepare(config.data)
    assert any("bucket 10x40x70 -> 9x32x64" in note for note in report.notes)
    dataset = LatentDataset(tmp_path / "cache", expect=config.data)
    sample = dataset[0]
    path = clips / sample.clip_id
    frames = next(iter(read_windows(path, [np.arange(9)])))
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    vae = diffusers.AutoencoderKLWan.from_pretrained(tmp_path / "pipeline" / "vae")
    with torch.no_grad():
        z = vae.encode(pixels).latent_dist.mode()[0]
    mean, std = (
        torch.tensor(v).view(-1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    torch.testing.assert_close(sample.latents, (z - mean) / std, rtol=1e-3, atol=1e-3)
    assert sample.text.shape == (512, tiny.TEXT)
    assert not sample.text[~sample.mask].any()


def test_encoders_are_freed_before_training(clips: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderKLWan
    from transformers import UMT5EncoderModel

    kinds = (AutoencoderKLWan, UMT5EncoderModel)

    def alive() -> list[str]:
        gc.collect()
        return [type(o).__name__ for o in gc.get_objects() if type(o) in kinds]

    write_pipeline(tmp_path / "pipeline", "wan")
    config = configure(tmp_path, clips, sample__prompts=f"[{PROMPT}]", sample__every_steps=1)
    seen: list[list[str]] = []
    prepare(config.data, progress=lambda *_: seen.append(alive()))
    assert seen[-1] == ["AutoencoderKLWan"], "the text encoder loads when the clips are done"
    assert alive() == []
    during: list[list[str]] = []
    train(config, on_progress=lambda *_: during.append(alive()))
    assert during == [[], []], "after samples, too"


def test_another_autoencoder_than_the_cache_was_made_with_is_refused(
    clips: Path, tmp_path: Path
) -> None:
    write_pipeline(tmp_path / "pipeline", "wan")
    config = configure(tmp_path, clips)
    prepare(config.data)
    tiny_pipelines.write_vae(tmp_path / "pipeline", "AutoencoderKLWan", seed=5)
    with pytest.raises(InputError, match=r"cache was made with other settings: codec\.files is"):
        train(config)


def test_another_familys_autoencoder_is_refused_by_the_command(clips: Path, tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipeline", "wan")
    file = tmp_path / "pipeline" / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"z_dim": 6}))
    save_config(configure(tmp_path, clips), tmp_path / "config.yaml")
    result = CliRunner().invoke(app, ["train", str(tmp_path / "config.yaml")])
    assert result.exit_code == 2
    assert "takes 4 latent channels, data.codec makes 6" in result.output
    assert "set data.codec.pretrained_model_name_or_path" in result.output


def test_a_pipeline_without_its_text_encoder_is_refused_by_the_command(
    clips: Path, tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path / "pipeline", "wan")
    (folder / "text_encoder").rename(tmp_path / "moved")
    save_config(configure(tmp_path, clips), tmp_path / "config.yaml")
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "config.yaml")])
    assert result.exit_code == 2
    assert f"{folder / 'text_encoder'}: no such folder" in result.output
    assert "set data.text.pretrained_model_name_or_path" in result.output
