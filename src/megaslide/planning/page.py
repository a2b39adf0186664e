"""A plan as one HTML file, in the look of megaslide's other pages.

Bars and timeline come from the same plan that the command prints; nothing on the page was run.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from megaslide.pages import rows, write_page
from megaslide.pages.charts import room_bar, timeline
from megaslide.pages.quantities import format_bytes, format_count, format_seconds, format_share
from megaslide.planning.plan import Plan
from megaslide.planning.subject import Subject
from megaslide.tracing import Span

_MEMORY_NOTE = (
    "Bytes needed, by kind. The line marks what is there; what lies right of it is missing. "
    "State, slots, gradients and resident weights are what the engine allocates, to the byte; "
    "inputs and working memory are what autograd keeps, without temporaries of single operations."
)
_TIMELINE_NOTE = (
    "Simulated: the engine itself, run on a clock at the rates below. Forward passes are the "
    "lighter ones. Point at a span for its block, time and bytes."
)
_FOOTER = (
    "A plan, made before anything ran. Bytes are the engine's own arithmetic; seconds are as good "
    "as the rates named above. Units are decimal: 1 GB is 10<sup>9</sup> bytes."
)


def write_html(
    path: Path, subject: Subject, plan: Plan, others: Sequence[tuple[str, Plan]]
) -> Path:
    """Write the page; it appears under `path` only when complete.

    Args:
        others: of `choosing.alternatives`.

    Raises:
        OSError: the page cannot be written.
    """
    body = "".join(
        [
            f"<p class='lead'>{escape(_lead(plan))}</p>",
            f"<dl class='headline'>{_headline(plan)}</dl>",
            f"<h2>Memory</h2><p class='note'>{_MEMORY_NOTE}</p>{_memory(plan)}",
            f"<h2>One step, on the clock</h2><p class='note'>{_TIMELINE_NOTE}</p>",
            timeline(one_step(plan)),
            f"<h2>Lanes</h2>{_lanes(plan)}",
            f"<h2>One change</h2>{_others(plan, others)}",
            f"<h2>What was planned</h2><table>{rows(_facts(subject, plan))}</table>",
        ]
    )
    title = f"megaslide: plan of {subject.network.name} on {plan.machine.name}"
    return write_page(path, title=title, body=body, footer=_FOOTER)


def one_step(plan: Plan) -> list[Span]:
    """What runs in the first simulated step, cut to it, with the model's own names of blocks."""
    names = {f"blocks.{n}": unit.name for n, unit in enumerate(plan.costs.units[1:])}
    end = plan.simulated.step_s
    found = []
    for span in plan.simulated.spans:
        start, stop = max(span.start, 0.0), min(span.end, end)
        if stop > start and span.lane != "wait":
            what, _, unit = span.name.rpartition(" ")
            name = f"{what} {names.get(unit, unit)}".strip()
            found.append(replace(span, name=name, start=start, end=stop))
    return found


def _lead(plan: Plan) -> str:
    words = {"device": "device memory"}
    lacks = [(format_bytes(n), words.get(name, name)) for name, n in plan.shortfall.items()]
    missing = " and ".join(f"{nbytes} of {name}" for nbytes, name in lacks)
    if missing:
        return f"This run does not fit: it lacks {missing}. Changes that would help are below."
    told = f" Nobody said how much {' and '.join(plan.untold)} there is." if plan.untold else ""
    step, bound = format_seconds(plan.simulated.step_s), plan.simulated.bound
    return f"This run fits. A step takes {step}, and its longest lane is {bound}.{told}"


def _headline(plan: Plan) -> str:
    figures = plan.to_dict()
    cards = [
        ("Step", format_seconds(figures["step_s"]), f"longest lane: {figures['bound']}"),
        ("MFU", format_share(plan.mfu), f"{figures['flop_per_step']:.3g} FLOP with recompute"),
        ("Device peak", format_bytes(figures["device_peak_bytes"]),
         "weights in flight, inputs, one block's work"),
        ("State", format_bytes(figures["state_bytes"]),
         f"{format_count(figures['params'])} parameters as {plan.choice.state_format}"),
    ]  # fmt: skip
    return "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in cards
    )


def _memory(plan: Plan) -> str:
    titles = {"device": f"Device: {plan.machine.name}", "RAM": "RAM", "disk": "Disk"}
    bars = []
    for name, (needs, room) in plan.places.items():
        parts = {k: n for k, n in needs.items() if k != "state"} | _state(plan, name)
        if any(parts.values()):
            bars.append(room_bar(titles[name], parts, room))
    return "".join(bars)


def _state(plan: Plan, place: str) -> dict[str, int]:
    """The store's bytes by kind in that place."""
    store = plan.store
    if place == "RAM":
        staging = sum(store.staging.values())
        return {k: n for k, n in store.kinds.items() if k in store.in_ram} | {"staging": staging}
    if place == "disk":
        return {k: n for k, n in store.kinds.items() if k not in store.in_ram}
    return {}


def _lanes(plan: Plan) -> str:
    figures, lanes = plan.to_dict(), plan.simulated.lanes
    steps = lanes.seconds / figures["step_s"]
    head = "<tr><th>lane</th><th>busy</th><th>of the step</th><th>bytes</th></tr>"
    lines = []
    for lane, seconds in sorted(figures["busy_s"].items(), key=lambda item: -item[1]):
        moved = lanes.nbytes.get(lane, 0) / steps
        cells = (format_seconds(seconds), format_share(seconds / figures["step_s"]),
                 format_bytes(moved) if moved else "")  # fmt: skip
        lines.append(f"<tr><td>{lane}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<div class='wide'><table>{head}{''.join(lines)}</table></div>"


def _others(plan: Plan, others: Sequence[tuple[str, Plan]]) -> str:
    head = "<tr><th>change</th><th>time per clip</th><th>lacks</th></tr>"
    lines = []
    for words, other in others:
        lacks = ", ".join(f"{format_bytes(n)} {name}" for name, n in other.shortfall.items())
        time = f"{other.pace_s / plan.pace_s:.2f}×"
        lines.append(
            f"<tr><td>{escape(words)}</td><td>{time}</td><td>{lacks or 'nothing'}</td></tr>"
        )
    return f"<div class='wide'><table>{head}{''.join(lines)}</table></div>"


def _facts(subject: Subject, plan: Plan) -> list[tuple[str, str]]:
    t, h, w = subject.latents
    count = plan.choice.micro_batches
    facts = {
        "model": f"{subject.network.name}, {format_count(plan.costs.parameters)} parameters",
        "batch": f"{count} x {subject.clips} clips of {t}x{h}x{w} latents, "
        f"{format_count(subject.tokens * count)} tokens",
        "choice": f"{plan.choice}, {plan.choice.slots} slots",
        **{f"rate of {name}": words for name, words in plan.machine.basis.items()},
    }
    return [(name, escape(words)) for name, words in facts.items()]
