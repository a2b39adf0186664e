"""AdamW on flat regions of host memory: one call per contiguous region of one dtype.

The region is what the store holds, not a parameter: the optimizer walks a block's memory once,
whatever the number of parameters in it. Backends share one signature; `reference` is the
definition, `native` the same bits in one pass over memory.
"""

from typing import Literal

import torch
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.adamw import native, reference
from megaslide.ops.adamw.codes import BLOCK8
from megaslide.ops.adamw.state import AdamWSettings, AdamWState, Coefficients

__all__ = ["BLOCK8", "AdamWSettings", "AdamWState", "adamw_"]

BACKENDS = {"native": native.adamw_, "reference": reference.adamw_}


def adamw_(
    state: AdamWState,
    grad: Tensor,
    settings: AdamWSettings,
    *,
    step: int,
    grad_scale: float = 1.0,
    ema_decay: float = 0.0,
    threads: int | None = None,
    backend: Literal["native", "reference"] | None = None,
) -> None:
    """One AdamW update in place, in torch.optim.AdamW's order of operations and roundings.

    Square roots are the nearest floats on every processor, which torch's are not.

    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101).

    A gradient, weight or moment that is not finite makes its own element not finite, as in torch,
    and no other; a bf16 weight of a NaN master is a NaN. With 8-bit moments it also spoils the
    moments of its block of BLOCK8 elements, whose next update is then NaN.

    Args:
        state: the region, `[n]`.
        grad: `[n]` float32 or bfloat16, multiplied by `grad_scale` (the clip coefficient) in fp32.
        settings: hyper-parameters.
        step: this update's number, starting at 1.
        ema_decay: ema becomes ema_decay * ema + (1 - ema_decay) * master.
        threads: at most so many; None takes torch.get_num_threads(). The result has the same bits
            for any number.
        backend: None takes native where the library loads, else reference.

    Raises:
        ValueError: dtypes, sizes or devices that do not belong together, step or threads < 1.
        RuntimeError: `backend="native"` without the native library.
    """
    if step < 1:
        raise ValueError(f"step {step} is below 1; the first update is step 1")
    if threads is not None and threads < 1:
        raise ValueError(f"threads {threads} is below 1; None takes torch.get_num_threads()")
    if backend is None:
        backend = "reference" if library.why_absent() else "native"
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {sorted(BACKENDS)}")
    state.check(grad)
    by = Coefficients.of(settings, step=step, grad_scale=grad_scale, ema_decay=ema_decay)
    BACKENDS[backend](state, grad, by, threads=threads or torch.get_num_threads())
