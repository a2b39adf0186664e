"""AdamW by the C++ kernels in csrc/: one pass over memory, without the GIL.

A plain ctypes call and no torch custom op: it changes its arguments and nobody traces it.

Shapes: n elements of one contiguous region.
"""

import ctypes
import dataclasses
import operator

import torch
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.adamw.state import AdamWState, Coefficients


def adamw_(state: AdamWState, grad: Tensor, by: Coefficients, *, threads: int) -> None:
    """See `megaslide.ops.adamw.adamw_`; arguments are checked there."""
    native = library.load()
    coefficients = _Coefficients(*_scalars(by))
    status = native.megaslide_adamw(
        ctypes.byref(_state(state)),
        ctypes.c_void_p(grad.data_ptr()),
        ctypes.c_int32(grad.dtype == torch.bfloat16),
        ctypes.byref(coefficients),
        ctypes.c_int32(threads),
    )
    library.check_status(status)


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


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
