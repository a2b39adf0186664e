"""3D deformable slide attention in plain torch: the definition every other backend must equal.

Trilinear sampling is linear in the volume, so q·k(x) is the interpolation of the products q·k[p],
and a weighted sum of samples v(x) is a weighted sum of voxels v[p]. The definition therefore lives
in score space: products with all voxels, scalars gathered at the corners of every tap, softmax,
scalars scattered back, one product with v. Queries go through in chunks of bounded size, each
recomputed in the backward, so nothing of size N*K*d exists.

Shapes: B batch, T H W voxels per axis, N = T*H*W (t-major), G offset groups, R heads per group,
n queries of one chunk, K taps, E extra keys, d head dim. Axes are always ordered (t, h, w).
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**20
"""Bound on the elements of one chunk's largest tensors; sets how many queries a chunk holds."""


def deformable_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    *,
    window: tuple[int, int, int],
    kind: str,
    scale: float,
) -> Tensor:
    """`deformable_attention` on validated arguments; `window` is already cut to the axes.

    Computes in fp32 (fp64 where q is fp64) and returns q's dtype; autograd gives the backward.
    """
    B, T, H, W, heads, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if offsets is None:
        offsets, kind = q.new_zeros(1, T, H, W, 1, 3), "shift"
    groups = offsets.shape[4]
    volume = [_by_group(x.flatten(1, 3), groups, dtype) for x in (q, k, v)]  # [B,G,R,N,d]
    extra = [_by_group(x, groups, dtype) for x in (extra_k, extra_v) if x is not None]
    offsets = offsets.flatten(1, 3).transpose(1, 2).to(dtype)  # [B,G,N,3 | 12 | K,3]
    taps = window[0] * window[1] * window[2]
    step = max(1, CHUNK_ELEMENTS // (B * heads * (T * H * W + 24 * taps)))
    chunks = zip(volume[0].split(step, 3), offsets.split(step, 2), strict=True)
    out = [
        checkpoint(
            _attend, q_, volume[1], volume[2], offsets_, extra, first * step,
            (T, H, W), window, kind, scale,
            use_reentrant=False, preserve_rng_state=False,
        )
        for first, (q_, offsets_) in enumerate(chunks)
    ]  # fmt: skip
    return torch.cat(out, 3).flatten(1, 2).transpose(1, 2).to(q.dtype).reshape(q.shape)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    extra: list[Tensor],
    first: int,
    size: tuple[int, int, int],
    window: tuple[int, int, int],
    kind: str,
    scale: float,
) -> Tensor:
    """One chunk of queries: q [B,G,R,n,d], k and v [B,G,R,N,d] to [B,G,R,n,d]."""
    query = torch.arange(first, first + q.shape[3], device=q.device)
    with _full_precision(q):
        position, at_end = sample_positions(offsets, query, size, window, kind)
        index, weight = (x.unsqueeze(2) for x in corners(position, at_end, size))  # [B,G,1,n,K,8]
        products = q @ k.mT  # [B,G,R,n,N]
        index = index.flatten(-2).expand(*products.shape[:-1], -1)
        scores = (products.gather(-1, index).unflatten(-1, (-1, 8)) * weight).sum(-1)
        if extra:
            scores = torch.cat([scores, q @ extra[0].mT], -1)
        probability = torch.softmax(scale * scores, -1)  # [B,G,R,n,K+E]
        of_taps = probability[..., : weight.shape[-2]]
        of_voxels = torch.zeros_like(products).scatter_add(
            -1, index, (of_taps.unsqueeze(-1) * weight).flatten(-2)
        )
        out = of_voxels @ v
        if extra:
            out = out + probability[..., weight.shape[-2] :] @ extra[1]
        return out


def sample_positions(
    offsets: Tensor,
    query: Tensor,
    size: tuple[int, int, int],
    window: tuple[int, int, int],
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Where the taps of `query` (flat voxel indices [n]) sample, in voxels.

    Returns positions [B,G,n,K,3], inside the volume, and `at_end` (broadcasts to them): whether
    the window lies against the last voxel of an axis and can only move back.
    """
    sizes, k = (torch.tensor(x).to(offsets) for x in (size, window))  # [3], in coordinates' dtype
    zero, last_start = torch.zeros_like(sizes), sizes - k
    voxel = torch.stack(torch.unravel_index(query, size), -1)  # [n,3]
    start = torch.clamp(voxel - torch.tensor(window, device=voxel.device) // 2, zero, last_start)
    tap = torch.cartesian_prod(*(torch.arange(length) for length in window)).to(offsets)  # [K,3]
    if kind == "tap":
        position = start.unsqueeze(1) + tap + offsets
    else:
        slid = torch.clamp(start + offsets[..., :3], zero, last_start)
        # A window as long as the axis cannot slide at all, so its slide has no gradient either.
        start = torch.where(last_start > 0, slid, start)  # [B,G,n,3]
        position = start.unsqueeze(-2) + tap
    if kind == "affine":
        position = position + (tap - (k - 1) / 2) @ offsets[..., 3:].unflatten(-1, (3, 3))
    at_end = (start == last_start) & (last_start > 0)
    return torch.clamp(position, zero, sizes - 1), at_end.unsqueeze(-2)


def corners(position: Tensor, at_end: Tensor, size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The 8 voxels around positions [...,K,3]: flat indices and trilinear weights [...,K,8].

    A position on a voxel belongs to two cells, which differ in the derivative alone. The cell
    above is taken, or the cell below at the last voxel and for windows at the end of the axis:
    the derivative is then one-sided in a direction in which the window can move.
    """
    last_cell = torch.tensor([max(length - 2, 0) for length in size], device=position.device)
    cell = torch.where(at_end, position.ceil() - 1, position.floor()).detach()
    cell = torch.nan_to_num(cell).clamp(torch.zeros_like(last_cell), last_cell)
    above = position - cell  # [...,K,3] weight of the upper voxel, per axis
    weight = torch.stack([1 - above, above], -1)  # [...,K,3,2]
    low = cell.long()
    high = torch.minimum(low + 1, torch.tensor(size, device=position.device) - 1)
    (t, h, w), (weight_t, weight_h, weight_w) = (
        (x[..., 0, :, None, None], x[..., 1, None, :, None], x[..., 2, None, None, :])
        for x in (torch.stack([low, high], -1), weight)
    )
    index = (t * size[1] + h) * size[2] + w  # [...,K,2,2,2]
    return index.flatten(-3), (weight_t * weight_h * weight_w).flatten(-3)


def _by_group(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[B,N,heads,d] to [B,G,R,N,d]."""
    return x.to(dtype).transpose(1, 2).unflatten(1, (groups, -1))


def _full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would round products and coordinates of a mixed-precision model to bf16."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
