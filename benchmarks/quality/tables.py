"""What the JSONs say, as rows: paired by seed, because every arm of a seed saw the same clips.

A conclusion is drawn only where all seeds agree; with one seed there is none.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.quality.arms import LARGE, arms
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
    train_cpu_s: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)


def rows_of(results: Sequence[Result], world: str, *, large: bool = False) -> list[Row]:
    """One row per arm of one size that was run in the world, in the order of `arms`."""
    rows = []
    for arm in (name for name in arms() if name.endswith(LARGE) == large):
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
                    train_cpu_s=[r["train_cpu_s"] for r in own],
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


def base_steps(results: Sequence[Result]) -> int:
    """Steps of the arms that train no longer than others."""
    return min(int(r["settings"]["steps"]) for r in results)


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


def against_longer(row: Row, longer: Row | None) -> str:
    """Verdict on a row against the baseline that had no less CPU time than it, on average."""
    if longer is None or row.arm.startswith(BASELINE):
        return ""
    if statistics.fmean(row.train_cpu_s) > statistics.fmean(longer.train_cpu_s):
        return "took longer"
    return against(row, longer)


def sampled_of(results: Sequence[Result], world: str) -> list[tuple[str, list[dict[str, float]]]]:
    """What each arm drew, by seed, and first `true`, the same of true clips; [] without samples."""
    own = [r for r in select(results, world=world) if r["sampled"] is not None]
    if not own:
        return []
    rows = [("true", [own[0]["sampled"]["true"]])]
    for arm in arms():
        of_arm = sorted(select(own, arm=arm), key=lambda r: r["seed"])
        rows += [(arm, [r["sampled"]["samples"] for r in of_arm])] if of_arm else []
    return rows


def strongest_block(result: Result) -> int:
    """Index among blocks and groups of the shear that follows the true motion best, or slide."""

    def strength(block: dict[str, Any]) -> float:
        return max(abs(block[name]["sprite"] or 0.0) for name in ("shear", "slide"))

    blocks = result["offsets"]["blocks"]
    return max(range(len(blocks)), key=lambda index: strength(blocks[index]))
