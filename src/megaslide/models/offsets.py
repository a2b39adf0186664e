"""Offsets of deformable attention: where they come from, and why no tap can leave its halo.

The streaming planner and the tiled kernels both rely on a fixed halo of `offset_range` voxels
around the undeformed window, so the bound is part of the model, not a loss or a clip.

**The bound.** A raw value v gives the displacement R·tanh(v) on an axis of range R. An affine
offset adds up to four contributions on an axis a: the slide s_a, and τ_b·M_ba for each window axis
b, where |τ_b| ≤ m_b = (k_b − 1)/2. They share the axis's budget. With raw values v_0 (slide) and
v_b (rows of M) and n = |v_0| + Σ_b |v_b|,

    s_a = R_a·v_0·tanh(n)/n        M_ba = R_a·v_b·tanh(n)/n / m_b   (0 where m_b = 0)

so that |s_a| + Σ_b m_b·|M_ba| = R_a·tanh(n) < R_a whatever the raw values: the slide alone, or one
row alone, may use the whole range, and together they trade it. Clamping to the volume only brings a
point nearer to its undeformed position, which lies inside. Near zero tanh(n)/n is 1, so the map is
R·v to first order and every raw value has a gradient from the first step. Windows cut to a short
axis have smaller |τ| than the uncut one, which is the one used here.

Shapes: B T H W D as in layers · G offset groups · K = kt·kh·kw taps · axes in order (t, h, w).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaslide.models.layers import DepthwiseConv3d, Grid, ZeroLinear
from megaslide.ops.deformable_attention import Kind, offset_channels

Range = tuple[float, float, float]
# Keeps the bound strict after fp32 rounding of the sums and of tanh.
_MARGIN = 1 - 2**-16


class OffsetNet(nn.Module):
    """Depthwise 3D convolution, GELU and a zero-initialised linear layer, bounded; fp32 offsets.

    Args:
        hidden_size: D.
        window: taps per axis (t, h, w).
        kind: "shift", "affine" or "tap".
        offset_range: voxels per axis that no tap is displaced beyond.
        groups: G, sets of offsets.
    """

    def __init__(
        self, hidden_size: int, *, window: Grid, kind: Kind, offset_range: Range, groups: int
    ) -> None:
        super().__init__()
        self.window, self.kind, self.groups = window, kind, groups
        self.offset_range = offset_range
        self.conv = DepthwiseConv3d(hidden_size)
        self.proj = ZeroLinear(hidden_size, groups * offset_channels(kind, window))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H, W, D] to fp32 [B, T, H, W, G, 3 | 12] or, for "tap", [B, T, H, W, G, K, 3]."""
        features = F.gelu(self.conv(x), approximate="tanh")
        with _full_precision(x):
            raw = F.linear(features.float(), self.proj.weight.float(), self.proj.bias.float())
        raw = raw.unflatten(-1, (self.groups, -1))
        return bound_offsets(raw, self.kind, self.window, self.offset_range)


def _full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would round raw offsets to bf16: 1/64 of a voxel at a displacement of 3."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def bound_offsets(raw: Tensor, kind: Kind, window: Grid, offset_range: Range) -> Tensor:
    """Raw values to offsets in voxels, by the formula at the head of this file.

    Args:
        raw: [..., 3 | 12 | 3K], any real values.

    Returns:
        the same shape, or [..., K, 3] for "tap".
    """
    limit = _MARGIN * _constant(offset_range, raw)
    if kind == "affine":
        return _bound_affine(raw, limit, window)
    displacement = torch.tanh(raw) if kind == "shift" else torch.tanh(raw.unflatten(-1, (-1, 3)))
    return limit * displacement


def _bound_affine(raw: Tensor, limit: Tensor, window: Grid) -> Tensor:
    reach = _constant([1.0, *((k - 1) / 2 for k in window)], raw)[:, None]  # slide, then m_b
    v = raw.unflatten(-1, (4, 3)) * (reach > 0)  # rows: slide, M_t, M_h, M_w; columns: axis a
    n = v.abs().sum(dim=-2, keepdim=True).clamp_min(1e-6)  # tanh(n)/n is 1 in fp32 below that
    displacement = limit * v * (torch.tanh(n) / n)
    return (displacement / reach.clamp_min(0.5)).flatten(-2)


def _constant(values: Sequence[float], like: Tensor) -> Tensor:
    """A small vector made on the device; copying one there would make the host wait for it."""
    return torch.stack([like.new_full((), value) for value in values])
