"""The study as one page: tables and figures from the JSONs, and verdicts where seeds agree."""

import base64
import io
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.quality.arms import LARGE, LONGER
from benchmarks.quality.figures import FIGURES, STYLE
from benchmarks.quality.study import Settings, is_current, read_results, write_atomically
from benchmarks.quality.tables import (
    BASELINE,
    Result,
    Row,
    against,
    against_longer,
    base_steps,
    of_sprite,
    rows_of,
    sampled_of,
    worlds_of,
)
from megaslide.errors import InputError
from megaslide.pages import write_page

TITLE = "Does learned motion earn its cost?"
HEAD = [
    "arm",
    "parameters",
    "CPU s",
    "MB kept",
    "loss by seed",
    "mean",
    "mean, sprite's cells",
    f"against {BASELINE}",
    f"sprite's cells, against {BASELINE}",
    f"against {BASELINE}-longer",
]
SAMPLED = ["samples of", "energy", "gathered", "identity", "off the path, cells"]
_LEAD = (
    "The same small video transformer, trained on synthetic latent videos of known motion, "
    "differing in its self-attention only. Arms of one seed saw the same clips and noise."
)
_NOTE = (
    "Loss: flow matching, mean over five noise levels on held-out clips. Verdicts compare with "
    f"`{BASELINE}` (neighbourhood attention, 3x3x3) of the same size of model, seed by seed; where "
    "seeds disagree, nothing is concluded. CPU seconds are those of training, one thread. Bytes "
    "are what autograd keeps between forward and backward of one step, outside of parameters. "
    "Samples: energy over that of true clips, the share of it in one sprite's square, the "
    "correlation of that square from frame to frame, and how far squares are from a lawful path; "
    "true clips in the first line."
)
_FOOTER = "Every number and figure on this page is computed from the JSONs of the runs."


def write_report(folder: Path, settings: Settings) -> Path:
    """Write `report.html`, `figures/` and `summary.md`, for the docs, from the folder's JSONs.

    Only results that were made with `settings`, in the worlds and with the arms of today, are used.

    Raises:
        InputError: no such results, or a damaged one; names the file.
    """
    every = read_results(folder.glob("*.json"))
    results = [r for r in every if is_current(r, settings)]
    if not results:
        raise InputError(f"{folder} holds no result of {settings}", "run `make ablation`")
    write_atomically(folder / "summary.md", summary(results))
    body = [f"<p class='lead'>{_LEAD}</p>", f"<p class='note'>{escape(_count(results, every))}</p>"]
    body.append(f"<p class='note'>{_NOTE}</p>")
    for world in worlds_of(results):
        body.append(f"<h2>{escape(world)}</h2>")
        for large in (False, True):
            body.append(_table(HEAD, _lines(rows_of(results, world, large=large))))
        body.append(_table(SAMPLED, _sampled_lines(results, world)))
    body += _figures(results, folder / "figures")
    body.append(_machines(results))
    return write_page(folder / "report.html", title=TITLE, body="".join(body), footer=_FOOTER)


def _count(results: Sequence[Result], every: Sequence[Result]) -> str:
    left_out = len(every) - len(results)
    return _runs(results) + (
        f" {left_out} runs of other settings, worlds or models are left out." if left_out else ""
    )


def _runs(results: Sequence[Result]) -> str:
    return f"{len(results)} runs of {base_steps(results)} steps ({', '.join(LONGER)}: more)."


def summary(results: Sequence[Result]) -> str:
    """The tables as Markdown."""
    parts = [f"# {TITLE}\n", f"{_runs(results)}\n"]
    for world in worlds_of(results):
        parts.append(f"## {world}\n")
        for large in (False, True):
            if rows_of(results, world, large=large):
                parts.append(f"{losses_table(results, world, large=large)}\n")
        if sampled_of(results, world):
            parts.append(f"{samples_table(results, world)}\n")
    return "\n".join(parts)


def losses_table(results: Sequence[Result], world: str, *, large: bool = False) -> str:
    """Markdown: one line per arm of one size, lowest mean loss first."""
    return markdown(HEAD, _lines(rows_of(results, world, large=large)))


def samples_table(results: Sequence[Result], world: str) -> str:
    """Markdown: what each arm drew, by seed, true clips first."""
    return markdown(SAMPLED, _sampled_lines(results, world))


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    rows = (
        f"<tr><td class='arm'>{escape(name)}</td>"
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in lines
    )
    return f"<div class='wide'><table><tr>{names}</tr>{''.join(rows)}</table></div>"


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of the rows, lowest mean loss first."""
    named = {row.arm.removesuffix(LARGE): row for row in rows}
    baseline, longer = named.get(BASELINE), named.get(f"{BASELINE}-longer")
    return [
        [
            row.arm,
            f"{row.parameters:,}",
            f"{statistics.fmean(row.train_cpu_s):.0f}",
            f"{row.saved_bytes / 1e6:.1f}",
            _numbers(row.losses),
            f"{row.mean:.4f}",
            f"{statistics.fmean(row.sprite_losses):.4f}",
            against(row, baseline),
            against(of_sprite(row), baseline and of_sprite(baseline)),
            against_longer(row, longer),
        ]
        for row in sorted(rows, key=lambda row: row.mean)
    ]


def _sampled_lines(results: Sequence[Result], world: str) -> list[list[str]]:
    names = ("energy", "gathered", "identity", "path")
    return [
        [arm, *(" ".join(f"{seed[name]:.2f}" for seed in seeds) for name in names)]
        for arm, seeds in sampled_of(results, world)
    ]


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def _figures(results: Sequence[Result], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    for name, (caption, make) in FIGURES.items():
        with mpl.rc_context(STYLE):
            figure = make(results)
            if figure is not None:
                pieces.append(_picture(name, caption, figure, folder))
    return pieces


def _picture(name: str, caption: str, figure: Figure, folder: Path) -> str:
    drawn = io.BytesIO()
    # Without the version and date that matplotlib writes, equal results give equal files.
    figure.savefig(drawn, format="png", facecolor="white", metadata={"Software": None})
    (folder / f"{name}.png").write_bytes(drawn.getvalue())
    data = base64.b64encode(drawn.getvalue()).decode("ascii")
    return (
        f"<h2>{escape(name.replace('_', ' '))}</h2><p class='note'>{escape(caption)}</p>"
        f"<div class='wide'><img style='max-width:100%;min-width:640px' alt='{escape(caption)}' "
        f"src='data:image/png;base64,{data}'></div>"
    )


def _machines(results: Sequence[Result]) -> str:
    def named(result: Result) -> str:
        machine = result["machine"]
        return f"{machine['cpu']}, torch {machine['packages']['torch']}, commit {machine['commit']}"

    known = sorted({named(result) for result in results})
    return "<h2>Measured on</h2>" + "".join(f"<p class='note'>{escape(n)}</p>" for n in known)
