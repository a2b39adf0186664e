"""Layers that every transformer block shares, so that the attention kinds differ in attention only.

Each layer owns its initialisation in `reset_parameters` and nothing re-initialises it from outside:
a layer that must start at zero (gates, offsets, the head) cannot be overwritten by a later, global
init. The same method fills a model that was built on the meta device.

Shapes: B batch · C latent channels · T H W latent voxels, then token grid · N = T·H·W tokens,
t-major · D hidden size · L text tokens · d channels of a head · p = (pt, ph, pw) patch.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int, int]
Rope = tuple[Tensor, Tensor]


class Linear(nn.Linear):
    """`nn.Linear` with Xavier-uniform weight and zero bias."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ZeroLinear(nn.Linear):
    """`nn.Linear` that starts at zero: a branch that is absent until training opens it."""

    def reset_parameters(self) -> None:
        _fill_zeros(self)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last axis, in its weight's dtype whatever autocast does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] to the same shape, dtype of the weight; statistics in fp32."""
        return super().forward(x.to(self.weight.dtype))


class DepthwiseConv3d(nn.Conv3d):
    """3×3×3 depthwise convolution over a grid of tokens, zero-padded, channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H, W, D] to the same shape, dtype of the weight."""
        out = _DepthwiseConv.apply(x, self.weight)
        return out if self.bias is None else out + self.bias


class ZeroDepthwiseConv3d(DepthwiseConv3d):
    """`DepthwiseConv3d` that starts at zero."""

    def reset_parameters(self) -> None:
        _fill_zeros(self)


