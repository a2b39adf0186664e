"""AdamW in plain torch: the definition every other backend is tested against.

The order of operations and the roundings are torch.optim.AdamW's (single-tensor form), but for
the square root: torch's is the nearest float or off by a unit in the last place, by library and
processor (oneMKL: 0.6 % of numbers with Intel's AVX-512, 17 % on AMD), and a run should not depend
on that. Given exact roots, torch.optim.AdamW has the same bits.

Regions are walked in chunks, because the temporaries of a whole block would triple its memory
traffic and its footprint.

A `split` master is a bf16 weight `hi` and a 16-bit residual `lo` that restore the fp32 master
exactly: hi = (bits + 0x8000) >> 16, bits = (hi << 16) + lo. Rounding half up rather than to even
is what makes the inverse exact. A NaN keeps no payload: rounding up could make it a number.
"""

import torch
from torch import Tensor

from megaslide.ops.adamw import codes
from megaslide.ops.adamw.state import AdamWState, Coefficients

CHUNK = 1 << 18
"""Elements: temporaries of 1 MB, near the caches, without many calls for a block. A multiple of
BLOCK8."""

NAN_BITS = 0x7FC00000


def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """The fp32 master of a bf16 weight `hi` and its int16 residual `lo`, both `[n]`."""
    bits = (hi.view(torch.int16).to(torch.int32) << 16) + lo.to(torch.int32)
    return bits.view(torch.float32)


def split_master_(master: Tensor, hi: Tensor, lo: Tensor | None = None) -> None:
    """Store the fp32 `master` as bf16 `hi` and, where it is given, int16 `lo`, all `[n]`."""
    bits = master.view(torch.int32).masked_fill(master.isnan(), NAN_BITS)
    high = (bits + 0x8000) >> 16
    hi.view(torch.int16).copy_(high)
    if lo is not None:
        lo.copy_(bits - (high << 16))


def adamw_(state: AdamWState, grad: Tensor, by: Coefficients, *, threads: int) -> None:
    """See `megaslide.ops.adamw.adamw_`; torch's own operators take torch's number of threads."""
    del threads
    for start in range(0, state.weight.numel(), CHUNK):
        _update_chunk_(_part(state, start, start + CHUNK), grad[start : start + CHUNK], by, start)


def _part(state: AdamWState, start: int, stop: int) -> AdamWState:
    def cut(x: Tensor | None, unit: int = 1) -> Tensor | None:
        return None if x is None else x[start // unit : stop // unit]

    return AdamWState(
        weight=state.weight[start:stop],
        residual=cut(state.residual),
        master=cut(state.master),
        exp_avg=state.exp_avg[start:stop],
        exp_avg_sq=state.exp_avg_sq[start:stop],
        exp_avg_scale=cut(state.exp_avg_scale, codes.BLOCK8),
        exp_avg_sq_scale=cut(state.exp_avg_sq_scale, codes.BLOCK8),
        ema=cut(state.ema),
    )


def _update_chunk_(state: AdamWState, grad: Tensor, by: Coefficients, first: int) -> None:
    master = state.weight if state.master is None else state.master
    if state.residual is not None:
        master = join_master(state.weight, state.residual)
    exp_avg, exp_avg_sq = _moments(state)
    _update_(master, exp_avg, exp_avg_sq, grad.float() * by.grad_scale, by)
    _store_moments_(state, exp_avg, exp_avg_sq, first, by.step)
    if state.weight.dtype == torch.bfloat16:
        split_master_(master, state.weight, state.residual)
    if state.ema is not None:
        state.ema.lerp_(master, by.ema_weight)


def _moments(state: AdamWState) -> tuple[Tensor, Tensor]:
    if state.exp_avg_scale is None or state.exp_avg_sq_scale is None:
        return state.exp_avg, state.exp_avg_sq
    exp_avg = codes.decode(state.exp_avg, state.exp_avg_scale, codes.EXP_AVG)
    return exp_avg, codes.decode(state.exp_avg_sq, state.exp_avg_sq_scale, codes.ROOT).square()


def _store_moments_(
    state: AdamWState, exp_avg: Tensor, exp_avg_sq: Tensor, first: int, step: int
) -> None:
    if state.exp_avg_scale is None or state.exp_avg_sq_scale is None:
        return  # updated in place
    noise, root_noise = codes.noise(first, len(exp_avg), step)
    codes.encode_(exp_avg, state.exp_avg, state.exp_avg_scale, codes.EXP_AVG, noise)
    root = _root(exp_avg_sq)
    codes.encode_(root, state.exp_avg_sq, state.exp_avg_sq_scale, codes.ROOT, root_noise)


def _update_(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, by: Coefficients
) -> None:
    master.mul_(by.decay)
    exp_avg.lerp_(grad, by.exp_avg_weight)
    exp_avg_sq.mul_(by.beta2).addcmul_(grad, grad, value=by.exp_avg_sq_weight)
    denominator = (_root(exp_avg_sq) / by.root_correction).add_(by.eps)
    master.addcdiv_(exp_avg, denominator, value=by.step_size)


def _root(x: Tensor) -> Tensor:
    """The nearest float32 to the square root: a double is too fine to round to its neighbour."""
    return x.double().sqrt().float()
