"""3D-DSA on GPUs: when the Triton kernels can run, and how they are launched, as torch operators.

Triton is imported at the first call, so that the package can be imported without it. As in
`native`, custom operators tell torch.compile and meta tensors the shape; q, k, v, offsets, out and
its log-sum-exp are kept for the backward.

Shapes: B batch, T H W voxels per axis, N = T*H*W, G offset groups, K taps, E extra keys, d head
dim, R voxels by which offsets displace a tap at most.
"""

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from megaslide.ops.deformable_attention.operators import make_differentiable

Triple = tuple[int, int, int]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INSTALL = "pip install 'megaslide[gpu]'"
OLDEST = (8, 0)
MAX_HEAD_DIM = 128


def why_not(q: Tensor) -> str | None:
    """Why the Triton kernels cannot take inputs like `q`, or None where they can."""
    if q.dtype not in DTYPES:
        return f"Triton kernels take {', '.join(map(str, DTYPES))}, and q is {q.dtype}"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"Triton kernels take head dims up to {MAX_HEAD_DIM}, and q has {q.shape[-1]}"
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed; {INSTALL}"
    if q.device.type == "meta" or (q.device.type == "cpu" and interpreting()):
        return None
    if q.device.type != "cuda":
        return f"Triton kernels run on GPUs, and q is on {q.device}"
    if torch.version.hip is None and torch.cuda.get_device_capability(q.device) < OLDEST:
        name = torch.cuda.get_device_name(q.device)
        return f"Triton kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, {name} has less"
    return None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: its switch, read at import."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def deformable_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    *,
    window: Triple,
    kind: str,
    scale: float,
) -> Tensor:
    """`deformable_attention` on validated arguments; `window` is already cut to the axes."""
    kind = "none" if offsets is None else kind
    out, _ = _forward(q, k, v, offsets, extra_k, extra_v, window, kind, scale)
    return out


# ---- operators -----------------------------------------------------------------------------------


@torch.library.custom_op("megaslide::deformable_attention_triton", mutates_args=())
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
) -> tuple[Tensor, Tensor]:
    """out [B,T,H,W,heads,d] in q's dtype, and the log-sum-exp [B,T,H,W,heads] fp32."""
    from megaslide.ops.deformable_attention import triton_launch

    inputs = triton_launch.prepare(q, k, v, offsets, extra_k, extra_v)
    return triton_launch.forward(inputs, window=window, kind=kind, scale=scale)


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
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:5], dtype=torch.float32)


@torch.library.custom_op("megaslide::deformable_attention_triton_backward", mutates_args=())
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
) -> list[Tensor]:
    """Gradients of the inputs that are given, in order, in their dtypes."""
    from megaslide.ops.deformable_attention import triton_launch

    inputs = triton_launch.prepare(q, k, v, offsets, extra_k, extra_v)
    gradients = triton_launch.backward(
        inputs, grad_out, out, lse, window=window, kind=kind, scale=scale
    )
    given = [x for x in (q, k, v, offsets, extra_k, extra_v) if x is not None]
    return [gradient.to(x.dtype) for gradient, x in zip(gradients, given, strict=True)]


make_differentiable(_forward, _backward)