def _fill_zeros(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


class _DepthwiseConv(torch.autograd.Function):
    """The input gradient of a depthwise convolution is the convolution with the mirrored kernel.

    Written out because torch's CPU backward takes 14 to 20 times its forward for it. On the CPU
    the weight gradient is summed in fp32, which is also several times faster there than bf16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _depthwise(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(weight.dtype).contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _depthwise(grad, weight.flip(2, 3, 4)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _depthwise_weight_grad(x, grad, weight)
        return grad_x, grad_weight


def _depthwise(x: Tensor, weight: Tensor) -> Tensor:
    out = F.conv3d(x.permute(0, 4, 1, 2, 3), weight, padding=1, groups=x.shape[-1])
    return out.permute(0, 2, 3, 4, 1)


def _depthwise_weight_grad(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    dtype = wide if x.device.type == "cpu" else weight.dtype
    x, grad = (tensor.to(dtype).permute(0, 4, 1, 2, 3) for tensor in (x, grad))
    ones, mask = [1, 1, 1], [False, True, False]
    _, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad, x, weight.to(dtype), None, ones, ones, ones, False, [0, 0, 0], x.shape[1], mask
    )
    return grad_weight.to(weight.dtype)


def patchify(x: Tensor, patch: Grid) -> Tensor:
    """[B, C, T, H, W] to [B, N, C·pt·ph·pw]; every axis must be a multiple of its patch."""
    b, c, *sizes = x.shape
    (pt, ph, pw), (t, h, w) = patch, (n // p for n, p in zip(sizes, patch, strict=True))
    x = x.reshape(b, c, t, pt, h, ph, w, pw)
    return x.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, t * h * w, c * pt * ph * pw)


def unpatchify(tokens: Tensor, grid: Grid, patch: Grid) -> Tensor:
    """Inverse of `patchify`: [B, N, C·pt·ph·pw] to [B, C, T·pt, H·ph, W·pw]."""
    (t, h, w), (pt, ph, pw) = grid, patch
    b, c = tokens.shape[0], tokens.shape[-1] // math.prod(patch)
    x = tokens.reshape(b, t, h, w, c, pt, ph, pw).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return x.reshape(b, c, t * pt, h * ph, w * pw)


class PatchEmbed(nn.Module):
    """Linear map of flattened patches: [B, C, T, H, W] to tokens [B, N, D]."""

    def __init__(self, in_channels: int, patch_size: Grid, hidden_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = Linear(in_channels * math.prod(patch_size), hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(patchify(x, self.patch_size).to(self.proj.weight.dtype))


class FinalLayer(nn.Module):
    """Norm modulated by the timestep, then tokens back to latents; predicts zero at first.

    The noisy latents come back in as well, every channel with a learned gain of the timestep: the
    best velocity that looks at one number alone is such a gain, and blocks that need not carry the
    input through learn the rest sooner (the learned form of c_skip in Karras et al. 2022,
    arXiv:2206.00364).

    [B, N, D], the timestep embedding [B, D] and latents [B, C, T·pt, H·ph, W·pw] to latents.
    """

    def __init__(self, hidden_size: int, patch_size: Grid, out_channels: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.modulation = ZeroLinear(hidden_size, 2 * hidden_size)
        self.gain = ZeroLinear(hidden_size, out_channels)
        self.proj = ZeroLinear(hidden_size, out_channels * math.prod(patch_size))

    def forward(self, x: Tensor, embedded_timestep: Tensor, latents: Tensor, grid: Grid) -> Tensor:
        timestep = F.silu(embedded_timestep)
        shift, scale = self.modulation(timestep).float().unsqueeze(1).chunk(2, -1)
        change = unpatchify(self.proj(modulated_norm(x, shift, scale)), grid, self.patch_size)
        gain = self.gain(timestep).float()[:, :, None, None, None]
        return torch.addcmul(change.float(), gain, latents.float())


def layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm without weights over the last axis; statistics in fp32, dtype of `x` out."""
    return F.layer_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm(x)·(1 + scale) + shift, rounded once: x [B, N, D]; shift, scale fp32 [B, 1, D].

    1 + scale is added in fp32, where a small scale is not lost against the one.
    """
    return torch.addcmul(shift.to(x.dtype), layer_norm(x), (1 + scale).to(x.dtype))


def sinusoid(value: Tensor, channels: int, *, base: float = 10000.0) -> Tensor:
    """Cosines then sines of value·base^(-2i/channels), fp32: [B] to [B, channels]."""
    half = channels // 2
    index = torch.arange(half, dtype=torch.float32, device=value.device)
    angle = value.float()[:, None] * torch.exp(-math.log(base) * index / half)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class PositionEmbedding(nn.Module):
    """Where a token is: a learned map of each axis's sinusoids, summed, [1, N, D] for a grid.

    Rotary positions tell how far two tokens are apart, and only to the attention's scores. What is
    at which wall, or which neighbour a value comes from, needs an absolute position in the tokens
    themselves; without one a small model paints every token by itself (docs/experiments.md).
    """

    CHANNELS = 64
    BASE = 256.0
    """Period of the slowest sinusoid over 2π, in tokens: about the longest axis in use."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.ModuleList(Linear(self.CHANNELS, hidden_size, bias=False) for _ in range(3))

    def forward(self, grid: Grid) -> Tensor:
        """Grid (T, H, W) to [1, T·H·W, D], dtype of the weight."""
        t, h, w = (
            proj(self._features(size, proj.get_parameter("weight")))
            for size, proj in zip(grid, self.proj, strict=True)
        )  # each [size, D]
        return (t[:, None, None] + h[:, None] + w).flatten(0, 2).unsqueeze(0)

    def _features(self, size: int, like: Tensor) -> Tensor:
        positions = torch.arange(size, device=like.device)
        return sinusoid(positions, self.CHANNELS, base=self.BASE).to(like.dtype)


class TimestepEmbedding(nn.Module):
    """Sinusoid and MLP: timestep t = 1000·sigma, float [B], to [B, D]."""

    def __init__(self, freq_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.freq_dim = freq_dim
        self.proj_in = Linear(freq_dim, hidden_size)
        self.proj_out = Linear(hidden_size, hidden_size)

    def forward(self, timestep: Tensor) -> Tensor:
        features = sinusoid(timestep, self.freq_dim).to(self.proj_in.weight.dtype)
        return self.proj_out(F.silu(self.proj_in(features)))


class FeedForward(nn.Module):
    """Linear, GELU (tanh form), linear: [..., in] to [..., out]."""

    def __init__(self, in_dim: int, inner_dim: int, out_dim: int) -> None:
        super().__init__()
        self.proj_in = Linear(in_dim, inner_dim)
        self.proj_out = Linear(inner_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj_out(F.gelu(self.proj_in(x), approximate="tanh"))


class CrossAttention(nn.Module):
    """Tokens attend to text; absent until training opens its zero-initialised output.

    A sample whose mask is all False gets zero attention, not NaN.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = Linear(hidden_size, hidden_size)
        self.to_k = Linear(hidden_size, hidden_size)
        self.to_v = Linear(hidden_size, hidden_size)
        self.norm_q = RMSNorm(hidden_size // num_heads)
        self.norm_k = RMSNorm(hidden_size // num_heads)
        self.to_out = ZeroLinear(hidden_size, hidden_size)

    def forward(self, x: Tensor, text: Tensor, text_mask: Tensor | None) -> Tensor:
        """x [B, N, D], text [B, L, D], text_mask bool [B, L] (True: attend) or None.

        Returns [B, N, D].
        """
        split = (self.num_heads, -1)
        v = self.to_v(text).unflatten(-1, split)
        q = self.norm_q(self.to_q(x).unflatten(-1, split)).to(v.dtype)
        k = self.norm_k(self.to_k(text).unflatten(-1, split)).to(v.dtype)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # [B, heads, N or L, d]
        if text_mask is None:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            empty = ~text_mask.any(dim=-1, keepdim=True)  # [B, 1]
            keep = (text_mask | empty)[:, None, None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
            out = out.masked_fill(empty[:, :, None, None], 0)
        return self.to_out(out.transpose(1, 2).flatten(2))


def rope_pairs(head_dim: int) -> Grid:
    """How many rotated channel pairs each axis (t, h, w) gets; t takes what h and w leave.

    Raises:
        ValueError: odd `head_dim`, or fewer than three pairs.
    """
    if head_dim % 2 or head_dim < 6:
        raise ValueError(
            f"head dim {head_dim} cannot carry 3D rotary positions; it must be even and 6 or more"
        )
    pairs = head_dim // 2
    return pairs - 2 * (pairs // 3), pairs // 3, pairs // 3


def rope_tables(
    grid: Grid, head_dim: int, *, theta: float = 10000.0, device: torch.device | str | None = None
) -> Rope:
    """Cosines and sines of 3D rotary positions, each fp32 [1, N, 1, d/2].

    Pair i of an axis with n pairs turns by position·theta^(-i/n); positions count tokens. The
    leading 1 keeps the tables whole where a batch is split. Angles are computed in fp64: at
    position 1000 an fp32 angle can be off by 3e-5.
    """
    axes = [
        _axis_angles(size, axis, pairs, theta, device)
        for axis, (size, pairs) in enumerate(zip(grid, rope_pairs(head_dim), strict=True))
    ]
    return _over_grid([a.cos() for a in axes], grid), _over_grid([a.sin() for a in axes], grid)


def _axis_angles(
    size: int, axis: int, pairs: int, theta: float, device: torch.device | str | None
) -> Tensor:
    """fp64 angles of one axis, shaped to broadcast over the grid: [size, 1, 1, pairs] for t."""
    position = torch.arange(size, dtype=torch.float64, device=device)
    frequency = theta ** -(torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
    shape = [1, 1, 1, pairs]
    shape[axis] = size
    return torch.outer(position, frequency).reshape(shape)


def _over_grid(axes: list[Tensor], grid: Grid) -> Tensor:
    table = torch.cat([axis.float().expand(*grid, -1) for axis in axes], dim=-1)
    return table.reshape(1, math.prod(grid), 1, -1)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate channels (i, i + d/2) of x [B, N, heads, d] by its token's angles; fp32 out."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
