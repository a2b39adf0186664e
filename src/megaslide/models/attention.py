"""Self-attention over video tokens: four kinds behind one interface, so that comparing is fair.

All kinds share projections, qk-norm, rotary positions, register tokens and the optional
convolution branch; they differ in `attend` only. A dense, shifted-window or neighbourhood baseline
is therefore the same model as the deformable one minus the idea under test.

Shapes: B batch · T H W token grid · N = T·H·W tokens, t-major · D hidden size · d channels of a
head · E register tokens · k window size per axis · P tokens of one window.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaslide.models.layers import Grid, Linear, RMSNorm, Rope, ZeroDepthwiseConv3d, apply_rope
from megaslide.models.offsets import OffsetNet, Range
from megaslide.ops.deformable_attention import Kind, cut_window, deformable_attention

Extra = tuple[Tensor, Tensor] | None
"""Keys and values that every query also sees."""
Frames = tuple[int, int]
"""The first frame, and the one after the last."""


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """What one self-attention module is built from; checked by `VideoDiTConfig`."""

    hidden_size: int
    num_heads: int
    kind: str = "deformable"
    window: Grid = (3, 3, 3)
    offset_kind: Kind = "affine"
    offset_range: Range = (1.0, 3.0, 3.0)
    offset_groups: int = 1
    conv_branch: bool = False
    backend: str = "auto"


def build_attention(settings: AttentionSettings, *, block_index: int = 0) -> "SelfAttention":
    """The self-attention module of one block; odd blocks of the `swin` kind shift their windows.

    Raises:
        ValueError: unknown `settings.kind`.
    """
    match settings.kind:
        case "deformable":
            return DeformableSlideAttention(settings)
        case "neighborhood":
            return NeighborhoodAttention(settings)
        case "swin":
            return ShiftedWindowAttention(settings, shifted=block_index % 2 == 1)
        case "dense":
            return DenseAttention(settings)
    kinds = "deformable, neighborhood, swin, dense"
    raise ValueError(f"attention kind {settings.kind!r} is not one of {kinds}")


class SelfAttention(nn.Module):
    """Projections, qk-norm, rotary positions and registers around a kind's `attend`.

    Register tokens are extra keys and values of every query, made by the block's own projections;
    they carry no position.
    """

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        dim, head_dim = settings.hidden_size, settings.hidden_size // settings.num_heads
        self.num_heads = settings.num_heads
        self.to_q, self.to_k, self.to_v = Linear(dim, dim), Linear(dim, dim), Linear(dim, dim)
        self.norm_q = RMSNorm(head_dim)
        self.norm_k = RMSNorm(head_dim)
        self.conv_branch = ZeroDepthwiseConv3d(dim) if settings.conv_branch else None
        self.to_out = Linear(dim, dim)

    def forward(
        self, x: Tensor, rope: Rope, registers: Tensor | None = None, *, grid: Grid,
        own: Frames | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend within the tokens of each sample.

        Args:
            x: [B, N, D] with N = T·H·W.
            rope: cosines and sines, each [1, N, 1, d/2], of `rope_tables(grid, d)`.
            registers: [1, E, D] or None.
            grid: (T, H, W).
            own: frames whose tokens are returned; None: all.

        Returns:
            [B, N, D], dtype of the projections; N of the frames `own`.
        """
        v = self._heads(self.to_v(x))
        q = apply_rope(self.norm_q(self._heads(self.to_q(x))), rope).to(v.dtype)
        k = apply_rope(self.norm_k(self._heads(self.to_k(x))), rope).to(v.dtype)
        q, k, v = (tensor.unflatten(1, grid) for tensor in (q, k, v))  # [B, T, H, W, heads, d]
        out = self.attend(x.unflatten(1, grid), q, k, v, self._extra(registers, v)).flatten(-2)
        if self.conv_branch is not None:
            out = out + self.conv_branch(v.flatten(-2))
        if own is not None:
            out = out[:, own[0] : own[1]]
        return self.to_out(out.flatten(1, 3))

    def why_whole(self) -> str | None:
        """Why the frames of a clip cannot be computed in parts, or None where they can."""
        return "its attention relates all frames; kinds deformable and neighborhood do not"

    def reach(self, own: Frames, frames: int) -> Frames:
        """The frames, of so many, that the output on the frames `own` depends on.

        On these alone the module gives the same output for `own` as on all.
        """
        return 0, frames

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, extra: Extra) -> Tensor:
        """x [B, T, H, W, D]; q, k, v [B, T, H, W, heads, d]; extra k and v [B, E, heads, d].

        Returns [B, T, H, W, heads, d].
        """
        raise NotImplementedError

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def _extra(self, registers: Tensor | None, v: Tensor) -> Extra:
        if registers is None:
            return None
        extra_v = self._heads(self.to_v(registers))
        extra_k = self.norm_k(self._heads(self.to_k(registers))).to(v.dtype)
        batch = (v.shape[0], -1, -1, -1)
        return extra_k.expand(batch), extra_v.expand(batch)


