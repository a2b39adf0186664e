"""Sizes of VideoDiT, and how a run's config becomes one checked model configuration.

A preset is named after its number of parameters, counted by a test with 16 latent channels, 4096
text channels and the default attention: a name is a claim. Every combination that cannot be built
is refused here, with the key, the number and the fix, before anything is allocated.
"""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from megaslide.errors import InputError
from megaslide.models.attention import AttentionSettings
from megaslide.models.layers import Grid, rope_pairs
from megaslide.ops.deformable_attention import Kind

if TYPE_CHECKING:
    from megaslide.config import AttentionConfig, ModelConfig

SIZES = ("patch_size", "hidden_size", "num_layers", "num_attention_heads")
"""Fields of the `model` section that replace a preset's."""

_ATTENTION_KINDS = ("deformable", "neighborhood", "swin", "dense")
_OFFSET_KINDS = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A size of VideoDiT; heads have hidden_size / num_attention_heads channels."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    patch_size: Grid = (1, 2, 2)
    mlp_ratio: float = 4.0


PRESETS: dict[str, Preset] = {
    "tiny": Preset(hidden_size=128, num_layers=6, num_attention_heads=4),
    "small": Preset(hidden_size=384, num_layers=12, num_attention_heads=6),
    "base": Preset(hidden_size=768, num_layers=12, num_attention_heads=12),
    "1b": Preset(hidden_size=1536, num_layers=26, num_attention_heads=12),
    "5b": Preset(hidden_size=3072, num_layers=32, num_attention_heads=24),
    "14b": Preset(hidden_size=5120, num_layers=33, num_attention_heads=40),
    "30b": Preset(hidden_size=6144, num_layers=49, num_attention_heads=48),
    "105b": Preset(hidden_size=8192, num_layers=97, num_attention_heads=64),
}


@dataclass(frozen=True, kw_only=True)
class VideoDiTConfig:
    """Everything a `VideoDiT` is built from; saved as its config.json.

    Raises:
        InputError: a combination that cannot be built; names the field, the number and the fix.
    """

    in_channels: int
    """Channels of the latents, in and out."""
    text_dim: int
    """Channels of the text embeddings."""
    hidden_size: int = 128
    num_layers: int = 6
    num_attention_heads: int = 4
    patch_size: Grid = (1, 2, 2)
    """Latent voxels per token (t, h, w)."""
    mlp_ratio: float = 4.0
    """Inner width of the MLP over hidden_size."""
    freq_dim: int = 256
    """Channels of the timestep sinusoid."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    num_register_tokens: int = 0
    """Learned global tokens that every query also attends to."""
    attention_kind: str = "deformable"
    window: Grid = (3, 3, 3)
    """Taps per axis (t, h, w) in tokens."""
    offset_kind: Kind = "affine"
    offset_range: tuple[float, float, float] = (1.0, 3.0, 3.0)
    """Voxels per axis that no tap is displaced beyond."""
    offset_groups: int = 1
    """Sets of offsets."""
    conv_branch: bool = False
    backend: str = "auto"
    """Implementation of the attention operator."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_heads(self)
        _check_attention(self)

    @property
    def attention(self) -> AttentionSettings:
        """The fields that one self-attention module is built from."""
        return AttentionSettings(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            kind=self.attention_kind,
            window=self.window,
            offset_kind=self.offset_kind,
            offset_range=self.offset_range,
            offset_groups=self.offset_groups,
            conv_branch=self.conv_branch,
            backend=self.backend,
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON has them: tuples as lists."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "VideoDiTConfig":
        """Inverse of `to_dict`; keys that begin with an underscore are not ours and are skipped.

        Raises:
            InputError: unknown or missing keys, or a combination that cannot be built.
        """
        given = {k: v for k, v in values.items() if not k.startswith("_")}
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(given) - set(names)):
            raise InputError(f"unknown keys {unknown}", f"keep to {', '.join(names)}")
        if missing := sorted({"in_channels", "text_dim"} - set(given)):
            raise InputError(f"missing keys {missing}", "add them")
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in given.items()
        }
        return cls(**fields)


def resolve_config(
    model: "ModelConfig", attention: "AttentionConfig", *, in_channels: int, text_dim: int
) -> VideoDiTConfig:
    """The preset with the config's overrides, checked.

    Raises:
        InputError: unknown preset (the nearest is named), or a combination that cannot be built.
    """
    values: dict[str, Any] = dataclasses.asdict(_preset(model.preset))
    values |= {k: v for k in SIZES if (v := getattr(model, k)) is not None}
    kind = "deformable" if attention.kind == "auto" else attention.kind
    values |= attention.model_dump(exclude={"kind", "layers"}) | {"attention_kind": kind}
    return VideoDiTConfig(in_channels=in_channels, text_dim=text_dim, **values)


def _preset(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InputError(f"model.preset={name!r} is unknown", f"{hint}choose from {', '.join(PRESETS)}")


def _check_sizes(config: VideoDiTConfig) -> None:
    names = ["in_channels", "text_dim", "hidden_size", "num_layers", "num_attention_heads"]
    for name in [*names, "freq_dim", "offset_groups", "mlp_ratio", "rope_theta"]:
        if getattr(config, name) <= 0:
            raise InputError(f"{name}={getattr(config, name)} is not positive", "make it 1 or more")
    if config.num_register_tokens < 0:
        raise InputError(f"num_register_tokens={config.num_register_tokens}", "make it 0 or more")
    if config.freq_dim % 2:
        raise InputError(f"freq_dim={config.freq_dim} is odd", "make it even: cosines and sines")
    for name in ("patch_size", "window"):
        triple = getattr(config, name)
        if len(triple) != 3 or min(triple) < 1:
            raise InputError(f"{name}={triple}", "give three numbers (t, h, w), each 1 or more")


def _check_heads(config: VideoDiTConfig) -> None:
    size, heads, groups = config.hidden_size, config.num_attention_heads, config.offset_groups
    if size % heads:
        raise InputError(
            f"hidden_size={size} is not divisible by num_attention_heads={heads}",
            f"use num_attention_heads in {_divisors_near(size, heads)} or hidden_size="
            f"{size - size % heads + heads}",
        )
    try:
        rope_pairs(size // heads)
    except ValueError as error:
        raise InputError(
            f"hidden_size={size} with num_attention_heads={heads}: {error}",
            "choose num_attention_heads so that hidden_size / heads is even and 6 or more",
        ) from None
    if heads % groups:
        raise InputError(
            f"offset_groups={groups} does not divide num_attention_heads={heads}",
            f"use offset_groups in {_divisors_near(heads, groups)}",
        )


def _check_attention(config: VideoDiTConfig) -> None:
    choices = {"attention_kind": _ATTENTION_KINDS, "offset_kind": _OFFSET_KINDS}
    for name, accepted in choices.items():
        if getattr(config, name) not in accepted:
            raise InputError(
                f"{name}={getattr(config, name)!r} is unknown", f"choose from {', '.join(accepted)}"
            )
    limits = config.offset_range
    if len(limits) != 3 or min(limits) < 0:
        raise InputError(f"offset_range={limits}", "give three voxel counts (t, h, w), 0 or more")


def _divisors_near(number: int, target: int) -> list[int]:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return sorted(sorted(divisors, key=lambda n: abs(n - target))[:3])
