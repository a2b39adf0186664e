"""3D-DSA in Triton where taps move on their own (`affine`, `tap`): forward, backward of queries.

A program holds a tile of queries of one head and walks the taps with an online softmax. Rows of K
and V at the eight corners come through the caches, in which neighbouring queries find each other's
rows; the interpolated row exists in registers only. docs/attention.md counts bytes and FLOP.

The backward of the queries gives dq and the gradients of the offsets. What it knows of keys it
leaves in score space: two numbers (weight on v, weight on k) per query and voxel that its taps can
reach, in `reach`. `triton_keys` gathers from there, so no row is ever added to memory atomically.
Numbers in `reach` are added to by one program only, each by one thread in the order of the
program: sums have the same bits in every run.

Shapes: Q queries of a block, D head dim (BLOCK_D padded), K taps, E extra keys,
slot = batch * heads + head, N = T*H*W voxels.
"""

import triton
import triton.language as tl

from megaslide.ops.deformable_attention.triton_geometry import (
    AFFINE,
    SIZES,
    TAP,
    load_rows,
    row_base,
    row_pointers,
    store_rows,
    tap_position,
    unit_steps,
    voxels_of_block,
    window_start,
    within,
)

# ---- forward -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, offsets, extra_k, extra_v, out, lse,
    T, H, W, heads, groups, E, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KIND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, B * heads): out [B,N,heads,D] and log-sum-exp [B,N,heads] fp32."""
    t, h, w, keep = voxels_of_block(tl.program_id(0), 0, T, H, W, BLOCK_T, BLOCK_H, BLOCK_W)
    slot = tl.program_id(1)
    n, rows, stride = (t * H + h) * W + w, T * H * W, heads * D
    query = load_rows(row_base(q, slot, rows, heads, D), n, stride, keep, D, BLOCK_D)
    m = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros_like(m)
    acc = tl.zeros_like(query)
    keys, values = row_base(k, slot, rows, heads, D), row_base(v, slot, rows, heads, D)
    sets = offsets_of(
        offsets, slot // heads, slot % heads * groups // heads, n, rows, groups, KT * KH * KW, KIND
    )
    for j in range(KT * KH * KW):
        key, value = sample(
            keys, values, sets, (t, h, w), (T, H, W), j, stride, keep, D, BLOCK_D, KT, KH, KW, KIND
        )
        score = scale * tl.sum(query * key, 1)
        peak = tl.maximum(m, score)
        rescale, p = tl.exp(m - peak), tl.exp(score - peak)
        total = total * rescale + p
        acc = acc * rescale[:, None] + p[:, None] * value
        m = peak
    if BLOCK_E > 0:
        m, total, acc = attend_extra(
            query, extra_k, extra_v, slot, heads, E, scale, m, total, acc, D, BLOCK_D, DOT, BLOCK_E
        )
    to = row_base(out, slot, rows, heads, D)
    store_rows(to, n, stride, keep, acc / total[:, None], D, BLOCK_D)
    tl.store(row_base(lse, slot, rows, heads, 1) + n.to(tl.int64) * heads, m + tl.log(total), keep)


@triton.jit
def offsets_of(offsets, batch, group, n, rows, groups, K: tl.constexpr, KIND: tl.constexpr):
    """Pointers [Q] at the queries' sets in offsets [B, N, groups, 3 | 12 | K * 3]."""
    channels: tl.constexpr = 12 if KIND == AFFINE else (3 * K if KIND == TAP else 3)
    return offsets + ((n.to(tl.int64) + batch * rows) * groups + group) * channels


