"""What a run trains, whichever way it came to be: our own VideoDiT, or a pretrained transformer.

`load` reads either back, resident, from a folder that was saved. Training, sampling and the command
line need the same few things of either: its sizes, a module to stream, where its weights lie, and
one way to call it. They learn nothing more of it than this.

Shapes: B batch, C T H W latents, L text tokens of D channels.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaslide.config import Config, DataConfig, Triple
from megaslide.errors import InputError
from megaslide.models.checkpoint import load_weights, read_config
from megaslide.models.dit import VideoDiT, count_parameters
from megaslide.models.presets import VideoDiTConfig, resolve_config
from megaslide.models.pretrained import (
    Family,
    Source,
    added_parameters,
    build_on_meta,
    converted_config,
    family_of,
    find_source,
)
from megaslide.weights import CONFIG_NAME, read_json

Denoiser = Callable[..., Any]
"""`(latents, 1000·sigma, *, encoder_hidden_states, encoder_attention_mask, ...)` to a velocity."""


@dataclass(frozen=True, kw_only=True)
class OwnNetwork:
    """Our VideoDiT, which is called by the common convention already."""

    name: str
    """Its preset."""
    config: VideoDiTConfig
    weights: Path | None = None
    """What the store is to load; None where `build` initialises."""
    source: None = None
    """Where a pretrained model comes from; this is none."""
    takes_first_frame: bool = False
    """Whether its first latent frame can be given, with a timestep of its own."""
    takes_image: bool = False
    """Whether it is always given the first frame, as a condition in channels of its own."""

    @property
    def patch_size(self) -> Triple:
        """Latent voxels per token (t, h, w)."""
        return self.config.patch_size

    def build(self, dtype: torch.dtype) -> nn.Module:
        """The module, on `meta` where there are `weights` to load."""
        if self.weights is None:
            return VideoDiT(self.config)
        with torch.device("meta"):
            return VideoDiT(self.config).to(dtype)

    def stream_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """`dtype` argument of `megaslide.stream`; masters are initialised in fp32."""
        return dtype

    def unsaved_parameters(self, model: nn.Module) -> Collection[str]:
        """Names of those parameters of `build`'s model that `weights` do not hold."""
        return ()

    def denoiser(self, model: Callable[..., Any], dtype: torch.dtype) -> Denoiser:
        """`model`, streamed or not, behind the common way to call it."""
        return model

    def count_parameters(self) -> int:
        return count_parameters(self.config)


@dataclass(frozen=True, kw_only=True)
class PretrainedNetwork:
    """A transformer of diffusers in the class it was saved from; members as in `OwnNetwork`."""

    source: Source
    family: Family
    backend: str = "auto"
    """Implementation of the operator, where attention is converted."""
    newly_converted: bool = False
    """Whether the run itself converts the attention: the source has no weights for it."""

    @property
    def name(self) -> str:
        return self.source.class_name

    @property
    def patch_size(self) -> Triple:
        return self.family.patch_size

    @property
    def takes_first_frame(self) -> bool:
        return self.family.takes_first_frame

    @property
    def takes_image(self) -> bool:
        return self.family.image != "none"

    @property
    def weights(self) -> Path:
        return self.source.folder

    def build(self, dtype: torch.dtype) -> nn.Module:
        return build_on_meta(self.source, dtype, backend=self.backend)

    def stream_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """None: `build` gives every parameter its dtype, and some stay in fp32."""
        return None

    def unsaved_parameters(self, model: nn.Module) -> Collection[str]:
        return added_parameters(model) if self.newly_converted else ()

    def denoiser(self, model: Callable[..., Any], dtype: torch.dtype) -> Denoiser:
        return FamilyDenoiser(family=self.family, model=model, dtype=dtype)

    def count_parameters(self) -> int:
        return sum(p.numel() for p in self.build(torch.float32).parameters())


Network = OwnNetwork | PretrainedNetwork
"""A transformer before its state is in a store."""


@dataclass(frozen=True, kw_only=True)
class FamilyDenoiser:
    """A family's transformer, called by the common convention."""

    family: Family
    model: Callable[..., Any]
    dtype: torch.dtype
    """What latents and text are given in; time stays fp32."""

    def __call__(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        *,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        image_latents: Tensor | None = None,
        **more: Tensor,
    ) -> Tensor:
        """Predict the velocity (CogVideoX: its v).

        Args:
            hidden_states: noisy latents [B, C, T, H, W].
            timestep: 1000·sigma, [B], or [B, T] where the first frame may be given.
            encoder_hidden_states: [B, L, D].
            encoder_attention_mask: [B, L], nonzero at tokens that count; None: all do.
            image_latents: [B, C, T, H, W] of the first frame, where the family takes them.
            more: other conditioning of the family (`pooled_projections`,
                `encoder_hidden_states_image`), tensors with B rows.

        Returns:
            [B, C, T, H, W] in the model's dtype.
        """
        text, mask = encoder_hidden_states, encoder_attention_mask
        valid = torch.ones(text.shape[:2], device=text.device) if mask is None else mask
        valid = valid.bool()
        text = text.masked_fill(~valid[..., None], 0).to(self.dtype)
        latents = hidden_states.to(self.dtype)
        arguments = self.family.arguments(latents, timestep.float(), text, valid)
        if image_latents is not None:
            arguments["hidden_states"] = self.family.with_image(
                latents, image_latents.to(self.dtype)
            )
        given = {key: value.to(self.dtype) for key, value in more.items()}
        output = self.model(**arguments, **given, return_dict=False)[0]
        return self.family.prediction(output, latents)


