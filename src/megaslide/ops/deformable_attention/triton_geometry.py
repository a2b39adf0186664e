"""Where queries and taps lie, for the Triton kernels: the geometry of `reference`, per block.

All of it is integer and fp32 arithmetic on blocks of queries; nothing here reads K or V. Kept apart
from the kernels, so that the definition of the operator can be read beside `reference`.

Shapes: [Q] one number per query of a block. Axes in the order (t, h, w).
"""

import triton
import triton.language as tl

SHIFT = tl.constexpr(1)
AFFINE = tl.constexpr(2)
TAP = tl.constexpr(3)

SIZES = (
    "T", "H", "W", "heads", "groups", "E", "rows", "split", "t0", "t1", "p0", "p1",
    "low_t", "low_h", "low_w", "box_t", "box_h", "box_w",
)  # fmt: skip
"""Integers that kernels are given. Triton would compile anew where one is 1 or a multiple of 16,
which a volume's shape or a block of frames may be or not, and no kernel gains by knowing it: rows
are D apart, and D is a constant."""


@triton.jit
def voxels_of_block(
    block, first, T, H, W,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Voxels (t, h, w) [Q] of one tile of the frames `first` to T.

    Neighbours share most of their windows, so a tile reads fewer rows of K and V than a line does.
    The last result is false outside the frames; coordinates are in the volume even there.
    """
    tiles_h, tiles_w = tl.cdiv(H, BLOCK_H), tl.cdiv(W, BLOCK_W)
    lane = tl.arange(0, BLOCK_T * BLOCK_H * BLOCK_W)
    t = first + block // (tiles_h * tiles_w) * BLOCK_T + lane // (BLOCK_H * BLOCK_W)
    h = block // tiles_w % tiles_h * BLOCK_H + lane // BLOCK_W % BLOCK_H
    w = block % tiles_w * BLOCK_W + lane % BLOCK_W
    inside = (h < H) & (w < W) & (t < T)
    return tl.minimum(t, T - 1), tl.minimum(h, H - 1), tl.minimum(w, W - 1), inside


@triton.jit
def window_start(i, k: tl.constexpr, size):
    """First voxel of the base window of a query at i, on one axis."""
    return tl.minimum(tl.maximum(i - k // 2, 0), size - k)


@triton.jit
def first_query(start, k: tl.constexpr, size):
    """Least query whose window starts at `start` or later; the inverse of `window_start`."""
    return tl.where(start <= 0, 0, tl.where(start > size - k, size, start + k // 2))


@triton.jit
def hull(first, end):
    """Least `first` [Q] and the length from there to the largest `end` [Q], on one axis."""
    low = tl.min(first)
    return low, tl.max(end) - low


@triton.jit
def voxels_of_box(first, low, length, size, BLOCK: tl.constexpr):
    """Voxels `first` to `first` + BLOCK of a box, t-major: (t, h, w) [BLOCK], flat, and whether
    they are in the box and in the volume."""
    c = first + tl.arange(0, BLOCK)
    t = low[0] + c // (length[1] * length[2])
    h = low[1] + c // length[2] % length[1]
    w = low[2] + c % length[2]
    inside = (c < length[0] * length[1] * length[2]) & (t < size[0])
    inside = inside & (h < size[1]) & (w < size[2])
    return (t, h, w), (t * size[1] + h) * size[2] + w, inside


@triton.jit
def within(steps, box):
    """Whether steps (t, h, w) from the first voxel of a box end in it."""
    t, h, w = steps
    inside = (t >= 0) & (t < box[0]) & (h >= 0) & (h < box[1])
    return inside & (w >= 0) & (w < box[2])


@triton.jit
def clamp(x, low, high):
    """As torch.clamp: a NaN stays one, where min and max of the hardware would hide it."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def tap_on_axis(
    offsets,
    i,
    size,
    j,
    centred_t,
    centred_h,
    centred_w,
    tap,
    axis: tl.constexpr,
    k: tl.constexpr,
    KIND: tl.constexpr,
):
    """The cell in which a tap samples on one axis, for the queries at i [Q].

    `offsets` points at each query's set; j is the tap's index on this axis, `tap` among all taps,
    centred_t, _h, _w its distance from the centre of the window.

    Returns lower voxel, weight of the upper voxel, and whether gradients pass to the tap's own
    position and to the slide of the window.
    """
    start = window_start(i, k, size)
    last = size - k
    begin = start.to(tl.float32)
    slides = begin >= 0
    if KIND == TAP:
        x = begin + j + tl.load(offsets + 3 * tap + axis)
    else:
        free = begin + tl.load(offsets + axis)
        slides = (free >= 0) & (free <= last) & (last > 0)
        begin = tl.where(last > 0, clamp(free, 0.0, last * 1.0), begin)
        x = begin + j
    if KIND == AFFINE:
        stretch = centred_t * tl.load(offsets + 3 + axis)
        stretch += centred_h * tl.load(offsets + 6 + axis)
        x += stretch + centred_w * tl.load(offsets + 9 + axis)
    inside = (x >= 0) & (x <= size - 1)
    x = clamp(x, 0.0, (size - 1) * 1.0)
    at_end = (begin == last) & (last > 0)
    cell = tl.where(at_end, tl.ceil(x) - 1, tl.floor(x)).to(tl.int32)
    cell = tl.minimum(tl.maximum(cell, 0), tl.maximum(size - 2, 0))
    return cell, x - cell, inside, slides


