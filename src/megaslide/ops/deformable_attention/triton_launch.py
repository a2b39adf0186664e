"""Launches the Triton kernels of 3D-DSA: tiles, blocks of frames, memory, the order of the passes.

The backward goes through the volume in blocks of frames. For each, `queries_kernel` gives dq and
the gradients of the offsets, and leaves its weights on the voxels in reach; `keys_kernel` sums them
into dk and dv of the keys that this block of queries can reach. The reach, 8 bytes per query, head
and voxel (`shift` in halves: 4), is the only memory that grows with the window, and a block of
frames bounds it. Without offsets there is none.

Shapes: B batch, T H W voxels per axis, N = T*H*W, G offset groups, K taps, E extra keys, d head
dim.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megaslide.ops.deformable_attention.triton_backend import interpreting
from megaslide.ops.deformable_attention.triton_kernels import (
    forward_kernel,
    queries_kernel,
    share_kernel,
)
from megaslide.ops.deformable_attention.triton_keys import extra_kernel, keys_kernel
from megaslide.ops.deformable_attention.triton_slide import (
    slide_forward_kernel,
    slide_queries_kernel,
)
from megaslide.ops.deformable_attention.triton_window import (
    window_forward_kernel,
    window_keys_kernel,
    window_queries_kernel,
)

KIND_CODES = {"shift": 1, "affine": 2, "tap": 3}
REACH_BYTES = 2**30
"""Bound on the weights of a block of frames; one frame is taken even above it."""
SPLIT = 4096
"""Queries per program that sums gradients of extra keys."""

# t, h, w, warps. 8 voxels along w: their rows of K and V, and their weights in the reach, are
# neighbours in memory.
FORWARD_TILES = ((1, 2, 8, 4), (1, 4, 8, 4), (1, 2, 8, 8), (1, 4, 8, 8))
# 8 numbers of a row per thread; with more, the backward of the queries spills registers.
BACKWARD_TILES = {64: (1, 2, 8, 4), 128: (1, 2, 8, 8)}
# t, h, w, warps, and rows of the box at a time. Frames of 8 x 8, because windows are mostly square:
# the box around a tile is then a small multiple of one window. Two frames are 128 queries, two
# instructions of Hopper's tensor cores; 8 warps on 64 would each be computed twice. Where numbers
# are gathered, a warp holds whole queries, and few of them: what a query is known by fills
# registers.
DENSE_TILES = {
    "forward": (2, 8, 8, 8, 64), "backward": (2, 8, 8, 8, 32),
    "slide forward": (1, 8, 8, 8, 32), "slide backward": (1, 4, 8, 8, 32),
}  # fmt: skip
# In fp32 dense products go without tensor cores and keep their operands in registers.
SINGLE_TILES = {
    "forward": (1, 4, 8, 8, 16), "backward": (1, 4, 8, 8, 16),
    "slide forward": (1, 4, 4, 8, 16), "slide backward": (1, 4, 4, 8, 16),
}  # fmt: skip
DENSE_STAGES = 2
"""Blocks of keys on their way or in use. A third does not fit an A100's shared memory twice."""
# The interpreter pays per operation, whatever its width.
INTERPRETED_TILE = (4, 4, 8, 1, 32)


class Inputs(NamedTuple):
    """Contiguous tensors; offsets in fp32, None for the fixed window."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor | None
    extra_k: Tensor | None
    extra_v: Tensor | None


def _config(tile: Sequence[int]) -> triton.Config:
    sizes = dict(zip(("BLOCK_T", "BLOCK_H", "BLOCK_W"), tile, strict=False))
    return triton.Config(sizes, num_warps=tile[3])


_configs = [_config(INTERPRETED_TILE)] if interpreting() else [_config(x) for x in FORWARD_TILES]
_tuned_forward = triton.autotune(_configs, key=["D", "KIND", "KT", "KH", "KW"])(forward_kernel)


def backward_config(q: Tensor) -> dict[str, Any]:
    """Not tuned: kernels of the backward add to memory, so trying them would change the result."""
    tile = INTERPRETED_TILE if interpreting() else BACKWARD_TILES[64 if q.shape[-1] <= 64 else 128]
    return _config(tile).all_kwargs()


def dense_config(dtype: torch.dtype, use: str) -> dict[str, Any]:
    """Blocks of the kernels that take dense products over a tile's box; not tuned either."""
    tiles = SINGLE_TILES if dtype == torch.float32 else DENSE_TILES
    tile = INTERPRETED_TILE if interpreting() else tiles[use]
    blocks = {"BLOCK_P": tile[4], "num_stages": DENSE_STAGES}
    return _config(tile).all_kwargs() | blocks


