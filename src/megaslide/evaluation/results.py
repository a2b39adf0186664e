"""A figure is a number or the reason why there is none; means never hide what was left out.

A frozen or blurred clip is the best clip by every measure of temporal consistency. So the mean of
such a measure is over the clips that carry no flag, and the mean over all clips stands beside it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaslide.evaluation.definitions import DEFINITIONS, FLAGS, OF_CHECKPOINT, Definition


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a figure was not measured."""

    reason: str

    def __str__(self) -> str:
        return f"not measured: {self.reason}"


Figure = float | Missing


@dataclass(slots=True, kw_only=True)
class ClipResult:
    """One clip: its size, its figures by name and the flags it carries."""

    path: Path
    frames: int
    height: int
    width: int
    fps: float
    """As the header states it; 0 where it does not."""
    prompt: str | None = None
    figures: dict[str, Figure] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A figure over the clips."""

    value: Figure
    """Without the clips whose flags the definition leaves out."""
    clips: int
    """Clips that are in `value`."""
    all_clips: Figure
    """Over every clip that has the figure."""


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """What `megaslide eval` found."""

    clips: list[ClipResult]
    """None where only a checkpoint is measured."""
    summary: dict[str, Mean]
    """Of every figure of `DEFINITIONS`; empty without clips."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Path to reason, of files that are no clips to measure."""
    notes: list[str] = field(default_factory=list)
    checkpoint: dict[str, Figure] = field(default_factory=dict)
    """Figures of the model, by the names of `OF_CHECKPOINT`."""


def summarise(
    clips: Sequence[ClipResult], official: Mapping[str, float] | None = None
) -> dict[str, Mean]:
    """The mean of every figure of `DEFINITIONS`, in its order.

    Args:
        clips: one or more.
        official: scores that a program gave for all clips together, which replace the mean over
            all clips (VBench weighs some by frames).
    """
    summary = {name: _mean(name, clips) for name in DEFINITIONS}
    for name, score in (official or {}).items():
        mean = summary[name]
        value = score if mean.clips == len(clips) else mean.value
        summary[name] = Mean(value=value, clips=mean.clips, all_clips=score)
    return summary


def _mean(name: str, clips: Sequence[ClipResult]) -> Mean:
    measured = [clip for clip in clips if isinstance(clip.figures.get(name), float)]
    distrusted = set(DEFINITIONS[name].left_out)
    counted = [clip for clip in measured if not distrusted & set(clip.flags)]
    return Mean(
        value=_average(name, counted) if counted else _why_none(name, clips, measured),
        clips=len(counted),
        all_clips=_average(name, measured) if measured else _why_none(name, clips, measured),
    )


def _average(name: str, clips: Sequence[ClipResult]) -> float:
    values = [figure for clip in clips if isinstance(figure := clip.figures[name], float)]
    return sum(values) / len(values)


def _why_none(name: str, clips: Sequence[ClipResult], measured: Sequence[ClipResult]) -> Missing:
    """One reason for all clips: the only one, or the first and how many others there are."""
    if measured:
        flags = sorted({flag for clip in measured for flag in clip.flags})
        return Missing(f"every clip is flagged: {', '.join(flags)}")
    reasons = [
        str(figure.reason)
        for clip in clips
        if isinstance(figure := clip.figures.get(name), Missing)
    ]
    distinct = list(dict.fromkeys(reasons))
    if not distinct:
        return Missing("no clip has it")
    more = f" (and {len(distinct) - 1} other reasons)" if len(distinct) > 1 else ""
    return Missing(distinct[0] + more)


def write_json(path: Path, evaluation: Evaluation) -> Path:
    """Write `to_json`; parent folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_json(evaluation), indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Everything, with definitions; a figure is a number or {"not_measured": reason}."""
    return {
        "summary": {
            name: {
                "value": _plain(mean.value),
                "clips": mean.clips,
                "all_clips": _plain(mean.all_clips),
                **_definition(DEFINITIONS[name]),
                "flags_left_out": list(DEFINITIONS[name].left_out),
            }
            for name, mean in evaluation.summary.items()
        },
        "checkpoint": {
            name: {"value": _plain(figure), **_definition(OF_CHECKPOINT[name])}
            for name, figure in evaluation.checkpoint.items()
        },
        "clips": [_clip(clip) for clip in evaluation.clips],
        "flags": FLAGS,
        "skipped": evaluation.skipped,
        "notes": evaluation.notes,
    }


def _definition(what: Definition) -> dict[str, str | None]:
    return {"definition": what.text, "source": what.source, "better": what.better or None}


def _clip(clip: ClipResult) -> dict[str, Any]:
    return {
        "path": str(clip.path),
        "frames": clip.frames,
        "height": clip.height,
        "width": clip.width,
        "fps": clip.fps,
        "prompt": clip.prompt,
        "flags": clip.flags,
        "figures": {name: _plain(figure) for name, figure in clip.figures.items()},
    }


def _plain(figure: Figure) -> float | dict[str, str]:
    return {"not_measured": figure.reason} if isinstance(figure, Missing) else figure
