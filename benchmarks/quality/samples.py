"""What a trained model draws from noise, held against what is known of every clip of its world.

A clip of a world with one sprite on an empty background has a law: the same texture in every frame,
on a path of constant velocity that is reflected at the walls. Four numbers say how much of it a
sample keeps, each beside that of true clips, which is the best that can be had:

- *energy*: mean square of the latents over that of true clips; 1 is right, 0 an empty clip.
- *gathered*: share of a frame's energy in the square of a sprite's size that holds most of it.
- *identity*: normalised correlation of that square with the one of the next frame; of subcell
  motion, even the true clips' is below 1.
- *path*: root mean square distance of the squares from the nearest lawful path, in cells.

Shapes: B clips, C channels, T frames, H W cells, S side of a sprite.
"""

import statistics
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.worlds import SIDE, Clips, World
from megaslide.diffusion.samplers import sample_latents, sigma_schedule
from megaslide.evaluation.paths import fit_path
from megaslide.models.dit import VideoDiT

STEPS = 20
SEED = 20_260_102


@dataclass(frozen=True)
class Lawfulness:
    """Means over clips."""

    energy: float
    gathered: float
    identity: float
    path: float


def measure_samples(
    model: VideoDiT, world: World, true: Clips, count: int, text: Tensor
) -> dict[str, dict[str, float]] | None:
    """`samples` of the model, and `true` clips measured in the same way; None where no law is.

    Args:
        model: predicts velocities.
        world: what it was trained on.
        true: at least `count` clips of it.
        count: samples drawn, all from the same noise for every model.
        text: [count, L, text_dim], what the model is told.
    """
    if world.background or world.crossing or world.cut:
        return None
    drawn = sample_latents(
        model, (count, *world.shape), sigmas=sigma_schedule(STEPS, 1.0), guidance_scale=1.0,
        generator=torch.Generator().manual_seed(SEED),
        conditioning={"encoder_hidden_states": text},
    )  # fmt: skip
    scale = true.latents.square().mean().item()
    pairs = {"samples": drawn, "true": true.latents[:count]}
    return {name: asdict(lawfulness(latents, scale)) for name, latents in pairs.items()}


def lawfulness(latents: Tensor, true_energy: float) -> Lawfulness:
    """The four numbers for clips [B, C, T, H, W]."""
    position, gathered = brightest_squares(latents)
    size = (latents.shape[3], latents.shape[4])
    middles = (position + SIDE / 2).double().numpy()
    paths = [fit_path(np.asarray(clip), size, SIDE).residual for clip in middles]
    return Lawfulness(
        energy=latents.square().mean().item() / true_energy,
        gathered=gathered.mean().item(),
        identity=_identity(latents, position).mean().item(),
        path=statistics.fmean(paths),
    )


def brightest_squares(latents: Tensor) -> tuple[Tensor, Tensor]:
    """First cell (h, w) of the S x S square with most energy, fp32 [B, T, 2]; its share [B, T].

    Subcell: the mean of all squares, weighted by a high power of their energies.
    """
    energy = latents.square().sum(1)  # [B, T, H, W]
    squares = F.avg_pool2d(energy, SIDE, stride=1) * SIDE**2  # [B, T, H-S+1, W-S+1]
    share = squares.flatten(2).amax(-1) / energy.sum((2, 3)).clamp_min(1e-12)
    weight = (squares / squares.amax((2, 3), keepdim=True).clamp_min(1e-12)) ** 16
    weight = weight / weight.sum((2, 3), keepdim=True)
    rows, columns = (torch.arange(n, dtype=torch.float32) for n in squares.shape[2:])
    middle = ((weight.sum(3) * rows).sum(-1), (weight.sum(2) * columns).sum(-1))
    return torch.stack(middle, -1), share


def _identity(latents: Tensor, position: Tensor) -> Tensor:
    """Normalised correlation [B, T-1] of neighbouring frames' squares, over channels and cells."""
    squares = _cut_out(latents, position).flatten(2)  # [B, T, C S S]
    return F.cosine_similarity(squares[:, 1:], squares[:, :-1], dim=-1, eps=1e-12)


def _cut_out(latents: Tensor, position: Tensor) -> Tensor:
    """Squares [B, T, C, S, S] at fractional positions, bilinear."""
    B, _, T, H, W = latents.shape
    frames = latents.transpose(1, 2).flatten(0, 1)  # [B T, C, H, W]
    offset = torch.arange(SIDE, dtype=torch.float32)
    at = position.flatten(0, 1)  # [B T, 2]
    rows, columns = (at[:, axis, None] + offset for axis in (0, 1))
    grid = torch.stack(
        [
            (2 * columns / (W - 1) - 1)[:, None, :].expand(-1, SIDE, -1),
            (2 * rows / (H - 1) - 1)[:, :, None].expand(-1, -1, SIDE),
        ],
        -1,
    )
    return F.grid_sample(frames, grid, align_corners=True).unflatten(0, (B, T))
