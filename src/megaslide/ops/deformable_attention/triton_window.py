"""3D-DSA in Triton without offsets: neighbourhood attention by dense products.

Where nothing moves, the windows of a tile of queries overlap so much that the box around all of
them is a few times one window. A program takes the product of its queries with every key of that
box, on tensor cores, and masks what a query does not see; reading the taps of each query one by one
would take fewer products, but without tensor cores and with a row of memory for each.

A masked key has weight 0, and 0 times an infinite or undefined v is undefined: such rows of v
reach the queries of a tile that do not see them, as they reach all queries in `reference`.

Shapes: Q queries of a block, P keys of a block, D head dim (BLOCK_D padded), E extra keys,
slot = batch * heads + head, N = T*H*W voxels.
"""

import triton
import triton.language as tl

from megaslide.ops.deformable_attention.triton_geometry import (
    SIZES,
    hull,
    read_rows,
    row_base,
    store_rows,
    voxels_of_block,
    voxels_of_box,
    window_start,
    within,
)
from megaslide.ops.deformable_attention.triton_kernels import (
    attend_extra,
    load_query,
    soften,
    through_extra,
)
from megaslide.ops.deformable_attention.triton_keys import queries_of


@triton.jit(do_not_specialize=SIZES)
def window_forward_kernel(
    q, k, v, extra_k, extra_v, out, lse, T, H, W, heads, E, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, B * heads): out [B,N,heads,D] and log-sum-exp [B,N,heads] fp32."""
    t, h, w, keep = voxels_of_block(tl.program_id(0), 0, T, H, W, BLOCK_T, BLOCK_H, BLOCK_W)
    slot = tl.program_id(1)
    n, rows, stride = (t * H + h) * W + w, T * H * W, heads * D
    query = read_rows(row_base(q, slot, rows, heads, D), n, stride, keep, D, BLOCK_D).to(DOT)
    m = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros_like(m)
    acc = tl.zeros([query.shape[0], BLOCK_D], tl.float32)
    keys, values = row_base(k, slot, rows, heads, D), row_base(v, slot, rows, heads, D)
    start, low, length = windows_of((t, h, w), (T, H, W), KT, KH, KW)
    for first in range(0, length[0] * length[1] * length[2], BLOCK_P):
        at, voxel, real = voxels_of_box(first, low, length, (T, H, W), BLOCK_P)
        key = read_rows(keys, voxel, stride, real, D, BLOCK_D).to(DOT)
        value = read_rows(values, voxel, stride, real, D, BLOCK_D).to(DOT)
        score = scale * tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.where(sees(start, at, real, KT, KH, KW), score, float("-inf"))
        p, rescale, m, total = soften(score, m, total)
        acc = acc * rescale[:, None]
        acc += tl.dot(p.to(DOT), value, input_precision="ieee")
    if BLOCK_E > 0:
        m, total, acc = attend_extra(
            query, extra_k, extra_v, slot, heads, E, scale, m, total, acc, D, BLOCK_D, DOT, BLOCK_E
        )
    to = row_base(out, slot, rows, heads, D)
    store_rows(to, n, stride, keep, acc / total[:, None], D, BLOCK_D)
    tl.store(row_base(lse, slot, rows, heads, 1) + n.to(tl.int64) * heads, m + tl.log(total), keep)


@triton.jit(do_not_specialize=SIZES)
def window_queries_kernel(
    q, k, v, extra_k, extra_v, grad_out, lse, delta, dq, T, H, W, heads, E, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, B * heads): dq [B,N,heads,D]."""
    t, h, w, keep = voxels_of_block(tl.program_id(0), 0, T, H, W, BLOCK_T, BLOCK_H, BLOCK_W)
    slot = tl.program_id(1)
    n, rows, stride = (t * H + h) * W + w, T * H * W, heads * D
    query, grad, norm, share = load_query(
        q, grad_out, lse, delta, slot, n, rows, heads, keep, D, BLOCK_D
    )
    query, grad = query.to(DOT), grad.to(DOT)
    dquery = tl.zeros([query.shape[0], BLOCK_D], tl.float32)
    keys, values = row_base(k, slot, rows, heads, D), row_base(v, slot, rows, heads, D)
    start, low, length = windows_of((t, h, w), (T, H, W), KT, KH, KW)
    for first in range(0, length[0] * length[1] * length[2], BLOCK_P):
        at, voxel, real = voxels_of_box(first, low, length, (T, H, W), BLOCK_P)
        key = read_rows(keys, voxel, stride, real, D, BLOCK_D).to(DOT)
        value = read_rows(values, voxel, stride, real, D, BLOCK_D).to(DOT)
        s = tl.dot(query, tl.trans(key), input_precision="ieee")
        dp = tl.dot(grad, tl.trans(value), input_precision="ieee")
        seen = sees(start, at, real, KT, KH, KW)
        p = tl.where(seen, tl.exp(scale * s - norm[:, None]), 0.0)
        ds = scale * p * (dp - share[:, None])
        dquery += tl.dot(ds.to(DOT), key, input_precision="ieee")
    if BLOCK_E > 0:
        dquery = through_extra(
            query, grad, norm, share, dquery, extra_k, extra_v, slot, heads, E, scale,
            D, BLOCK_D, DOT, BLOCK_E,
        )  # fmt: skip
    store_rows(row_base(dq, slot, rows, heads, D), n, stride, keep, dquery, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def window_keys_kernel(
    q, k, v, grad_out, lse, delta, dk, dv, T, H, W, heads, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of keys, B * heads): dk, dv [B,N,heads,D] fp32; BLOCK_P queries at a time."""
    t, h, w, keep = voxels_of_block(tl.program_id(0), 0, T, H, W, BLOCK_T, BLOCK_H, BLOCK_W)
    slot, rows, stride = tl.program_id(1), T * H * W, heads * D
    n = (t * H + h) * W + w
    low, length = queries_of((t, h, w), (0, 0, 0), (KT, KH, KW), (T, H, W), 0, T, KT, KH, KW)
    key = read_rows(row_base(k, slot, rows, heads, D), n, stride, keep, D, BLOCK_D).to(DOT)
    value = read_rows(row_base(v, slot, rows, heads, D), n, stride, keep, D, BLOCK_D).to(DOT)
    queries, grads = row_base(q, slot, rows, heads, D), row_base(grad_out, slot, rows, heads, D)
    norms, shares = row_base(lse, slot, rows, heads, 1), row_base(delta, slot, rows, heads, 1)
    dkey = tl.zeros([BLOCK_T * BLOCK_H * BLOCK_W, BLOCK_D], tl.float32)
    dvalue = tl.zeros_like(dkey)
    for first in range(0, length[0] * length[1] * length[2], BLOCK_P):
        at, i, real = voxels_of_box(first, low, length, (T, H, W), BLOCK_P)
        query = read_rows(queries, i, stride, real, D, BLOCK_D).to(DOT)
        grad = read_rows(grads, i, stride, real, D, BLOCK_D).to(DOT)
        norm = tl.load(norms + i.to(tl.int64) * heads, real, other=0.0)
        share = tl.load(shares + i.to(tl.int64) * heads, real, other=0.0)
        r_t = t[:, None] - window_start(at[0], KT, T)
        r_h = h[:, None] - window_start(at[1], KH, H)
        r_w = w[:, None] - window_start(at[2], KW, W)
        meet = keep[:, None] & real[None, :] & within((r_t, r_h, r_w), (KT, KH, KW))
        s = scale * tl.dot(key, tl.trans(query), input_precision="ieee")
        dp = tl.dot(value, tl.trans(grad), input_precision="ieee")
        p = tl.where(meet, tl.exp(s - norm[None, :]), 0.0)
        ds = scale * p * (dp - share[None, :])
        dvalue += tl.dot(p.to(DOT), grad, input_precision="ieee")
        dkey += tl.dot(ds.to(DOT), query, input_precision="ieee")
    store_rows(row_base(dk, slot, rows, heads, D), n, stride, keep, dkey, D, BLOCK_D)
    store_rows(row_base(dv, slot, rows, heads, D), n, stride, keep, dvalue, D, BLOCK_D)


@triton.jit
def windows_of(at, size, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    """First voxels (t, h, w) [Q] of the queries' windows; the box around all: corner, lengths."""
    t, h, w = (
        window_start(at[0], KT, size[0]), window_start(at[1], KH, size[1]),
        window_start(at[2], KW, size[2]),
    )  # fmt: skip
    low_t, length_t = hull(t, t + KT)
    low_h, length_h = hull(h, h + KH)
    low_w, length_w = hull(w, w + KW)
    return (t, h, w), (low_t, low_h, low_w), (length_t, length_h, length_w)


@triton.jit
def sees(start, at, real, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    """[Q, P]: whether the key at (t, h, w) [P] lies in the window from `start` [Q]."""
    t, h, w = at[0] - start[0][:, None], at[1] - start[1][:, None], at[2] - start[2][:, None]
    return real[None, :] & within((t, h, w), (KT, KH, KW))