class DenseAttention(SelfAttention):
    """Every token attends to every token, through torch's fused attention."""

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, extra: Extra) -> Tensor:
        out = _fused_attention(q.flatten(1, 3), k.flatten(1, 3), v.flatten(1, 3), extra)
        return out.unflatten(1, q.shape[1:4])


class NeighborhoodAttention(SelfAttention):
    """Every token attends to a window centred on it, shifted inward at borders."""

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        self.window = settings.window
        self.displacement = 0.0
        """Frames that no tap is displaced beyond."""
        self.convolves = settings.conv_branch
        """Whether a 3x3x3 convolution looks at the frames beside a token's own."""
        self.operator = partial(
            deformable_attention,
            window=settings.window,
            kind=settings.offset_kind,
            backend=settings.backend,
        )

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, extra: Extra) -> Tensor:
        extra_k, extra_v = (None, None) if extra is None else extra
        return self.operator(q, k, v, self.offsets(x), extra_k=extra_k, extra_v=extra_v)

    def offsets(self, x: Tensor) -> Tensor | None:
        """None: the window does not deform."""
        return None

    def why_whole(self) -> str | None:
        return None

    def reach(self, own: Frames, frames: int) -> Frames:
        """The windows of the frames `own`, moved as far as they can; and what convolutions need.

        The window of frame i begins at clamp(i - k//2, 0, frames - k) and has k frames. A tap is
        displaced by less than `displacement` frames, so the two that it lies between are within
        that of the window, rounded up. Where the window could end with the given frames, it ends
        with the clip or cannot move: its borders are where they are in the whole clip.
        """
        k = min(self.window[0], frames)
        first, last = (min(max(i - k // 2, 0), frames - k) for i in (own[0], own[1] - 1))
        moved, beside = math.ceil(self.displacement), int(self.convolves)
        return (
            max(0, min(first - moved, own[0] - beside)),
            min(frames, max(last + k + moved, own[1] + beside)),
        )


class DeformableSlideAttention(NeighborhoodAttention):
    """3D-DSA: the neighbourhood window slides, stretches and shears with learned offsets.

    At init the offsets are zero and the module equals `NeighborhoodAttention` exactly.
    """

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        self.displacement, self.convolves = settings.offset_range[0], True
        self.offset_net = OffsetNet(
            settings.hidden_size,
            window=settings.window,
            kind=settings.offset_kind,
            offset_range=settings.offset_range,
            groups=settings.offset_groups,
        )

    def offsets(self, x: Tensor) -> Tensor:
        """[B, T, H, W, D] to fp32 offsets in voxels, no tap beyond `offset_range`."""
        return self.offset_net(x)


class ShiftedWindowAttention(SelfAttention):
    """Swin: attention within disjoint windows, displaced by half a window in every other block.

    Sizes that the window does not divide are padded, and padding is masked out of the softmax;
    tokens brought together only by the cyclic shift do not see each other. An axis that one window
    covers is not shifted.
    """

    def __init__(self, settings: AttentionSettings, *, shifted: bool) -> None:
        super().__init__(settings)
        self.window, self.shifted = settings.window, shifted

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, extra: Extra) -> Tensor:
        return shifted_window_attention(q, k, v, extra, window=self.window, shifted=self.shifted)


def shifted_window_attention(
    q: Tensor, k: Tensor, v: Tensor, extra: Extra = None, *, window: Grid, shifted: bool
) -> Tensor:
    """The operator of `ShiftedWindowAttention`, for queries, keys and values made elsewhere.

    Args:
        q, k, v: [B, T, H, W, heads, d].
        extra: keys and values that every query also sees, [B, E, heads, d].
        window: tokens per axis of one window; cut to the grid where longer.
        shifted: whether windows are displaced by half a window.

    Returns:
        [B, T, H, W, heads, d].
    """
    _, t, h, w, _, _ = q.shape
    sizes = (t, h, w)
    window, shift = _plan_windows(window, sizes, shifted)
    q, k, v = (_to_windows(tensor, window, shift) for tensor in (q, k, v))
    batch, count = q.shape[:2]
    mask = _window_mask(sizes, window, shift, q.device)
    mask = None if mask is None else mask.repeat(batch, 1, 1)  # [B·windows, P, P]
    if extra is not None:
        extra = (extra[0].repeat_interleave(count, 0), extra[1].repeat_interleave(count, 0))
    out = _fused_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), extra, mask)
    return _from_windows(out.unflatten(0, (batch, count)), sizes, window, shift)


