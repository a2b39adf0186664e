"""Arithmetic of the depthwise convolution, told to torch's FLOP counter.

Every number of the output is 27 multiplies and 27 adds: 54 FLOP, padding counted as if it were
there and the bias left out, as torch counts convolutions. The gradient of the input is the same
operator; the sums that give the gradient of the weight cost as much again.
"""

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from megaslide.ops.depthwise_conv.native import TAPS


@register_flop_formula(torch.ops.megaslide.depthwise_conv3d)
def _convolve_flop(x: Any, *_: Any, out_shape: Any = None) -> int:
    return 2 * TAPS * math.prod(x)


@register_flop_formula(torch.ops.megaslide.depthwise_conv3d_sums)
def _sums_flop(x: Any, *_: Any, out_shape: Any = None) -> int:
    return 2 * TAPS * math.prod(x)
