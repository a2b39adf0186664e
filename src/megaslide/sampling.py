"""From prompts to video files: text embeddings, latents, pixels, mp4.

One path serves `megaslide sample`, sampling during training and the demo. Each prompt draws its
noise from its own generator, seeded by (seed, index), so adding, removing or batching prompts does
not change what another prompt gives, beyond the rounding of batched matrix products.

Shapes: B prompts of a batch, latents [B, C, t, h, w], pixels [B, 3, T, H, W], frames [T, H, W, 3],
text [B, L, D].
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaslide.config import Config, SampleConfig, Triple, load_config, parse_triple
from megaslide.data.codecs import Codec, build_codec
from megaslide.data.sheets import contact_sheet
from megaslide.data.text import TextEncoder, build_text_encoder
from megaslide.data.video import write_video
from megaslide.diffusion.objectives import Denoiser
from megaslide.diffusion.recipes import FULL_RANGE, Recipe
from megaslide.diffusion.samplers import Progress, draw_noise, sample_latents
from megaslide.errors import InputError
from megaslide.models.network import Network, saved_network
from megaslide.models.pretrained.pipelines import KINDS, FamilyPipeline
from megaslide.runs import CONFIG, find_checkpoint, read_state, weights_folder
from megaslide.streaming import StreamedModel, stream

logger = logging.getLogger(__name__)

Frames = np.ndarray
"""uint8 RGB [T, H, W, 3]."""

_SLUG_LENGTH = 48


def generate(
    model: Denoiser,
    codec: Codec,
    text_encoder: TextEncoder,
    prompts: Sequence[str],
    *,
    bucket: Triple,
    settings: SampleConfig,
    shift: float,
    device: torch.device | str,
    negative_prompt: str = "",
    batch_size: int = 4,
    pipeline: FamilyPipeline | None = None,
    progress: Progress | None = None,
) -> list[Frames]:
    """Sample one clip per prompt; `settings.prompts`, `.bucket` and `.fps` are not read here.

    Args:
        model: predicts the velocity, called as in `megaslide.diffusion`, with the keyword
            arguments `encoder_hidden_states` [B, L, D] and `encoder_attention_mask` [B, L].
        prompts: captions; the position of each is part of its seed.
        bucket: frames, height and width of the clips, in pixels.
        shift: timestep shift the model was trained with.
        device: where the model takes its inputs.
        negative_prompt: what guidance leads away from; the empty caption of training by default.
        batch_size: prompts sampled together. Streamed weights cross the link once per step and
            batch, so larger is faster where activations fit.
        pipeline: samples instead of `model` and `shift`, where a pretrained family has one.
        progress: called with (model steps done, in all) over all batches.

    Returns:
        uint8 RGB frames [T, H, W, 3] per prompt, in order.

    Raises:
        ValueError: no prompts, or `batch_size` below 1.
        RuntimeError: a clip came out with values that are not finite.
    """
    if not prompts or batch_size < 1:
        raise ValueError(
            f"{len(prompts)} prompts and batch_size={batch_size}; both must be 1 or more"
        )
    starts = range(0, len(prompts), batch_size)
    text = _text_conditioning(text_encoder, prompts, negative_prompt, device)
    text_encoder.close()
    clips: list[Frames] = []
    for number, start in enumerate(starts):
        batch = prompts[start : start + batch_size]
        latents = _latents(
            model, pipeline, (len(batch), codec.channels, *codec.latent_shape(bucket)),
            settings=settings, shift=shift, **_rows(text, start, len(batch)),
            generators=[prompt_generator(settings.seed, start + i) for i in range(len(batch))],
            progress=_overall(progress, number, len(starts)),
        )  # fmt: skip
        # One clip at a time: pixels take far more memory than latents.
        for prompt, row in zip(batch, latents.split(1), strict=True):
            clips.append(_frames_of(codec, row, bucket[0], prompt))
    codec.close()
    return clips


def _latents(
    model: Denoiser,
    pipeline: FamilyPipeline | None,
    shape: tuple[int, ...],
    *,
    settings: SampleConfig,
    shift: float,
    generators: Sequence[torch.Generator],
    conditioning: Mapping[str, Tensor],
    negative: Mapping[str, Tensor],
    progress: Progress | None,
) -> Tensor:
    steps, scale = settings.num_inference_steps, settings.guidance_scale
    if pipeline is not None:
        noise = draw_noise(shape, generators, conditioning["encoder_hidden_states"].device)
        return pipeline.latents(
            noise, conditioning, negative, steps=steps, guidance_scale=scale, progress=progress
        )
    return sample_latents(
        model, shape, steps=steps, guidance_scale=scale, shift=shift, generator=generators,
        conditioning=conditioning, negative=negative, progress=progress,
    )  # fmt: skip


def prompt_generator(seed: int, index: int) -> torch.Generator:
    """CPU generator of prompt `index`: the same noise on every device, and for no two prompts."""
    mixed = np.random.SeedSequence((seed % 2**64, index)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


def to_frames(pixels: Tensor) -> Frames:
    """Pixels [3, T, H, W] in [-1, 1], values outside clamped, as uint8 [T, H, W, 3].

    Rounds to the nearest level: truncation would darken every clip by half a level.
    """
    levels = ((pixels.float() + 1) * 127.5).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu().numpy()


def save_samples(
    frames: Sequence[Frames],
    prompts: Sequence[str],
    folder: Path,
    fps: float,
    settings: SampleConfig | None = None,
) -> list[Path]:
    """Write `00_prompt-slug.mp4` per clip, `contact_sheet.png` and `prompts.json` into `folder`.

    Each file appears under its name only when complete, so a viewer or a dashboard that polls the
    folder never opens half of one.

    Args:
        frames: uint8 RGB [T, H, W, 3] per prompt.
        prompts: one per clip; written in full to `prompts.json`.
        folder: created if missing; files of the same name are replaced.
        fps: frames per second.
        settings: recorded in `prompts.json`, to make the samples again.

    Returns:
        Paths of the mp4 files, one per prompt, in order.

    Raises:
        ValueError: no clips, or their number is not that of the prompts.
    """
    if not frames or len(frames) != len(prompts):
        raise ValueError(f"{len(frames)} clips for {len(prompts)} prompts; need 1 or more, equal")
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{index:02d}_{slug(prompt)}.mp4" for index, prompt in enumerate(prompts)]
    paths = [
        _complete(folder / name, partial(write_video, frames=clip, fps=fps))
        for name, clip in zip(names, frames, strict=True)
    ]
    _complete(folder / "contact_sheet.png", partial(contact_sheet, frames, labels=prompts))
    record = _record(frames, prompts, names, fps, settings)
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    _complete(folder / "prompts.json", lambda path: path.write_text(text, encoding="utf-8"))
    logger.info("wrote %d samples to %s", len(paths), folder)
    return paths


def slug(prompt: str) -> str:
    """Letters, digits and hyphens of a prompt, lower case, for a file name of bounded length."""
    words = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")
    return words[:_SLUG_LENGTH].strip("-") or "empty"


def _text_conditioning(
    text_encoder: TextEncoder, prompts: Sequence[str], negative: str, device: torch.device | str
) -> dict[str, dict[str, Tensor]]:
    """Arguments `conditioning` and `negative` of the sampler, of all prompts: an encoder is loaded
    once, and what it gives is of one length."""
    embeddings, mask = (each.to(device) for each in text_encoder.encode([*prompts, negative]))
    last = torch.full((len(prompts),), len(prompts), device=embeddings.device)
    return {
        "conditioning": {
            "encoder_hidden_states": embeddings[:-1],
            "encoder_attention_mask": mask[:-1],
        },
        "negative": {
            "encoder_hidden_states": embeddings[last],
            "encoder_attention_mask": mask[last],
        },
    }


def _rows(
    text: Mapping[str, Mapping[str, Tensor]], start: int, count: int
) -> dict[str, dict[str, Tensor]]:
    """The same for `count` of the prompts."""
    return {
        side: {key: value[start : start + count] for key, value in tensors.items()}
        for side, tensors in text.items()
    }


def _overall(progress: Progress | None, number: int, batches: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, steps: progress(number * steps + done, batches * steps)


@torch.no_grad()
def _frames_of(codec: Codec, latents: Tensor, num_frames: int, prompt: str) -> Frames:
    pixels = codec.decode(latents, frames=num_frames)[0]
    if not pixels.isfinite().all():
        raise RuntimeError(
            f"the sample of {prompt!r} has values that are not finite; the model has diverged, "
            "or a bf16 model overflows: sample an earlier checkpoint, or in fp32"
        )
    return to_frames(pixels)


def _complete(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write under a hidden name of the same suffix (which selects the format), then rename."""
    unfinished = path.with_name(f".partial-{path.name}")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _record(
    frames: Sequence[Frames],
    prompts: Sequence[str],
    names: Sequence[str],
    fps: float,
    settings: SampleConfig | None,
) -> dict[str, Any]:
    samples = [
        {"file": name, "prompt": prompt, "size": list(clip.shape[:3])}
        for name, prompt, clip in zip(names, prompts, frames, strict=True)
    ]
    recorded = None if settings is None else settings.model_dump(mode="json", exclude={"prompts"})
    return {"fps": fps, "settings": recorded, "samples": samples}


