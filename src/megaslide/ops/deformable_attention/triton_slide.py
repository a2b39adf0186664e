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
    sets = offsets_of(
        offsets, slot // heads, slot % heads * groups // heads, n, rows, groups, 1, SHIFT
    )
    cell, _inside, _slides = tap_position(sets, (t, h, w), (T, H, W), 0, KT, KH, KW, SHIFT)
    ft, fh, fw = cell[3][:, None], cell[4][:, None], cell[5][:, None]
    query = read_rows(row_base(q, slot, rows, heads, D), n, stride, keep, D, BLOCK_D).to(DOT)
    m = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros_like(m)
    acc = tl.zeros([query.shape[0], BLOCK_D], tl.float32)
    before = tl.zeros([query.shape[0], S], tl.float32)
    p_before = tl.zeros_like(before)
    keys, values = row_base(k, slot, rows, heads, D), row_base(v, slot, rows, heads, D)
    low, length, own = plane_of(cell, KT, KW)
    columns = length[0] * length[1]
    first_row, last_row = tl.min(cell[1]), tl.max(cell[1]) + KH
    for row in range(first_row, last_row + 2):
        level = tl.zeros_like(before)
        for first in range(0, tl.where(row <= last_row, columns, 0), BLOCK_P):
            voxel, real = voxels_of_plane(first, row, low, length, (T, H, W), BLOCK_P)
            key = read_rows(keys, voxel, stride, real, D, BLOCK_D).to(DOT)
            product = tl.dot(query, tl.trans(key), input_precision="ieee")
            level = pick(product, own, first, length, level, ROW, S, BLOCK_P)
        level = mix(level, ft, fw, ROW, S)
        score = scale * (before + fh * (level - before))
        score = tl.where(taps_of_row(row - 1, cell, KT, KH, KW, ROW, S), score, float("-inf"))
        p, rescale, m, total = soften(score, m, total)
        weight = mix_back(p + fh * (p_before * rescale[:, None] - p), ft, fw, ROW, S)
        acc = acc * rescale[:, None]
        for first in range(0, tl.where(row > first_row, columns, 0), BLOCK_P):
            voxel, real = voxels_of_plane(first, row - 1, low, length, (T, H, W), BLOCK_P)
            value = read_rows(values, voxel, stride, real, D, BLOCK_D).to(DOT)
            dense = place(weight, own, first, length, KT, KW, ROW, BLOCK_P)
            acc += tl.dot(dense.to(DOT), value, input_precision="ieee")
        before, p_before = level, p
    if BLOCK_E > 0:
        m, total, acc = attend_extra(
            query, extra_k, extra_v, slot, heads, E, scale, m, total, acc, D, BLOCK_D, DOT, BLOCK_E
        )
    to = row_base(out, slot, rows, heads, D)
    store_rows(to, n, stride, keep, acc / total[:, None], D, BLOCK_D)
    tl.store(row_base(lse, slot, rows, heads, 1) + n.to(tl.int64) * heads, m + tl.log(total), keep)


