"""What the custom operators of every backend of 3D-DSA share: shapes and autograd.

A backend has a forward `(q, k, v, offsets, extra_k, extra_v, *settings) -> (out, log-sum-exp)` and
a backward `(grad_out, out, lse, *the same) -> gradients of the inputs that are given`.
"""

from typing import Any

from torch import Tensor

INPUTS = 6
"""Tensors before the settings, some of them None."""


def make_differentiable(forward: Any, backward: Any) -> None:
    """Register the backward's shapes, and the backward as the derivative of the forward."""

    def shapes(grad_out: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in arguments[:INPUTS] if x is not None]

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.settings = inputs[INPUTS:]
        ctx.save_for_backward(*output, *inputs[:INPUTS])
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, *inputs = ctx.saved_tensors
        gradients = iter(backward(grad_out, out, lse, *inputs, *ctx.settings))
        of_inputs = (None if x is None else next(gradients) for x in inputs)
        return *of_inputs, *(None for _ in ctx.settings)

    backward.register_fake(shapes)
    forward.register_autograd(differentiate, setup_context=save)
