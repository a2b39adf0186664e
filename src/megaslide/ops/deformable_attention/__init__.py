"""3D deformable slide attention (3D-DSA): the one public function, whatever computes it.

Every token attends to a small window of the volume whose sampling points move with learned
offsets; the cost is linear in tokens. Arguments are checked here, once, so that no backend has to.

Where the interpolation has no derivative, all backends take the same one. A coordinate strictly
outside its bounds has gradient 0; at the bound the gradient passes. At an integer coordinate the
derivative is that of the cell above, or of the cell below at the last voxel and for windows that
lie at the end of the axis, so that a fresh model (all offsets 0) learns from the direction in
which a window can move. Where the window is the whole axis, a slide has no effect and no gradient.

Shapes: B batch, T H W voxels per axis, G offset groups, K taps, E extra keys, d head dim.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.deformable_attention import native, triton_backend
from megaslide.ops.deformable_attention.reference import deformable_attention_reference

__all__ = ["Kind", "cut_window", "deformable_attention", "offset_channels"]

Kind = Literal["shift", "affine", "tap"]
Triple = tuple[int, int, int]

KINDS: tuple[str, ...] = get_args(Kind)
BACKENDS = ("auto", "reference", "native", "triton")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

KERNELS = {
    "native": (native, "deformable_attention_native"),
    "triton": (triton_backend, "deformable_attention_triton"),
}

logger = logging.getLogger(__name__)


def deformable_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None = None,
    *,
    window: Sequence[int],
    kind: Kind = "affine",
    extra_k: Tensor | None = None,
    extra_v: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of every voxel to K trilinearly sampled taps, and to E extra keys.

    The base window of a query at i is that of neighbourhood attention: it begins at
    start = clamp(i - k//2, 0, size - k) on each axis, so every query has exactly K taps. Odd k
    centres it; even k puts the query at tap k/2, half a voxel above the centre. A window longer
    than the axis is cut to the axis. Tap j samples, in voxels:

        shift   x_j = clamp(start + s, 0, size - k) + j
        affine  x_j = clamp(clamp(start + s, 0, size - k) + j + (j - (k - 1)/2) M, 0, size - 1)
        tap     x_j = clamp(start + j + delta_j, 0, size - 1)

    Args:
        q, k, v: [B, T, H, W, heads, d], one dtype of fp64, fp32, bf16, fp16, one device.
        offsets: in voxels, axes ordered (t, h, w), any floating dtype; head h of `heads` uses
            group h // (heads // G). None is the fixed window (`kind` is then not used).
            shift [B, T, H, W, G, 3]; affine [B, T, H, W, G, 12]: s, then M row-major, row =
            axis of the tap, column = axis displaced; tap [B, T, H, W, G, K, 3], K the taps of
            `window` as given (t-major): on an axis that cuts it, those at the kept displacements
            from the query are used.
        window: taps per axis (kt, kh, kw), each 1 or more.
        kind: how the window deforms.
        extra_k, extra_v: [B, E, heads, d], dtype of q: keys every query sees too, in the same
            softmax.
        scale: factor on q·k; None is d**-0.5.
        backend: None or "auto" takes the kernels of the device ("triton" on a GPU, "native" on
            the CPU) where they can run, else the reference; a name insists.

    Returns:
        [B, T, H, W, heads, d] in q's dtype. Coordinates, softmax and sums are fp32 (fp64 for
        fp64 inputs). The reference can be differentiated twice, the kernels once.

    Raises:
        ValueError: an argument that does not fit, with its value and what would.
        RuntimeError: a backend asked for by name where it cannot run, with the reason.
    """
    window = _check_window(window)
    _check_volume(q, k, v)
    _check_extra(q, extra_k, extra_v)
    if offsets is not None:
        _check_offsets(q, offsets, window, kind)
    cut = cut_window(window, q.shape[1:4])
    if offsets is not None and kind == "tap" and cut != window:
        offsets = _kept_taps(offsets, window, cut)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    attend = _select(backend, q)
    return attend(q, k, v, offsets, extra_k, extra_v, window=cut, kind=kind, scale=scale)


def offset_channels(kind: Kind, window: Sequence[int]) -> int:
    """Numbers per token and offset group: 3 for shift, 12 for affine, 3K for tap."""
    kt, kh, kw = _check_window(window)
    _check_kind(kind)
    return {"shift": 3, "affine": 12, "tap": 3 * kt * kh * kw}[kind]


