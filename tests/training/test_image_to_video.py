"""Wan's image-to-video models: conditions, training and samples are those of the stock pipeline.

The oracle is diffusers' `WanImageToVideoPipeline`, loaded from the same folder.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_diffusers as tiny
import tiny_pipelines
import torch

from megaslide.config import Config, load_config
from megaslide.data.latents import LatentDataset
from megaslide.data.prepare import prepare
from megaslide.data.sprites import write_sprites
from megaslide.data.video import read_windows
from megaslide.errors import InputError
from megaslide.planning.run import plan_run
from megaslide.sampling import prompt_generator, sample_run
from megaslide.training.loop import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*smaller than the batch.*"),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
]
PROMPT = "digit 3 moves left"
SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 5.0,
    "prediction_type": "flow_prediction",
}  # fmt: skip
KINDS = {"wan-i2v": "encoder", "wan-a14b-i2v": "latents"}
SIZE = (9, 32, 64)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "clips"
    write_sprites(root, count=4, frames=10, size=SIZE[1:], seed=3)
    return root


def write_pipeline(folder: Path, name: str) -> Path:
    tiny.write_pipeline(folder, name)
    tiny_pipelines.write_vae(folder, "AutoencoderKLWan")
    tiny_pipelines.write_text(folder, kind="UMT5")
    tiny_pipelines.write_scheduler(folder, SCHEDULER)
    if name == "wan-i2v":
        tiny_pipelines.write_image_encoder(folder)
    return folder


def configure(root: Path, clips: Path, kind: str, **changes: Any) -> Config:
    values = {
        "output_dir": root / "run",
        "model.pretrained_model_name_or_path": root / "pipeline",
        "data.path": clips, "data.cache_dir": root / "cache", "data.buckets": "[9x32x64]",
        "data.codec.name": "vae", "data.text.name": "encoder", "data.image.name": kind,
        "data.validation_split": 0.3, "data.caption_dropout": 0.5,
        "optim.learning_rate": 1e-2, "train.max_train_steps": 2, "train.train_batch_size": 2,
        "sample.num_inference_steps": 3, "sample.guidance_scale": 2.5,
        "log.log_every": 1, "log.report_to": "none",
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(None, [f"{key}={value}" for key, value in values.items()])


def stock(folder: Path, checkpoint: Path | None = None, **parts: Any) -> Any:
    import diffusers
    import transformers

    if (folder / "image_encoder").exists():
        parts |= {
            "image_encoder": transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder"),
            "image_processor": transformers.CLIPImageProcessor.from_pretrained(
                folder / "image_processor"
            ),
        }
    pipeline = diffusers.WanImageToVideoPipeline(
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder=transformers.UMT5EncoderModel.from_pretrained(folder / "text_encoder"),
        vae=diffusers.AutoencoderKLWan.from_pretrained(folder / "vae"),
        scheduler=diffusers.UniPCMultistepScheduler.from_pretrained(folder / "scheduler"),
        transformer=load(checkpoint or folder), **parts,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load(folder: Path, subfolder: str = "transformer") -> Any:
    import diffusers

    return diffusers.WanTransformer3DModel.from_pretrained(folder, subfolder=subfolder)


def picture(path: Path, seed: int = 0) -> Any:
    from PIL import Image

    levels = (127.5 * (tiny_pipelines.frames(1, *SIZE[1:], seed=seed)[0, :, 0] + 1)).round().byte()
    image = Image.fromarray(levels.permute(1, 2, 0).numpy())
    image.save(path)
    return image


def stock_clip(pipeline: Any, image: Any, prompt: int = 0) -> np.ndarray:
    """uint8 [T, H, W, 3] from the noise of a prompt's place in the list."""
    noise = torch.randn(1, tiny.C, 3, 4, 8, generator=prompt_generator(0, prompt))
    video = pipeline(
        image, PROMPT, "", height=SIZE[1], width=SIZE[2], num_frames=SIZE[0], latents=noise,
        num_inference_steps=3, guidance_scale=2.5, return_dict=False,
    )[0]  # fmt: skip
    return np.round(video[0] * 255).astype(np.uint8)


def test_an_image_becomes_a_clip_as_the_stock_pipeline_makes_it(
    clips: Path, tmp_path: Path, written: list[np.ndarray]
) -> None:
    """Two images in one batch, by the model that takes their embeddings as well."""
    folder = write_pipeline(tmp_path / "pipeline", "wan-i2v")
    config = configure(tmp_path, clips, "encoder")
    prepare(config.data)
    result = train(config)
    images = [picture(tmp_path / f"{seed}.png", seed) for seed in (0, 1)]
    given = {"images": (str(tmp_path / "0.png"), str(tmp_path / "1.png"))}
    sample_run(result.checkpoint, prompts=(PROMPT, PROMPT), out=tmp_path / "a", settings=given)
    for number, image in enumerate(images):
        expected = stock_clip(stock(folder, result.checkpoint), image, number)
        assert expected.std() > 1
        assert np.abs(written[number].astype(int) - expected.astype(int)).max() <= 1
    other = stock_clip(stock(folder, result.checkpoint), images[1], 0)
    assert np.abs(written[0].astype(int) - other.astype(int)).max() > 3, "images matter"
    with pytest.raises(
        InputError, match=r"sample\.images is empty: Wan.* makes a clip of an image"
    ):
        sample_run(result.checkpoint, prompts=(PROMPT,), out=tmp_path / "b")


