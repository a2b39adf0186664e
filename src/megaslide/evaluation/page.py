"""An evaluation as one HTML file, in the look of megaslide's other pages.

A figure never stands without its definition and its source, and what was not measured is in the
same table with the reason in the figure's place.
"""

from html import escape
from pathlib import Path

from megaslide.evaluation.definitions import DEFINITIONS, FLAGS
from megaslide.evaluation.results import ClipResult, Evaluation, Figure, Mean, Missing
from megaslide.evaluation.tables import explained, shown
from megaslide.pages import clip_gallery, rows, write_page

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
            f"<h2>Means</h2><p class='note'>{_MEANS_NOTE}</p>{_means(evaluation)}",
            f"<h2>Checkpoint</h2>{_checkpoint(evaluation)}",
            f"<h2>Clips</h2>{_clip_table(evaluation)}",
            f"<h2>Flags</h2><table>{rows((n, escape(t)) for n, t in FLAGS.items())}</table>",
            _pairs("Skipped", list(evaluation.skipped.items())),
            _pairs("Notes", [("note", note) for note in evaluation.notes]),
            _videos(evaluation),
        ]
    )
    return write_page(path, title=title, body=body, footer=_FOOTER)


def _lead(evaluation: Evaluation) -> str:
    clips = evaluation.clips
    flagged = sum(bool(clip.flags) for clip in clips)
    measured = sum(isinstance(mean.all_clips, float) for mean in evaluation.summary.values())
    return (
        f"{len(clips)} clips measured, {len(evaluation.skipped)} skipped, {flagged} flagged; "
        f"{measured} of {len(evaluation.summary)} figures could be measured."
    )


def _means(evaluation: Evaluation) -> str:
    head = "<tr><th>figure</th><th>mean</th><th>clips</th><th>with flagged clips</th></tr>"
    lines = (_mean(n, m, len(evaluation.clips)) for n, m in evaluation.summary.items())
    return f"<div class='wide'><table>{head}{''.join(lines)}</table></div>"


def _mean(name: str, mean: Mean, clips: int) -> str:
    every = _figure(name, mean.all_clips) if mean.value != mean.all_clips else ""
    cells = (_figure(name, mean.value), f"{mean.clips}/{clips}", every)
    small = f"<small>{escape(explained(name))}</small>"
    return f"<tr><td>{escape(name)}{small}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _checkpoint(evaluation: Evaluation) -> str:
    lines = (
        f"<tr><td>{escape(name)}<small>{escape(explained(name))}</small></td>"
        f"<td>{_figure(name, figure)}</td></tr>"
        for name, figure in evaluation.checkpoint.items()
    )
    head = "<tr><th>figure</th><th>value</th></tr>"
    return f"<div class='wide'><table>{head}{''.join(lines)}</table></div>"


def _figure(name: str, figure: Figure) -> str:
    if isinstance(figure, Missing):
        return f"<span class='absent'>{escape(str(figure))}</span>"
    return shown(name, figure)


def _clip_table(evaluation: Evaluation) -> str:
    """Every clip with the figures that at least one of them has."""
    names = [
        name
        for name in DEFINITIONS
        if any(isinstance(clip.figures[name], float) for clip in evaluation.clips)
    ]
    head = "".join(f"<th>{escape(name.replace('.', ' ').replace('_', ' '))}</th>" for name in names)
    lines = "".join(_clip(clip, names) for clip in evaluation.clips)
    return (
        f"<div class='wide'><table><tr><th>clip</th><th>flags</th>{head}</tr>{lines}</table></div>"
    )


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


def _pairs(heading: str, pairs: list[tuple[str, str]]) -> str:
    if not pairs:
        return ""
    return f"<h2>{heading}</h2><table>{rows((n, escape(t)) for n, t in pairs)}</table>"


def _videos(evaluation: Evaluation) -> str:
    """The first clips that browsers play, with their prompts."""
    playable = [
        (clip.prompt or clip.path.name, clip.path)
        for clip in evaluation.clips
        if clip.path.suffix.lower() == ".mp4" and clip.path.stat().st_size <= VIDEO_BYTES
    ]
    return clip_gallery("As they look", playable[:SHOWN_VIDEOS])
