"""3D-DSA in Triton: the part of the backward that belongs to keys, dk and dv.

A program holds a tile of keys and walks the queries that can reach it, which lie in a box because
offsets are bounded. Each row of dk and dv is summed by one program in a fixed order: no row is
added to memory atomically, and two runs give the same bits.

Without offsets the weights of a pair are computed again from q, k and the log-sum-exp. With offsets
that would take the neighbours of the key for every pair; the weights are then read from the reach
that `queries_kernel` filled. Extra keys meet every query: a dense product, split over queries.

Shapes: P keys of a block, D head dim (BLOCK_D padded), E extra keys, slot = batch * heads + head.
"""

import triton
import triton.language as tl

from megaslide.ops.deformable_attention.triton_geometry import (
    NONE,
    SIZES,
    first_query,
    load_rows,
    row_base,
    store_rows,
    voxels_of_block,
    window_start,
)
from megaslide.ops.deformable_attention.triton_kernels import extra_scores, load_query, reach_of


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    q, k, v, grad_out, lse, delta, dk, dv, reach_v, reach_k,
    T, H, W, heads, scale, p0, p1, t0, t1,
    low_t, low_h, low_w, box_t, box_h, box_w,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KIND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of frames p0 to p1, B * heads): adds to dk, dv [B,N,heads,D] fp32.

    Queries are those of frames t0 to t1; `low`, `box` and the reach as in `queries_kernel`
    (without offsets: low 0, box the window, no reach).
    """
    t, h, w, keep = voxels_of_block(tl.program_id(0), p0, p1, H, W, BLOCK_T, BLOCK_H, BLOCK_W)
    slot, rows, stride = tl.program_id(1), T * H * W, heads * D
    n = (t * H + h) * W + w
    key = load_rows(row_base(k, slot, rows, heads, D), n, stride, keep, D, BLOCK_D)
    value = load_rows(row_base(v, slot, rows, heads, D), n, stride, keep, D, BLOCK_D)
    from_t, end_t = queries_on_axis(t, low_t, box_t, KT, T)
    from_t, end_t = tl.maximum(from_t, t0), tl.minimum(end_t, t1)
    from_h, end_h = queries_on_axis(h, low_h, box_h, KH, H)
    from_w, end_w = queries_on_axis(w, low_w, box_w, KW, W)
    count_h, count_w = tl.max(end_h - from_h), tl.max(end_w - from_w)
    cells = reach_of(slot, tl.zeros_like(n), (t1 - t0) * H * W, box_t * box_h * box_w)
    dkey, dvalue = tl.zeros_like(key), tl.zeros_like(value)
    for c in range(tl.max(end_t - from_t) * count_h * count_w):
        i_t, i_h, i_w = (
            from_t + c // (count_h * count_w), from_h + c // count_w % count_h, from_w + c % count_w
        )  # fmt: skip
        meet = keep & (i_t < end_t) & (i_h < end_h) & (i_w < end_w)
        i = (i_t * H + i_h) * W + i_w
        query, grad, norm, share = load_query(
            q, grad_out, lse, delta, slot, i, rows, heads, meet, D, BLOCK_D
        )
        if KIND == NONE:
            p = tl.where(meet, tl.exp(scale * tl.sum(query * key, 1) - norm), 0.0)
            ds = scale * p * (tl.sum(grad * value, 1) - share)
        else:
            r_t = t - window_start(i_t, KT, T) + low_t
            r_h = h - window_start(i_h, KH, H) + low_h
            r_w = w - window_start(i_w, KW, W) + low_w
            cell = ((r_t * box_h + r_h) * box_w + r_w).to(tl.int64) * ((t1 - t0) * H * W)
            at = cells + cell + (i - t0 * H * W)
            p = tl.load(reach_v + at, meet, other=0.0)
            ds = tl.load(reach_k + at, meet, other=0.0)
        dvalue += p[:, None] * grad
        dkey += ds[:, None] * query
    to_k, to_v = row_base(dk, slot, rows, heads, D), row_base(dv, slot, rows, heads, D)
    dkey += load_rows(to_k, n, stride, keep, D, BLOCK_D)
    dvalue += load_rows(to_v, n, stride, keep, D, BLOCK_D)
    store_rows(to_k, n, stride, keep, dkey, D, BLOCK_D)
    store_rows(to_v, n, stride, keep, dvalue, D, BLOCK_D)


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
