"""AdamW on flat regions of host memory: one call per contiguous region of one dtype.

The region is what the store holds, not a parameter: the optimizer walks a block's memory once,
whatever the number of parameters in it. Backends share this signature; `reference` is the
definition.
"""

from dataclasses import dataclass

import torch

from megaslide.ops.adamw import reference


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWSettings:
    """Hyper-parameters of one update, in torch.optim.AdamW's words."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


def adamw_(
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    settings: AdamWSettings,
    *,
    step: int,
    grad_scale: float = 1.0,
    ema: torch.Tensor | None = None,
    ema_decay: float = 0.0,
) -> None:
    """One AdamW update in place, in torch.optim.AdamW's order of operations.

    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101).

    Args:
        weight: `[n]` float32 (the master itself) or bfloat16 (the high half of a split master).
        residual: `[n]` int16, the low half of the master; None exactly when weight is float32.
        exp_avg, exp_avg_sq: `[n]` float32 moments.
        grad: `[n]` float32 or bfloat16, multiplied by `grad_scale` (the clip coefficient) in fp32.
        settings: hyper-parameters.
        step: this update's number, starting at 1.
        ema: `[n]` float32 moving average of the master, updated in the same pass.

    Raises:
        ValueError: dtypes or sizes that do not belong together, or step < 1.
    """
    if (residual is None) != (weight.dtype == torch.float32):
        raise ValueError(f"weight dtype {weight.dtype} with residual={residual is not None}")
    if step < 1:
        raise ValueError(f"step {step} is below 1; the first update is step 1")
    regions = [t for t in (weight, residual, exp_avg, exp_avg_sq, grad, ema) if t is not None]
    sizes = {region.numel() for region in regions}
    if len(sizes) != 1:
        raise ValueError(f"regions of different sizes {sorted(sizes)}; all must be equal")
    reference.adamw_(
        weight, residual, exp_avg, exp_avg_sq, grad, settings,
        step=step, grad_scale=grad_scale, ema=ema, ema_decay=ema_decay,
    )  # fmt: skip
