"""The report of a run: one HTML file that can be mailed, opened offline and believed.

It loads nothing (a content security policy in the page forbids it), so the videos are inside as
data and the charts are inline SVG. No figure is written here: text changes with the arguments, and
a figure that was not passed is left out instead of being guessed.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import yaml
from rich.table import Table

from megaslide.config import Config
from megaslide.pages import Clips, clip_gallery, rows, write_page
from megaslide.pages.charts import (
    Points,
    device_parts,
    loss_chart,
    memory_bars,
    overlap,
    timeline,
)
from megaslide.pages.quantities import (
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
    format_share,
    label_of,
    text_of,
)
from megaslide.tracing import Span

_TEMPLATE = Template(resources.files("megaslide.demo").joinpath("report.html").read_text("utf-8"))


def write_report(
    path: Path,
    summary: Mapping[str, Any],
    losses: Mapping[str, Points],
    samples: Clips,
    training_examples: Clips,
    memory: Mapping[str, float],
    spans: Sequence[Span],
    *,
    config: Config | None = None,
    machine: Mapping[str, Any] | None = None,
    title: str = "megaslide: one training run, measured",
) -> Path:
    """Write the page; it appears under `path` only when complete.

    Args:
        path: where the page goes; parent folders are created.
        summary: figures by key, all shown; `quantities.LABELS` lists the keys with a name of their
            own, other keys are shown in words. Units by ending: `_bytes`, `_s`, `_ratio`,
            `_share`. `device` ("cpu" or "cuda") chooses how the page words memory and overlap.
        losses: `train` and `eval`, each [(step, loss)].
        samples: generated clips, shown in this order.
        training_examples: clips of the training set.
        memory: bytes: `state` (host), and on the device `slots`, `gradient_buffers`, `resident`,
            `activations` and their peak together, `device_peak` (default: their sum).
        spans: what ran during about one step, such as `trace.between(start, end)`; drawn whole.
        config: shown as the YAML that repeats the run.
        machine: names and values of the machine and the software.
        title: heading of the page.

    Returns:
        `path`.

    Raises:
        OSError: a clip cannot be read or the page cannot be written.
        KeyError: `memory` has no `state`.
    """
    on_cpu = summary.get("device") == "cpu"
    body = _TEMPLATE.substitute(
        _story(summary, memory, spans, on_cpu),
        loss_chart=loss_chart(losses, summary.get("val_loss_zero")),
        clips=clip_gallery("From the training set", training_examples)
        + clip_gallery("Generated", samples)
        or "<p class='empty'>No clips were recorded.</p>",
        memory_bars=memory_bars(memory),
        timeline=timeline(spans),
        figures=rows((label_of(key), _figure(key, value)) for key, value in summary.items()),
        machine=rows((name, escape(str(value))) for name, value in (machine or {}).items()),
        config=_config(config),
    )
    return write_page(path, title=title, body=body, footer=_FOOTER)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The figures of a summary as a table for a terminal of 80 columns or less."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="dim", overflow="fold", max_width=44)
    table.add_column(style="bold", justify="right", overflow="fold", max_width=32)
    for key, value in summary.items():
        table.add_row(label_of(key), text_of(key, value))
    return table


# --- sentences --------------------------------------------------------------------------------

_LOSS_NOTE = (
    "The flow-matching loss. Training points are single steps at random noise levels and scatter "
    "for that reason; eval/loss repeats the same noise and the same levels on held-out clips, so "
    "its points can be compared with one another. Lower means a better prediction of the velocity; "
    "it does not say how good a clip looks."
)
_CLIPS_NOTE = (
    "All clips that this page was given, in their order and in the pixels they have. The generated "
    "ones start from noise and a caption only. Click a clip to pause it."
)
_FOOTER = (
    "Every figure on this page comes from the run it describes, and nothing is loaded from "
    "elsewhere. Units are decimal: 1 GB is 10<sup>9</sup> bytes."
)


def _story(
    summary: Mapping[str, Any], memory: Mapping[str, float], spans: Sequence[Span], on_cpu: bool
) -> dict[str, str]:
    """The page's text, by its place in the template."""
    return {
        "lead": _lead(summary, memory),
        "headline": _headline(summary, memory),
        "loss_note": _LOSS_NOTE,
        "clips_note": _CLIPS_NOTE,
        "memory_note": _memory_note(memory, on_cpu),
        "timeline_note": _timeline_note(spans, on_cpu),
    }


