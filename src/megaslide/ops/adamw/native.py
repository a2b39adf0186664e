"""AdamW by the C++ kernels in csrc/: one pass over memory, without the GIL.

A plain ctypes call and no torch custom op: it changes its arguments and nobody traces it. Torch's
bits need torch's square root, which is not the same function in every build (oneMKL's with AVX-512
is not the nearest float); the kernels have both that were met, and the one that fits is found here
by comparison.

Shapes: n elements of one contiguous region.
"""

import ctypes
import dataclasses
import functools
import logging
import operator

import torch
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.adamw.state import AdamWState, Coefficients

ROOT_NEAREST, ROOT_NEWTON = 0, 1

logger = logging.getLogger(__name__)


def adamw_(state: AdamWState, grad: Tensor, by: Coefficients, *, threads: int) -> None:
    """See `megaslide.ops.adamw.adamw_`; arguments are checked there."""
    native = library.load()
    coefficients = _Coefficients(*_scalars(by), root_like_torch(_instruction_set(native)))
    status = native.megaslide_adamw(
        ctypes.byref(_state(state)),
        ctypes.c_void_p(grad.data_ptr()),
        ctypes.c_int32(grad.dtype == torch.bfloat16),
        ctypes.byref(coefficients),
        ctypes.c_int32(threads),
    )
    library.check_status(status)


@functools.cache
def root_like_torch(instruction_set: bytes) -> int:
    """The megaslide_root with the bits of torch.sqrt; that of the nearest float if none has them.

    Compared on every exponent, since libraries treat the smallest numbers apart.
    """
    generator = torch.Generator().manual_seed(0)
    size = (255, 256)
    mantissas = torch.randint(0, 1 << 23, size, dtype=torch.int32, generator=generator)
    numbers = (mantissas + (torch.arange(255, dtype=torch.int32) << 23)[:, None]).view(
        torch.float32
    )
    expected, found = numbers.sqrt(), torch.empty_like(numbers)
    for root in (ROOT_NEAREST, ROOT_NEWTON):
        if square_root(root, numbers, found) and torch.equal(found, expected):
            return root
    logger.info(
        "torch.sqrt has bits of its own here; native AdamW (%s) differs from torch.optim.AdamW by "
        "a unit in the last place of sqrt(exp_avg_sq)", instruction_set.decode(),
    )  # fmt: skip
    return ROOT_NEAREST


def square_root(root: int, numbers: Tensor, out: Tensor) -> bool:
    """Write the roots of float32 `numbers` by a megaslide_root; False where it does not exist."""
    status: int = library.load().megaslide_square_root(
        ctypes.c_int32(root),
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(numbers.numel()),
    )
    return status == 0


# ---- the C interface (csrc/include/megaslide.h) --------------------------------------------------


class _State(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("master", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("exp_avg_scale", ctypes.c_void_p),
        ("exp_avg_sq_scale", ctypes.c_void_p),
        ("ema", ctypes.c_void_p),
    )


_SCALARS = tuple(field.name for field in dataclasses.fields(Coefficients))
_scalars = operator.attrgetter(*_SCALARS)  # dataclasses.astuple copies, ten times as slowly


class _Coefficients(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_float) for name in _SCALARS[:-1]),
        ("step", ctypes.c_uint32),
        ("root", ctypes.c_int32),
    )


def _state(state: AdamWState) -> _State:
    whole = state.weight.dtype == torch.float32
    return _State(
        count=state.weight.numel(),
        master=_pointer(state.weight if whole else state.master),
        weight=_pointer(None if whole else state.weight),
        residual=_pointer(state.residual),
        exp_avg=_pointer(state.exp_avg),
        exp_avg_sq=_pointer(state.exp_avg_sq),
        exp_avg_scale=_pointer(state.exp_avg_scale),
        exp_avg_sq_scale=_pointer(state.exp_avg_sq_scale),
        ema=_pointer(state.ema),
    )


def _instruction_set(native: ctypes.CDLL) -> bytes:
    name = native.megaslide_instruction_set
    name.restype = ctypes.c_char_p
    found: bytes = name()
    return found


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
