"""Counts the FLOP of whatever runs within, by the formulas that torch has and those it lacks.

torch's FlopCounterMode also follows modules, whose hooks do not survive a forward that runs inside
an autograd function; and its table leaves out the fused attention of the CPU and counts the
backward of a grouped convolution as if it had one group. So its formulas are used, in a mode of a
few lines, with those two put right. As there, a multiply and an add are two FLOP, and only
products of matrices, convolutions and attention count: they are all but a percent of a step.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megaslide.ops.deformable_attention import flops as _attention
from megaslide.ops.depthwise_conv import flops as _convolution

__all__ = ["FlopCounter"]

REGISTERED = (_attention, _convolution)
"""Operators that tell torch's table their FLOP when they are imported."""
aten = torch.ops.aten


def _fused_forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    flop: int = sdpa_flop_count(q.shape, k.shape, v.shape)
    return flop


def _fused_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Five products of matrices: the scores are computed again."""
    flop: int = sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    return flop


def _convolution_backward(
    grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Any, **_: Any,
) -> int:  # fmt: skip
    """Each gradient meets every product of the forward once; `weight` is [out, in/groups, ...]."""
    places = (x if transposed else grad).shape[2:]
    each = 2 * len(x) * math.prod(places) * weight.numel()
    return each * (bool(mask[0]) + bool(mask[1]))


FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _fused_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
    aten.convolution_backward: _convolution_backward,
}
"""Instead of torch's, by operator."""


class FlopCounter(TorchDispatchMode):
    """Within, `total` grows by the FLOP of every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        formula = FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result