class Reach(NamedTuple):
    """The voxels that taps of a query can sample: `box` per axis, from `low` before its window."""

    low: tuple[int, ...]
    box: tuple[int, ...]


def prepare(*tensors: Tensor | None) -> Inputs:
    """q, k, v, offsets, extra_k, extra_v as the kernels take them."""
    q, k, v, offsets, extra_k, extra_v = (
        None if x is None else x.detach().contiguous() for x in tensors
    )
    assert q is not None and k is not None and v is not None  # noqa: PT018
    return Inputs(q, k, v, None if offsets is None else offsets.float(), extra_k, extra_v)


def forward(
    inputs: Inputs, *, window: Sequence[int], kind: str, scale: float
) -> tuple[Tensor, Tensor]:
    """out [B,T,H,W,heads,d] in q's dtype, and the log-sum-exp [B,T,H,W,heads] fp32."""
    q, k, v, offsets, extra_k, extra_v = inputs
    B, T, H, W, heads, _ = q.shape
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:5], dtype=torch.float32)
    if B and kind == "none":
        window_forward_kernel[_grid(T, H, W, B * heads)](
            q, k, v, _or(extra_k, q), _or(extra_v, q), out, lse, T, H, W, heads, _extra(inputs),
            scale, **_head(q), **_dot(q), **_taps(window), **_extra_block(inputs),
            **dense_config(q.dtype, "forward"),
        )  # fmt: skip
    elif B and kind == "shift":
        slide_forward_kernel[_grid(T, H, W, B * heads)](
            q, k, v, offsets, _or(extra_k, q), _or(extra_v, q), out, lse,
            T, H, W, heads, _groups(inputs), _extra(inputs), scale,
            **_head(q), **_dot(q), **_slots(window), **_extra_block(inputs),
            **dense_config(q.dtype, "slide forward"),
        )  # fmt: skip
    elif B:
        _tuned_forward[_grid(T, H, W, B * heads)](
            q, k, v, offsets, _or(extra_k, q), _or(extra_v, q), out, lse,
            T, H, W, heads, _groups(inputs), _extra(inputs), scale,
            **_head(q), **_dot(q), **_window(window, kind), **_extra_block(inputs),
        )  # fmt: skip
    return out, lse


class Setting(NamedTuple):
    """What all passes of one backward share."""

    inputs: Inputs
    grad_out: Tensor
    lse: Tensor
    shares: Tensor
    gradients: list[Tensor]
    reach: Reach
    window: Sequence[int]
    kind: str
    scale: float


def backward(
    inputs: Inputs,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    window: Sequence[int],
    kind: str,
    scale: float,
) -> list[Tensor]:
    """Gradients of the inputs that are given, in order; fp32, dq in q's dtype."""
    q, k, v, offsets, extra_k, _ = inputs
    gradients = [torch.empty_like(q), _zeros(k), _zeros(v)]
    gradients += [] if offsets is None else [_zeros(offsets)]
    if not q.shape[0]:
        return gradients + ([] if extra_k is None else [_zeros(extra_k), _zeros(extra_k)])
    grad_out, reach = grad_out.contiguous(), reach_of(inputs, window, kind)
    shares = _shares(out.contiguous(), grad_out)
    setting = Setting(inputs, grad_out, lse, shares, gradients, reach, window, kind, scale)
    for t0, t1 in _blocks_of_frames(setting):
        room = _room(setting, t1 - t0)
        _queries(setting, room, t0, t1)
        _keys(setting, room, t0, t1)
    return gradients + ([] if extra_k is None else _extra_gradients(setting))


def reach_of(inputs: Inputs, window: Sequence[int], kind: str) -> Reach:
    """The box that holds every corner of every tap, by the largest offset there is.

    Reads one number per axis from the device, so the host waits for it. A tap moves by at most r <
    R = floor(r) + 1 voxels, before it is clamped to the volume, which brings it nearer.
    """
    size, k = inputs.q.shape[1:4], tuple(window)
    if inputs.offsets is None:
        return Reach((0, 0, 0), k)
    low, box = [], []
    for r, length, taps in zip(_displacement(inputs.offsets, k, kind), size, k, strict=True):
        rounding = 1e-6 * r + 2e-7 * length
        bound = length if not math.isfinite(r) else int(min(r + rounding, length)) + 1
        before, after = min(bound, length - taps), min(taps - 1 + bound, length - 1)
        low.append(before)
        box.append(before + after + 1)
    return Reach(tuple(low), tuple(box))


