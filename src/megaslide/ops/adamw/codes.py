"""8-bit moments that do not stall: codes of a block of elements relative to its largest.

A magnitude x of a block whose largest is `scale` becomes y = offset + (TOP - offset) * x / scale,
whose float32 bits, cut to four bits of mantissa, hold the code: 16 codes per octave down to
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

STEP_BITS = 19
TOP_BITS, TOP = 0x3FF80000, 1.9375
"""With it `offset` is a power of two, and a code the lower bits of what is cut."""
MASK32 = 0xFFFFFFFF
SMALLEST_SCALE = 2.0**-100
"""Blocks below it are zero; the reciprocal of a denormal would be infinite."""


@dataclass(frozen=True)
class Code:
    """A code of `most` magnitudes above zero: 127, with a sign in the bit above them, or 255."""

    most: int

    @property
    def has_sign(self) -> bool:
        return self.most == 127

    @property
    def offset_bits(self) -> int:
        return TOP_BITS - (self.most << STEP_BITS)

    @property
    def offset(self) -> float:
        return 2.0 ** ((self.offset_bits >> 23) - 127)


EXP_AVG = Code(127)
ROOT = Code(255)


def num_blocks(n: int) -> int:
    return -(-n // BLOCK8)


def decode(codes: Tensor, scale: Tensor, code: Code) -> Tensor:
    """float32 `[n]` of uint8 codes `[n]` and float32 scales `[b]`."""
    wide = codes.to(torch.int32)
    y = (((wide & code.most) << STEP_BITS) + code.offset_bits).view(torch.float32)
    unit = (scale * (1 / (TOP - code.offset))).repeat_interleave(BLOCK8)[: len(codes)]
    magnitude = (y - code.offset) * unit
    return torch.where(wide > code.most, -magnitude, magnitude)


def encode_(x: Tensor, codes: Tensor, scale: Tensor, code: Code, noise: Tensor) -> None:
    """Store float32 `x` `[n]` as uint8 `codes` `[n]` and float32 `scale` `[b]`.

    `noise` is int32 `[n]` in [0, 2^STEP_BITS). A block that is not finite gets a scale that is
    not finite, and decodes to NaN.
    """
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    padded = F.pad(magnitude, (0, -len(x) % BLOCK8)).view(-1, BLOCK8)
    scale.copy_(padded.amax(1).view(torch.float32))
    usable = scale.isfinite() & (scale >= SMALLEST_SCALE)
    inverse = torch.full_like(scale, TOP - code.offset).div_(scale).masked_fill_(~usable, 0)
    inverse = inverse.repeat_interleave(BLOCK8)[: len(x)]
    y = torch.full_like(x, code.offset).addcmul_(magnitude.view(torch.float32), inverse)
    cut = (y.view(torch.int32) + noise) >> STEP_BITS
    found = cut.clamp_(max=TOP_BITS >> STEP_BITS) & code.most
    if code.has_sign:
        found |= (x.view(torch.int32) >> 24) & 0x80
    else:
        found.clamp_(min=(x > 0).to(torch.int32))
    codes.copy_(found)


def noise(first: int, count: int, step: int) -> tuple[Tensor, Tensor]:
    """For exp_avg and for the root of `count` elements from `first` on: random, int32 `[count]`.

    In [0, 2^STEP_BITS). Of 32 random bits both take 19; the six they share weigh least in the root.
    """
    index = torch.arange(first, first + count, dtype=torch.int64)
    seeds = (index * 0x9E3779B9 + _mixed(step)) & MASK32
    bits = ((seeds ^ (seeds >> 16)) * 0xC2B2AE35) & MASK32
    low = bits & ((1 << STEP_BITS) - 1)
    return low.to(torch.int32), (bits >> (32 - STEP_BITS)).to(torch.int32)


def _mixed(x: int) -> int:
    """32 bits, each of which depends on all of the lower 32 of x (MurmurHash3's finalizer)."""
    x &= MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)