def test_two_experts_make_a_clip_of_an_image(
    clips: Path, tmp_path: Path, written: list[np.ndarray]
) -> None:
    folder = write_pipeline(tmp_path / "pipeline", "wan-a14b-i2v")
    tiny.build("wan-a14b-i2v", seed=1).save_pretrained(folder / "transformer_2")
    (folder / "model_index.json").write_text(json.dumps({"boundary_ratio": 0.9}))
    config = configure(tmp_path, clips, "latents")
    prepare(config.data)
    result = train(config)
    image = picture(tmp_path / "first.png")
    given = {"images": (str(tmp_path / "first.png"),)}
    sample_run(result.checkpoint, prompts=(PROMPT,), out=tmp_path / "samples", settings=given)
    pipeline = stock(
        folder, result.checkpoint, transformer_2=load(folder, "transformer_2"), boundary_ratio=0.9
    )
    expected = stock_clip(pipeline, image)
    assert np.abs(written[0].astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_the_cache_holds_the_conditions_that_the_pipeline_makes(
    name: str, clips: Path, tmp_path: Path
) -> None:
    from PIL import Image

    folder = write_pipeline(tmp_path / "pipeline", name)
    config = configure(tmp_path, clips, KINDS[name], data__codec__posterior="sample")
    prepare(config.data)
    dataset, pipeline = LatentDataset(tmp_path / "cache", expect=config.data), stock(folder)
    sample = dataset[1]
    frames = next(iter(read_windows(clips / sample.clip_id, [np.arange(SIZE[0])])))
    image = Image.fromarray(frames[0])
    pixels = pipeline.video_processor.preprocess(image, height=SIZE[1], width=SIZE[2])
    _, condition = pipeline.prepare_latents(
        pixels, 1, tiny.C, *SIZE[1:], SIZE[0], torch.float32, torch.device("cpu")
    )  # [1, 4 + C, t, h, w]
    family = plan_run(config).network.family  # type: ignore[union-attr]
    noisy = tiny.random(1, tiny.C, 3, 4, 8)
    given = family.with_image(noisy, sample.image["image_latents"][None])
    torch.testing.assert_close(given, torch.cat([noisy, condition], dim=1), rtol=1e-3, atol=1e-3)
    assert set(sample.image) == {"image_latents", "encoder_hidden_states_image"} - (
        set() if name == "wan-i2v" else {"encoder_hidden_states_image"}
    )
    if name == "wan-i2v":
        torch.testing.assert_close(
            sample.image["encoder_hidden_states_image"][None], pipeline.encode_image(image),
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


def test_inputs_that_do_not_fit_are_refused(clips: Path, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "pipeline", "wan-i2v")
    for kind in ("none", "latents"):
        with pytest.raises(InputError, match="image encoder's embedding") as caught:
            plan_run(configure(tmp_path, clips, kind))
        assert "set data.image.name=encoder" in str(caught.value)
    config = configure(tmp_path, clips, "encoder")
    (folder / "image_encoder").rename(tmp_path / "image_encoder")
    with pytest.raises(InputError, match="image_encoder: no such folder") as caught:
        prepare(config.data)
    assert "set data.image.pretrained_model_name_or_path" in str(caught.value)
    (tmp_path / "image_encoder").rename(folder / "image_encoder")
    file = folder / "image_encoder" / "config.json"
    text = file.read_text()
    file.write_text(text.replace("CLIPVisionModel", "SiglipVisionModel"))
    with pytest.raises(InputError, match="SiglipVisionModel is not an image encoder known here"):
        prepare(config.data)
    file.write_text(text.replace(f'"hidden_size": {tiny.TEXT}', '"hidden_size": 6'))
    with pytest.raises(InputError, match=r"of images of 16 channels, data\.image makes 6"):
        plan_run(config)
    file.write_text(text)
    (folder / "vae").rename(tmp_path / "vae")
    with pytest.raises(InputError, match="vae: no such folder"):
        prepare(config.data)


def test_samples_during_training_need_an_image(
    clips: Path, tmp_path: Path, written: list[np.ndarray]
) -> None:
    """By our own sampler here, which takes latents of any codec."""
    write_pipeline(tmp_path / "pipeline", "wan-a14b-i2v")
    few = {"train__max_train_steps": 1, "sample__every_steps": 1, "sample__prompts": "[a, b]"}
    own = {"data__codec__name": "dct", "data__codec__channels": tiny.C, **few}
    config = configure(tmp_path, clips, "latents", **own)
    prepare(config.data)
    with pytest.raises(InputError, match=r"sample\.images is empty"):
        train(config)
    assert not (tmp_path / "run").exists(), "refused before training"
    picture(tmp_path / "a.png")
    given = {"sample__images": f"[{tmp_path / 'a.png'}]"}
    train(configure(tmp_path, clips, "latents", **own, **given))
    assert [clip.shape for clip in written] == [(*SIZE, 3)] * 2


def test_a_cache_without_conditions_is_refused(clips: Path, tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipeline", "wan-a14b-i2v")
    config = configure(tmp_path, clips, "none")
    prepare(config.data)
    with pytest.raises(InputError, match=r"image\.name is None there, 'latents' now"):
        train(configure(tmp_path, clips, "latents"))