def _displacement(offsets: Tensor, k: Sequence[int], kind: str) -> list[float]:
    """Largest distance in voxels that a tap is moved by, per axis."""
    distance = offsets.abs().flatten(0, -2).unflatten(-1, (-1, 3))  # rows: slide, M_t, M_h, M_w
    if kind == "affine":
        furthest = torch.stack([distance.new_full((), x) for x in (1, *((n - 1) / 2 for n in k))])
        distance = (distance * furthest[:, None]).sum(-2)
    return [float(x) for x in distance.flatten(0, -2).amax(0).tolist()]


# ---- passes --------------------------------------------------------------------------------------


def _shares(out: Tensor, grad_out: Tensor) -> Tensor:
    shares = out.new_empty(out.shape[:5], dtype=torch.float32)
    rows, block = shares.numel(), 64
    share_kernel[(triton.cdiv(rows, block),)](
        out, grad_out, shares, rows, **_head(out), BLOCK=block, num_warps=4
    )
    return shares


def _queries(setting: Setting, room: Sequence[Tensor], t0: int, t1: int) -> None:
    inputs, grad_out, lse, shares, gradients, reach, window, kind, scale = setting
    q, k, v, offsets, extra_k, extra_v = inputs
    B, T, H, W, heads, _ = q.shape
    if kind == "none":
        window_queries_kernel[_grid(T, H, W, B * heads)](
            q, k, v, _or(extra_k, q), _or(extra_v, q), grad_out, lse, shares, gradients[0],
            T, H, W, heads, _extra(inputs), scale,
            **_head(q), **_dot(q), **_taps(window), **_extra_block(inputs),
            **dense_config(q.dtype, "backward"),
        )  # fmt: skip
        return
    groups = _groups(inputs)
    if kind == "shift":
        slide_queries_kernel[_grid(t1 - t0, H, W, B * groups)](
            q, k, v, offsets, _or(extra_k, q), _or(extra_v, q), grad_out, lse, shares,
            gradients[0], gradients[3], *room,
            T, H, W, heads, groups, _extra(inputs), scale, t0, t1,
            **_head(q), **_dot(q), **_slots(window), **_extra_block(inputs),
            **dense_config(q.dtype, "slide backward"),
        )  # fmt: skip
        return
    queries_kernel[_grid(t1 - t0, H, W, B * groups)](
        q, k, v, offsets, _or(extra_k, q), _or(extra_v, q), grad_out, lse, shares,
        gradients[0], gradients[3], *room[:2],
        T, H, W, heads, groups, _extra(inputs), scale, t0, t1, *reach.low, *reach.box,
        **_head(q), **_dot(q), **_window(window, kind), **_extra_block(inputs),
        **backward_config(q),
    )  # fmt: skip