@triton.jit(do_not_specialize=SIZES)
def slide_queries_kernel(
    q, k, v, offsets, extra_k, extra_v, grad_out, lse, delta, dq, doffsets,
    reach_v, reach_k, cells, T, H, W, heads, groups, E, scale, t0, t1,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ROW: tl.constexpr, S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of frames t0 to t1, B * groups): dq, doffsets, the reach and `cells`.

    The heads of a group go through one after the other, as in `queries_kernel`.

    reach_v, reach_k: [B * heads, (t1 - t0) * H * W, kh+1, kt+1, kw+1]: the weights in dv and dk of
    the voxels from a query's `cells` on: int32 [B * groups, (t1 - t0) * H * W, 3].
    """
    t, h, w, keep = voxels_of_block(tl.program_id(0), t0, t1, H, W, BLOCK_T, BLOCK_H, BLOCK_W)
    batch, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    n, rows = (t * H + h) * W + w, T * H * W
    i, queries = n - t0 * H * W, (t1 - t0) * H * W
    sets = offsets_of(offsets, batch, group, n, rows, groups, 1, SHIFT)
    cell, _inside, slides = tap_position(sets, (t, h, w), (T, H, W), 0, KT, KH, KW, SHIFT)
    moved_t = tl.zeros([BLOCK_T * BLOCK_H * BLOCK_W, S], tl.float32)
    moved_h, moved_w = moved_t, moved_t
    for r in range(heads // groups):
        slot = batch * heads + group * (heads // groups) + r
        query, grad, norm, share = load_query(
            q, grad_out, lse, delta, slot, n, rows, heads, keep, D, BLOCK_D
        )
        query, grad = query.to(DOT), grad.to(DOT)
        voxels: tl.constexpr = (KT + 1) * (KH + 1) * (KW + 1)
        at = slot.to(tl.int64) * queries * voxels
        dquery, moved_t, moved_h, moved_w = through_rows(
            query, grad, norm, share, moved_t, moved_h, moved_w,
            row_base(k, slot, rows, heads, D), row_base(v, slot, rows, heads, D),
            reach_v + at, reach_k + at, i * voxels, cell, (T, H, W), heads * D, keep, scale,
            D, BLOCK_D, DOT, KT, KH, KW, ROW, S, BLOCK_P,
        )  # fmt: skip
        if BLOCK_E > 0:
            dquery = through_extra(
                query, grad, norm, share, dquery, extra_k, extra_v, slot, heads, E, scale,
                D, BLOCK_D, DOT, BLOCK_E,
            )  # fmt: skip
        store_rows(row_base(dq, slot, rows, heads, D), n, heads * D, keep, dquery, D, BLOCK_D)
    dsets = offsets_of(doffsets, batch, group, n, rows, groups, 1, SHIFT)
    firsts = cells + 3 * (tl.program_id(1).to(tl.int64) * queries + i)
    moved = (tl.sum(moved_t, 1), tl.sum(moved_h, 1), tl.sum(moved_w, 1))
    for axis in tl.static_range(3):
        tl.store(dsets + axis, tl.where(slides[axis], moved[axis], 0.0), keep)
        tl.store(firsts + axis, cell[axis], keep)


@triton.jit
def through_rows(
    query, grad, norm, share, moved_t, moved_h, moved_w, keys, values, reach_v, reach_k,
    lowest, cell, size, stride, keep, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ROW: tl.constexpr, S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One head: its dq [Q, BLOCK_D], and what moves the window added, per slot [Q, S].

    s is scale * q.k less the log-sum-exp and g is grad.v less the share, so that a tap has
    p = exp(s) and ds = p * g: mixing has weights of sum 1 and passes on what is taken off. The loss
    changes with the position through both, by ds times the slope of s and p times that of g; a
    slope is summed where an axis is not mixed yet, with p and ds mixed back on the others.
    """
    ft, fh, fw = cell[3][:, None], cell[4][:, None], cell[5][:, None]
    dquery = tl.zeros([query.shape[0], BLOCK_D], tl.float32)
    s0 = tl.zeros([query.shape[0], S], tl.float32)
    g0, p0, ds0 = s0, s0, s0
    low, length, own = plane_of(cell, KT, KW)
    columns = length[0] * length[1]
    first_row, last_row = tl.min(cell[1]), tl.max(cell[1]) + KH
    r = tl.arange(0, S)[None, :]
    for row in range(first_row, last_row + 2):
        s1 = tl.zeros_like(s0)
        g1 = tl.zeros_like(s0)
        for first in range(0, tl.where(row <= last_row, columns, 0), BLOCK_P):
            voxel, real = voxels_of_plane(first, row, low, length, size, BLOCK_P)
            key = read_rows(keys, voxel, stride, real, D, BLOCK_D).to(DOT)
            value = read_rows(values, voxel, stride, real, D, BLOCK_D).to(DOT)
            s = scale * tl.dot(query, tl.trans(key), input_precision="ieee") - norm[:, None]
            g = tl.dot(grad, tl.trans(value), input_precision="ieee") - share[:, None]
            s1 = pick(s, own, first, length, s1, ROW, S, BLOCK_P)
            g1 = pick(g, own, first, length, g1, ROW, S, BLOCK_P)
        s, s_w, s_t = climb(s0 + fh * (s1 - s0), ft, fw, ROW, S)
        g, g_w, g_t = climb(g0 + fh * (g1 - g0), ft, fw, ROW, S)
        p = tl.where(taps_of_row(row - 1, cell, KT, KH, KW, ROW, S), tl.exp(s), 0.0)
        ds = p * g
        moved_t += ds * s_t + p * g_t
        p += ft * (turn(p, -ROW, S) - p)
        ds += ft * (turn(ds, -ROW, S) - ds)
        moved_w += ds * s_w + p * g_w
        p += fw * (turn(p, -1, S) - p)
        ds += fw * (turn(ds, -1, S) - ds)
        moved_h += ds * (s1 - s0) + p * (g1 - g0)
        weight_v, weight_k = p + fh * (p0 - p), scale * (ds + fh * (ds0 - ds))
        j = row - 1 - cell[1][:, None]
        seen = keep[:, None] & (j >= 0) & (j <= KH) & (r // ROW <= KT) & (r % ROW <= KW)
        at = lowest[:, None] + (j * (KT + 1) + r // ROW) * (KW + 1) + r % ROW
        tl.store(reach_v + at, weight_v.to(reach_v.dtype.element_ty), seen)
        tl.store(reach_k + at, weight_k.to(reach_k.dtype.element_ty), seen)
        for first in range(0, tl.where(row > first_row, columns, 0), BLOCK_P):
            voxel, real = voxels_of_plane(first, row - 1, low, length, size, BLOCK_P)
            key = read_rows(keys, voxel, stride, real, D, BLOCK_D).to(DOT)
            dense = place(weight_k, own, first, length, KT, KW, ROW, BLOCK_P)
            dquery += tl.dot(dense.to(DOT), key, input_precision="ieee")
        s0, g0, p0, ds0 = s1, g1, p, ds
    return dquery, moved_t, moved_h, moved_w


# ---- planes and slots ----------------------------------------------------------------------------


@triton.jit
def plane_of(cell, KT: tl.constexpr, KW: tl.constexpr):
    """Corner and lengths on (t, w) of what the queries of a block sample from; the column [Q] of
    their cells."""
    low_t, length_t = hull(cell[0], cell[0] + KT + 1)
    low_w, length_w = hull(cell[2], cell[2] + KW + 1)
    own = (cell[0] - low_t) * length_w + cell[2] - low_w
    return (low_t, low_w), (length_t, length_w), own


@triton.jit
def voxels_of_plane(first, h, low, length, size, BLOCK_P: tl.constexpr):
    """Columns `first` to `first` + BLOCK_P of the plane at h: voxels [P], flat, and whether real.

    A window's last voxels may lie outside the volume, where their weight is 0.
    """
    c = first + tl.arange(0, BLOCK_P)
    t, w = low[0] + c // length[1], low[1] + c % length[1]
    h += tl.zeros_like(c)
    real = (c < length[0] * length[1]) & (t < size[0]) & (h < size[1]) & (w < size[2])
    return (t * size[1] + h) * size[2] + w, real


@triton.jit
def pick(
    product, own, first, length, into, ROW: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr
):
    """`into` [Q, S], with what `product` [Q, P], columns from `first` on, has of the slots."""
    r = tl.arange(0, S)[None, :]
    column = own[:, None] + (r // ROW * length[1] + r % ROW - first)
    here = (column >= 0) & (column < BLOCK_P)
    return tl.where(here, tl.gather(product, tl.where(here, column, 0), 1), into)


@triton.jit
def place(
    weight, own, first, length, KT: tl.constexpr, KW: tl.constexpr, ROW: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """[Q, P]: the weights [Q, S] of the slots on the columns from `first` on; 0 on others."""
    step = first + tl.arange(0, BLOCK_P)[None, :] - own[:, None]
    t = tl.zeros_like(step)
    for i in tl.static_range(1, KT + 1):
        t += (step >= i * length[1]).to(tl.int32)
    w = step - t * length[1]
    here = (step >= 0) & (w <= KW)  # past the last frame, w is as long as the plane or longer
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
def climb(x, ft, fw, ROW: tl.constexpr, S: tl.constexpr):
    """`mix`, and its slopes: on w before t is mixed, on t."""
    on_w = turn(x, 1, S) - x
    x += fw * on_w
    on_t = turn(x, ROW, S) - x
    return x + ft * on_t, on_w, on_t


@triton.jit
def mix_back(x, ft, fw, ROW: tl.constexpr, S: tl.constexpr):
    """The transpose of `mix`. Taps never fill the last slots on an axis: nothing turns around."""
    x += fw * (turn(x, -1, S) - x)
    return x + ft * (turn(x, -ROW, S) - x)
