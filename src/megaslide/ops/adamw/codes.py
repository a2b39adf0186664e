"""8-bit moments that do not stall: codes of a block of elements relative to its largest.

A magnitude x of a block whose largest is `scale` becomes y = offset + (1 - offset) * x / scale,
whose float32 bits, cut to four bits of mantissa, are the code: 16 codes per octave down to
`offset`, and equal steps from there to 0. exp_avg has a sign and 127 magnitudes, which span 8
octaves. Of exp_avg_sq the square root is kept, which halves its range in octaves: 255 magnitudes
span 16, so that rows with outliers keep their small elements.

exp_avg_sq moves by a thousandth per step, less than a step of any 8-bit code: rounded to nearest it
would never move again. Cutting is therefore stochastic, by random bits keyed with (step, element):
right on average, and the same for every run, thread count and backend. The root of a number that is
not zero is never rounded to zero, because the update divides by it.

Shapes: n elements, b = ceil(n / BLOCK8) blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK8 = 128
"""Elements that share one scale; MEGASLIDE_ADAMW_BLOCK of csrc/include/megaslide.h."""

STEP_BITS, NOISE_BITS = 19, 16
ONE_BITS = 0x3F800000
MASK32 = 0xFFFFFFFF
SMALLEST_SCALE = 2.0**-100
"""Blocks below it are zero; the reciprocal of a denormal would be infinite."""


@dataclass(frozen=True)
class Code:
    """A code of `most` magnitudes above zero, with or without a sign in the bit above them."""

    most: int
    has_sign: bool

    @property
    def offset_bits(self) -> int:
        return ONE_BITS - (self.most << STEP_BITS)

    @property
    def offset(self) -> float:
        return torch.tensor(self.offset_bits, dtype=torch.int32).view(torch.float32).item()


EXP_AVG = Code(127, has_sign=True)
ROOT = Code(255, has_sign=False)


def num_blocks(n: int) -> int:
    return -(-n // BLOCK8)


def decode(codes: Tensor, scale: Tensor, code: Code) -> Tensor:
    """float32 `[n]` of uint8 codes `[n]` and float32 scales `[b]`."""
    wide = codes.to(torch.int32)
    y = (((wide & code.most) << STEP_BITS) + code.offset_bits).view(torch.float32)
    unit = (scale * (1 / (1 - code.offset))).repeat_interleave(BLOCK8)[: len(codes)]
    magnitude = (y - code.offset) * unit
    return torch.where(wide > code.most, -magnitude, magnitude)


def encode_(x: Tensor, codes: Tensor, scale: Tensor, code: Code, noise: Tensor) -> None:
    """Store float32 `x` `[n]` as uint8 `codes` `[n]` and float32 `scale` `[b]`.

    `noise` is int32 `[n]` in [0, 2^NOISE_BITS). A block that is not finite gets a scale that is
    not finite, and decodes to NaN.
    """
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    padded = F.pad(magnitude, (0, -len(x) % BLOCK8)).view(-1, BLOCK8)
    scale.copy_(padded.amax(1).view(torch.float32))
    usable = scale.isfinite() & (scale >= SMALLEST_SCALE)
    inverse = torch.full_like(scale, 1 - code.offset).div_(scale).masked_fill_(~usable, 0)
    inverse = inverse.repeat_interleave(BLOCK8)[: len(x)]
    y = magnitude.view(torch.float32) * inverse + code.offset
    above = y.view(torch.int32) - code.offset_bits + (noise << (STEP_BITS - NOISE_BITS))
    found = (above >> STEP_BITS).clamp_(max=code.most)
    if code.has_sign:
        found |= (x.view(torch.int32) >> 24) & 0x80
    else:
        found.clamp_(min=(x > 0).to(torch.int32))
    codes.copy_(found)


def noise(first: int, count: int, step: int) -> tuple[Tensor, Tensor]:
    """Random bits for exp_avg and for the root of `count` elements from `first` on, int32 `[count]`."""
    index = torch.arange(first, first + count, dtype=torch.int64)
    bits = _mixed((index + _mixed(torch.tensor(step))) & MASK32)
    return (bits & 0xFFFF).to(torch.int32), (bits >> NOISE_BITS).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """32 bits, each of which depends on all of x (the finalizer of MurmurHash3); int64 in and out."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)
