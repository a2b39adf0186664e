"""An evaluation as one HTML file, in the look of megaslide's other pages.

A figure never stands without its definition and its source. What was not measured is listed by the
reason, once each: in the figures' own table the reasons would leave no room for the definitions.
"""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from megaslide.evaluation.definitions import DEFINITIONS, FLAGS
from megaslide.evaluation.results import ClipResult, Evaluation, Figure, Mean, Missing
from megaslide.evaluation.tables import explained, reasons, shown
from megaslide.pages import clip_gallery, write_page

SHOWN_VIDEOS = 24
VIDEO_BYTES = 4_000_000
"""Larger files are not copied into the page."""
_MEANS_NOTE = (
    "Means over the clips. A clip that is frozen, static or blurred is the best clip by every "
    "measure of consistency; where that is so, flagged clips are not in the mean, and the mean "
    "with them stands beside it."
)
_FOOTER = (
    "Every figure on this page was measured on the clips it names, and nothing is loaded from "
    "elsewhere. What was not measured says why; nothing stands in for it."
)


def write_html(
    path: Path, evaluation: Evaluation, *, title: str = "megaslide: clips, measured"
) -> Path:
    """Write the page; it appears under `path` only when complete.

    Raises:
        OSError: the page cannot be written, or a clip not be read again.
    """
    body = "".join(
        [
            f"<p class='lead'>{escape(_lead(evaluation))}</p>",
            _means(evaluation),
            _checkpoint(evaluation),
            _absent(evaluation),
            _clip_table(evaluation),
            _list("Flags", FLAGS.items()),
            _list("Skipped", evaluation.skipped.items()),
            _list("Notes", [("", note) for note in evaluation.notes]),
            _videos(evaluation),
        ]
    )
    return write_page(path, title=title, body=body, footer=_FOOTER)


def _lead(evaluation: Evaluation) -> str:
    clips = evaluation.clips
    if not clips:
        return "The loss of a checkpoint on the clips that were held out; no clip was measured."
    flagged = sum(bool(clip.flags) for clip in clips)
    measured = sum(isinstance(mean.all_clips, float) for mean in evaluation.summary.values())
    return (
        f"{len(clips)} clips measured, {len(evaluation.skipped)} skipped, {flagged} flagged; "
        f"{measured} of {len(evaluation.summary)} figures could be measured."
    )


def _means(evaluation: Evaluation) -> str:
    if not evaluation.clips:
        return ""
    head = "<tr><th>figure</th><th>mean</th><th>clips</th><th>with flagged clips</th></tr>"
    clips, found = len(evaluation.clips), evaluation.summary.items()
    lines = (_mean(n, m, clips) for n, m in found if isinstance(m.all_clips, float))
    table = f"<table class='figures'>{head}{''.join(lines)}</table>"
    return f"<h2>Means</h2><p class='note'>{_MEANS_NOTE}</p>{table}"


def _mean(name: str, mean: Mean, clips: int) -> str:
    every = _figure(name, mean.all_clips) if mean.value != mean.all_clips else ""
    cells = (_figure(name, mean.value), f"{mean.clips}/{clips}", every)
    figures = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr>{_named(name, explained(name))}{figures}</tr>"


def _checkpoint(evaluation: Evaluation) -> str:
    """Figures of the model, where there are any."""
    lines = [
        f"<tr>{_named(name, explained(name))}<td>{shown(name, figure)}</td></tr>"
        for name, figure in evaluation.checkpoint.items()
        if isinstance(figure, float)
    ]
    head = "<tr><th>figure</th><th>value</th></tr>"
    table = f"<table class='figures'>{head}{''.join(lines)}</table>"
    return f"<h2>Checkpoint</h2>{table}" if lines else ""


def _absent(evaluation: Evaluation) -> str:
    """What was not measured: each reason with the figures that it explains, defined as others."""
    parts = [
        f"<h3>not measured: {escape(reason)}</h3>{_table((n, explained(n)) for n in names)}"
        for reason, names in reasons(evaluation).items()
    ]
    return f"<h2>Not measured</h2>{''.join(parts)}" if parts else ""


def _named(name: str, text: str) -> str:
    """The cell of a name and what it means."""
    return f"<td class='name'>{escape(name)}<small>{escape(text)}</small></td>"


def _figure(name: str, figure: Figure) -> str:
    if isinstance(figure, Missing):
        return f"<span class='absent'>{escape(str(figure))}</span>"
    return shown(name, figure)


def _clip_table(evaluation: Evaluation) -> str:
    """Every clip with the figures that at least one of them has; nothing without clips."""
    if not evaluation.clips:
        return ""
    names = [
        name
        for name in DEFINITIONS
        if any(isinstance(clip.figures[name], float) for clip in evaluation.clips)
    ]
    head = "".join(f"<th>{escape(name.replace('.', ' ').replace('_', ' '))}</th>" for name in names)
    lines = "".join(_clip(clip, names) for clip in evaluation.clips)
    table = f"<table><tr><th>clip</th><th>flags</th>{head}</tr>{lines}</table>"
    return f"<h2>Clips</h2><div class='wide'>{table}</div>"


def _clip(clip: ClipResult, names: list[str]) -> str:
    cells = "".join(
        f"<td title='{escape(_why(clip.figures[n]))}'>{shown(n, clip.figures[n])}</td>"
        for n in names
    )
    size = f"<small>{clip.frames} frames of {clip.width}x{clip.height}</small>"
    flags = f"<span class='flag'>{escape(' '.join(clip.flags))}</span>"
    return f"<tr><td>{escape(clip.path.name)}{size}</td><td>{flags}</td>{cells}</tr>"


def _why(figure: Figure) -> str:
    return str(figure) if isinstance(figure, Missing) else ""


def _list(heading: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Names with what is to be said of each; nothing where there are none."""
    pairs = list(pairs)
    return f"<h2>{heading}</h2>{_table(pairs)}" if pairs else ""


def _table(pairs: Iterable[tuple[str, str]]) -> str:
    return f"<table>{''.join(f'<tr>{_named(*pair)}</tr>' for pair in pairs)}</table>"


def _videos(evaluation: Evaluation) -> str:
    """The first clips that browsers play, with their prompts."""
    playable = [
        (clip.prompt or clip.path.name, clip.path)
        for clip in evaluation.clips
        if clip.path.suffix.lower() == ".mp4" and clip.path.stat().st_size <= VIDEO_BYTES
    ]
    return clip_gallery("As they look", playable[:SHOWN_VIDEOS])