def cut_window(window: Sequence[int], size: Sequence[int]) -> Triple:
    """The window that a volume of `size` (T, H, W) leaves of `window`."""
    kt, kh, kw = (min(k, length) for k, length in zip(window, size, strict=True))
    return kt, kh, kw


def _select(backend: str | None, q: Tensor) -> Callable[..., Tensor]:
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend {backend!r} is unknown; accepted: None, {', '.join(BACKENDS)}")
    if library.is_counting_only():
        return native.deformable_attention_native
    if backend == "reference":
        return deformable_attention_reference
    on_host = q.device.type in ("cpu", "meta")
    name = backend if backend in KERNELS else "native" if on_host else "triton"
    module, function = KERNELS[name]
    reason = module.why_not(q)
    if reason is None:
        return getattr(module, function)
    if backend == name:
        raise RuntimeError(f"backend {name!r} cannot run here: {reason}")
    if torch.compiler.is_compiling():
        return deformable_attention_reference
    logger.debug("deformable attention takes the reference: %s", reason)
    if not on_host:
        _warn_once(reason)
    return deformable_attention_reference


@functools.cache
def _warn_once(reason: str) -> None:
    """On a GPU the reference costs the square of the tokens: more than a detail for a debug log."""
    logger.warning("deformable attention runs the slow reference code: %s", reason)


def _check_window(window: Sequence[int]) -> Triple:
    if len(window) != 3 or any(int(k) != k or k < 1 for k in window):
        raise ValueError(f"window {tuple(window)}: needs 3 whole numbers (t, h, w), each >= 1")
    kt, kh, kw = (int(k) for k in window)
    return kt, kh, kw


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; accepted: {', '.join(KINDS)}")


def _check_volume(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 6 or 0 in q.shape[1:]:
        raise ValueError(f"q has shape {list(q.shape)}; needs [B, T, H, W, heads, d], none empty")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; accepted: {', '.join(map(str, DTYPES))}")
    for name, x in (("k", k), ("v", v)):
        _check_like(name, x, q, list(q.shape))


def _check_extra(q: Tensor, extra_k: Tensor | None, extra_v: Tensor | None) -> None:
    if extra_k is None and extra_v is None:
        return
    if extra_k is None or extra_v is None:
        missing = "extra_k" if extra_k is None else "extra_v"
        raise ValueError(f"{missing} is None; give both extra_k and extra_v, or neither")
    B, heads, d = q.shape[0], q.shape[4], q.shape[5]
    count = extra_k.shape[1] if extra_k.ndim == 4 else "E"
    for name, x in (("extra_k", extra_k), ("extra_v", extra_v)):
        _check_like(name, x, q, [B, count, heads, d])


def _check_like(name: str, x: Tensor, q: Tensor, shape: list[int | str]) -> None:
    if list(x.shape) != shape:
        wanted = ", ".join(map(str, shape))
        raise ValueError(
            f"{name} has shape {list(x.shape)}; with q {list(q.shape)} needs [{wanted}]"
        )
    if x.dtype != q.dtype or x.device != q.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}; needs q's {q.dtype} on {q.device}")


def _check_offsets(q: Tensor, offsets: Tensor, window: Triple, kind: str) -> None:
    _check_kind(kind)
    channels = {"shift": [3], "affine": [12], "tap": [window[0] * window[1] * window[2], 3]}[kind]
    if offsets.ndim < 5 or offsets.shape[:4] != q.shape[:4] or list(offsets.shape[5:]) != channels:
        wanted = ", ".join(map(str, [*q.shape[:4], "G", *channels]))
        raise ValueError(
            f"offsets have shape {list(offsets.shape)}; kind {kind!r} with window {window} and "
            f"q {list(q.shape)} needs [{wanted}]"
        )
    groups, heads = offsets.shape[4], q.shape[4]
    if groups < 1 or heads % groups:
        raise ValueError(f"offsets have {groups} groups; needs a divisor of the {heads} heads of q")
    if not offsets.is_floating_point() or offsets.device != q.device:
        raise ValueError(
            f"offsets are {offsets.dtype} on {offsets.device}; needs a floating dtype on {q.device}"
        )


def _kept_taps(offsets: Tensor, window: Triple, cut: Triple) -> Tensor:
    """[..., K, 3] for the taps of `window` to [..., K', 3] for those that `cut` keeps."""
    taps = offsets.unflatten(-2, window)
    for axis, (k, kept) in enumerate(zip(window, cut, strict=True)):
        taps = taps.narrow(axis - 4, k // 2 - kept // 2, kept)
    return taps.flatten(-4, -2)