def network_of(
    config: Config, *, channels: int, text_dim: int, pooled_dim: int | None = None,
    image_dim: int | None = None,
) -> Network:  # fmt: skip
    """The network that a run's config describes.

    Args:
        config: its sections `model`, `attention` and `data`.
        channels: of the latents that the run's codec makes.
        text_dim: channels of its text embeddings.
        pooled_dim: channels of the embedding of a whole caption, where there is one.
        image_dim: channels of the embedding of a first frame, where there is one.

    Raises:
        InputError: a combination that cannot be built, or a pretrained model that is not there,
            of no known family, or made for other latents or another text encoder.
    """
    model = config.model
    if model.pretrained_model_name_or_path is None:
        _require_pooled(model.preset, None, pooled_dim)
        _require_image(model.preset, config.data, "none")
        sizes = resolve_config(model, config.attention, in_channels=channels, text_dim=text_dim)
        return OwnNetwork(name=model.preset, config=sizes)
    network = pretrained_network(config)
    _require_inputs(network, config.data, channels, text_dim)
    where = f"{network.source.folder}: {network.name}"
    _require_pooled(where, network.family.pooled_dim, pooled_dim)
    _require_image(where, config.data, network.family.image)
    if image_dim != network.family.image_dim:
        raise InputError(
            f"{where} takes embeddings of images of {network.family.image_dim} channels, "
            f"data.image makes {image_dim}",
            "set data.image.pretrained_model_name_or_path to the pipeline it belongs to",
        )
    return network


def pretrained_network(config: Config) -> PretrainedNetwork:
    """The network that the config's `model` and `attention` sections name, whatever the data.

    Raises:
        InputError: it is not there, of no known family, or its attention cannot be converted.
    """
    model = config.model
    assert model.pretrained_model_name_or_path is not None
    source = find_source(
        model.pretrained_model_name_or_path, subfolder=model.subfolder, revision=model.revision
    )
    network = _pretrained(source, config)
    changed = converted_config(source, config.attention)
    return replace(network, source=changed, newly_converted=changed is not source)


def saved_network(folder: Path, config: Config) -> Network:
    """The network that a checkpoint of a run holds in `folder`, with `weights` to load.

    Raises:
        InputError: the folder does not hold a model that this package trains.
    """
    class_name = read_json(folder / CONFIG_NAME, "give a checkpoint").get("_class_name")
    if class_name == VideoDiT.__name__:
        sizes = read_config(folder, class_name=class_name, parse=VideoDiTConfig.from_dict)
        return OwnNetwork(name=class_name, config=sizes, weights=folder)
    return _pretrained(find_source(str(folder.parent), subfolder=folder.name), config)


def load(name_or_path: str | Path, *, subfolder: str = "transformer") -> nn.Module:
    """A saved transformer with all its weights, converted attention included.

    Args:
        name_or_path: a checkpoint, a converted folder, a pipeline's folder, the transformer's own
            folder, or an id on the hub.
        subfolder: where in it the transformer is.

    Returns:
        A `VideoDiT`, or a diffusers model that fits its family's pipeline, in eval mode on the
        CPU, in the dtypes it was saved in.

    Raises:
        InputError: nothing there, something else there, or files that do not fit each other.
        ImportError: diffusers is not installed and is needed.
    """
    source = find_source(str(name_or_path), subfolder=subfolder)
    if source.class_name == VideoDiT.__name__:
        return VideoDiT.from_pretrained(source.folder).eval()
    model = build_on_meta(source, torch.float32)
    load_weights(model, source.folder)
    return model.eval()


def _pretrained(source: Source, config: Config) -> PretrainedNetwork:
    try:
        make = family_of(source.class_name)
        family = make(source.config, fps=config.data.target_fps, guidance=config.model.guidance)
    except InputError as error:
        raise InputError(f"{source.folder}: {error.problem}", error.fix) from None
    return PretrainedNetwork(source=source, family=family, backend=config.attention.backend)


def _require_inputs(
    network: PretrainedNetwork, config: DataConfig, channels: int, text_dim: int
) -> None:
    family, where = network.family, network.source.folder
    if channels != family.channels:
        raise InputError(
            f"{where}: {network.name} takes {family.channels} latent channels, data.codec makes "
            f"{channels}",
            f"set data.codec.channels={family.channels}, or data.codec.name=vae for its own"
            if config.codec.name != "vae"
            else "set data.codec.pretrained_model_name_or_path to the pipeline it belongs to",
        )
    if text_dim != family.text_dim:
        raise InputError(
            f"{where}: {network.name} takes text of {family.text_dim} channels, data.text makes "
            f"{text_dim}",
            f"set data.text.dim={family.text_dim}, or data.text.name=encoder for its own"
            if config.text.name != "encoder"
            else "set data.text.pretrained_model_name_or_path to the pipeline it belongs to",
        )


def _require_pooled(where: str, wanted: int | None, made: int | None) -> None:
    if wanted == made:
        return
    sizes = [f"one of {n} channels" if n else "none" for n in (wanted, made)]
    raise InputError(
        f"{where} takes a pooled text embedding: {sizes[0]}; data.text makes {sizes[1]}",
        "set data.text.name=encoder, with the text encoders of the model's own pipeline"
        if wanted
        else "set data.text to another encoder",
    )


def _require_image(where: str, config: DataConfig, wanted: str) -> None:
    if config.image.name == wanted:
        return
    takes = {
        "none": "takes no condition on a first frame",
        "latents": "takes a first frame, as latents",
        "encoder": "takes a first frame, as latents and as an image encoder's embedding",
    }
    raise InputError(f"{where} {takes[wanted]}", f"set data.image.name={wanted}")
