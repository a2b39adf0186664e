"""3D-DSA by the C++ kernels in csrc/, as torch custom ops.

Custom ops (and not an autograd.Function around ctypes) so that meta tensors, torch.compile and
opcheck see an operator with a known shape and gradient. Only q, k, v, the offsets, the output and
its log-sum-exp are kept for the backward; everything else is recomputed there.

Shapes: B batch, T H W voxels per axis, G offset groups, K taps, E extra keys, d head dim.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.deformable_attention.operators import make_differentiable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KIND_CODES = {"none": 0, "shift": 1, "affine": 2, "tap": 3}
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


def why_not(q: Tensor) -> str | None:
    """Why the native kernels cannot take inputs like `q`, or None where they can."""
    if q.device.type not in ("cpu", "meta"):
        return f"native kernels run on the CPU, and q is on {q.device}"
    if q.dtype not in DTYPES:
        return f"native kernels compute in float32, and q is {q.dtype}"
    return library.why_absent()


def deformable_attention_native(
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
    num_threads: int | None = None,
) -> Tensor:
    """`deformable_attention` on validated arguments; `window` is already cut to the axes.

    The result has the same bits for every `num_threads`; None takes torch.get_num_threads().
    """
    kind = "none" if offsets is None else kind
    out, _ = _forward(
        q, k, v, offsets, extra_k, extra_v, window, kind, scale, num_threads or 0
    )  # fmt: skip
    return out


# ---- operators -----------------------------------------------------------------------------------


@torch.library.custom_op("megaslide::deformable_attention", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    window: Sequence[int],
    kind: str,
    scale: float,
    num_threads: int,
) -> tuple[Tensor, Tensor]:
    """out [B,T,H,W,heads,d] in q's dtype, and the log-sum-exp [B,T,H,W,heads] fp32."""
    inputs = _prepare(q=q, k=k, v=v, offsets=offsets, extra_k=extra_k, extra_v=extra_v)
    out = torch.empty_like(inputs["q"])
    lse = q.new_empty(q.shape[:5], dtype=torch.float32)
    shape = _shape(q, offsets, extra_k, window, kind, scale, num_threads)
    status = library.load().megaslide_attention_forward(
        ctypes.byref(shape), ctypes.byref(_struct(inputs)), _pointer(out), _pointer(lse)
    )
    library.check_status(status)
    return out.to(q.dtype), lse


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    window: Sequence[int],
    kind: str,
    scale: float,
    num_threads: int,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:5], dtype=torch.float32)


@torch.library.custom_op(
    "megaslide::deformable_attention_backward", mutates_args=(), device_types="cpu"
)
def _backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    window: Sequence[int],
    kind: str,
    scale: float,
    num_threads: int,
) -> list[Tensor]:
    """Gradients of the inputs that are given, in order, in their dtypes."""
    named = {"q": q, "k": k, "v": v, "offsets": offsets, "extra_k": extra_k, "extra_v": extra_v}
    inputs = _prepare(**named)
    gradients = {name: torch.empty_like(x) for name, x in inputs.items()}
    saved = (_native(out), lse, _native(grad_out))
    shape = _shape(q, offsets, extra_k, window, kind, scale, num_threads)
    status = library.load().megaslide_attention_backward(
        ctypes.byref(shape),
        ctypes.byref(_struct(inputs)),
        *map(_pointer, saved),
        ctypes.byref(_struct(gradients)),
    )
    library.check_status(status)
    return [gradients[name].to(x.dtype) for name, x in named.items() if x is not None]


make_differentiable(_forward, _backward)


# ---- the C interface (csrc/include/megaslide.h) --------------------------------------------------


class _Shape(ctypes.Structure):
    _fields_ = (
        ("batch", ctypes.c_int64),
        ("size", ctypes.c_int64 * 3),
        ("heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64 * 3),
        ("groups", ctypes.c_int64),
        ("extra", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class _Inputs(ctypes.Structure):
    """megaslide_attention_inputs, and ..._gradients, which has the same fields."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("q", "k", "v", "offsets", "extra_k", "extra_v")
    )


def _prepare(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that are given, as the kernels take them: offsets in fp32, the others bf16 or fp32."""
    given = {name: x for name, x in tensors.items() if x is not None}
    return {n: _float(x) if n == "offsets" else _native(x) for n, x in given.items()}


def _struct(tensors: dict[str, Tensor]) -> _Inputs:
    """Pointers, valid for as long as `tensors` are held."""
    return _Inputs(**{name: x.data_ptr() for name, x in tensors.items()})


def _float(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32).contiguous()


def _native(x: Tensor) -> Tensor:
    """Contiguous, in a dtype that kernels read: fp16 alone needs a copy in fp32."""
    return x.detach().contiguous() if x.dtype in DTYPE_CODES else _float(x)


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _shape(
    q: Tensor,
    offsets: Tensor | None,
    extra_k: Tensor | None,
    window: Sequence[int],
    kind: str,
    scale: float,
    num_threads: int,
) -> _Shape:
    batch, *size, heads, head_dim = q.shape
    triple = ctypes.c_int64 * 3
    return _Shape(
        batch=batch,
        size=triple(*size),
        heads=heads,
        head_dim=head_dim,
        window=triple(*window),
        groups=1 if offsets is None else offsets.shape[4],
        extra=0 if extra_k is None else extra_k.shape[1],
        kind=KIND_CODES[kind],
        dtype=DTYPE_CODES.get(q.dtype, DTYPE_CODES[torch.float32]),
        threads=num_threads or torch.get_num_threads(),
        scale=scale,
    )
