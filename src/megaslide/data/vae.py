"""The autoencoders of pretrained video models, behind the interface of the other codecs.

A transformer knows only the latents that its own pipeline makes, so the class is the one that the
pipeline's vae/config.json names, in diffusers, and latents are normalised as that pipeline does:

    latents = ((z − mean) / std − shift) · scale

with what of the four a class has. Tiles and slices are on where a class has them: their size, and
not the clip's, then bounds the memory. Sources: diffusers 0.42, `pipelines/<family>`, what is done
to the latents before `vae.decode` (Wan, Cosmos-Predict2: mean and std of config.json; LTX: mean and
std of the weights, and scaling_factor; Mochi: all of config.json; HunyuanVideo and CogVideoX:
scaling_factor).

Shapes: B batch, C latent channels, T H W pixels, t h w latent voxels.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaslide.config import CodecConfig, Triple
from megaslide.data.codecs import BlockGrid
from megaslide.data.components import Component, find_components, load_component
from megaslide.errors import InputError

VERSION = 1
"""Counts changes to what a VAE's latents are here: old caches must not be mistaken for new."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What differs between the autoencoders of the families."""

    channels_key: str
    """Of config.json: channels of the latents."""
    channels: int
    """Where config.json does not say, as in the class's own defaults."""
    block: Callable[[Mapping[str, Any]], Triple]
    """Pixels per latent voxel, from config.json."""
    statistics: str | None = None
    """Where `latents_mean` and `latents_std` are: `config`, `buffers`, or nowhere."""
    frame_step: int = 1
    """Latent frames that decode come as 1 + a multiple of this."""


def _wan_block(config: Mapping[str, Any]) -> Triple:
    side = config.get("scale_factor_spatial") or 8
    return config.get("scale_factor_temporal") or 4, side, side


def _ltx_block(config: Mapping[str, Any]) -> Triple:
    grown = 2 ** sum(config.get("spatio_temporal_scaling", (True, True, True, False)))
    side = config.get("spatial_compression_ratio") or config.get("patch_size", 4) * grown
    frames = config.get("temporal_compression_ratio") or config.get("patch_size_t", 1) * grown
    return frames, side, side


def _cogvideox_block(config: Mapping[str, Any]) -> Triple:
    side = 2 ** (len(config.get("block_out_channels", (128, 256, 256, 512))) - 1)
    return int(config.get("temporal_compression_ratio", 4)), side, side


def _hunyuan_block(config: Mapping[str, Any]) -> Triple:
    side = config.get("spatial_compression_ratio", 8)
    return config.get("temporal_compression_ratio", 4), side, side


def _hunyuan15_block(config: Mapping[str, Any]) -> Triple:
    return _hunyuan_block({"spatial_compression_ratio": 16, **config})


def _mochi_block(config: Mapping[str, Any]) -> Triple:
    side = math.prod(config.get("spatial_expansions", (2, 2, 2)))
    return math.prod(config.get("temporal_expansions", (1, 2, 3))), side, side


KINDS: dict[str, Kind] = {
    "AutoencoderKLWan": Kind(
        channels_key="z_dim", channels=16, block=_wan_block, statistics="config"
    ),
    "AutoencoderKLLTXVideo": Kind(
        channels_key="latent_channels", channels=128, block=_ltx_block, statistics="buffers"
    ),
    # Its decoder takes frames in twos, the first alone: an even number comes out too short.
    "AutoencoderKLCogVideoX": Kind(
        channels_key="latent_channels", channels=16, block=_cogvideox_block, frame_step=2
    ),
    "AutoencoderKLHunyuanVideo": Kind(
        channels_key="latent_channels", channels=16, block=_hunyuan_block
    ),
    "AutoencoderKLHunyuanVideo15": Kind(
        channels_key="latent_channels", channels=32, block=_hunyuan15_block
    ),
    "AutoencoderKLMochi": Kind(
        channels_key="latent_channels", channels=12, block=_mochi_block, statistics="config"
    ),
}
"""By the class that vae/config.json names."""


