"""The models under comparison: one `VideoDiT`, differing in its self-attention alone.

The controls are arms like any other: a fixed window that reaches as far as a deformed one can, a
fixed window with as many parameters as a deformable one, and an offset network whose offsets are
held at zero.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from benchmarks.quality.worlds import CHANNELS
from megaslide.errors import InputError
from megaslide.models.dit import VideoDiTConfig, count_parameters

HEADS = 4
REGISTERS = 4
TEXT_DIM = 8
"""There are no captions: one text token of zeros."""

BASE: dict[str, Any] = {
    "in_channels": CHANNELS,
    "text_dim": TEXT_DIM,
    "hidden_size": 64,
    "num_layers": 4,
    "num_attention_heads": HEADS,
    "patch_size": (1, 1, 1),
    "freq_dim": 64,
    "window": (3, 3, 3),
}
FIXED = {"attention_kind": "neighborhood"}
REACH = (5, 9, 9)
"""What a 3x3x3 window can see when no tap moves by more than (1, 3, 3) voxels."""
LONGER = {"fixed-longer": 1.75, "fixed-533-longer": 1.55, "fixed-longer-large": 1.35}
"""Arms that train for more steps than the others, by how many times as many: the control for time,
compared with arms that took no more of it."""
LARGE = "-large"
"""Ends the name of an arm of a larger model."""
LARGER: dict[str, Any] = {"hidden_size": 128, "num_layers": 6}


@functools.cache  # counts parameters of many models: too slow to do again for every result
def arms() -> dict[str, VideoDiTConfig]:
    """Every arm by name: `+r` has registers, `-heads` a set of offsets per head, `-large` is of a
    larger model."""
    return dict(_with_and_without_registers(_plain_arms())) | _large_arms()


def arm(name: str) -> VideoDiTConfig:
    """One arm.

    Raises:
        InputError: there is none of that name; lists the names.
    """
    known = arms()
    if name not in known:
        raise InputError(f"arm {name!r} is unknown", f"choose from {', '.join(known)}")
    return known[name]


def _plain_arms() -> dict[str, dict[str, Any]]:
    deforming: dict[str, dict[str, Any]] = {}
    for kind in ("shift", "affine", "tap"):
        deforming[kind] = {"offset_kind": kind}
        deforming[f"{kind}-heads"] = {"offset_kind": kind, "offset_groups": HEADS}
    return {
        "dense": {"attention_kind": "dense"},
        "swin": {"attention_kind": "swin"},
        "fixed": FIXED,
        "fixed-longer": FIXED,
        "fixed-355": {**FIXED, "window": (3, 5, 5)},
        "fixed-533": {**FIXED, "window": (5, 3, 3)},
        "fixed-533-longer": {**FIXED, "window": (5, 3, 3)},
        "fixed-reach": {**FIXED, "window": REACH},
        "affine-355": {"offset_kind": "affine", "window": (3, 5, 5)},
        **deforming,
        "affine-held": {"offset_kind": "affine", "offset_range": (0.0, 0.0, 0.0)},
        "fixed-as-affine": {**FIXED, "mlp_ratio": matched_mlp_ratio(deforming["affine"])},
        "fixed-as-tap": {**FIXED, "mlp_ratio": matched_mlp_ratio(deforming["tap"])},
    }


def _large_arms() -> dict[str, VideoDiTConfig]:
    plain = _plain_arms()
    return {
        f"{name}{LARGE}": VideoDiTConfig(**BASE | plain[name] | LARGER)
        for name in ("fixed", "fixed-longer", "affine")
    }


def matched_mlp_ratio(options: dict[str, Any]) -> float:
    """MLP ratio that gives the fixed window the parameter count of the arm with `options`.

    Within one hidden unit per block; the nearest count is taken.
    """
    wanted = count_parameters(VideoDiTConfig(**BASE | options))
    fixed = VideoDiTConfig(**BASE | FIXED)
    width = fixed.hidden_size
    inner = round(width * fixed.mlp_ratio)
    one_more = dataclasses.replace(fixed, mlp_ratio=(inner + 1) / width)
    per_unit = count_parameters(one_more) - count_parameters(fixed)
    return (inner + round((wanted - count_parameters(fixed)) / per_unit)) / width


def _with_and_without_registers(
    plain: dict[str, dict[str, Any]],
) -> Iterator[tuple[str, VideoDiTConfig]]:
    for name, options in plain.items():
        yield name, VideoDiTConfig(**BASE | options)
        yield f"{name}+r", VideoDiTConfig(**BASE | options, num_register_tokens=REGISTERS)
