"""One run: a model trained and measured, written as one JSON; and the loop over all runs.

A run that has its JSON is never repeated, and a JSON appears only when its run is complete, so a
study that was stopped goes on with the run in which it stopped. A run is identified by all that
defines it (settings, worlds, model): after a change of one of them it is another run. Within a
seed, every arm gets the same clips, noise and noise levels in the same order, and every run is
measured on the same held-out clips with the same noise.

Shapes: B clips · C T H W latents · N tokens of a clip.
"""

import dataclasses
import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.arms import LONGER, TEXT_DIM, arm
from benchmarks.quality.offsets import COVERED, measure_offsets
from benchmarks.quality.samples import measure_samples
from benchmarks.quality.worlds import WORLDS, Clips, World, definition, draw
from megaslide.diffusion.objectives import FlowMatching, call_model, interpolate, velocity
from megaslide.errors import InputError
from megaslide.models.dit import VideoDiT
from megaslide.planning.hardware import probe

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Noise levels of validation."""
HELD_OUT_SEED = 20_260_101
_MICRO = 8
"""Clips per forward pass of validation."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of a study share."""

    steps: int = 500
    batch: int = 4
    learning_rate: float = 4e-3
    """At its peak; it falls linearly to zero at the last step."""
    warmup: int = 25
    curve_every: int = 100
    """Steps between points of the validation curve."""
    curve_clips: int = 8
    """Held-out clips of the curve, and of the worlds that a run was not trained in."""
    held_out: int = 48
    """Clips of the final measurement."""
    samples: int = 24
    """Clips drawn from noise."""

    def of(self, arm_name: str) -> "Settings":
        """The settings of one arm, which may train longer than others."""
        return dataclasses.replace(self, steps=round(LONGER.get(arm_name, 1) * self.steps))

    def rate(self, step: int) -> float:
        """Learning rate of a step, the first being 1."""
        return self.learning_rate * min(1, step / self.warmup) * (1 - (step - 1) / self.steps)


@dataclass(frozen=True, order=True)
class Run:
    """Names one run; the names of its measured worlds beside its own are in `also`."""

    arm: str
    world: str
    seed: int
    also: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def identity(self, settings: Settings) -> str:
        """Eight hex digits of all that defines the run: settings, worlds and model.

        Raises:
            InputError: a world or an arm that does not exist.
        """
        worlds = [definition(_world(name)) for name in (self.world, *self.also)]
        parts = [dataclasses.asdict(settings.of(self.arm)), worlds, arm(self.arm).to_dict()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]

    def path(self, folder: Path, settings: Settings) -> Path:
        """Where its JSON goes."""
        name = f"{self.world}--{self.arm}--seed-{self.seed}--{self.identity(settings)}.json"
        return folder / name


def run_study(runs: Sequence[Run], folder: Path, settings: Settings) -> list[Path]:
    """Carry out the runs that have no JSON in `folder` yet, in order.

    Returns:
        The JSONs of all runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine = probe().provenance()
    paths = [run.path(folder, settings) for run in runs]
    missing = [(run, path) for run, path in zip(runs, paths, strict=True) if not path.exists()]
    logger.info("%d of %d runs are there already", len(runs) - len(missing), len(runs))
    for number, (run, path) in enumerate(missing, 1):
        result = carry_out(run, settings)
        write_atomically(path, json.dumps(result | {"machine": machine}, indent=1) + "\n")
        logger.info(
            "%d/%d %s: loss %.4f, %.0f s of CPU",
            number, len(missing), path.stem, result["loss"], result["train_cpu_s"],
        )  # fmt: skip
    return paths


def read_results(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The results that exist under `paths`.

    Raises:
        InputError: a file that is not a run's result; names it.
    """
    results = []
    for path in sorted(path for path in paths if path.exists()):
        try:
            result = json.loads(path.read_text())
            result["arm"], result["world"], result["loss"], result["identity"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} is not the result of a run ({error!r})", "delete it; the run is repeated"
            ) from None
        results.append(result)
    return results


def is_current(result: dict[str, Any], settings: Settings) -> bool:
    """Whether a result is that of the run its arm, world and seed name today."""
    run = Run(result["arm"], result["world"], result["seed"], tuple(result["elsewhere"]))
    try:
        return result["identity"] == run.identity(settings)
    except InputError:  # an arm or a world that is gone
        return False


