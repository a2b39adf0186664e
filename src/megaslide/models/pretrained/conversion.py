"""Which attention of a pretrained transformer becomes local, and folders of such models.

Self-attention over video tokens is converted, alone or joint with text. Every weight of the model
stays what and where it is; what is added lies under the attention module's own prefix
(`blocks.0.attn1.dsa.`), and the `attention` entry of config.json says how to build it. diffusers
ignores both with a warning and loads the base model.

Shapes: T H W token grid, as elsewhere (latent voxels over the patch size).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from torch import nn

from megaslide.config import AttentionConfig
from megaslide.errors import InputError
from megaslide.models.layers import Grid
from megaslide.models.pretrained.source import Source
from megaslide.models.pretrained.video_attention import (
    GridReader,
    TextPlace,
    VideoAttention,
    localize,
)
from megaslide.weights import CONFIG_NAME

ENTRY = "attention"
"""Key of config.json."""
_KEPT = ("auto", "dense")
"""Kinds that leave a pretrained model's attention as it is."""
_PREFIX = "dsa"


def _tokens(config: Any, sizes: Any) -> Grid:
    """Latent voxels T, H, W over the patch size, which some configs have as two numbers."""
    size = config.patch_size
    if isinstance(size, int):
        size = (getattr(config, "patch_size_t", None) or 1, size, size)
    t, h, w = (int(n) // int(p) for n, p in zip(sizes, size, strict=True))
    return t, h, w


def _of_latents(model: Any, given: Mapping[str, Any]) -> Grid:
    """hidden_states [B, C, T·pt, H·ph, W·pw]."""
    return _tokens(model.config, given["hidden_states"].shape[2:])


def _of_channels_last(model: Any, given: Mapping[str, Any]) -> Grid:
    """hidden_states [B, T·pt, H·ph, W·pw, C]."""
    return _tokens(model.config, given["hidden_states"].shape[1:4])


def _of_frames_first(model: Any, given: Mapping[str, Any]) -> Grid:
    """hidden_states [B, T·pt, C, H·ph, W·pw]."""
    _, t, _, h, w = given["hidden_states"].shape
    return _tokens(model.config, (t, h, w))


def _of_sizes(model: Any, given: Mapping[str, Any]) -> Grid:
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
    modules: Mapping[str, str] = field(default_factory=lambda: {"transformer_blocks": "attn1"})
    """Lists of blocks in the order of the forward pass, and the attention's name in each."""
    text: TextPlace = None
    """Where text tokens are that take part in it."""


_WAN = Site(_of_latents, {"blocks": "attn1"})
_COGVIDEOX = Site(_of_frames_first, text="before")
CONVERTIBLE: dict[str, Site] = {
    "WanTransformer3DModel": _WAN,
    "SkyReelsV2Transformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    "LTXVideoTransformer3DModel": Site(_of_sizes),
    "LTX2VideoTransformer3DModel": Site(_of_sizes),
    "CosmosTransformer3DModel": Site(_of_latents),
    "AllegroTransformer3DModel": Site(_of_latents),
    "Kandinsky5Transformer3DModel": Site(
        _of_channels_last, {"visual_transformer_blocks": "self_attention"}
    ),
    "CogVideoXTransformer3DModel": _COGVIDEOX,
    "ConsisIDTransformer3DModel": _COGVIDEOX,
    "MochiTransformer3DModel": Site(_of_latents, text="after"),
    "HunyuanVideoTransformer3DModel": Site(
        _of_latents, {"transformer_blocks": "attn", "single_transformer_blocks": "attn"}, "after"
    ),
    "HunyuanVideo15Transformer3DModel": Site(_of_latents, {"transformer_blocks": "attn"}, "after"),
}
"""By the class that config.json names."""


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
    blocks = [
        (f"{names}.{name}.{attention}", block, block.get_submodule(attention))
        for names, attention in site.modules.items()
        for name, block in model.get_submodule(names).named_children()
    ]
    changed: dict[nn.Module, tuple[nn.Module, VideoAttention]] = {}
    for number, index in enumerate(chosen_layers(settings.layers, len(blocks))):
        name, block, attention = blocks[index]
        if hasattr(attention, _PREFIX):
            raise ValueError(f"{name} is converted already")
        # Every other of the converted blocks shifts its windows, whichever blocks they are.
        changed[block] = (attention, _operator(attention, settings, number % 2 == 1))
    localize(model, changed, site.grid, site.text)
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
        settings, channels=query.in_features, num_heads=heads, value_channels=query.out_features,
        shifted=shifted,
    )  # fmt: skip
    return operator.to(query.weight.dtype)


def _site_of(class_name: str, where: str) -> Site:
    if class_name in CONVERTIBLE:
        return CONVERTIBLE[class_name]
    prefix = "" if where == class_name else f"{where}: "
    raise InputError(
        f"{prefix}the attention of {class_name} cannot be converted",
        f"set attention.kind=auto to keep it; converted are {', '.join(sorted(CONVERTIBLE))}",
    )


def _entry_of(settings: AttentionConfig) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude={"backend"})
