"""The study as one page: tables and figures from the JSONs, and verdicts where seeds agree."""

import base64
import io
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.quality.figures import FIGURES, STYLE
from benchmarks.quality.study import Settings, is_current, read_results, write_atomically
from benchmarks.quality.tables import (
    BASELINE,
    Result,
    Row,
    against,
    equal_time,
    of_sprite,
    rows_of,
    select,
    worlds_of,
)
from megaslide.errors import InputError
from megaslide.pages import write_page

TITLE = "Does learned motion earn its cost?"
HEAD = [
    "arm",
    "parameters",
    "CPU ms per step",
    "MB kept",
    "loss by seed",
    "mean",
    "mean, sprite's cells",
    f"against {BASELINE}",
    f"sprite's cells, against {BASELINE}",
]
_LEAD = (
    "The same small video transformer, trained on synthetic latent videos of known motion, "
    "differing in its self-attention only. Arms of one seed saw the same clips and noise."
)
_NOTE = (
    "Loss: flow matching, mean over five noise levels on held-out clips. Verdicts compare with "
    f"`{BASELINE}` (neighbourhood attention, 3x3x3) seed by seed; where seeds disagree, nothing "
    "is concluded. CPU seconds are those of training, one thread. Bytes are what autograd keeps "
    "between forward and backward of one step, outside of parameters."
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
    body += [_equal_time(results), f"<p class='note'>{_NOTE}</p>"]
    body += [_table(world, rows_of(results, world)) for world in worlds_of(results)]
    body += _figures(results, folder / "figures")
    body.append(_machines(results))
    return write_page(folder / "report.html", title=TITLE, body="".join(body), footer=_FOOTER)


def _count(results: Sequence[Result], every: Sequence[Result]) -> str:
    steps = results[0]["settings"]["steps"]
    left_out = len(every) - len(results)
    text = f"{len(results)} runs of {steps} steps."
    return (
        f"{text} {left_out} runs of other settings, worlds or models are left out."
        if left_out
        else text
    )


def summary(results: Sequence[Result]) -> str:
    """The tables as Markdown."""
    parts = [f"# {TITLE}\n", f"{len(results)} runs of {results[0]['settings']['steps']} steps.\n"]
    for world in worlds_of(results):
        parts.append(f"## {world}\n\n{markdown_table(rows_of(results, world))}\n")
    seconds, losses = equal_time(select(results, world="base") or results)
    parts.append(f"## base, after {seconds:.0f} s of CPU\n")
    parts += [f"- {arm}: {_numbers(values)}" for arm, values in _ranked(losses)]
    return "\n".join(parts) + "\n"


def markdown_table(rows: Sequence[Row]) -> str:
    """One line per arm, lowest mean loss first."""
    lines = [HEAD, ["---"] * len(HEAD), *_lines(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table(world: str, rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEAD)
    lines = (
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for cells in _lines(rows)
    )
    table = f"<table><tr>{head}</tr>{''.join(lines)}</table>"
    return f"<h2>{escape(world)}</h2><div class='wide'>{table}</div>"


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of the rows, lowest mean loss first."""
    baseline = next((row for row in rows if row.arm == BASELINE), None)
    return [
        [
            row.arm,
            f"{row.parameters:,}",
            f"{1e3 * statistics.fmean(row.step_cpu_s):.0f}",
            f"{row.saved_bytes / 1e6:.1f}",
            _numbers(row.losses),
            f"{row.mean:.4f}",
            f"{statistics.fmean(row.sprite_losses):.4f}",
            against(row, baseline),
            against(of_sprite(row), baseline and of_sprite(baseline)),
        ]
        for row in sorted(rows, key=lambda row: row.mean)
    ]


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def _ranked(losses: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(losses.items(), key=lambda pair: statistics.fmean(pair[1]))


def _equal_time(results: Sequence[Result]) -> str:
    own = select(results, world="base")
    if not own:
        return ""
    seconds, losses = equal_time(own)
    lines = "".join(
        f"<tr><td>{escape(name)}</td><td>{_numbers(values)}</td></tr>"
        for name, values in _ranked(losses)
    )
    return (
        f"<h2>base, at equal CPU time</h2><p class='note'>After {seconds:.0f} s of training, "
        f"one thread.</p><table><tr><th>arm</th><th>loss by seed</th></tr>{lines}</table>"
    )


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
