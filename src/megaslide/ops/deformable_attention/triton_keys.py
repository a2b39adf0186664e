"""3D-DSA in Triton: the part of the backward that belongs to keys, dk and dv.

A program holds a tile of keys and takes the queries that can reach it, which lie in a box because
offsets are bounded, a block at a time: their weights on its keys come from the reach that the
queries left, and one dense product sums the block. Each row of dk and dv is summed by one program
in a fixed order: no row is added to memory atomically, and two runs give the same bits. dk and dv
take a launch each, or their sums would fill the registers.

Extra keys meet every query: a dense product, split over queries.

Shapes: P keys of a block, D head dim (BLOCK_D padded), E extra keys, slot = batch * heads + head.
"""

import triton
import triton.language as tl

from megaslide.ops.deformable_attention.triton_geometry import (
    SHIFT,
    SIZES,
    first_query,
    hull,
    load_rows,
    read_rows,
    row_base,
    store_rows,
    voxels_of_block,
    voxels_of_box,
    window_start,
    within,
)
from megaslide.ops.deformable_attention.triton_kernels import extra_scores, load_query


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    x, reach, cells, total, T, H, W, heads, groups, p0, p1, t0, t1,
    low_t, low_h, low_w, box_t, box_h, box_w,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KIND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of frames p0 to p1, B * heads): adds to dk or dv, `total` [B,N,heads,D] fp32.

    Of every query of frames t0 to t1, BLOCK_P at a time, its row of `x` (q for dk, grad_out for
    dv) by its weight in `reach`; `low`, `box` and the reach as in `queries_kernel`;
    for `shift` the reach and `cells` as in `slide_queries_kernel`.
    """
    t, h, w, keep = voxels_of_block(tl.program_id(0), p0, p1, H, W, BLOCK_T, BLOCK_H, BLOCK_W)
    slot, rows, stride = tl.program_id(1), T * H * W, heads * D
    low, length = queries_of(
        (t, h, w), (low_t, low_h, low_w), (box_t, box_h, box_w), (T, H, W), t0, t1, KT, KH, KW
    )
    to, from_x = row_base(total, slot, rows, heads, D), row_base(x, slot, rows, heads, D)
    n, queries = (t * H + h) * W + w, (t1 - t0) * H * W
    if KIND == SHIFT:
        group = slot // heads * groups + slot % heads * groups // heads
        reach += slot.to(tl.int64) * queries * ((KT + 1) * (KH + 1) * (KW + 1))
        cells += 3 * (group.to(tl.int64) * queries)
    else:
        reach += slot.to(tl.int64) * queries * (box_t * box_h * box_w)
    acc = load_rows(to, n, stride, keep, D, BLOCK_D)
    for first in range(0, length[0] * length[1] * length[2], BLOCK_P):
        at, i, real = voxels_of_box(first, low, length, (T, H, W), BLOCK_P)
        row = read_rows(from_x, i, stride, real, D, BLOCK_D).to(DOT)
        i = (i - t0 * H * W)[:, None].to(tl.int64)
        meet = real[:, None] & keep[None, :]
        # Keys lie along the columns: of one query's weights, those of neighbours on w do too.
        if KIND == SHIFT:
            j_t = t[None, :] - tl.load(cells + 3 * i, real[:, None], other=0)
            j_h = h[None, :] - tl.load(cells + 3 * i + 1, real[:, None], other=0)
            j_w = w[None, :] - tl.load(cells + 3 * i + 2, real[:, None], other=0)
            meet &= within((j_t, j_h, j_w), (KT + 1, KH + 1, KW + 1))
            at = i * ((KT + 1) * (KH + 1) * (KW + 1)) + (j_h * (KT + 1) + j_t) * (KW + 1) + j_w
        else:
            j_t = t[None, :] + (low_t - window_start(at[0], KT, T))[:, None]
            j_h = h[None, :] + (low_h - window_start(at[1], KH, H))[:, None]
            j_w = w[None, :] + (low_w - window_start(at[2], KW, W))[:, None]
            meet &= within((j_t, j_h, j_w), (box_t, box_h, box_w))
            at = ((j_t * box_h + j_h) * box_w + j_w).to(tl.int64) * queries + i
        weight = tl.load(reach + at, meet, other=0.0).to(DOT)
        acc += tl.dot(tl.trans(weight), row, input_precision="ieee")
    store_rows(to, n, stride, keep, acc, D, BLOCK_D)


@triton.jit
def queries_of(
    key, low, box, size, t0, t1, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr
):  # fmt: skip
    """The box of queries, of frames t0 to t1, whose boxes hold a key at (t, h, w) [P]."""
    from_t, end_t = queries_on_axis(key[0], low[0], box[0], KT, size[0])
    from_h, end_h = queries_on_axis(key[1], low[1], box[1], KH, size[1])
    from_w, end_w = queries_on_axis(key[2], low[2], box[2], KW, size[2])
    from_t, length_t = hull(tl.maximum(from_t, t0), tl.minimum(end_t, t1))
    from_h, length_h = hull(from_h, end_h)
    from_w, length_w = hull(from_w, end_w)
    return (from_t, from_h, from_w), (tl.maximum(length_t, 0), length_h, length_w)


@triton.jit
def queries_on_axis(p, low, box, k: tl.constexpr, size):
    """First query, and one past the last, whose box holds a key at p [P], on one axis."""
    return first_query(p + low - box + 1, k, size), first_query(p + low + 1, k, size)


@triton.jit(do_not_specialize=SIZES)
def extra_kernel(
    q, extra_k, extra_v, grad_out, lse, delta, dk, dv,
    rows, heads, E, scale, split,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of E, B * heads, splits of `split` queries): dk, dv fp32 [splits, B,E,heads,D].

    The caller sums over splits; one program per block would leave most of a GPU idle.
    """
    slot, part = tl.program_id(1), tl.program_id(2)
    e, stride = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), heads * D
    key = load_rows(row_base(extra_k, slot, E, heads, D), e, stride, e < E, D, BLOCK_D)
    value = load_rows(row_base(extra_v, slot, E, heads, D), e, stride, e < E, D, BLOCK_D)
    dkey, dvalue = tl.zeros_like(key), tl.zeros_like(value)
    end = tl.minimum(rows, (part + 1) * split)
    for first in range(part * split, end, BLOCK_Q):
        n = first + tl.arange(0, BLOCK_Q)
        query, grad, norm, share = load_query(
            q, grad_out, lse, delta, slot, n, rows, heads, n < end, D, BLOCK_D
        )
        p, ds = extra_scores(query, grad, norm, share, key, value, e < E, scale, DOT)
        dvalue += tl.dot(tl.trans(p.to(DOT)), grad.to(DOT), input_precision="ieee")
        dkey += tl.dot(tl.trans(ds.to(DOT)), query.to(DOT), input_precision="ieee")
    slots = part * tl.num_programs(1) + slot
    store_rows(row_base(dk, slots, E, heads, D), e, stride, e < E, dkey, D, BLOCK_D)
    store_rows(row_base(dv, slots, E, heads, D), e, stride, e < E, dvalue, D, BLOCK_D)