def sample_run(
    source: Path,
    *,
    prompts: Sequence[str] = (),
    out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    ema: bool | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Sample from a run or checkpoint, streaming its weights forward only (no optimizer state).

    Args:
        source: a run's folder (its latest checkpoint) or a `checkpoint-N`.
        prompts: captions; those of the run's config if empty.
        out: where clips go; `samples/` beside the checkpoints by default.
        settings: fields of `SampleConfig` that replace the run's.
        ema: averaged weights or not; None takes them if the checkpoint has them.

    Raises:
        InputError: no complete checkpoint, no prompts, or no averaged weights where asked for.
    """
    checkpoint = find_checkpoint(source)
    config = load_config(checkpoint / CONFIG)
    sample = SampleConfig.model_validate({**config.sample.model_dump(), **(settings or {})})
    prompts = tuple(prompts) or sample.prompts
    if not prompts:
        raise InputError(f"{checkpoint}: its config has no sample.prompts", "give --prompt")
    codec = build_codec(config.data.codec)
    weights = checkpoint / weights_folder(checkpoint, ema)
    network = saved_network(weights, config)
    recipe = Recipe(
        train=config.train,
        scheduler=None if network.source is None else network.source.scheduler,
        sigma_range=tuple(read_state(checkpoint).get("sigma_range", FULL_RANGE)),
    )
    bucket = sample_size(sample, config, codec, network.patch_size)
    shift = sampling_shift(recipe, codec, network, bucket)
    dtype = torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32
    with closing(forward_only(network, dtype)) as model:
        frames = generate(
            network.denoiser(model, dtype), codec, build_text_encoder(config.data.text), prompts,
            bucket=bucket, settings=sample, shift=shift, device="cpu", progress=progress,
            pipeline=family_pipeline(network, recipe, codec, model, dtype),
        )  # fmt: skip
    folder = out or checkpoint.parent / "samples" / checkpoint.name
    return save_samples(frames, prompts, folder, sample.fps, sample)


def sample_size(sample: SampleConfig, config: Config, codec: Codec, patch_size: Triple) -> Triple:
    """Frames, height and width of samples: `sample.bucket`, else the first training bucket.

    Cropped to whole latent voxels and patches, as the training clips were.
    """
    return codec.fit_size(parse_triple(sample.bucket or config.data.buckets[0]), patch_size)


def sampling_shift(recipe: Recipe, codec: Codec, network: Network, bucket: Triple) -> float:
    """Timestep shift for clips of `bucket` pixels.

    Raises:
        InputError: a model that this sampler cannot sample by itself.
    """
    if recipe.sigma_range != FULL_RANGE:
        low, high = recipe.sigma_range
        raise InputError(
            f"{network.name}: an expert for noise levels {low:g} to {high:g} cannot sample alone",
            "load both experts into their diffusers pipeline",
        )
    if recipe.is_v_prediction:
        if has_pipeline(network, codec):
            return 1.0
        raise InputError(
            f"{network.name}: v-prediction is sampled by the family's own pipeline, from latents "
            "of its own autoencoder",
            "set data.codec.name=vae, or load the transformer into a pipeline of your own",
        )
    voxels = math.prod(codec.latent_shape(bucket))
    return recipe.shift(voxels // math.prod(network.patch_size))


def has_pipeline(network: Network, codec: Codec) -> bool:
    """Whether the family's own pipeline can sample: it wants latents of its own autoencoder."""
    return network.name in KINDS and codec.settings()["name"] == "vae"


def family_pipeline(
    network: Network, recipe: Recipe, codec: Codec, model: StreamedModel, dtype: torch.dtype
) -> FamilyPipeline | None:
    """The family's own pipeline around `model`; None where the sampler here is used."""
    if network.source is None or recipe.scheduler is None or not has_pipeline(network, codec):
        return None
    return FamilyPipeline(
        network.name, family=network.family, model=model, dtype=dtype,
        scheduler=recipe.sampling_scheduler, block=codec.block,
    )  # fmt: skip


def forward_only(network: Network, dtype: torch.dtype) -> StreamedModel:
    """A saved network with frozen weights, read straight into the store."""
    model = network.build(dtype).requires_grad_(False).eval()
    streamed = stream(model)
    if network.weights is None:
        raise ValueError(f"{network.name} has no weights to load; give a saved network")
    streamed.load(network.weights)
    return streamed
