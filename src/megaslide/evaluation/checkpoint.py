"""eval/loss of a checkpoint: what training logs under this name, measured again from its files."""

from contextlib import closing
from math import prod
from pathlib import Path

import torch

from megaslide.diffusion.objectives import Objective
from megaslide.errors import InputError
from megaslide.evaluation.definitions import OF_CHECKPOINT
from megaslide.evaluation.results import Figure, Missing
from megaslide.evaluation.validation import validation_batches, validation_loss
from megaslide.sampling import forward_only, trained_at
from megaslide.streaming.placement import chosen_device


def checkpoint_figures(source: Path | None) -> dict[str, Figure]:
    """The figures of `OF_CHECKPOINT`, of averaged weights where the checkpoint has them.

    Args:
        source: a run's folder (its latest checkpoint) or a checkpoint; None: none is asked for.

    Raises:
        InputError: no complete checkpoint there.
    """
    if source is None:
        return _missing("no --checkpoint")
    trained = trained_at(source)
    config, network = trained.config, trained.network
    try:
        batches = validation_batches(config)
    except InputError as error:
        return _missing(error.problem)
    if not batches:
        return _missing(f"{config.data.cache_dir} holds no clips out (data.validation_split)")

    def objective(latents: torch.Tensor) -> Objective:
        return trained.recipe.objective(latents[0, 0].numel() // prod(network.patch_size))

    device = torch.device(chosen_device(config.offload))
    with closing(forward_only(network, trained.dtype, config.offload)) as model:
        denoiser = network.denoiser(model, trained.dtype)
        found = validation_loss(denoiser, objective, batches, device)
    return {
        "eval/loss": found.loss,
        "eval/loss_of_zero": found.zero_loss,
        "eval/samples": float(found.samples),
    }


def _missing(reason: str) -> dict[str, Figure]:
    return dict.fromkeys(OF_CHECKPOINT, Missing(reason))
