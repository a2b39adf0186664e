"""Which attention of a pretrained transformer becomes local, and folders of such models.

Only self-attention over video tokens alone is converted. Every weight of the model stays what and
where it is; what is added lies under the attention module's own prefix (`blocks.0.attn1.dsa.`), and
the `attention` entry of config.json says how to build it. diffusers ignores both with a warning and
loads the base model.

Shapes: T H W token grid, as elsewhere (latent voxels over the patch size).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from torch import nn

from megaslide.config import AttentionConfig
from megaslide.errors import InputError
from megaslide.models.layers import Grid
from megaslide.models.pretrained.source import Source
from megaslide.models.pretrained.video_attention import GridReader, VideoAttention, localize
from megaslide.weights import CONFIG_NAME

ENTRY = "attention"
"""Key of config.json."""
_KEPT = ("auto", "dense")
"""Kinds that leave a pretrained model's attention as it is."""
_PREFIX = "dsa"
_NOT_SAVED = {"backend", "num_register_tokens"}


def _volume(patch_size: Any, sizes: Any) -> Grid:
    t, h, w = (int(n) // int(p) for n, p in zip(sizes, patch_size, strict=True))
    return t, h, w


def _of_latents(model: nn.Module, given: Mapping[str, Any]) -> Grid:
    """hidden_states [B, C, T·pt, H·ph, W·pw]."""
    config: Any = model.config
    size = config.patch_size
    patch = (config.patch_size_t, size, size) if isinstance(size, int) else size
    return _volume(patch, given["hidden_states"].shape[2:])


def _of_channels_last(model: nn.Module, given: Mapping[str, Any]) -> Grid:
    """hidden_states [B, T·pt, H·ph, W·pw, C]."""
    config: Any = model.config
    return _volume(config.patch_size, given["hidden_states"].shape[1:4])


def _of_sizes(model: nn.Module, given: Mapping[str, Any]) -> Grid:
    """Tokens [B, N, C], with the grid as arguments of its own."""
    names = ("num_frames", "height", "width")
    t, h, w = (given.get(name) for name in names)
    if t is None or h is None or w is None:
        raise ValueError(f"a converted {type(model).__name__} needs {', '.join(names)}")
    return int(t), int(h), int(w)


@dataclass(frozen=True)
class Site:
    """Where a class has its self-attention over video."""

    grid: GridReader
    blocks: str = "transformer_blocks"
    attention: str = "attn1"


CONVERTIBLE: dict[str, Site] = {
    "WanTransformer3DModel": Site(_of_latents, "blocks"),
    "SkyReelsV2Transformer3DModel": Site(_of_latents, "blocks"),
    "ChronoEditTransformer3DModel": Site(_of_latents, "blocks"),
    "LTXVideoTransformer3DModel": Site(_of_sizes),
    "LTX2VideoTransformer3DModel": Site(_of_sizes),
    "CosmosTransformer3DModel": Site(_of_latents),
    "AllegroTransformer3DModel": Site(_of_latents),
    "Kandinsky5Transformer3DModel": Site(
        _of_channels_last, "visual_transformer_blocks", "self_attention"
    ),
}
"""By the class that config.json names."""

JOINT = (
    "HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel",
    "HunyuanVideoFramepackTransformer3DModel", "CogVideoXTransformer3DModel",
    "ConsisIDTransformer3DModel", "MochiTransformer3DModel", "EasyAnimateTransformer3DModel",
)  # fmt: skip
"""Classes whose video and text tokens attend to each other in one softmax."""


def converted_config(source: Source, settings: AttentionConfig) -> Source:
    """`source` as a model whose attention is `settings`; nothing is built or written.

    Returns:
        `source` itself where it is such a model already.

    Raises:
        InputError: the class cannot be converted, or the folder's model is, but otherwise.
    """
    where, saved = source.folder / CONFIG_NAME, read_settings(source)
    if settings.kind == "auto" or (settings.kind == "dense" and saved is None):
        return source
    entry = _entry_of(settings)
    if saved is not None:
        if _entry_of(saved) == entry:
            return source
        raise InputError(
            f"{where}: already converted, with attention {source.config[ENTRY]}",
            "convert the original, or leave attention.kind=auto to keep what it has",
        )
    if settings.num_register_tokens:
        raise InputError(
            f"attention.num_register_tokens={settings.num_register_tokens}: register tokens are "
            "not there for pretrained models",
            "set it to 0",
        )
    _site_of(source.class_name, str(where))
    return replace(source, config={**source.config, ENTRY: entry})


def read_settings(source: Source, backend: str = "auto") -> AttentionConfig | None:
    """What the source's config.json says of converted attention; None where it is as it was.

    Raises:
        InputError: an entry that is not ours, or damaged.
    """
    entry = source.config.get(ENTRY)
    if entry is None:
        return None
    try:
        settings = AttentionConfig.model_validate({**entry, "backend": backend})
        if settings.kind in _KEPT:
            raise ValueError(f"kind {settings.kind!r}")
    except (TypeError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"msg": str(error)}
        path = ".".join(map(str, (ENTRY, *first.get("loc", ()))))
        raise InputError(
            f"{source.folder / CONFIG_NAME}: {path}: {first['msg']}",
            "copy the file again, or remove the entry to load the model with its own attention",
        ) from None
    return settings


def convert(model: nn.Module, settings: AttentionConfig) -> nn.Module:
    """Make the video self-attention of a diffusers model local, in place; returns `model`.

    With zero offsets, as they begin, and a window that covers the grid, it computes what it did
    before. `save_pretrained` and `save_config` of the model write what `megaslide.load` needs.

    Args:
        model: of a class in `CONVERTIBLE`; its parameters may be on the meta device.
        settings: kind, window, layers and offsets. New parameters have the dtype of each
            attention's projections, and lie on the device of the default tensor.

    Raises:
        InputError: a class, layers or groups of offsets that do not fit.
        ValueError: converted already, or a kind that converts nothing.
    """
    if settings.kind in _KEPT:
        raise ValueError(f"attention.kind={settings.kind!r} converts nothing")
    site = _site_of(type(model).__name__, type(model).__name__)
    blocks = list(model.get_submodule(site.blocks).children())
    changed: dict[nn.Module, tuple[nn.Module, VideoAttention]] = {}
    for number, index in enumerate(chosen_layers(settings.layers, len(blocks))):
        attention = blocks[index].get_submodule(site.attention)
        if hasattr(attention, _PREFIX):
            raise ValueError(f"{site.blocks}.{index}.{site.attention} is converted already")
        # Every other of the converted blocks shifts its windows, whichever blocks they are.
        changed[blocks[index]] = (attention, _operator(attention, settings, number % 2 == 1))
    localize(model, changed, site.grid)
    config: Any = model
    config.register_to_config(**{ENTRY: _entry_of(settings)})
    return model


def added_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that conversion has added."""
    return frozenset(n for n, _ in model.named_parameters() if _PREFIX in n.split("."))


def chosen_layers(layers: str | tuple[int, ...], count: int) -> list[int]:
    """Indices of the converted blocks out of `count`: all, those listed, or 0, k, 2k, ...

    Raises:
        InputError: an index that is no block.
    """
    if layers == "all":
        return list(range(count))
    if isinstance(layers, str):
        return list(range(0, count, int(layers.removeprefix("every-"))))
    if unknown := [n for n in layers if not 0 <= n < count]:
        raise InputError(
            f"attention.layers={list(layers)}: no blocks {unknown}", f"use 0 to {count - 1}"
        )
    return sorted(set(layers))


def _operator(attention: Any, settings: AttentionConfig, shifted: bool) -> VideoAttention:
    query = attention.to_query if hasattr(attention, "to_query") else attention.to_q
    heads = attention.num_heads if hasattr(attention, "num_heads") else attention.heads
    if heads % settings.offset_groups:
        raise InputError(
            f"attention.offset_groups={settings.offset_groups} does not divide the {heads} heads",
            "use a divisor of it",
        )
    operator = VideoAttention(
        settings, channels=query.in_features, value_channels=query.out_features, shifted=shifted
    )
    return operator.to(query.weight.dtype)


def _site_of(class_name: str, where: str) -> Site:
    if class_name in CONVERTIBLE:
        return CONVERTIBLE[class_name]
    joint = ": its attention is joint over video and text" if class_name in JOINT else ""
    prefix = "" if where == class_name else f"{where}: "
    raise InputError(
        f"{prefix}the attention of {class_name} cannot be converted yet{joint}",
        f"set attention.kind=auto to keep it; converted are {', '.join(sorted(CONVERTIBLE))}",
    )


def _entry_of(settings: AttentionConfig) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude=_NOT_SAVED)
