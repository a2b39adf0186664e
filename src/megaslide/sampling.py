"""From prompts to video files: text embeddings, latents, pixels, mp4.

One path serves `megaslide sample`, sampling during training and the demo. Each prompt draws its
noise from its own generator, seeded by (seed, index), so adding, removing or batching prompts does
not change what another prompt gives, beyond the rounding of batched matrix products.

Shapes: B prompts of a batch, latents [B, C, t, h, w], pixels [B, 3, T, H, W], frames [T, H, W, 3],
text [B, L, D].
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaslide.config import (
    AttentionConfig,
    Config,
    OffloadConfig,
    SampleConfig,
    Triple,
    load_config,
    parse_triple,
)
from megaslide.data.codecs import Codec, build_codec
from megaslide.data.first_frames import FirstFrames, build_first_frames
from megaslide.data.images import add_images, encode_image, require_images
from megaslide.data.samples import Frames, save_samples, to_frames
from megaslide.data.text import TextEncoder, build_text_encoder
from megaslide.diffusion.objectives import Denoiser
from megaslide.diffusion.recipes import FULL_RANGE, Recipe
from megaslide.diffusion.samplers import Progress, draw_noise, sample_latents, sigma_schedule
from megaslide.errors import InputError
from megaslide.models.network import Network, pretrained_network, saved_network
from megaslide.models.pretrained.pipelines import KINDS, FamilyPipeline
from megaslide.runs import CONFIG, find_checkpoint, read_state, weights_folder
from megaslide.streaming import StreamedModel, stream
from megaslide.streaming.placement import chosen_device, encoder_placement


def generate(
    model: Denoiser,
    codec: Codec,
    text_encoder: TextEncoder,
    prompts: Sequence[str],
    *,
    bucket: Triple,
    settings: SampleConfig,
    sigmas: Tensor,
    device: torch.device | str,
    negative_prompt: str = "",
    batch_size: int = 4,
    pipeline: FamilyPipeline | None = None,
    images: FirstFrames | None = None,
    progress: Progress | None = None,
) -> list[Frames]:
    """Sample one clip per prompt; `settings.prompts`, `.bucket` and `.fps` are not read here.

    Args:
        model: predicts the velocity, called as in `megaslide.diffusion`, with the keyword
            arguments of `Batch.conditioning`.
        prompts: captions; the position of each is part of its seed.
        bucket: frames, height and width of the clips, in pixels.
        sigmas: noise levels of our own sampler.
        device: where the model takes its inputs.
        negative_prompt: what guidance leads away from; the empty caption of training by default.
        batch_size: prompts sampled together. Streamed weights cross the link once per step and
            batch, so larger is faster where activations fit.
        pipeline: samples instead of `model` and `sigmas`, where a pretrained family has one; not
            where `settings.images` are the first latent frames themselves.
        images: makes conditions of `settings.images`, for models that take those instead.
        progress: called with (model steps done, in all) over all batches.

    Returns:
        uint8 RGB frames [T, H, W, 3] per prompt, in order.

    Raises:
        ValueError: no prompts, or `batch_size` below 1.
        InputError: images that cannot be read, or not one for each prompt.
        RuntimeError: a clip came out with values that are not finite.
    """
    _require_prompts(prompts, batch_size)
    starts = range(0, len(prompts), batch_size)
    text = _text_conditioning(text_encoder, prompts, negative_prompt, device)
    given = _first_frames(settings.images, images, text, codec, bucket)
    clips: list[Frames] = []
    for number, start in enumerate(starts):
        batch = prompts[start : start + batch_size]
        latents = _latents(
            model, pipeline, (len(batch), codec.channels, *codec.latent_shape(bucket)),
            settings=settings, sigmas=sigmas, **_rows(text, start, len(batch)),
            first_frame=None if given is None else given[start : start + len(batch)],
            generators=[prompt_generator(settings.seed, start + i) for i in range(len(batch))],
            progress=_overall(progress, number, len(starts)),
        )  # fmt: skip
        # One clip at a time: pixels take far more memory than latents.
        for prompt, row in zip(batch, latents.split(1), strict=True):
            clips.append(_frames_of(codec, row, bucket[0], prompt))
    codec.close()
    return clips


def _require_prompts(prompts: Sequence[str], batch_size: int) -> None:
    if not prompts or batch_size < 1:
        raise ValueError(
            f"{len(prompts)} prompts and batch_size={batch_size}; both must be 1 or more"
        )


def _latents(
    model: Denoiser,
    pipeline: FamilyPipeline | None,
    shape: tuple[int, ...],
    *,
    settings: SampleConfig,
    sigmas: Tensor,
    generators: Sequence[torch.Generator],
    conditioning: Mapping[str, Tensor],
    negative: Mapping[str, Tensor],
    first_frame: Tensor | None,
    progress: Progress | None,
) -> Tensor:
    steps, scale = settings.num_inference_steps, settings.guidance_scale
    if pipeline is not None and first_frame is None:
        noise = draw_noise(shape, generators, conditioning["encoder_hidden_states"].device)
        return pipeline.latents(
            noise, conditioning, negative, steps=steps, guidance_scale=scale, progress=progress
        )
    return sample_latents(
        model, shape, sigmas=sigmas, guidance_scale=scale, generator=generators,
        conditioning=conditioning, negative=negative, first_frame=first_frame, progress=progress,
    )  # fmt: skip


def prompt_generator(seed: int, index: int) -> torch.Generator:
    """CPU generator of prompt `index`: the same noise on every device, and for no two prompts."""
    mixed = np.random.SeedSequence((seed % 2**64, index)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


def _first_frames(
    paths: Sequence[str], images: FirstFrames | None, text: dict[str, dict[str, Tensor]],
    codec: Codec, size: Triple,
) -> Tensor | None:  # fmt: skip
    """Latents [B, C, 1, h, w] of images that are first frames; conditions on them go to `text`."""
    if images is not None:
        add_images(text, images, paths, size)
    if images is not None or not paths:
        return None
    count = len(text["conditioning"]["encoder_hidden_states"])
    require_images(paths, count)
    frames = torch.cat([encode_image(Path(path), codec, size) for path in paths])
    codec.close()  # its memory is the model's until the clips are decoded
    return frames.expand(count, *frames.shape[1:])


def _text_conditioning(
    text_encoder: TextEncoder, prompts: Sequence[str], negative: str, device: torch.device | str
) -> dict[str, dict[str, Tensor]]:
    """Arguments `conditioning` and `negative` of the sampler, of all prompts: an encoder is loaded
    once, closed here, and what it gives is of one length."""
    captions = [*prompts, negative]
    embeddings, mask = text_encoder.encode(captions)
    text = {"encoder_hidden_states": embeddings, "encoder_attention_mask": mask}
    if (pooled := text_encoder.pooled(captions)) is not None:
        text["pooled_projections"] = pooled
    text_encoder.close()
    last = torch.full((len(prompts),), len(prompts))
    return {
        "conditioning": {key: value[:-1].to(device) for key, value in text.items()},
        "negative": {key: value[last].to(device) for key, value in text.items()},
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


def sample_run(
    source: Path,
    *,
    prompts: Sequence[str] = (),
    out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    ema: bool | None = None,
    second: Path | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Sample from a run or checkpoint, streaming its weights forward only (no optimizer state).

    Args:
        source: a run's folder (its latest checkpoint) or a `checkpoint-N`.
        prompts: captions; those of the run's config if empty.
        out: where clips go; `samples/` beside the checkpoints by default.
        settings: fields of `SampleConfig` that replace the run's.
        ema: averaged weights or not; None takes them if the checkpoint has them.
        second: a run of the other expert, where the model is one of two; None takes the published
            one, from the pipeline that the run began with.

    Raises:
        InputError: no complete checkpoint, no prompts, no averaged weights where asked for, or no
            second expert where one is needed.
    """
    trained = trained_at(source, ema)
    checkpoint, config, dtype = trained.checkpoint, trained.config, trained.dtype
    network, recipe = trained.network, trained.recipe
    sample = SampleConfig.model_validate({**config.sample.model_dump(), **(settings or {})})
    prompts = tuple(prompts) or sample.prompts
    if not prompts:
        raise InputError(f"{checkpoint}: its config has no sample.prompts", "give --prompt")
    codec = build_codec(config.data.codec)
    bucket = sample_size(sample, config, codec, network.patch_size)
    other = _other_expert(config, network, recipe, codec, second)
    sigmas = sampling_sigmas(recipe, codec, network, bucket, sample, alone=other is None)
    folder = out or checkpoint.parent / "samples" / checkpoint.name
    folder.mkdir(parents=True, exist_ok=True)  # what cannot be written fails before the sampling
    with ExitStack() as stack:
        model, *partner = (
            stack.enter_context(closing(forward_only(each, dtype, config.offload)))
            for each in (network, other)
            if each is not None
        )
        frames = generate(
            network.denoiser(model, dtype), codec,
            build_text_encoder(config.data.text, encoder_placement(config.offload)), prompts,
            bucket=bucket, settings=sample, sigmas=sigmas, device=chosen_device(config.offload),
            progress=progress, images=build_first_frames(config.data, codec),
            pipeline=family_pipeline(network, recipe, codec, model, dtype, *partner),
        )  # fmt: skip
    return save_samples(frames, prompts, folder, sample.fps, sample)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A checkpoint of a run, before its weights are in a store."""

    checkpoint: Path
    config: Config
    network: Network
    recipe: Recipe

    @property
    def dtype(self) -> torch.dtype:
        """What the run computed in."""
        return torch.bfloat16 if self.config.train.mixed_precision == "bf16" else torch.float32


def trained_at(source: Path, ema: bool | None = None) -> Trained:
    """The checkpoint that `source`, itself or a run, names.

    Args:
        source: a run's folder or a checkpoint.
        ema: averaged weights or not; None takes them if the checkpoint has them.

    Raises:
        InputError: no complete checkpoint, or no averaged weights where asked for.
    """
    checkpoint = find_checkpoint(source)
    config = load_config(checkpoint / CONFIG)
    network = saved_network(checkpoint / weights_folder(checkpoint, ema), config)
    scheduler = None if network.source is None else network.source.scheduler
    levels = tuple(read_state(checkpoint).get("sigma_range", FULL_RANGE))
    recipe = Recipe(train=config.train, scheduler=scheduler, sigma_range=levels)
    return Trained(checkpoint=checkpoint, config=config, network=network, recipe=recipe)


def _other_expert(
    config: Config, network: Network, recipe: Recipe, codec: Codec, second: Path | None
) -> Network | None:
    """The expert for the noise levels that `network` is not for, if its pipeline can sample."""
    if recipe.sigma_range == FULL_RANGE or not has_pipeline(network, codec):
        if second is None:
            return None
        raise InputError(f"{second}: {network.name} takes no second expert", "leave it out")
    low, _ = recipe.sigma_range
    wanted = "transformer_2" if low > 0 else "transformer"
    if second is None:
        where = {"subfolder": wanted}
        values = {"model": config.model.model_copy(update=where), "attention": AttentionConfig()}
        try:
            return pretrained_network(config.model_copy(update=values))
        except InputError as error:
            raise InputError(f"the other expert: {error.problem}", "give --second RUN") from None
    checkpoint = find_checkpoint(second)
    its_config = load_config(checkpoint / CONFIG)
    if its_config.model.subfolder != wanted:
        raise InputError(f"{checkpoint}: trained {its_config.model.subfolder}", f"give a {wanted}")
    return saved_network(checkpoint / weights_folder(checkpoint, None), its_config)


def sample_size(sample: SampleConfig, config: Config, codec: Codec, patch_size: Triple) -> Triple:
    """Frames, height and width of samples: `sample.bucket`, else the first training bucket.

    Cropped to whole latent voxels and patches, as the training clips were.
    """
    return codec.fit_size(parse_triple(sample.bucket or config.data.buckets[0]), patch_size)


def sampling_sigmas(
    recipe: Recipe, codec: Codec, network: Network, bucket: Triple, settings: SampleConfig, *,
    alone: bool = True,
) -> Tensor:  # fmt: skip
    """Noise levels [S + 1] of our own sampler for clips of `bucket` pixels.

    `alone` says that no second expert is at hand.

    Raises:
        InputError: a model that this sampler cannot sample by itself, or images for one that
            takes none.
    """
    steps = settings.num_inference_steps
    if network.takes_image and not settings.images:
        raise InputError(
            f"sample.images is empty: {network.name} makes a clip of an image", "give --image FILE"
        )
    if settings.images and not (network.takes_first_frame or network.takes_image):
        raise InputError(
            f"sample.images: {network.name} has one timestep for all frames", "leave images out"
        )
    if alone and recipe.sigma_range != FULL_RANGE:
        low, high = recipe.sigma_range
        raise InputError(
            f"{network.name}: an expert for noise levels {low:g} to {high:g} cannot sample alone",
            "set data.codec.name=vae and call `megaslide sample`, which takes both experts",
        )
    if recipe.is_v_prediction:
        if has_pipeline(network, codec):
            return sigma_schedule(steps, 1.0)
        raise InputError(
            f"{network.name}: v-prediction is sampled by the family's own pipeline, from latents "
            "of its own autoencoder",
            "set data.codec.name=vae, or load the transformer into a pipeline of your own",
        )
    voxels = math.prod(codec.latent_shape(bucket))
    return recipe.sampling_sigmas(steps, voxels // math.prod(network.patch_size))


def has_pipeline(network: Network, codec: Codec) -> bool:
    """Whether the family's own pipeline can sample: it wants latents of its own autoencoder."""
    return network.name in KINDS and codec.settings()["name"] == "vae"


def family_pipeline(
    network: Network, recipe: Recipe, codec: Codec, model: StreamedModel, dtype: torch.dtype,
    partner: StreamedModel | None = None,
) -> FamilyPipeline | None:  # fmt: skip
    """The family's own pipeline around `model`; None where the sampler here is used.

    `partner` is the other of two experts.
    """
    if network.source is None or recipe.scheduler is None or not has_pipeline(network, codec):
        return None
    low, high = recipe.sigma_range
    experts = None
    if partner is not None:
        model, partner = (model, partner) if low > 0 else (partner, model)
        experts = partner, low or high
    return FamilyPipeline(
        network.name, family=network.family, model=model, dtype=dtype, experts=experts,
        scheduler=recipe.sampling_scheduler, block=codec.block,
    )  # fmt: skip


def forward_only(network: Network, dtype: torch.dtype, offload: OffloadConfig) -> StreamedModel:
    """A saved network with frozen weights, read straight into the store."""
    model = network.build(dtype).requires_grad_(False).eval()
    streamed = stream(model, device=chosen_device(offload))
    if network.weights is None:
        raise ValueError(f"{network.name} has no weights to load; give a saved network")
    streamed.load(network.weights)
    return streamed
