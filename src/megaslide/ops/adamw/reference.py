"""AdamW in plain torch: the definition every other backend is tested against.

The order of operations is torch.optim.AdamW's (single-tensor form), so that fp32 streamed
training follows plain PyTorch training bit for bit. Regions are walked in chunks, because the
temporaries of a whole block would triple its memory traffic and its footprint.

A `split` master is a bf16 weight `hi` and a 16-bit residual `lo` that restore the fp32 master
exactly: hi = (bits + 0x8000) >> 16, bits = (hi << 16) + lo. Rounding half up rather than to even
is what makes the inverse exact.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megaslide.ops.adamw import AdamWSettings

CHUNK = 1 << 18
"""Elements: temporaries of 1 MB, near the caches, without many calls for a block."""


def join_master(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 weight `hi` and its int16 residual `lo`, both `[n]`."""
    bits = (hi.view(torch.int16).to(torch.int32) << 16) + lo.to(torch.int32)
    return bits.view(torch.float32)


def split_master_(master: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
    """Store the fp32 `master` as bf16 `hi` and int16 `lo`, all `[n]`."""
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    hi.view(torch.int16).copy_(high)
    lo.copy_(bits - (high << 16))


def adamw_(
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    settings: "AdamWSettings",
    *,
    step: int,
    grad_scale: float,
    ema: torch.Tensor | None,
    ema_decay: float,
) -> None:
    """See `megaslide.ops.adamw.adamw_`."""
    for start in range(0, weight.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        lo = None if residual is None else residual[part]
        master = weight[part] if lo is None else join_master(weight[part], lo)
        scaled = grad[part].float() * grad_scale
        _update_(master, exp_avg[part], exp_avg_sq[part], scaled, settings, step)
        if lo is not None:
            split_master_(master, weight[part], lo)
        if ema is not None:
            ema[part].lerp_(master, 1 - ema_decay)


def _update_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    s: "AdamWSettings",
    step: int,
) -> None:
    master.mul_(1 - s.lr * s.weight_decay)
    exp_avg.lerp_(grad, 1 - s.beta1)
    exp_avg_sq.mul_(s.beta2).addcmul_(grad, grad, value=1 - s.beta2)
    step_size = s.lr / (1 - s.beta1**step)
    denominator = (exp_avg_sq.sqrt() / (1 - s.beta2**step) ** 0.5).add_(s.eps)
    master.addcdiv_(exp_avg, denominator, value=-step_size)
