"""3×3×3 depthwise convolution over grids of tokens: the one public function, whatever computes it.

Little arithmetic on much memory: every number of the volume meets 27 weights. Arguments are checked
here, once, so that no backend has to.

Shapes: B batch, T H W tokens per axis, D channels.
"""

import logging

import torch
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.depthwise_conv import native
from megaslide.ops.depthwise_conv.reference import depthwise_conv3d_reference

__all__ = ["depthwise_conv3d"]

BACKENDS = ("auto", "reference", "native")

logger = logging.getLogger(__name__)


def depthwise_conv3d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Every channel convolved by itself, zero-padded; sums in fp32 at least, autocast or not.

    Args:
        x: [B, T, H, W, D], any floating dtype.
        weight: [D, 1, 3, 3, 3], the layout of a `torch.nn.Conv3d` with groups=D.
        bias: [D], dtype of the weight.
        backend: None or "auto" takes the native kernels where they can run, else the reference;
            "reference" or "native" insists.

    Returns:
        [B, T, H, W, D] in the weight's dtype. Can be differentiated any number of times.

    Raises:
        ValueError: an argument that does not fit, with its value and what would.
        RuntimeError: backend="native" where it cannot run, with the reason.
    """
    _check(x, weight, bias)
    if _takes_native(backend, x, weight):
        return native.depthwise_conv3d_native(x, weight, bias)
    return depthwise_conv3d_reference(x, weight, bias)


def _takes_native(backend: str | None, x: Tensor, weight: Tensor) -> bool:
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend {backend!r} is unknown; accepted: None, {', '.join(BACKENDS)}")
    if library.is_counting_only():
        return True
    if backend == "reference":
        return False
    reason = native.why_not(x, weight)
    if reason is not None and backend == "native":
        raise RuntimeError(f"backend 'native' cannot run here: {reason}")
    if reason is not None and not torch.compiler.is_compiling():
        logger.debug("depthwise convolution takes the reference: %s", reason)
    return reason is None


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.ndim != 5 or 0 in x.shape[1:]:
        raise ValueError(f"x has shape {list(x.shape)}; needs [B, T, H, W, D], only B may be 0")
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; needs a floating dtype")
    wanted = [x.shape[-1], 1, 3, 3, 3]
    if list(weight.shape) != wanted:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; with x {list(x.shape)} needs {wanted}"
        )
    if not weight.is_floating_point() or weight.device != x.device:
        raise ValueError(
            f"weight is {weight.dtype} on {weight.device}; needs a floating dtype on {x.device}"
        )
    if bias is None:
        return
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias has shape {list(bias.shape)}; needs [{x.shape[-1]}]")
    if bias.dtype != weight.dtype or bias.device != x.device:
        raise ValueError(
            f"bias is {bias.dtype} on {bias.device}; needs {weight.dtype} on {x.device}"
        )