def _lead(summary: Mapping[str, Any], memory: Mapping[str, float]) -> str:
    """What this is, in three sentences."""
    size = _maybe(summary, "params", " {}")
    steps = _maybe(summary, "steps", " for {} steps")
    clips = _maybe(summary, "clips", " on {} captioned clips")
    state, peak = (_unbroken(format_bytes(n)) for n in (memory["state"], device_parts(memory)[1]))
    return (
        f"megaslide trained all{size} parameters of a video diffusion transformer{steps}{clips}. "
        f"Its weights, their fp32 masters and the Adam moments, {state} together, stayed in host "
        "memory while the blocks passed through the device one after another, so that the device "
        f"never held more than {peak}. "
        "This page shows how the loss went, what the model generates now, and where memory and "
        "time went."
    )


def _headline(summary: Mapping[str, Any], memory: Mapping[str, float]) -> str:
    """Up to four figures; one whose parts were not all passed is left out."""
    peak = device_parts(memory)[1]
    state = memory["state"]
    cards = [
        (
            "State ÷ device peak",
            format_ratio(state / peak) if peak else "no device memory",
            _unbroken(format_bytes(state))
            + " in host memory, "
            + _unbroken(format_bytes(peak))
            + " on the device",
        )
    ]
    if {"val_loss_first", "val_loss"} <= summary.keys():
        first, last = (f"{summary[key]:.3g}" for key in ("val_loss_first", "val_loss"))
        cards.append(
            (
                "eval/loss",
                f"{first} → {last}",
                _maybe(summary, "val_loss_zero", "{} if zero is predicted"),
            )
        )
    if "train_s" in summary:
        details = [_maybe(summary, "steps", "{} steps"), _maybe(summary, "step_s", "{} each")]
        cards.append(
            ("Training time", format_seconds(summary["train_s"]), ", ".join(filter(None, details)))
        )
    if "params" in summary:
        cards.append(("Parameters", format_count(summary["params"]), "all of them trained"))
    return "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{detail}</small></dd></div>"
        for name, value, detail in cards
    )


def _memory_note(memory: Mapping[str, float], on_cpu: bool) -> str:
    peak = device_parts(memory)[1]
    state = memory["state"]
    larger = format_ratio(state / peak) if state >= peak > 0 else ""
    sentences = [
        f"The state is {larger} the device's peak."
        if larger
        else "Here the device's peak is larger than the state: activations, which grow with the "
        "clips and not with the model, outweigh a model this small."
    ]
    sentences.append("What the data, the program and PyTorch itself take is not in the bars.")
    if on_cpu:
        sentences.append(
            "The device of this run is the CPU, as a device with memory of its own in the same "
            "machine: the figures are what the engine allocated there and followed, not a GPU's."
        )
    return " ".join(sentences)


def _timeline_note(spans: Sequence[Span], on_cpu: bool) -> str:
    if not spans:
        return ""
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    sentences = [
        f"{format_seconds(end - start)} of the run, one row per unit of work; forward passes are "
        "the lighter ones. Point at a span for its name, time and bytes."
    ]
    hidden = overlap(spans, ("h2d", "d2h"), ("compute", "adamw"))
    if hidden is not None:
        sentences.append(
            f"During {format_share(hidden)} of the time in which anything was copied, a block or "
            "AdamW was computing too."
        )
    if on_cpu:
        sentences.append(
            "On a CPU the copies and the computation share the same cores and the same memory bus, "
            "so overlap shows that the order is right, not what a GPU would gain from it."
        )
    return " ".join(sentences)


def _maybe(summary: Mapping[str, Any], key: str, sentence: str) -> str:
    """The sentence with the figure in it, or nothing where the figure is missing."""
    return sentence.format(_figure(key, summary[key])) if key in summary else ""


def _figure(key: str, value: Any) -> str:
    """A figure as HTML; text may wrap, a number with its unit may not."""
    text = escape(text_of(key, value))
    return text if isinstance(value, str) else _unbroken(text)


def _unbroken(quantity: str) -> str:
    return f"<span class='quantity'>{quantity}</span>"


# --- pieces of the page -----------------------------------------------------------------------


def _config(config: Config | None) -> str:
    if config is None:
        return ""
    text = yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False, allow_unicode=True)
    return (
        f"<details><summary>The configuration, as YAML</summary><pre>{escape(text)}</pre></details>"
    )
