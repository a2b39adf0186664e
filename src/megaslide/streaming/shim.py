"""Stands in for the next form of `megaslide.ops.adamw`; not to be merged."""

from dataclasses import dataclass

import torch

from megaslide.ops import adamw as old
from megaslide.ops.adamw.reference import split_master_

T = torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWState:
    weight: T
    residual: T | None = None
    master: T | None = None
    exp_avg: T
    exp_avg_sq: T
    exp_avg_scale: T | None = None
    exp_avg_sq_scale: T | None = None
    ema: T | None = None


def adamw_(state, grad, settings, *, step, grad_scale=1.0, ema_decay=0.0):  # type: ignore
    main = state.weight if state.master is None else state.master
    m, v = state.exp_avg, state.exp_avg_sq
    if state.exp_avg_scale is not None:
        m = ((m.view(-1, 256).float() - 128) * state.exp_avg_scale[:, None]).view(-1)
        m.view(-1, 256)[state.exp_avg_scale == 0] = 0
        v = ((v.view(-1, 256).float()) ** 2 * state.exp_avg_sq_scale[:, None]).view(-1)
    old.adamw_(
        main,
        state.residual,
        m,
        v,
        grad,
        settings,
        step=step,
        grad_scale=grad_scale,
        ema=state.ema,
        ema_decay=ema_decay,
    )
    if state.exp_avg_scale is not None:
        s = m.view(-1, 256).abs().amax(1) / 127
        state.exp_avg_scale.copy_(s)
        state.exp_avg.copy_(
            ((m.view(-1, 256) / s[:, None].clamp_min(1e-38)).round() + 128).view(-1)
        )
        s = v.view(-1, 256).amax(1) / 255**2
        state.exp_avg_sq_scale.copy_(s)
        state.exp_avg_sq.copy_(
            ((v.view(-1, 256) / s[:, None].clamp_min(1e-38)).sqrt().ceil()).view(-1)
        )
    if state.master is not None:
        split_master_(state.master, state.weight, torch.empty_like(state.weight, dtype=torch.int16))