def _keys(setting: Setting, room: Sequence[Tensor], t0: int, t1: int) -> None:
    inputs, grad_out, lse, shares, gradients, reach, window, kind, scale = setting
    q, k, v = inputs[:3]
    B, T, H, W, heads, _ = q.shape
    if kind == "none":
        window_keys_kernel[_grid(T, H, W, B * heads)](
            q, k, v, grad_out, lse, shares, gradients[1], gradients[2], T, H, W, heads, scale,
            **_head(q), **_dot(q), **_taps(window), **dense_config(q.dtype, "backward"),
        )  # fmt: skip
        return
    first, last = (min(max(t - window[0] // 2, 0), T - window[0]) for t in (t0, t1 - 1))
    p0, p1 = max(first - reach.low[0], 0), min(last - reach.low[0] + reach.box[0], T)
    for x, weights, total in ((grad_out, room[0], gradients[2]), (q, room[1], gradients[1])):
        keys_kernel[_grid(p1 - p0, H, W, B * heads)](
            x, weights, room[2], total, T, H, W, heads, _groups(inputs), p0, p1, t0, t1,
            *reach.low, *reach.box,
            **_head(q), **_dot(q), **_window(window, kind), **dense_config(q.dtype, "backward"),
        )  # fmt: skip


def _extra_gradients(setting: Setting) -> list[Tensor]:
    """dk and dv of the extra keys [B, E, heads, d] fp32."""
    q, _, _, _, extra_k, extra_v = setting.inputs
    assert extra_k is not None
    B, T, H, W, heads, _ = q.shape
    rows = T * H * W
    block, warps = (16, 8) if q.dtype == torch.float32 else (32, 4)  # wider, fp32 spills
    E, splits = extra_k.shape[1], triton.cdiv(rows, SPLIT)
    parts = [q.new_zeros(splits, *extra_k.shape, dtype=torch.float32) for _ in range(2)]
    if E:
        extra_kernel[(triton.cdiv(E, block), B * heads, splits)](
            q, extra_k, extra_v, setting.grad_out, setting.lse, setting.shares, *parts,
            rows, heads, E, setting.scale, SPLIT,
            **_head(q), **_dot(q), BLOCK_Q=block, BLOCK_E=block, num_warps=warps,
        )  # fmt: skip
    return [x.sum(0) for x in parts]


# ---- blocks --------------------------------------------------------------------------------------


def _blocks_of_frames(setting: Setting) -> list[tuple[int, int]]:
    """[(first, end)] such that the reach of the frames between them stays within REACH_BYTES."""
    q = setting.inputs.q
    B, T, H, W, heads, _ = q.shape
    if setting.kind == "none":
        return [(0, T)]
    step = max(1, REACH_BYTES // (2 * B * heads * H * W * _reach_bytes(setting)))
    return [(t, min(t + step, T)) for t in range(0, T, step)]


def _room(setting: Setting, frames: int) -> tuple[Tensor, ...]:
    """For the weights of `frames` frames on v and on k, and for the cells of `shift`."""
    q, kind, box = setting.inputs.q, setting.kind, setting.reach.box
    B, _, H, W, heads, _ = q.shape
    if kind == "none":
        return (q, q, q)  # not read
    if kind == "shift":
        room = q.new_empty(2, B * heads, frames * H * W, _voxels(setting), dtype=_kept(q))
        cells = q.new_empty(B * _groups(setting.inputs), frames * H * W, 3, dtype=torch.int32)
        return room[0], room[1], cells
    room = q.new_zeros(2, B * heads, math.prod(box), frames * H * W, dtype=torch.float32)
    return room[0], room[1], q


def _reach_bytes(setting: Setting) -> int:
    """Of one query and head, on one of v and k."""
    if setting.kind == "shift":
        return _kept(setting.inputs.q).itemsize * _voxels(setting)
    return 4 * math.prod(setting.reach.box)


def _voxels(setting: Setting) -> int:
    """Voxels that serve the taps of a window that slides as a whole."""
    return math.prod(n + 1 for n in setting.window)


def _kept(q: Tensor) -> torch.dtype:
    """Of weights that one program writes and dense products read, which round to it anyway."""
    return torch.float32 if interpreting() else q.dtype


def _grid(T: int, H: int, W: int, slots: int) -> Callable[[dict[str, Any]], tuple[int, int]]:
    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        sizes = zip((T, H, W), ("BLOCK_T", "BLOCK_H", "BLOCK_W"), strict=True)
        return math.prod(triton.cdiv(size, meta[name]) for size, name in sizes), slots

    return grid


def _head(q: Tensor) -> dict[str, int]:
    d = q.shape[-1]
    sizes = {"D": d, "BLOCK_D": max(16, triton.next_power_of_2(d))}
    return sizes | {"enable_fp_fusion": True}  # versions of Triton differ in the default


def _dot(q: Tensor) -> dict[str, Any]:
    """Operands of dense products: q's dtype on a GPU; the interpreter's bf16 is not to be used."""
    wide = interpreting() or q.dtype == torch.float32
    half = triton.language.bfloat16 if q.dtype == torch.bfloat16 else triton.language.float16
    return {"DOT": triton.language.float32 if wide else half}


def _window(window: Sequence[int], kind: str) -> dict[str, int]:
    return _taps(window) | {"KIND": KIND_CODES[kind]}


def _taps(window: Sequence[int]) -> dict[str, int]:
    return dict(zip(("KT", "KH", "KW"), window, strict=True))


def _slots(window: Sequence[int]) -> dict[str, int]:
    """Of a window, cut at a fixed h, with one voxel more on each axis: see `triton_slide`."""
    frames, row = (triton.next_power_of_2(window[axis] + 1) for axis in (0, 2))
    return _taps(window) | {"ROW": row, "S": frames * row}


def _extra_block(inputs: Inputs) -> dict[str, int]:
    return {"BLOCK_E": 32 if _extra(inputs) else 0}


def _extra(inputs: Inputs) -> int:
    return 0 if inputs.extra_k is None else inputs.extra_k.shape[1]


def _groups(inputs: Inputs) -> int:
    return 1 if inputs.offsets is None else inputs.offsets.shape[4]


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer is always passed; `other` stands where nothing is read."""
    return other if x is None else x


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.float32)
