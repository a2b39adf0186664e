"""An evaluation on a terminal of 80 columns: figures, what they mean, what is missing and why."""

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megaslide.evaluation.definitions import DEFINITIONS, FLAGS, OF_CHECKPOINT
from megaslide.evaluation.results import ClipResult, Evaluation, Figure, Mean, Missing

SHOWN_CLIPS = 20
SHOWN_SKIPS = 10
CLIP_FIGURES = {
    "vbench.temporal_flickering": "flickering",
    "flow.warp_error": "warp error",
    "flow.magnitude": "magnitude",
    "image.sharpness": "sharpness",
}
"""Columns of the table of clips, by heading; the JSON has every figure of every clip."""
_ALL = DEFINITIONS | OF_CHECKPOINT
_ARROWS = {"high": "higher is better", "low": "lower is better", "": "neither end is better"}


def render(evaluation: Evaluation) -> RenderableType:
    """Everything to print, in the order in which it should be read."""
    measured = {n: m for n, m in evaluation.summary.items() if isinstance(m.all_clips, float)}
    model = {n: f for n, f in evaluation.checkpoint.items() if isinstance(f, float)}
    parts: list[RenderableType] = []
    if evaluation.clips:
        parts += [summary_table(measured, len(evaluation.clips)), Text()]
    parts += [_definition(name) for name in measured]
    parts += _section("checkpoint", [Text(f"{n}: {shown(n, f)}") for n, f in model.items()])
    parts += [_definition(name) for name in model]
    parts += _section("missing", _absent(evaluation))
    if evaluation.clips:
        parts += [Text(), clip_table(evaluation.clips[:SHOWN_CLIPS])]
    if len(evaluation.clips) > SHOWN_CLIPS:
        parts.append(Text(f"and {len(evaluation.clips) - SHOWN_CLIPS} more clips; see --json"))
    seen = {flag for clip in evaluation.clips for flag in clip.flags}
    parts += _section("flags", [Text(f"{flag}: {FLAGS[flag]}") for flag in FLAGS if flag in seen])
    parts += _section("skipped", _skipped(evaluation.skipped))
    parts += _section("notes", [Text(note) for note in evaluation.notes])
    return Group(*parts)


def summary_table(measured: Mapping[str, Mean], clips: int) -> Table:
    """Name, mean, clips in the mean, and the mean over all clips where some were left out."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("figure", no_wrap=True)
    for heading in ("mean", "clips", "with flagged clips"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, mean in measured.items():
        every = shown(name, mean.all_clips) if mean.value != mean.all_clips else ""
        value = Text(shown(name, mean.value), style="bold")
        table.add_row(name, value, f"{mean.clips}/{clips}", Text(every, style="dim"))
    return table


def clip_table(clips: Iterable[ClipResult]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("clip", overflow="ellipsis", no_wrap=True, max_width=22)
    for heading in CLIP_FIGURES.values():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("flags", overflow="fold", max_width=8)
    for clip in clips:
        figures = [shown(name, clip.figures[name]) for name in CLIP_FIGURES]
        table.add_row(clip.path.name, *figures, Text(" ".join(clip.flags), style="yellow"))
    return table


def shown(name: str, figure: Figure) -> str:
    """A figure with the decimals of its definition; a dash where it was not measured."""
    if isinstance(figure, Missing):
        return "-"
    return f"{figure:.{_ALL[name].digits}f}"


def reasons(evaluation: Evaluation) -> dict[str, list[str]]:
    """Names of the figures that were not measured at all, by the reason."""
    found = {name: mean.all_clips for name, mean in evaluation.summary.items()}
    grouped: dict[str, list[str]] = {}
    for name, figure in (found | evaluation.checkpoint).items():
        if isinstance(figure, Missing):
            grouped.setdefault(figure.reason, []).append(name)
    return grouped


def explained(name: str) -> str:
    """Definition, direction and source of a figure, in one sentence each."""
    what = _ALL[name]
    return f"{what.text} [{what.source}; {_ARROWS[what.better]}]"


def _definition(name: str) -> Padding:
    text = Text.assemble((name, "bold"), f": {explained(name)}")
    return _hanging(text)


def _absent(evaluation: Evaluation) -> list[Text]:
    return [
        Text.assemble((", ".join(names), "bold"), f": not measured: {reason}")
        for reason, names in reasons(evaluation).items()
    ]


def _skipped(skipped: Mapping[str, str]) -> list[Text]:
    lines = [Text(f"{path}: {reason}") for path, reason in list(skipped.items())[:SHOWN_SKIPS]]
    if len(skipped) > SHOWN_SKIPS:
        lines.append(Text(f"and {len(skipped) - SHOWN_SKIPS} more; see --json"))
    return lines


def _section(heading: str, lines: list[Text]) -> list[RenderableType]:
    """A heading and its lines; nothing where there are none."""
    return [Text(), Text(heading, style="dim"), *map(_hanging, lines)] if lines else []


def _hanging(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2))
