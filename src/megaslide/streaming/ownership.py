"""Whether a gradient that autograd hands over is seen by nobody else, and may be overwritten.

The gradient of a block's output is used up rows by rows while that of its input comes into being,
and both have the same shape; of a clip of two million tokens, only one of them fits. Autograd
passes the output's on by reference: where a node, a hook, the caller of `backward` or a captured
result of `torch.autograd.grad` holds it too, it has more references than one that nobody kept.

How many that are is a matter of torch's and Python's version, so it is measured once, on a
gradient that certainly nobody kept. A version that counts otherwise makes gradients look shared,
and costs memory, never a result. (A hook that kept a raw pointer would not be seen.)
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Counts = tuple[int, int, int]


def overwritable(grads: Sequence[Tensor | None], unshared: Counts | None) -> list[bool]:
    """Which gradients have no other holder; to be called by `Function.backward` with its `*grads`.

    Args:
        unshared: of `counts_of_unshared` for the device.
    """
    if unshared is None or torch.is_grad_enabled():  # a graph of the backward may keep them too
        return [False] * len(grads)
    return [count == unshared for count in _counts(grads)]


@functools.cache
def counts_of_unshared(device: torch.device) -> Counts | None:
    """What `overwritable` finds of a gradient that nobody else has; None where torch cannot say."""
    if not hasattr(torch._C, "_storage_Use_Count") or not hasattr(Tensor, "_use_count"):
        return None
    seen: list[list[Counts | None]] = []
    with torch.enable_grad():
        middle = _Probe.apply(torch.zeros(1, device=device, requires_grad=True), seen)
        _Probe.apply(middle, seen).backward(torch.zeros(1, device=device))
    return seen[1][0]


def _counts(grads: Sequence[Tensor | None]) -> list[Counts | None]:
    """References of each: in C++, in Python, and tensors on its memory."""
    return [None if grad is None else _count(grad) for grad in grads]


def _count(grad: Tensor) -> Counts | None:
    if grad._base is not None:
        return None
    memory = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    return grad._use_count(), sys.getrefcount(grad), memory  # type: ignore[attr-defined]


class _Probe(torch.autograd.Function):
    """Notes the references of its gradient, and makes one that nobody else has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[list[Counts | None]]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.seen.append(_counts(grads))
        return torch.zeros(1, device=grads[0].device), None  # type: ignore[union-attr]
