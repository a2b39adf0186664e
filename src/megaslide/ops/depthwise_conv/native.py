"""Depthwise convolution by the C++ kernels in csrc/, as torch custom ops.

Custom ops (and not an autograd.Function around ctypes) so that fake tensors, torch.compile and
opcheck see an operator with a known shape and gradient. The gradient of the input is the same
operator with the kernel mirrored, so there are two: the convolution, and the sums over all tokens
that are the gradients of weight and bias.

Shapes: B batch, T H W tokens per axis, D channels.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from megaslide.ops import library

DTYPES = (torch.float32, torch.bfloat16)
TAPS = 27


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Why the native kernels cannot take inputs like these, or None where they can."""
    if x.device.type != "cpu":
        return f"native kernels run on the CPU, and x is on {x.device}"
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            return f"native kernels take float32 and bfloat16, and {name} is {tensor.dtype}"
    return library.why_absent()


def depthwise_conv3d_native(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, num_threads: int | None = None
) -> Tensor:
    """`depthwise_conv3d` on validated arguments.

    The result has the same bits for every `num_threads`; None takes torch.get_num_threads().
    """
    return _convolve(x, weight, bias, False, weight.dtype, num_threads or 0)


# ---- operators -----------------------------------------------------------------------------------


@torch.library.custom_op("megaslide::depthwise_conv3d", mutates_args=(), device_types="cpu")
def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mirrored: bool,
    dtype: torch.dtype,
    num_threads: int,
) -> Tensor:
    """[B, T, H, W, D] in `dtype`; `mirrored` takes the taps in reverse order."""
    out = x.new_empty(x.shape, dtype=dtype)
    taps = weight.detach().reshape(-1, TAPS).t()
    taps = (taps.flip(0) if mirrored else taps).to(torch.float32).contiguous()
    x, bias = x.contiguous(), None if bias is None else bias.to(torch.float32).contiguous()
    status = library.load().megaslide_depthwise_conv(
        ctypes.byref(_shape(x, dtype, num_threads)), *map(_pointer, (x, taps, bias, out))
    )
    library.check_status(status)
    return out


@_convolve.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mirrored: bool,
    dtype: torch.dtype,
    num_threads: int,
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("megaslide::depthwise_conv3d_sums", mutates_args=(), device_types="cpu")
def _sums(x: Tensor, grad: Tensor, num_threads: int) -> Tensor:
    """fp32 [28, D]: over all tokens, `grad` times x at each tap, and `grad`."""
    sums = x.new_empty((TAPS + 1, x.shape[-1]), dtype=torch.float32)
    x, grad = x.contiguous(), grad.contiguous()
    status = library.load().megaslide_depthwise_conv_sums(
        ctypes.byref(_shape(x, grad.dtype, num_threads)), *map(_pointer, (x, grad, sums))
    )
    library.check_status(status)
    return sums


@_sums.register_fake
def _(x: Tensor, grad: Tensor, num_threads: int) -> Tensor:
    return x.new_empty((TAPS + 1, x.shape[-1]), dtype=torch.float32)


# Each is linear in x and in the other factor, and its gradients are the two operators again: they
# can be differentiated any number of times.


def _save_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.mirrored, _, ctx.num_threads = inputs
    ctx.save_for_backward(x, weight)


def _differentiate_conv(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = _convolve(grad, weight, None, not ctx.mirrored, x.dtype, ctx.num_threads)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        sums = _sums(x, grad, ctx.num_threads)
        taps = sums[:TAPS].flip(0) if ctx.mirrored else sums[:TAPS]
        grad_weight = taps.t().reshape(weight.shape).to(weight.dtype)
        grad_bias = sums[TAPS].to(weight.dtype) if ctx.needs_input_grad[2] else None
    return grad_x, grad_weight, grad_bias, None, None, None


def _save_sums(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, grad, ctx.num_threads = inputs
    ctx.save_for_backward(x, grad)


def _differentiate_sums(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:
    x, grad = ctx.saved_tensors
    weight, bias = by[:TAPS].t().reshape(-1, 1, 3, 3, 3), by[TAPS]
    grad_x = _convolve(grad, weight, None, True, x.dtype, ctx.num_threads)
    return grad_x, _convolve(x, weight, bias, False, grad.dtype, ctx.num_threads), None


_convolve.register_autograd(_differentiate_conv, setup_context=_save_conv)
_sums.register_autograd(_differentiate_sums, setup_context=_save_sums)


# ---- the C interface (csrc/include/megaslide.h) --------------------------------------------------


class _Shape(ctypes.Structure):
    _fields_ = (
        ("batch", ctypes.c_int64),
        ("size", ctypes.c_int64 * 3),
        ("channels", ctypes.c_int64),
        ("x_is_bf16", ctypes.c_int32),
        ("out_is_bf16", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def _shape(x: Tensor, out_dtype: torch.dtype, num_threads: int) -> _Shape:
    batch, *size, channels = x.shape
    return _Shape(
        batch=batch,
        size=(ctypes.c_int64 * 3)(*size),
        channels=channels,
        x_is_bf16=x.dtype == torch.bfloat16,
        out_is_bf16=out_dtype == torch.bfloat16,
        threads=num_threads or torch.get_num_threads(),
    )


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())