@triton.jit
def sample(
    keys, values, sets, at, size, j, stride, keep, D: tl.constexpr, BLOCK_D: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """k and v [Q, BLOCK_D] at tap j of the queries."""
    cell, _inside, _slides = tap_position(sets, at, size, j, KT, KH, KW, KIND)
    ft, fh, fw = cell[3], cell[4], cell[5]
    step_t, step_h, step_w = unit_steps(size[0], size[1], size[2])
    lower = (cell[0] * size[1] + cell[1]) * size[2] + cell[2]
    key_at = row_pointers(keys, lower, stride, BLOCK_D)
    value_at = row_pointers(values, lower, stride, BLOCK_D)
    mask = keep[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    key = tl.zeros([keep.shape[0], BLOCK_D], tl.float32)
    value = tl.zeros_like(key)
    for c in tl.static_range(8):
        weight = (ft if c // 4 else 1 - ft) * (fh if c // 2 % 2 else 1 - fh)
        weight = (weight * (fw if c % 2 else 1 - fw))[:, None]
        skip = (c // 4 * step_t * size[1] + c // 2 % 2 * step_h) * size[2] + c % 2 * step_w
        skip = skip.to(tl.int64) * stride
        key += weight * tl.load(key_at + skip, mask, other=0.0).to(tl.float32)
        value += weight * tl.load(value_at + skip, mask, other=0.0).to(tl.float32)
    return key, value


@triton.jit
def attend_extra(
    query, extra_k, extra_v, slot, heads, E, scale, m, total, acc,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The running softmax (m, total, acc) continued over the extra keys, block by block."""
    query = query.to(DOT)
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        key = load_rows(row_base(extra_k, slot, E, heads, D), e, heads * D, e < E, D, BLOCK_D)
        value = load_rows(row_base(extra_v, slot, E, heads, D), e, heads * D, e < E, D, BLOCK_D)
        score = scale * tl.dot(query, tl.trans(key.to(DOT)), input_precision="ieee")
        score = tl.where((e < E)[None, :], score, float("-inf"))
        p, rescale, m, total = soften(score, m, total)
        acc = acc * rescale[:, None]
        acc += tl.dot(p.to(DOT), value.to(DOT), input_precision="ieee")
    return m, total, acc


@triton.jit
def soften(score, m, total):
    """The running softmax taken on by scores [Q, P], -inf where there is no key.

    Returns exp(score - m) [Q, P], what earlier sums are scaled by, m and total; until a query has
    met its first key, m is -inf and total 0.
    """
    peak = tl.maximum(m, tl.max(score, 1))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    rescale, p = tl.exp(m - base), tl.exp(score - base[:, None])
    return p, rescale, peak, total * rescale + tl.sum(p, 1)


# ---- backward of the queries ---------------------------------------------------------------------


@triton.jit(do_not_specialize=SIZES)
def share_kernel(
    out, grad_out, delta, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (blocks of B * N * heads): out . grad_out, what the softmax takes off every gradient."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = load_rows(out, n, D, n < rows, D, BLOCK_D)
    product *= load_rows(grad_out, n, D, n < rows, D, BLOCK_D)
    tl.store(delta + n, tl.sum(product, 1), n < rows)


@triton.jit(do_not_specialize=SIZES)
def queries_kernel(
    q, k, v, offsets, extra_k, extra_v, grad_out, lse, delta, dq, doffsets, reach_v, reach_k,
    T, H, W, heads, groups, E, scale, t0, t1,
    low_t, low_h, low_w, box_t, box_h, box_w,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KIND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of frames t0 to t1, B * groups): dq, doffsets, and the reach filled.

    The heads of a group go through one after the other, because they share offsets: their
    gradients meet in registers (`tap`: in memory that no other program adds to).

    reach_v, reach_k: fp32 zeros [B * heads, box_t * box_h * box_w, (t1 - t0) * H * W]: the weights
    in dv and dk of the voxels around each query, counted from `low` before its window's start.
    """
    t, h, w, keep = voxels_of_block(tl.program_id(0), t0, t1, H, W, BLOCK_T, BLOCK_H, BLOCK_W)
    batch, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    n, rows, stride = (t * H + h) * W + w, T * H * W, heads * D
    sets = offsets_of(offsets, batch, group, n, rows, groups, KT * KH * KW, KIND)
    dsets = offsets_of(doffsets, batch, group, n, rows, groups, KT * KH * KW, KIND)
    origin = (
        window_start(t, KT, T) - low_t, window_start(h, KH, H) - low_h,
        window_start(w, KW, W) - low_w,
    )  # fmt: skip
    moved = tl.zeros([BLOCK_T * BLOCK_H * BLOCK_W, 16], tl.float32)
    for r in range(heads // groups):
        slot = batch * heads + group * (heads // groups) + r
        query, grad, norm, share = load_query(
            q, grad_out, lse, delta, slot, n, rows, heads, keep, D, BLOCK_D
        )
        cells = reach_of(slot, n - t0 * H * W, (t1 - t0) * H * W, box_t * box_h * box_w)
        dquery, moved = through_taps(
            query, grad, norm, share, moved,
            row_base(k, slot, rows, heads, D), row_base(v, slot, rows, heads, D), sets, dsets,
            reach_v + cells, reach_k + cells, (t, h, w), origin, (T, H, W), (box_t, box_h, box_w),
            (t1 - t0) * H * W, stride, keep, scale, D, BLOCK_D, KT, KH, KW, KIND,
        )  # fmt: skip
        if BLOCK_E > 0:
            dquery = through_extra(
                query, grad, norm, share, dquery, extra_k, extra_v, slot, heads, E, scale,
                D, BLOCK_D, DOT, BLOCK_E,
            )  # fmt: skip
        store_rows(row_base(dq, slot, rows, heads, D), n, stride, keep, dquery, D, BLOCK_D)
    if KIND != TAP:
        channel = tl.arange(0, 16)[None, :]
        channels: tl.constexpr = 12 if KIND == AFFINE else 3
        tl.store(dsets[:, None] + channel, moved, keep[:, None] & (channel < channels))


@triton.jit
def load_query(
    q, grad_out, lse, delta, slot, n, rows, heads, keep, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Of the queries: q and grad_out [Q, BLOCK_D], log-sum-exp and out . grad_out [Q]."""
    query = load_rows(row_base(q, slot, rows, heads, D), n, heads * D, keep, D, BLOCK_D)
    grad = load_rows(row_base(grad_out, slot, rows, heads, D), n, heads * D, keep, D, BLOCK_D)
    at = n.to(tl.int64) * heads
    norm = tl.load(row_base(lse, slot, rows, heads, 1) + at, keep, other=0.0)
    share = tl.load(row_base(delta, slot, rows, heads, 1) + at, keep, other=0.0)
    return query, grad, norm, share


@triton.jit
def reach_of(slot, query, queries, box):
    """Where the cells of `query` begin; cells lie `queries` apart: neighbours store together."""
    return query.to(tl.int64) + slot.to(tl.int64) * box * queries


@triton.jit
def through_taps(
    query, grad, norm, share, moved, keys, values, sets, dsets, reach_v, reach_k,
    at, origin, size, box, queries, stride, keep, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One head: its dq [Q, BLOCK_D], and `moved` [Q, 16] with the gradient of the offsets added."""
    dquery = tl.zeros_like(query)
    for j in range(KT * KH * KW):
        cell, inside, slides = tap_position(sets, at, size, j, KT, KH, KW, KIND)
        key, p, ds, slope = slopes(
            query, grad, norm, share, keys, values, cell, size, stride, keep, scale, D, BLOCK_D
        )
        dquery += ds[:, None] * key
        moved = add_slopes(moved, dsets, slope, inside, slides, j, keep, KT, KH, KW, KIND)
        spread(reach_v, reach_k, p, ds, cell, origin, size, box, queries, keep)
    return dquery, moved


@triton.jit
def slopes(
    query, grad, norm, share, keys, values, cell, size, stride, keep, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tap: k there, its probability, gradient of q.k, and of the tap's position (t, h, w).

    The loss depends on the position through q.k and grad.v, both trilinear in it: value and three
    derivatives of each come from its products with the eight corners.
    """
    ft, fh, fw = cell[3], cell[4], cell[5]
    step_t, step_h, step_w = unit_steps(size[0], size[1], size[2])
    lower = (cell[0] * size[1] + cell[1]) * size[2] + cell[2]
    key_at = row_pointers(keys, lower, stride, BLOCK_D)
    value_at = row_pointers(values, lower, stride, BLOCK_D)
    mask = keep[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    zero = tl.zeros_like(norm)
    key, s, st, sh, sw = tl.zeros_like(query), zero, zero, zero, zero
    g, gt, gh, gw = zero, zero, zero, zero
    # An edge is two corners, neighbours on w; one at a time, or their rows fill the registers.
    for edge in range(4):
        e_t, e_h = edge // 2, edge % 2
        wt, wh = 1 - ft + e_t * (2 * ft - 1), 1 - fh + e_h * (2 * fh - 1)
        up_t, up_h = (2 * e_t - 1) * wh, (2 * e_h - 1) * wt
        skip = (e_t * step_t * size[1] + e_h * step_h) * size[2]
        skip = skip.to(tl.int64) * stride
        far = skip + step_w * stride
        near_row = tl.load(key_at + skip, mask, other=0.0).to(tl.float32)
        far_row = tl.load(key_at + far, mask, other=0.0).to(tl.float32)
        key += (wt * wh * (1 - fw))[:, None] * near_row + (wt * wh * fw)[:, None] * far_row
        of_near = tl.sum(query * near_row, 1)
        rise = tl.sum(query * far_row, 1) - of_near
        level = of_near + fw * rise
        s, st, sh, sw = (
            s + wt * wh * level,
            st + up_t * level,
            sh + up_h * level,
            sw + wt * wh * rise,
        )
        of_near = tl.sum(grad * tl.load(value_at + skip, mask, other=0.0).to(tl.float32), 1)
        rise = tl.sum(grad * tl.load(value_at + far, mask, other=0.0).to(tl.float32), 1) - of_near
        level = of_near + fw * rise
        g, gt, gh, gw = (
            g + wt * wh * level,
            gt + up_t * level,
            gh + up_h * level,
            gw + wt * wh * rise,
        )
    p = tl.exp(scale * s - norm)
    ds = scale * p * (g - share)
    return key, p, ds, (ds * st + p * gt, ds * sh + p * gh, ds * sw + p * gw)


@triton.jit
def add_slopes(
    moved, dsets, slope, inside, slides, j, keep,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Gradients of a tap's position, brought to the offsets that made it.

    Column a < 3 of `moved` is the slide on axis a; 3 + 3 b + a is what displaces a by the tap's
    distance on b. `tap` has columns of its own, which go to memory.
    """
    xt, xh, xw = (
        tl.where(inside[0], slope[0], 0.0), tl.where(inside[1], slope[1], 0.0),
        tl.where(inside[2], slope[2], 0.0),
    )  # fmt: skip
    if KIND == TAP:
        tl.atomic_add(dsets + 3 * j, xt, keep, sem="relaxed", scope="cta")
        tl.atomic_add(dsets + 3 * j + 1, xh, keep, sem="relaxed", scope="cta")
        tl.atomic_add(dsets + 3 * j + 2, xw, keep, sem="relaxed", scope="cta")
    else:
        column = tl.arange(0, 16)[None, :]
        of_t, of_h = column % 3 == 0, column % 3 == 1
        change = tl.where(of_t, xt[:, None], tl.where(of_h, xh[:, None], xw[:, None]))
        slid = tl.where(of_h, slides[1][:, None], slides[2][:, None])
        slid = tl.where(of_t, slides[0][:, None], slid)
        jt, jh, jw = j // (KH * KW), j // KW % KH, j % KW
        centred = tl.where(column < 9, jh - (KH - 1) / 2, jw - (KW - 1) / 2)
        centred = tl.where(column < 6, jt - (KT - 1) / 2, centred)
        moved += change * tl.where(column < 3, slid.to(tl.float32), centred)
    return moved


@triton.jit
def spread(reach_v, reach_k, p, ds, cell, origin, size, box, queries, keep):
    """A tap's probability and its gradient of q.k, to the eight voxels it was sampled from."""
    ft, fh, fw = cell[3], cell[4], cell[5]
    rt, rh, rw = cell[0] - origin[0], cell[1] - origin[1], cell[2] - origin[2]
    # The box holds every tap; only a NaN, whose cell means nothing, can be outside.
    held = keep & within((rt, rh, rw), box)
    lower = ((rt * box[1] + rh) * box[2] + rw).to(tl.int64) * queries
    step_t, step_h, step_w = unit_steps(size[0], size[1], size[2])
    for c in tl.static_range(8):
        weight = (ft if c // 4 else 1 - ft) * (fh if c // 2 % 2 else 1 - fh)
        weight = weight * (fw if c % 2 else 1 - fw)
        skip = (c // 4 * step_t * box[1] + c // 2 % 2 * step_h) * box[2] + c % 2 * step_w
        skip = skip.to(tl.int64) * queries
        tl.atomic_add(reach_v + lower + skip, weight * p, held, sem="relaxed", scope="cta")
        tl.atomic_add(reach_k + lower + skip, weight * ds, held, sem="relaxed", scope="cta")


@triton.jit
def through_extra(
    query, grad, norm, share, dquery, extra_k, extra_v, slot, heads, E, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`dquery` with the share of the extra keys added."""
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        key = load_rows(row_base(extra_k, slot, E, heads, D), e, heads * D, e < E, D, BLOCK_D)
        value = load_rows(row_base(extra_v, slot, E, heads, D), e, heads * D, e < E, D, BLOCK_D)
        _p, ds = extra_scores(query, grad, norm, share, key, value, e < E, scale, DOT)
        dquery += tl.dot(ds.to(DOT), key.to(DOT), input_precision="ieee")
    return dquery


@triton.jit
def extra_scores(query, grad, norm, share, key, value, keep, scale, DOT: tl.constexpr):
    """Probabilities of extra keys and gradients of their q.k, [Q, BLOCK_E]."""
    s = tl.dot(query.to(DOT), tl.trans(key.to(DOT)), input_precision="ieee")
    dp = tl.dot(grad.to(DOT), tl.trans(value.to(DOT)), input_precision="ieee")
    p = tl.where(keep[None, :], tl.exp(scale * s - norm[:, None]), 0.0)
    return p, scale * p * (dp - share[:, None])