def write_atomically(path: Path, text: str) -> None:
    """The file appears under `path` only when it is complete."""
    unfinished = path.with_name(f".partial-{path.name}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def carry_out(run: Run, settings: Settings) -> dict[str, Any]:
    """Train and measure one model; figures as the JSON has them."""
    world, config, identity = _world(run.world), arm(run.arm), run.identity(settings)
    settings = settings.of(run.arm)
    torch.manual_seed(run.seed)
    model = VideoDiT(config)
    held_out = _held_out(world, settings.held_out)
    saved_bytes = _saved_bytes(model, _training_batch(world, settings.batch, _generator(run.seed)))
    curve, cpu_s = _train(model, world, held_out, run.seed, settings)
    final = losses(model, held_out)
    return {
        "arm": run.arm,
        "world": run.world,
        "seed": run.seed,
        "identity": identity,
        "loss": final.mean,
        "loss_by_level": final.by_level,
        "sprite_loss_by_level": final.of_sprite,
        "zero_loss": 1 + held_out.latents.square().mean().item(),
        "elsewhere": {name: _loss_in(name, model, settings) for name in run.also},
        "sampled": measure_samples(
            model, world, held_out, settings.samples, _no_text(settings.samples)
        ),
        "offsets": measure_offsets(model, held_out, lambda: losses_at(model, held_out, 0.5)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "saved_bytes": saved_bytes,
        "train_cpu_s": cpu_s,
        "step_cpu_s": cpu_s / settings.steps,
        "curve": curve,
        "settings": dataclasses.asdict(settings),
        "world_definition": definition(world),
        "config": config.to_dict(),
        "threads": torch.get_num_threads(),
    }


@dataclass(frozen=True)
class Losses:
    """Flow-matching losses by noise level, over all cells and over those of the sprite."""

    by_level: dict[str, float]
    of_sprite: dict[str, float]

    @property
    def mean(self) -> float:
        """Over the levels, of all cells."""
        return statistics.fmean(self.by_level.values())

    @property
    def sprite_mean(self) -> float:
        """Over the levels, of the sprite's cells."""
        return statistics.fmean(self.of_sprite.values())


def losses(model: VideoDiT, clips: Clips) -> Losses:
    """Losses at each of `LEVELS`, with fixed noise."""
    pairs = {str(level): losses_at(model, clips, level) for level in LEVELS}
    return Losses({k: v[0] for k, v in pairs.items()}, {k: v[1] for k, v in pairs.items()})


@torch.no_grad()
def losses_at(model: VideoDiT, clips: Clips, level: float) -> tuple[float, float]:
    """Mean squared error of the velocity at one noise level: of all cells, of the sprite's."""
    latents = clips.latents
    noise = torch.randn(latents.shape, generator=_generator(HELD_OUT_SEED + round(1000 * level)))
    parts = []
    for clean, noise_ in zip(latents.split(_MICRO), noise.split(_MICRO), strict=True):
        sigmas, text = torch.full((len(clean),), level), _no_text(len(clean))
        noisy = interpolate(clean, noise_, sigmas)
        prediction = call_model(model, noisy, sigmas, encoder_hidden_states=text)
        parts.append((prediction - velocity(clean, noise_)).square().mean(1))
    error = torch.cat(parts)  # [B, T, H, W]
    return error.mean().item(), error[clips.mask > COVERED].mean().item()


def _train(
    model: VideoDiT, world: World, held_out: Clips, seed: int, settings: Settings
) -> tuple[list[dict[str, float]], float]:
    """The validation curve, and the CPU seconds that training alone took."""
    generator, cpu_s = _generator(seed), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    shown = held_out.first(settings.curve_clips)
    curve: list[dict[str, float]] = []
    for step in range(1, settings.steps + 1):
        batch = _training_batch(world, settings.batch, generator)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        start = time.process_time()
        _objective_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        cpu_s += time.process_time() - start
        if step % settings.curve_every == 0 or step == settings.steps:
            now = losses(model, shown)
            point = {"loss": now.mean, "sprite_loss": now.sprite_mean}
            curve.append({"step": step, "cpu_s": cpu_s, **point})
    return curve, cpu_s


Batch = tuple[Tensor, Tensor, Tensor]
"""Latents, noise, noise levels [B]."""


def _training_batch(world: World, batch: int, generator: torch.Generator) -> Batch:
    latents = draw(world, batch, generator).latents
    noise = torch.randn(latents.shape, generator=generator)
    return latents, noise, FlowMatching().sample_sigmas(batch, generator)


def _objective_loss(model: VideoDiT, batch: Batch) -> Tensor:
    loss, _ = FlowMatching().loss(model, *batch, encoder_hidden_states=_no_text(len(batch[0])))
    return loss


def _saved_bytes(model: VideoDiT, batch: Batch) -> int:
    """Bytes that autograd keeps from forward to backward of one step, parameters excepted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _objective_loss(model, batch)
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)


def _loss_in(name: str, model: VideoDiT, settings: Settings) -> float:
    return losses(model, _held_out(_world(name), settings.curve_clips)).mean


def _held_out(world: World, clips: int) -> Clips:
    return draw(world, clips, _generator(HELD_OUT_SEED))


def _world(name: str) -> World:
    if name not in WORLDS:
        raise InputError(f"world {name!r} is unknown", f"choose from {', '.join(WORLDS)}")
    return WORLDS[name]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _no_text(batch: int) -> Tensor:
    return torch.zeros(batch, 1, TEXT_DIM)
