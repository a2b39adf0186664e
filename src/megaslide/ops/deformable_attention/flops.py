"""Arithmetic of 3D-DSA, told to torch's FLOP counter; it knows no custom operators by itself.

The count is that of the definition, so that a rate in FLOP/s compares kernels: a kernel that
computes products with a whole halo does more than is counted here, and gets no credit for it. As
torch counts, a multiply and an add are two; softmax, coordinates and corner weights are left out.

Per query, head and tap, forward:

    q·k and p·v                        2d + 2d
    with offsets: a score is interpolated from 8 voxels' products,
    and a probability spread to them   16 + 16

and backward, where the scores are computed again as every fused kernel does:

    q·k again, dp = g·v, dq, dk, dv    5 · 2d
    with offsets: q·k, g·v interpolated,
    p, ds spread                       4 · 16
    gradient of a tap's position: the
    gradients of 8 corner weights, each
    times its slope on 3 axes          8 · 3 + 8 · 3 · 2

Extra keys cost 4d and 10d. Trilinear interpolation of scores instead of vectors is the definition
in `reference`: interpolating k and v themselves would take 32d more per tap.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

__all__ = ["backward_flop", "forward_flop"]

_CORNERS = 8
_SAMPLING_FORWARD = 2 * 2 * _CORNERS
_SAMPLING_BACKWARD = 4 * 2 * _CORNERS + _CORNERS * 3 + _CORNERS * 3 * 2


def forward_flop(
    q: Sequence[int], window: Sequence[int], *, extra: int = 0, offsets: bool = True
) -> int:
    """FLOP of one forward.

    Args:
        q: shape [B, T, H, W, heads, d].
        window: taps per axis, cut to the volume.
        extra: keys besides the window that every query sees.
        offsets: whether taps lie between voxels.
    """
    sampling = _SAMPLING_FORWARD if offsets else 0
    return _count(q, window, extra, products=2, sampling=sampling)


def backward_flop(
    q: Sequence[int], window: Sequence[int], *, extra: int = 0, offsets: bool = True
) -> int:
    """FLOP of one backward, to all inputs; arguments as `forward_flop`."""
    sampling = _SAMPLING_BACKWARD if offsets else 0
    return _count(q, window, extra, products=5, sampling=sampling)


def _count(
    q: Sequence[int], window: Sequence[int], extra: int, *, products: int, sampling: int
) -> int:
    *queries, d = q  # heads counted
    taps = math.prod(window)
    return math.prod(queries) * (products * 2 * d * (taps + extra) + sampling * taps)


@register_flop_formula(
    [torch.ops.megaslide.deformable_attention, torch.ops.megaslide.deformable_attention_triton]
)
def _forward_of_operator(
    q: Any, k: Any, v: Any, offsets: Any, extra_k: Any, extra_v: Any, window: Sequence[int],
    *_: Any, out_shape: Any = None,
) -> int:  # fmt: skip
    extra = 0 if extra_k is None else extra_k[1]
    return forward_flop(q, window, extra=extra, offsets=offsets is not None)


@register_flop_formula(
    [
        torch.ops.megaslide.deformable_attention_backward,
        torch.ops.megaslide.deformable_attention_triton_backward,
    ]
)
def _backward_of_operator(
    grad_out: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, offsets: Any, extra_k: Any,
    extra_v: Any, window: Sequence[int], *_: Any, out_shape: Any = None,
) -> int:  # fmt: skip
    extra = 0 if extra_k is None else extra_k[1]
    return backward_flop(q, window, extra=extra, offsets=offsets is not None)
