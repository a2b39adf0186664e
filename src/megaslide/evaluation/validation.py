"""eval/loss: the training objective on held-out clips at fixed timesteps with fixed noise.

Everything random is the same at every evaluation, so two values differ only by the model, and a
curve of them is smooth enough to compare runs by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaslide.config import Config
from megaslide.data.latents import Batch, BucketSampler, LatentDataset, collate
from megaslide.diffusion.objectives import Objective

NOISE_SEED = 20_260_101


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationLoss:
    """Mean losses over the validation batches, weighted by their sizes."""

    loss: float
    zero_loss: float
    """Loss of predicting zero on the same latents, noise and timesteps."""
    samples: int
    """How many were measured."""


def validation_batches(config: Config) -> list[Batch]:
    """The same held-out latents at every evaluation: `train.validation_batches` batches at most.

    Returns:
        no batch where the cache holds nothing out.

    Raises:
        InputError: no cache in `data.cache_dir`, or one that does not fit `data`.
    """
    held_out = LatentDataset(Path(config.data.cache_dir), "validation", config.data)
    if not len(held_out):
        return []
    size, count = config.train.train_batch_size, config.train.validation_batches
    sampler = iter(BucketSampler(held_out, min(size, len(held_out)), seed=0))
    count = min(count, -(-len(held_out) // size))
    return [collate([held_out[i] for i in next(sampler)]) for _ in range(count)]


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
    return ValidationLoss(loss=total / count, zero_loss=zero / count, samples=count)
