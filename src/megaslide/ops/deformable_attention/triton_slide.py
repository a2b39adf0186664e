"""3D-DSA in Triton for `shift`: windows slide as a whole, so dense products serve them too.

All taps of a query share one fractional part. The score of a tap is a mix, with the same eight
weights for every tap, of products of q with voxels; mixed on one axis after the other, that is a
stencil of two points per axis. A program takes its queries through the box around all of their
voxels, one row (fixed h) after the other:

- a dense product of the queries with the row's plane of keys, all t and w, on tensor cores;
- from it every query picks the (kt+1)(kw+1) products of its own, wherever its window has slid to
  ("slots"): the only gather, of numbers, not of rows of memory;
- slots are mixed along w and t with neighbours in the slots, and along h with the row before;
- the softmax goes on over the taps that this completes; their probabilities, mixed back the same
  way, are the weights of the previous row's voxels, which go to the columns of a dense product.

Nothing is written to memory in between, and slides of any size are right: they make the box longer.
As in `triton_window`, a weight of 0 times an undefined row of v is undefined.

Shapes: Q queries of a block, P columns of a plane, S = ROW * next power of 2 of kt+1 slots
(t-major; ROW: next power of 2 of kw+1), D head dim (BLOCK_D padded), E extra keys,
slot = batch * heads + head, N = T*H*W voxels.
"""

import triton
import triton.language as tl

from megaslide.ops.deformable_attention.triton_geometry import (
    SHIFT,
    SIZES,
    hull,
    read_rows,
    row_base,
    store_rows,
    tap_position,
    voxels_of_block,
)
from megaslide.ops.deformable_attention.triton_kernels import (
    attend_extra,
    load_query,
    offsets_of,
    soften,
    through_extra,
)


@triton.jit(do_not_specialize=SIZES)
def slide_forward_kernel(
    q, k, v, offsets, extra_k, extra_v, out, lse, T, H, W, heads, groups, E, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ROW: tl.constexpr, S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, B * heads): out [B,N,heads,D] and log-sum-exp [B,N,heads] fp32."""
    t, h, w, keep = voxels_of_block(tl.program_id(0), 0, T, H, W, BLOCK_T, BLOCK_H, BLOCK_W)
    slot = tl.program_id(1)
    n, rows, stride = (t * H + h) * W + w, T * H * W, heads * D
    sets = offsets_of(offsets, slot // heads, slot % heads * groups // heads, n, rows, groups, 1, 1)
    cell, _inside, _slides = tap_position(sets, (t, h, w), (T, H, W), 0, KT, KH, KW, SHIFT)
    ft, fh, fw = cell[3][:, None], cell[4][:, None], cell[5][:, None]
    query = read_rows(row_base(q, slot, rows, heads, D), n, stride, keep, D, BLOCK_D).to(DOT)
    m = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros_like(m)
    acc = tl.zeros([query.shape[0], BLOCK_D], tl.float32)
    before = tl.zeros([query.shape[0], S], tl.float32)
    p_before = tl.zeros_like(before)
    keys, values = row_base(k, slot, rows, heads, D), row_base(v, slot, rows, heads, D)
    low, length = plane_of(cell, KT, KW)
    columns = length[0] * length[1]
    first_row, last_row = tl.min(cell[1]), tl.max(cell[1]) + KH
    own = columns_of_slots(cell, low, length, ROW, S)
    for row in range(first_row, last_row + 2):
        level = tl.zeros_like(before)
        for first in range(0, tl.where(row <= last_row, columns, 0), BLOCK_P):
            _at, voxel, real = voxels_of_plane(first, row, low, length, (T, H, W), BLOCK_P)
            key = read_rows(keys, voxel, stride, real, D, BLOCK_D).to(DOT)
            product = tl.dot(query, tl.trans(key), input_precision="ieee")
            level = pick(product, own - first, level, BLOCK_P)
        level = mix(level, ft, fw, ROW, S)
        score = scale * (before + fh * (level - before))
        score = tl.where(taps_of_row(row - 1, cell, KT, KH, KW, ROW, S), score, float("-inf"))
        p, rescale, m, total = soften(score, m, total)
        weight = mix_back(p + fh * (p_before * rescale[:, None] - p), ft, fw, ROW, S)
        acc = acc * rescale[:, None]
        for first in range(0, tl.where(row > first_row, columns, 0), BLOCK_P):
            at, voxel, real = voxels_of_plane(first, row - 1, low, length, (T, H, W), BLOCK_P)
            value = read_rows(values, voxel, stride, real, D, BLOCK_D).to(DOT)
            dense = place(weight, at, cell, KT, KW, ROW, S)
            acc += tl.dot(dense.to(DOT), value, input_precision="ieee")
        before, p_before = level, p
    if BLOCK_E > 0:
        m, total, acc = attend_extra(
            query, extra_k, extra_v, slot, heads, E, scale, m, total, acc, D, BLOCK_D, DOT, BLOCK_E
        )
    to = row_base(out, slot, rows, heads, D)
    store_rows(to, n, stride, keep, acc / total[:, None], D, BLOCK_D)
    tl.store(row_base(lse, slot, rows, heads, 1) + n.to(tl.int64) * heads, m + tl.log(total), keep)


# ---- planes and slots ----------------------------------------------------------------------------


@triton.jit
def plane_of(cell, KT: tl.constexpr, KW: tl.constexpr):
    """Corner and lengths on (t, w) of what the queries of a block sample from."""
    low_t, length_t = hull(cell[0], cell[0] + KT + 1)
    low_w, length_w = hull(cell[2], cell[2] + KW + 1)
    return (low_t, low_w), (length_t, length_w)


@triton.jit
def voxels_of_plane(first, h, low, length, size, BLOCK_P: tl.constexpr):
    """Columns `first` to `first` + BLOCK_P of the plane at h: (t, w) [P], flat, and whether real.

    A window's last voxels may lie outside the volume, where their weight is 0.
    """
    c = first + tl.arange(0, BLOCK_P)
    t, w = low[0] + c // length[1], low[1] + c % length[1]
    h += tl.zeros_like(c)
    real = (c < length[0] * length[1]) & (t < size[0]) & (h < size[1]) & (w < size[2])
    return (t, w), (t * size[1] + h) * size[2] + w, real


@triton.jit
def columns_of_slots(cell, low, length, ROW: tl.constexpr, S: tl.constexpr):
    """[Q, S]: the column in the plane that is in each of a query's slots."""
    r = tl.arange(0, S)[None, :]
    t, w = (cell[0] - low[0])[:, None] + r // ROW, (cell[2] - low[1])[:, None] + r % ROW
    return t * length[1] + w