class VaeCodec(BlockGrid):
    """An autoencoder, loaded at its first use, in fp32, on the GPU where there is one.

    Args:
        component: its folder.
        posterior: `mode` takes the mean of the distribution that the encoder gives; `sample` one
            draw, from a generator seeded by the pixels, so that a clip has the same latents
            whenever it is encoded.

    Raises:
        InputError: a class whose latents are not known here.
    """

    def __init__(self, component: Component, posterior: str = "mode") -> None:
        if component.class_name not in KINDS:
            raise InputError(
                f"{component.config_file}: latents of {component.class_name or 'no class'} are "
                "not known here",
                f"known are {', '.join(sorted(KINDS))}",
            )
        self._component, self._posterior = component, posterior
        self._kind = KINDS[component.class_name]
        self.block = self._kind.block(component.config)
        self.channels = int(component.config.get(self._kind.channels_key, self._kind.channels))
        self.frame_step = self._kind.frame_step
        self._model: Any = None

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        self._check_pixels(pixels)
        model = self._loaded()
        posterior = model.encode(pixels.to(model.device, torch.float32)).latent_dist
        z = posterior.mode() if self._posterior == "mode" else posterior.sample(_seeded(pixels))
        mean, std = self._statistics(model, z)
        shift, scale = self._shift_and_scale()
        latents = ((z - mean) / std - shift) * scale
        self._require_shape(latents, self.latent_shape(_size(pixels)), "encodes")
        return latents.to(pixels.device)

    @torch.no_grad()
    def decode(self, latents: Tensor, frames: int | None = None) -> Tensor:
        whole = self._check_latents(latents, self.channels, frames)
        model = self._loaded()
        z = latents.to(model.device, torch.float32)
        mean, std = self._statistics(model, z)
        shift, scale = self._shift_and_scale()
        pixels = model.decode((z / scale + shift) * std + mean, **self._decoding(z)).sample
        _, bh, bw = self.block
        size = whole, latents.shape[3] * bh, latents.shape[4] * bw
        self._require_shape(pixels, size, "decodes")
        return pixels.float().to(latents.device)

    def settings(self) -> dict[str, Any]:
        return {
            "name": "vae",
            "class": self._component.class_name,
            "files": self._component.fingerprint(),
            "posterior": self._posterior,
            "block": "x".join(map(str, self.block)),
            "channels": self.channels,
            "version": VERSION,
        }

    def close(self) -> None:
        self._model = None

    def _loaded(self) -> Any:
        if self._model is None:
            self._model = _load(self._component)
        return self._model

    def _statistics(self, model: Any, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation, `[1, C, 1, 1, 1]`."""
        home = {"config": model.config, "buffers": model, None: None}[self._kind.statistics]
        values = getattr(home, "latents_mean", None), getattr(home, "latents_std", None)
        shape = (1, self.channels, 1, 1, 1)
        if values[0] is None or values[1] is None:
            return like.new_zeros(shape), like.new_ones(shape)
        mean, std = (torch.as_tensor(v, dtype=like.dtype, device=like.device) for v in values)
        if mean.numel() != self.channels or std.numel() != self.channels:
            raise InputError(
                f"{self._component.config_file}: {mean.numel()} means and {std.numel()} deviations "
                f"for {self.channels} latent channels",
                "take the autoencoder's files from one save",
            )
        return mean.view(shape), std.view(shape)

    def _shift_and_scale(self) -> tuple[float, float]:
        """`shift_factor` and `scaling_factor`, or what changes nothing."""
        config = self._loaded().config
        shift, scale = config.get("shift_factor"), config.get("scaling_factor")
        return float(shift or 0.0), float(1.0 if scale is None else scale)

    def _decoding(self, z: Tensor) -> dict[str, Tensor]:
        """LTX's decoder may finish the denoising; its pipeline gives it no noise, at time 0."""
        if not self._loaded().config.get("timestep_conditioning"):
            return {}
        return {"temb": z.new_zeros(len(z))}

    def _require_shape(self, tensor: Tensor, size: Triple, does: str) -> None:
        if _size(tensor) != size:
            raise InputError(
                f"{self._component.folder}: {self._component.class_name} {does} to "
                f"{_size(tensor)} where {size} is expected, so its config.json does not "
                "describe its sizes",
                "take config.json and weights from one save",
            )


def find_vae(config: CodecConfig) -> VaeCodec:
    """The autoencoder that `data.codec` names; its weights are read at its first use.

    Raises:
        InputError: not there, or of a class that is not known here.
    """
    assert config.pretrained_model_name_or_path is not None
    (component,) = find_components(
        config.pretrained_model_name_or_path, (config.subfolder,), key="data.codec",
        revision=config.revision,
    )  # fmt: skip
    return VaeCodec(component, config.posterior)


def _load(component: Component) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("autoencoders need diffusers: pip install 'megaslide[train]'") from error
    cls = getattr(diffusers, component.class_name)
    model = load_component(component, cls, torch_dtype=torch.float32)
    for option in ("enable_tiling", "enable_slicing"):
        if hasattr(model, option):
            getattr(model, option)()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device)


def _seeded(pixels: Tensor) -> torch.Generator:
    content = pixels.detach().cpu().contiguous().numpy().tobytes()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _size(tensor: Tensor) -> Triple:
    t, h, w = tensor.shape[2:]
    return t, h, w
