"""`megaslide eval`: from paths to an `Evaluation`.

A clip that cannot be read is named and skipped; an evaluation that measures nothing is an error.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaslide.data.video import UnreadableVideoError
from megaslide.errors import InputError
from megaslide.evaluation import vbench
from megaslide.evaluation.checkpoint import checkpoint_figures
from megaslide.evaluation.definitions import DEFINITIONS
from megaslide.evaluation.inputs import Reference, find_clips, find_prompts, find_references
from megaslide.evaluation.measure import measure_clip
from megaslide.evaluation.results import ClipResult, Evaluation, Figure, Mean, Missing, summarise

Progress = Callable[[int, int, str], None]

CONSISTENCY = (
    "vbench.subject_consistency",
    "vbench.background_consistency",
    "vbench.temporal_flickering",
    "vbench.motion_smoothness",
)
"""What `temporal_consistency` is the mean of."""


def evaluate(
    paths: Sequence[Path],
    *,
    prompts: Path | None = None,
    reference: Path | None = None,
    checkpoint: Path | None = None,
    environment: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure the clips at `paths`, and a checkpoint where one is given.

    Args:
        paths: video files and folders of them; none are needed with a checkpoint.
        prompts: file with the prompts; by default what lies beside each clip.
        reference: folder with a clip of the same name for each, and their `trajectories.jsonl`.
        checkpoint: a run's folder or a checkpoint in it, whose loss is measured too.
        environment: where VBENCH_PYTHON and VBENCH_CACHE_DIR are looked up; the process's own by
            default.
        progress: called with (clips done, in all, name of the next).

    Raises:
        InputError: nothing to measure, or a file or folder that is not what it should be.
    """
    if not paths:
        return _of_checkpoint_alone(checkpoint, prompts=prompts, reference=reference)
    of_checkpoint = checkpoint_figures(checkpoint)
    found = find_clips(paths)
    by_prompt = find_prompts(found, prompts)
    references = None if reference is None else find_references(found, reference)
    clips, skipped = _measured(found, by_prompt, references, progress)
    official = _add_official(clips, by_prompt, environment, progress)
    for clip in clips:
        clip.figures = _in_order(clip.figures | aggregates(clip.figures))
    notes = [
        *_size_note(clips),
        *_prompt_note(clips, by_prompt),
        *_reference_note(clips, references),
    ]
    return Evaluation(
        clips=clips, summary=_summary(clips, official), skipped=skipped, notes=notes,
        checkpoint=of_checkpoint,
    )  # fmt: skip


def _of_checkpoint_alone(checkpoint: Path | None, **of_clips: Path | None) -> Evaluation:
    """The evaluation without clips; `of_clips` are options that make no sense without."""
    if checkpoint is None:
        raise InputError("no PATH and no --checkpoint", "give clips, their folder, or a run")
    for name, value in of_clips.items():
        if value is not None:
            raise InputError(f"--{name} {value} without PATH", "give the clips that it is for")
    figures = checkpoint_figures(checkpoint)
    for figure in figures.values():
        if isinstance(figure, Missing):
            raise InputError(
                f"--checkpoint {checkpoint}: its loss is {figure}",
                "prepare the data it was trained on, or give clips to measure",
            )
    return Evaluation(clips=[], summary={}, checkpoint=figures)


def aggregates(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """`temporal_consistency` and `text_video_alignment`; absent where a part is absent."""
    parts = {name: figures[name] for name in CONSISTENCY}
    values = [part for part in parts.values() if isinstance(part, float)]
    missing = {name: part for name, part in parts.items() if isinstance(part, Missing)}
    consistency: Figure = sum(values) / len(CONSISTENCY)
    if missing:
        name, part = next(iter(missing.items()))
        others = f" and {len(missing) - 1} more parts" if len(missing) > 1 else ""
        consistency = Missing(f"needs {name}{others}: {part.reason}")
    alignment = figures["vbench.overall_consistency"]
    return {"temporal_consistency": consistency, "text_video_alignment": alignment}


def _measured(
    found: Sequence[Path],
    prompts: Mapping[Path, str],
    references: Mapping[Path, Reference] | None,
    progress: Progress | None,
) -> tuple[list[ClipResult], dict[str, str]]:
    """Results of the clips that can be measured, and why the others cannot."""
    none = Missing("no --reference" if references is None else "no reference of this name")
    clips, skipped = [], {}
    for number, path in enumerate(found):
        if progress is not None:
            progress(number, len(found), path.name)
        try:
            clips.append(measure_clip(path, prompts.get(path), (references or {}).get(path, none)))
        except UnreadableVideoError as error:
            skipped[str(path)] = error.reason
    if progress is not None:
        progress(len(found), len(found), "")
    if not clips:
        name, reason = next(iter(skipped.items()))
        more = f"; and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        raise InputError(f"no clip can be measured: {name}: {reason}{more}", "give other clips")
    return clips, skipped


def _add_official(
    clips: Sequence[ClipResult],
    prompts: Mapping[Path, str],
    environment: Mapping[str, str] | None,
    progress: Progress | None,
) -> dict[str, float]:
    """Add the official package's figures to every clip; its scores for all clips together."""
    paths = [clip.path for clip in clips]
    scores = vbench.measure(paths, prompts, environment=environment, progress=progress)
    for clip in clips:
        clip.figures |= vbench.figures_of(clip.path, scores)
    return {name: s.overall for name, s in scores.items() if isinstance(s, vbench.Scores)}


def _summary(clips: Sequence[ClipResult], official: Mapping[str, float]) -> dict[str, Mean]:
    """Means over clips; the aggregates are taken from the means, so that they can be checked."""
    summary = summarise(clips, official)
    values = aggregates({name: mean.value for name, mean in summary.items()})
    every = aggregates({name: mean.all_clips for name, mean in summary.items()})
    for name in values:
        summary[name] = replace(summary[name], value=values[name], all_clips=every[name])
    return summary


def _in_order(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    return {name: figures[name] for name in DEFINITIONS}


# --- notes ------------------------------------------------------------------------------------


def _size_note(clips: Sequence[ClipResult]) -> list[str]:
    sizes = Counter(f"{clip.frames}x{clip.height}x{clip.width}" for clip in clips)
    if len(sizes) < 2:
        return []
    shown = ", ".join(f"{count} of {size}" for size, count in sizes.most_common(3))
    more = f" and {len(sizes) - 3} more sizes" if len(sizes) > 3 else ""
    return [f"mixed sizes ({shown}{more}): figures in pixels, and sharpness, depend on the size"]


def _prompt_note(clips: Sequence[ClipResult], prompts: Mapping[Path, str]) -> list[str]:
    without = [clip.path.name for clip in clips if clip.path not in prompts]
    return [f"{len(without)} of {len(clips)} clips have no prompt: {_some(without)}"] * bool(
        without
    )


def _reference_note(
    clips: Sequence[ClipResult], references: Mapping[Path, Reference] | None
) -> list[str]:
    if references is None:
        return []
    without = [clip.path.name for clip in clips if clip.path not in references]
    return [f"{len(without)} of {len(clips)} clips have no reference: {_some(without)}"] * bool(
        without
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
