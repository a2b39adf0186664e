"""The definition of the depthwise convolution, in plain PyTorch; runs on every device.

The backward is written out because torch's on the CPU takes 14 to 20 times its forward for the
gradient of the input, which is the convolution with the mirrored kernel.

Shapes: B batch, T H W tokens per axis, D channels.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def depthwise_conv3d_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`depthwise_conv3d` on validated arguments."""
    out = _DepthwiseConv.apply(x, weight)
    return out if bias is None else out + bias


class _DepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolve(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _convolve(grad, weight.flip(2, 3, 4)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_grad(x, grad, weight)
        return grad_x, grad_weight


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    channels_first = x.to(weight.dtype).permute(0, 4, 1, 2, 3)
    with _no_autocast(x):
        out = F.conv3d(channels_first, weight, padding=1, groups=x.shape[-1])
    return out.permute(0, 2, 3, 4, 1)


def _weight_grad(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """[D, 1, 3, 3, 3]; computed in fp32 on the CPU, several times faster there than bf16."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    dtype = wide if x.device.type == "cpu" else weight.dtype
    x, grad = (tensor.to(dtype).permute(0, 4, 1, 2, 3) for tensor in (x, grad))
    ones, mask = [1, 1, 1], [False, True, False]
    _, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad, x, weight.to(dtype), None, ones, ones, ones, False, [0, 0, 0], x.shape[1], mask
    )
    return grad_weight.to(weight.dtype)


def _no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would round x and the weight to its own dtype, and return that dtype."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