def _plan_windows(window: Grid, sizes: Grid, shifted: bool) -> tuple[Grid, Grid]:
    """Window cut to the grid, and by how many tokens each axis is rolled."""
    kt, kh, kw = cut_window(window, sizes)
    st, sh, sw = (
        k // 2 if shifted and k < size else 0 for k, size in zip((kt, kh, kw), sizes, strict=True)
    )
    return (kt, kh, kw), (st, sh, sw)


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, extra: Extra, mask: Tensor | None = None
) -> Tensor:
    """q, k, v [B, N, heads, d], extra [B, E, heads, d], mask bool [B, N, N] to [B, N, heads, d]."""
    if extra is not None:
        k, v = torch.cat([k, extra[0]], dim=1), torch.cat([v, extra[1]], dim=1)
        mask = None if mask is None else F.pad(mask, (0, extra[0].shape[1]), value=True)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mask = None if mask is None else mask.unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _to_windows(x: Tensor, window: Grid, shift: Grid) -> Tensor:
    """Pad, roll and cut [B, T, H, W, ...] into [B, windows, P, ...]."""
    sizes, trailing = x.shape[1:4], x.ndim - 4
    pads = [-size % k for size, k in zip(sizes, window, strict=True)]
    x = F.pad(x, [0, 0] * trailing + [0, pads[2], 0, pads[1], 0, pads[0]])
    x = torch.roll(x, [-s for s in shift], dims=(1, 2, 3))
    for axis, k in zip((1, 3, 5), window, strict=True):
        x = x.unflatten(axis, (-1, k))
    rest = range(7, x.ndim)
    return x.permute(0, 1, 3, 5, 2, 4, 6, *rest).flatten(4, 6).flatten(1, 3)


def _from_windows(x: Tensor, sizes: Grid, window: Grid, shift: Grid) -> Tensor:
    """Inverse of `_to_windows`: [B, windows, P, heads, d] to [B, T, H, W, heads, d]."""
    counts = [math.ceil(size / k) for size, k in zip(sizes, window, strict=True)]
    x = x.unflatten(2, window).unflatten(1, counts)
    x = x.permute(0, 1, 4, 2, 5, 3, 6, 7, 8).flatten(5, 6).flatten(3, 4).flatten(1, 2)
    x = torch.roll(x, list(shift), dims=(1, 2, 3))
    return x[:, : sizes[0], : sizes[1], : sizes[2]]


def _window_mask(sizes: Grid, window: Grid, shift: Grid, device: torch.device) -> Tensor | None:
    """Who may see whom within each window, bool [windows, P, P]; None where everyone may.

    On each axis a token belongs to the wrapped part (before the shift), the body, or the padding;
    tokens of one window see each other where all three axes agree.
    """
    if not any(shift) and not any(size % k for size, k in zip(sizes, window, strict=True)):
        return None
    region = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
    for axis, (size, k, s) in enumerate(zip(sizes, window, shift, strict=True)):
        position = torch.arange(size + -size % k, device=device)
        part = (position >= s).int() + (position >= size).int()  # 0 wrapped, 1 body, 2 padding
        region = 3 * region + part.reshape([-1 if a == axis else 1 for a in range(3)])
    labels = _to_windows(region[None, ..., None], window, shift)[0, :, :, 0]  # [windows, P]
    return labels[:, :, None] == labels[:, None, :]
