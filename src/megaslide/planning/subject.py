"""What a plan is about: a preset by its name, a run's config, or a pretrained model's folder.

All three become a network on the meta device and the shapes of one micro-batch; nothing is loaded.

Shapes: latents [B, C, T, H, W], text [B, L, D].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megaslide.config import Config, OffloadConfig, Triple, load_config
from megaslide.errors import InputError
from megaslide.models.network import Network, OwnNetwork, network_of, pretrained_network
from megaslide.models.presets import PRESETS, resolve_config
from megaslide.planning.costs import ModelCosts, model_costs
from megaslide.planning.plan import Choice

PRESET_CHANNELS, PRESET_TEXT_DIM = 16, 4096
"""What the presets' names count with: the latents and the text of today's large models."""
COMPRESSION: Triple = (4, 8, 8)
"""Pixels per latent voxel (t, h, w) of today's video autoencoders; the first frame has its own."""
CLIP: Triple = (81, 480, 832)
"""Frames, height and width where nobody says: what Wan 2.1 was released with."""
TEXT_TOKENS = 512
WINDOW: Triple = (3, 7, 7)
"""Of the presets' attention, in tokens."""
BF16 = "train.mixed_precision=bf16"
"""What a large model is trained in unless the command says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A network, what one micro-batch of it is, and how the run streams."""

    network: Network
    dtype: torch.dtype
    channels: int
    text_dim: int
    latents: Triple
    """T, H, W."""
    text_tokens: int
    clips: int
    """In one micro-batch."""
    choices: tuple[Choice, ...]
    """What the config leaves open, the preferred first; one where it says everything."""
    offload: OffloadConfig
    """Of the config."""

    @property
    def tokens(self) -> int:
        """Of one micro-batch, text not counted."""
        t, h, w = (n // p for n, p in zip(self.latents, self.network.patch_size, strict=True))
        return self.clips * t * h * w

    def costs(self) -> ModelCosts:
        """Of one micro-batch.

        Raises:
            InputError: `offload.frames_per_chunk` for blocks that cannot be computed in chunks.
        """
        with torch.device("meta"):
            model = self.network.build(self.dtype)
            inputs = {
                "hidden_states": torch.empty(self.clips, self.channels, *self.latents),
                "timestep": torch.empty(self.clips),
                "encoder_hidden_states": torch.empty(self.clips, self.text_tokens, self.text_dim),
            }
            family = None if isinstance(self.network, OwnNetwork) else self.network.family
            if family is not None:
                for key, shape in family.conditions(self.latents).items():
                    inputs[key] = torch.empty(self.clips, *shape)
        if isinstance(self.network, OwnNetwork):
            model = model.to(self.dtype)
            inputs = {key: value.to(self.dtype) for key, value in inputs.items()}
        call = self.network.denoiser(model, self.dtype)
        return model_costs(
            model, inputs, call=call, dtype=self.network.stream_dtype(self.dtype),
            frames_per_chunk=self.offload.frames_per_chunk,
        )  # fmt: skip

    def besides(self, costs: ModelCosts) -> dict[str, int]:
        """Bytes of RAM, by kind, that a run takes besides what the engine allocates.

        A new model is initialised whole, in fp32, and is there until the store holds a copy.
        """
        new = isinstance(self.network, OwnNetwork)
        return {"new weights in fp32": 4 * costs.parameters} if new else {}


def subject_of(
    what: str, overrides: Sequence[str] = (), *, clip: Triple | None = None,
    compression: Triple = COMPRESSION,
) -> Subject:  # fmt: skip
    """The subject of a plan.

    Args:
        what: a preset's name, a config's YAML file, or the folder of a diffusers pipeline.
        overrides: `section.key=value`, of the sections that matter to what is named.
        clip: frames, height, width in pixels; None takes the config's largest bucket, or CLIP.
        compression: pixels per latent voxel where no config names a codec.

    Raises:
        InputError: none of these, a clip too small for one token, or a config that is refused.
    """
    path = Path(what)
    if path.suffix in (".yaml", ".yml"):
        return subject_of_run(load_config(path, list(overrides)), clip)
    if path.is_dir():
        return _of_folder(what, overrides, clip or CLIP, compression)
    if what in PRESETS:
        return _of_preset(what, overrides, clip or CLIP, compression)
    raise InputError(
        f"{what!r} is no preset, no .yaml file and no folder",
        f"give a config, the folder of a diffusers pipeline, or one of {', '.join(PRESETS)}",
    )


def subject_of_run(config: Config, clip: Triple | None = None) -> Subject:
    """A run's subject; its latents are the largest that it meets.

    Raises:
        InputError: a bucket, a model or a combination that cannot be.
    """
    from megaslide.data.buckets import fit_buckets
    from megaslide.data.codecs import build_codec
    from megaslide.data.first_frames import build_first_frames
    from megaslide.data.text import build_text_encoder

    codec, encoder = build_codec(config.data.codec), build_text_encoder(config.data.text)
    images = build_first_frames(config.data, codec)
    network = network_of(
        config, channels=codec.channels, text_dim=encoder.dim, pooled_dim=encoder.pooled_dim,
        image_dim=None if images is None else images.dim,
    )  # fmt: skip
    if clip is None:
        buckets, _ = fit_buckets(config.data.buckets, codec, network.patch_size)
        latents = max((bucket.latent_shape for bucket in buckets), key=math.prod)
    else:
        latents = codec.latent_shape(codec.fit_size(clip, network.patch_size))
    return Subject(
        network=network, channels=codec.channels, text_dim=encoder.dim, latents=latents,
        text_tokens=encoder.max_length, **_told(config),
    )  # fmt: skip


def _of_preset(name: str, overrides: Sequence[str], clip: Triple, compression: Triple) -> Subject:
    chosen = (f"model.preset={name}", f"attention.window={list(WINDOW)}", *overrides)
    config = load_config(None, [BF16, *chosen])
    sizes = resolve_config(
        config.model, config.attention, in_channels=PRESET_CHANNELS, text_dim=PRESET_TEXT_DIM
    )
    network = OwnNetwork(name=name, config=sizes)
    return _pretend(network, PRESET_CHANNELS, PRESET_TEXT_DIM, config, clip, compression)


def _of_folder(where: str, overrides: Sequence[str], clip: Triple, compression: Triple) -> Subject:
    named = f"model.pretrained_model_name_or_path={where}"
    config = load_config(None, [BF16, named, *overrides])
    network = pretrained_network(config)
    family = network.family
    return _pretend(network, family.channels, family.text_dim, config, clip, compression)


def _pretend(
    network: Network, channels: int, text_dim: int, config: Config, clip: Triple,
    compression: Triple,
) -> Subject:  # fmt: skip
    return Subject(
        network=network, channels=channels, text_dim=text_dim, text_tokens=TEXT_TOKENS,
        latents=_latents(clip, compression, network.patch_size), **_told(config),
    )  # fmt: skip


def _told(config: Config) -> dict[str, Any]:
    """What a config says of precision, batch and streaming."""
    batch = config.train.train_batch_size * config.train.gradient_accumulation_steps
    clips = min(config.offload.micro_batch_size or config.train.train_batch_size, batch)
    bf16 = config.train.mixed_precision == "bf16"
    return {
        "dtype": torch.bfloat16 if bf16 else torch.float32, "clips": clips,
        "choices": _choices(config, -(-batch // clips)), "offload": config.offload,
    }  # fmt: skip


def _latents(clip: Triple, compression: Triple, patch_size: Triple) -> Triple:
    """T, H, W: the first frame alone, then groups; cut to whole patches."""
    frames, height, width = clip
    voxels = ((frames - 1) // compression[0] + 1, height // compression[1], width // compression[2])
    t, h, w = (n // p * p for n, p in zip(voxels, patch_size, strict=True))
    if min(t, h, w) < 1:
        raise InputError(
            f"a clip of {frames} frames, {height}x{width}, is no whole token: a token is "
            f"{patch_size} voxels of {compression} pixels",
            "give more frames or pixels",
        )
    return t, h, w


OPEN: dict[str, tuple[Any, ...]] = {
    "state_format": ("split", "split8"),
    "tier": ("ram", "disk"),
    "gradient_tier": ("ram", "disk"),
    "activations": ("device", "host"),
    "slots": (2, 3, 4),
}
"""What `auto` may become, by key of `offload`, the preferred first. A disk wears and is slow:
inputs of blocks go there only when told to, state only where RAM is too small."""


def _choices(config: Config, micro_batches: int) -> tuple[Choice, ...]:
    told = {name: getattr(config.offload, name) for name in OPEN}
    values = [OPEN[name] if value == "auto" else (value,) for name, value in told.items()]
    found = [dict(zip(OPEN, chosen, strict=True)) for chosen in product(*values)]
    return tuple(
        Choice(
            **chosen, micro_batches=micro_batches,
            clip=config.optim.max_grad_norm is not None, ema=config.train.use_ema,
        )
        for chosen in found
        if chosen["tier"] == "disk" or chosen["gradient_tier"] == "ram"
    )  # fmt: skip