@triton.jit
def tap_position(
    offsets, voxel, size, j,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`tap_on_axis` of tap j on the three axes: (cells, weights), inside, slides."""
    t, h, w = voxel
    T, H, W = size
    jt, jh, jw = j // (KH * KW), j // KW % KH, j % KW
    ct, ch, cw = jt - (KT - 1) / 2, jh - (KH - 1) / 2, jw - (KW - 1) / 2
    pt, ft, it, st = tap_on_axis(offsets, t, T, jt, ct, ch, cw, j, 0, KT, KIND)
    ph, fh, ih, sh = tap_on_axis(offsets, h, H, jh, ct, ch, cw, j, 1, KH, KIND)
    pw, fw, iw, sw = tap_on_axis(offsets, w, W, jw, ct, ch, cw, j, 2, KW, KIND)
    return (pt, ph, pw, ft, fh, fw), (it, ih, iw), (st, sh, sw)


@triton.jit
def unit_steps(T, H, W):
    """From a cell's lower voxel to its upper one, per axis: 1, or 0 on an axis of one voxel.

    The same for every cell, so that the eight rows of a cell have one address and eight constants.
    """
    return tl.minimum(T - 1, 1), tl.minimum(H - 1, 1), tl.minimum(W - 1, 1)


@triton.jit
def row_pointers(base, row, stride, BLOCK_D: tl.constexpr):
    """Pointers [Q, BLOCK_D]; int64, because tokens x heads x d passes 2^31."""
    return base + row.to(tl.int64)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_rows(base, row, stride, keep, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [Q, BLOCK_D] in fp32, zero where not kept and beyond D."""
    return read_rows(base, row, stride, keep, D, BLOCK_D).to(tl.float32)


@triton.jit
def read_rows(base, row, stride, keep, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """As `load_rows`, in the dtype of memory: what dense products take without a conversion."""
    mask = keep[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    return tl.load(row_pointers(base, row, stride, BLOCK_D), mask=mask, other=0.0)


@triton.jit
def store_rows(base, row, stride, keep, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [Q, BLOCK_D] to memory, rounded to its dtype."""
    mask = keep[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(row_pointers(base, row, stride, BLOCK_D), x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def row_base(x, slot, rows, heads, D: tl.constexpr):
    """Pointer to row 0 of `slot` = batch * heads + head in [B, rows, heads, D]."""
    wide = slot.to(tl.int64)
    return x + (wide // heads * rows * heads + wide % heads) * D