@triton.jit
def pick(product, column, into, BLOCK_P: tl.constexpr):
    """`into` [Q, S], with what `product` [Q, P] has of the slots' columns."""
    here = (column >= 0) & (column < BLOCK_P)
    return tl.where(here, tl.gather(product, tl.where(here, column, 0), 1), into)


@triton.jit
def place(weight, at, cell, KT: tl.constexpr, KW: tl.constexpr, ROW: tl.constexpr, S: tl.constexpr):
    """[Q, P]: the weights [Q, S] of a query's slots on the columns (t, w) [P]; the rest 0."""
    t, w = at[0][None, :] - cell[0][:, None], at[1][None, :] - cell[2][:, None]
    here = (t >= 0) & (t <= KT) & (w >= 0) & (w <= KW)
    return tl.where(here, tl.gather(weight, tl.where(here, t * ROW + w, 0), 1), 0.0)


@triton.jit
def taps_of_row(
    h, cell, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ROW: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """[Q, S]: slots that are taps of which the cells begin on row h."""
    r, j = tl.arange(0, S)[None, :], h - cell[1][:, None]
    return (r // ROW < KT) & (r % ROW < KW) & (j >= 0) & (j < KH)


@triton.jit
def turn(x, step: tl.constexpr, S: tl.constexpr):
    """[Q, S], slot r holding what slot r + step held; behind the last comes the first."""
    source = (tl.arange(0, S)[None, :] + (step + S)) % S
    return tl.gather(x, tl.broadcast_to(source, x.shape), 1)


@triton.jit
def mix(x, ft, fw, ROW: tl.constexpr, S: tl.constexpr):
    """Interpolated between neighbours on w, then on t: right in slots of taps, noise in others."""
    x += fw * (turn(x, 1, S) - x)
    return x + ft * (turn(x, ROW, S) - x)


@triton.jit
def mix_back(x, ft, fw, ROW: tl.constexpr, S: tl.constexpr):
    """The transpose of `mix`. Taps never fill the last slots on an axis: nothing turns around."""
    x += fw * (turn(x, -1, S) - x)
    return x + ft * (turn(x, -ROW, S) - x)
