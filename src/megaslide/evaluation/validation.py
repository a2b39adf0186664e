"""eval/loss: the training objective on held-out clips at fixed timesteps with fixed noise.

Everything random is the same at every evaluation, so two values differ only by the model, and a
curve of them is smooth enough to compare runs by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megaslide.data.latents import Batch
from megaslide.diffusion.objectives import Objective

NOISE_SEED = 20_260_101


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationLoss:
    """Mean losses over the validation batches, weighted by their sizes."""

    loss: float
    zero_loss: float
    """Loss of predicting zero on the same latents, noise and timesteps."""


@torch.no_grad()
def validation_loss(
    model: Callable[..., Any],
    objective_of: Callable[[torch.Tensor], Objective],
    batches: Sequence[Batch],
    device: torch.device,
) -> ValidationLoss:
    """Evaluate `model` (called as in `megaslide.diffusion`) on batches of held-out latents.

    `objective_of` gives the objective for latents [B, C, T, H, W], which may depend on their size.
    """
    total = zero = 0.0
    count = 0
    for index, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(NOISE_SEED + index)
        noise = torch.randn(batch.latents.shape, generator=generator).to(device)
        latents = batch.latents.to(device)
        objective = objective_of(latents)
        sigmas = objective.fixed_sigmas(len(noise), index, len(batches)).to(device)
        text = {key: value.to(device) for key, value in batch.conditioning().items()}
        loss, _ = objective.loss(model, latents, noise, sigmas, **text)
        total += loss.item() * len(noise)
        zero += objective.zero_loss(latents, noise, sigmas).item() * len(noise)
        count += len(noise)
    return ValidationLoss(loss=total / count, zero_loss=zero / count)
