"""What the JSONs say, as rows: paired by seed, because every arm of a seed saw the same clips.

A conclusion is drawn only where all seeds agree; with one seed there is none.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.quality.arms import arms
from benchmarks.quality.worlds import WORLDS

Result = dict[str, Any]
BASELINE = "fixed"


@dataclass(frozen=True)
class Row:
    """All seeds of one arm in one world."""

    arm: str
    seeds: list[int]
    losses: list[float]
    sprite_losses: list[float]
    parameters: int
    saved_bytes: int
    step_cpu_s: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)


def rows_of(results: Sequence[Result], world: str) -> list[Row]:
    """One row per arm that was run in the world, in the order of `arms`."""
    rows = []
    for arm in arms():
        own = sorted(select(results, arm=arm, world=world), key=lambda r: r["seed"])
        if own:
            rows.append(
                Row(
                    arm=arm,
                    seeds=[r["seed"] for r in own],
                    losses=[r["loss"] for r in own],
                    sprite_losses=[sprite_loss(r) for r in own],
                    parameters=own[0]["parameters"],
                    saved_bytes=own[0]["saved_bytes"],
                    step_cpu_s=[r["step_cpu_s"] for r in own],
                )
            )
    return rows


def select(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """Results whose fields have these values."""
    return [r for r in results if all(r[key] == value for key, value in wanted.items())]


def sprite_loss(result: Result) -> float:
    """Mean over the noise levels of the loss on the sprite's cells."""
    return statistics.fmean(result["sprite_loss_by_level"].values())


def of_sprite(row: Row) -> Row:
    """The row with the losses of the sprite's cells in the place of those of all cells."""
    return replace(row, losses=row.sprite_losses)


def worlds_of(results: Sequence[Result]) -> list[str]:
    """Worlds that models were trained in, in the order of `WORLDS`."""
    return [name for name in WORLDS if select(results, world=name)]


def against(row: Row, baseline: Row | None) -> str:
    """Verdict on a row: below or above the baseline in all common seeds, or not known."""
    if baseline is None or row.arm == baseline.arm:
        return ""
    known = dict(zip(baseline.seeds, baseline.losses, strict=True))
    pairs = zip(row.seeds, row.losses, strict=True)
    gaps = [loss - known[seed] for seed, loss in pairs if seed in known]
    if len(gaps) < 2:
        return "fewer than two seeds: no conclusion"
    if max(gaps) < 0:
        return f"lower in all {len(gaps)} seeds"
    if min(gaps) > 0:
        return f"higher in all {len(gaps)} seeds"
    return "seeds disagree"


def equal_time(results: Sequence[Result]) -> tuple[float, dict[str, list[float]]]:
    """The CPU seconds of the fastest run, and each arm's losses after as many, by seed.

    Losses lie on the curve of `curve_clips` held-out clips, interpolated between its points.
    """
    seconds = min(r["train_cpu_s"] for r in results)
    losses: dict[str, list[float]] = {}
    for result in sorted(results, key=lambda r: r["seed"]):
        times, values = zip(*((p["cpu_s"], p["loss"]) for p in result["curve"]), strict=True)
        losses.setdefault(result["arm"], []).append(float(np.interp(seconds, times, values)))
    return seconds, losses


def strongest_block(result: Result) -> int:
    """Index among blocks and groups of the shear that follows the true motion best, or slide."""

    def strength(block: dict[str, Any]) -> float:
        return max(abs(block[name]["sprite"] or 0.0) for name in ("shear", "slide"))

    blocks = result["offsets"]["blocks"]
    return max(range(len(blocks)), key=lambda index: strength(blocks[index]))
