"""Charts as inline SVG, drawn here so that the page loads nothing and needs no script.

Positions are percentages of the drawing and only curves are stretched, so a chart fills a phone or
a desktop with the same 12-pixel text. Colours are CSS classes: the page's light and dark themes
decide them.

Terms: a fraction is a position from 0 (left or bottom) to 1 (right or top).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megaslide.pages.quantities import format_bytes, format_count, format_number, format_seconds
from megaslide.tracing import Span

Points = Sequence[tuple[float, float]]
"""(step, loss) in order of steps."""

LANES = ("h2d", "compute", "d2h", "adamw")
LANE_NAMES = {
    "h2d": "h2d: weights to the device",
    "compute": "compute: blocks, forward and backward",
    "d2h": "d2h: gradients to the host",
    "adamw": "adamw: the update, on the CPU",
    "disk_weights": "disk_weights: weights from the disk, for h2d",
    "disk_read": "disk_read: state from the disk, for adamw",
    "disk_write": "disk_write: state back to the disk",
}
DEVICE_PARTS = {
    "slots": "slots (streamed weights)",
    "gradient_buffers": "gradient buffers",
    "resident": "resident unit (embeddings, head)",
    "activations": "activations",
}
KINDS = {
    **DEVICE_PARTS,
    "gradients": "gradients",
    "inputs": "inputs of blocks",
    "working": "working memory of one block",
    "device": "the device's, in the same memory",
    "staging": "staging for the disk",
    "residual": "residuals (low bits of masters)",
    "master": "fp32 masters",
    "ema": "moving average",
}
"""Names of kinds of bytes that are not clear by themselves."""

_CURVE_UNITS = 1000
_DRAWN_POINTS = 1500
_SMALLEST_SHARE = 1 / 1200
"""Part of the timeline below which a span is about a pixel wide and is merged with others."""

_THIN_SHARE = 1 / 250
"""Part of the timeline below which a span has no border, which would cover it."""

_LABELLED_SHARE = 0.1
"""Part of the timeline from which a span has room for its name; the page hides names on a phone."""


@dataclass(frozen=True)
class Scale:
    """Maps values to fractions, linearly or by logarithm, and names its ticks."""

    low: float
    high: float
    log: bool = False

    def fraction(self, value: float) -> float:
        low, high, value = (self._map(v) for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values in the range: 1, 2, 5 times powers of ten."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            values = [m * 10.0**d for d in decades for m in steps]
        else:
            step = _round_step((self.high - self.low) / count)
            first = math.ceil(self.low / step - 1e-9)
            values = [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [v for v in values if -1e-9 <= self.fraction(v) <= 1 + 1e-9]

    def _map(self, value: float) -> float:
        return math.log10(value) if self.log else value


def loss_chart(curves: Mapping[str, Points], baseline: float | None = None) -> str:
    """Training loss (raw and, when there are many points, smoothed), eval/loss, and a baseline.

    Args:
        curves: `train` and `eval`; either may be missing or empty. Losses that are not finite are
            left out.
        baseline: loss of predicting zero, drawn as a dashed line.

    Returns:
        Legend and SVG, or a sentence where there is nothing to draw.
    """
    train, evaluated = (_finite(curves.get(name, ())) for name in ("train", "eval"))
    points = [*train, *evaluated]
    if not points:
        return "<p class='empty'>No losses were recorded.</p>"
    steps = Scale(min(s for s, _ in points), max(max(s for s, _ in points), points[0][0] + 1))
    losses = _loss_scale([loss for _, loss in points], baseline)
    smooth, window = smoothed(train)
    raw = "train raw" if smooth else "train"
    drawn = [_curve(train, steps, losses, raw), _curve(smooth, steps, losses, "train")]
    drawn += [_curve(evaluated, steps, losses, "eval"), *_dots(evaluated, steps, losses)]
    legend = [(raw, "train, each point")] if train else []
    legend += [("train", f"train, mean of {window} points")] if smooth else []
    legend += [("eval", "eval/loss, held-out clips")] if evaluated else []
    if baseline is not None:
        drawn.append(_horizontal(losses.fraction(baseline), "baseline"))
        legend.append(("baseline", f"predicting zero: {format_number(baseline)}"))
    kind = "logarithmic" if losses.log else "linear"
    return _legend(legend) + _svg(
        f"Loss over training steps, {kind} scale", "chart", 280, [*_axes(steps, losses), *drawn]
    )


def smoothed(points: Points) -> tuple[Points, int]:
    """Centred running mean and its width in points; empty when there are too few to need one."""
    if len(points) < 60:
        return [], 1
    half = max(2, len(points) // 60)
    sums = [0.0]
    for _, loss in points:
        sums.append(sums[-1] + loss)
    means = []
    for i, (step, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)  # symmetric, or the ends would be biased
        means.append((step, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return means, 2 * half + 1


def memory_bars(memory: Mapping[str, float]) -> str:
    """State in host memory against the device's peak at one scale, then the peak enlarged.

    Args:
        memory: bytes under `state`, `device_peak` (default: the sum of the parts) and the keys of
            `DEVICE_PARTS`; what the parts leave of the peak is drawn as `other`.
    """
    parts, peak = device_parts(memory)
    state = memory["state"]
    largest = max(state, peak, 1)
    bars = _bar("State in host memory", [("state", state)], state, largest)
    bars += _bar("Device memory, peak", parts, peak, largest)
    if peak < 0.5 * largest:
        bars += _bar("Device memory, peak, enlarged", parts, peak, max(peak, 1))
    legend = [(name, f"{DEVICE_PARTS.get(name, name)}: {format_bytes(n)}") for name, n in parts]
    return bars + _legend(legend, "swatch")


def room_bar(title: str, parts: Mapping[str, float], room: float | None) -> str:
    """Bytes by kind against the room that there is, which a line marks where it is known.

    The scale is the larger of the two, so what is missing lies right of the line.
    """
    total = sum(parts.values())
    shown = [(name, n) for name, n in parts.items() if n > 0]
    head = format_bytes(total) + (f" of {format_bytes(room)}" if room is not None else "")
    bar = _bar(title, shown, total, max(total, room or 0, 1), head=head, mark=room)
    legend = [(name, f"{KINDS.get(name, name)}: {format_bytes(n)}") for name, n in shown]
    return bar + _legend(legend, "swatch")


def device_parts(memory: Mapping[str, float]) -> tuple[list[tuple[str, float]], float]:
    """The parts of the device's peak that are not zero, in drawing order, and the peak."""
    parts = [(name, memory.get(name, 0)) for name in DEVICE_PARTS if memory.get(name, 0) > 0]
    known = sum(n for _, n in parts)
    peak = max(memory.get("device_peak", known), known)
    if peak > known:
        parts.append(("other", peak - known))
    return parts, peak


def timeline(spans: Iterable[Span]) -> str:
    """Lanes of spans on a common time axis from the first start to the last end.

    Neighbouring spans of a lane that are narrower than about a pixel are drawn as one, whose title
    says how many they are.
    """
    spans = sorted(spans, key=lambda span: span.start)
    if not spans:
        return "<p class='empty'>No spans were recorded.</p>"
    first, last = spans[0].start, max(span.end for span in spans)
    times = Scale(0, max(last - first, 1e-9))
    rows = []
    for lane in lanes_of(spans):
        own = [span for span in spans if span.lane == lane]
        busy = union_length((s.start, s.end) for s in own) / times.high
        name = escape(LANE_NAMES.get(lane, lane))
        boxes = [_box(group, first, times) for group in merge_tiny(own, times.high)]
        rows.append(
            f"<div class='lane'><p>{name} <b>busy {100 * busy:.0f} %</b></p>"
            f"{_svg(name, f'spans {_css(lane)}', 30, boxes)}</div>"
        )
    ticks = [_tick(times.fraction(t), format_seconds(t), "0.9em") for t in times.ticks(6)]
    axis = _svg("Time axis", "axis", 18, ticks)
    return f"<div class='timeline'>{''.join(rows)}{axis}</div>"


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """The lanes that occur, known ones first and in the order in which data passes them."""
    found = {span.lane for span in spans}
    return [lane for lane in LANES if lane in found] + sorted(found - set(LANES))


def merge_tiny(spans: Sequence[Span], duration: float) -> list[list[Span]]:
    """Groups of spans drawn as one box each; `spans` sorted by start."""
    tiny = duration * _SMALLEST_SHARE
    groups: list[list[Span]] = []
    for span in spans:
        joins = (
            bool(groups)
            and span.end - span.start < tiny
            and all(s.end - s.start < tiny for s in groups[-1])
            and span.start - groups[-1][-1].end < tiny
        )
        if joins:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one interval."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def overlap(spans: Iterable[Span], lanes: Sequence[str], others: Sequence[str]) -> float | None:
    """Share of the busy time of `lanes` during which one of `others` was busy too.

    None when `lanes` were never busy. Inclusion-exclusion: |A∩B| = |A| + |B| − |A∪B|.
    """
    spans = list(spans)
    a, b = ([(s.start, s.end) for s in spans if s.lane in chosen] for chosen in (lanes, others))
    busy = union_length(a)
    return (busy + union_length(b) - union_length([*a, *b])) / busy if busy else None


# --- pieces of SVG ----------------------------------------------------------------------------


def _svg(label: str, name: str, height: int, pieces: Iterable[str]) -> str:
    return (
        f"<svg class='{name}' role='img' aria-label='{escape(label)}' width='100%' "
        f"height='{height}'>{''.join(pieces)}</svg>"
    )


def _axes(steps: Scale, losses: Scale) -> list[str]:
    ticks = losses.ticks()
    decimals = 0 if losses.log else max(len(f"{v:g}".partition(".")[2]) for v in ticks)
    pieces = ["<text x='0' y='100%' dx='-8' dy='1.7em' class='y'>step</text>"]
    for value in ticks:
        y, text = losses.fraction(value), f"{value:.{decimals}f}" if decimals else f"{value:g}"
        pieces.append(_horizontal(y, "grid"))
        pieces.append(f"<text x='0' y='{_top(y)}' dx='-8' dy='.35em' class='y'>{text}</text>")
    return pieces + [
        _tick(steps.fraction(v), format_count(v), "1.7em", "100%") for v in steps.ticks()
    ]


def _tick(x: float, text: str, dy: str, y: str = "0") -> str:
    """A label of a horizontal axis; those at the ends grow inwards, so none is cut off."""
    anchor = "start" if x < 0.03 else "end" if x > 0.97 else "middle"
    return f"<text x='{_percent(x)}' y='{y}' dy='{dy}' text-anchor='{anchor}'>{text}</text>"


def _horizontal(y: float, name: str) -> str:
    return f"<line x1='0' x2='100%' y1='{_top(y)}' y2='{_top(y)}' class='{name}'/>"


def _curve(points: Points, steps: Scale, losses: Scale, name: str) -> str:
    """A polyline in a nested drawing that is stretched over the whole chart, strokes excepted."""
    stride = max(1, math.ceil(len(points) / _DRAWN_POINTS))
    shown = [*points[:-1:stride], *points[-1:]]
    where = " ".join(
        f"{_CURVE_UNITS * steps.fraction(s):.1f},{_CURVE_UNITS * (1 - losses.fraction(v)):.1f}"
        for s, v in shown
    )
    box = f"viewBox='0 0 {_CURVE_UNITS} {_CURVE_UNITS}' preserveAspectRatio='none'"
    line = f"<polyline points='{where}' class='{name}' vector-effect='non-scaling-stroke'/>"
    return (
        f"<svg {box} width='100%' height='100%' overflow='visible'>{line}</svg>" if points else ""
    )


def _dots(points: Points, steps: Scale, losses: Scale) -> list[str]:
    return [
        f"<circle cx='{_percent(steps.fraction(s))}' cy='{_top(losses.fraction(v))}' r='3.5' "
        f"class='eval'><title>step {format_count(s)}: {format_number(v)}</title></circle>"
        for s, v in points
    ]


def _bar(
    title: str, parts: Iterable[tuple[str, float]], total: float, largest: float, *,
    head: str = "", mark: float | None = None,
) -> str:  # fmt: skip
    boxes, left = [], 0.0
    for name, size in parts:
        hover = f"{KINDS.get(name, name)}: {format_bytes(size)}"
        boxes.append(_rect(left / largest, size / largest, _css(name), hover))
        left += size
    if mark is not None:
        x = _percent(mark / largest)
        boxes.append(f"<line x1='{x}' x2='{x}' y1='0' y2='100%' class='room'/>")
    words = f"<p>{escape(title)} <b>{head or format_bytes(total)}</b></p>"
    return f"<div class='bar'>{words}{_svg(title, 'parts', 22, boxes)}</div>"


def _box(group: Sequence[Span], first: float, times: Scale) -> str:
    start, end = group[0].start, max(span.end for span in group)
    seconds = sum(span.end - span.start for span in group)
    nbytes = sum(span.nbytes for span in group)
    names = group[0].name if len(group) == 1 else f"{len(group)} spans, {group[0].name} and on"
    title = f"{names}: {format_seconds(seconds)}"
    if nbytes:
        title += f", {format_bytes(nbytes)} at {format_bytes(nbytes / max(seconds, 1e-9))}/s"
    width = max(times.fraction(end - start), _SMALLEST_SHARE)
    left = times.fraction(start - first)
    phase = "forward" if group[0].name.startswith("forward") else "span"
    phase += " thin" if width < _THIN_SHARE else ""
    box = _rect(left, width, phase, title)
    short = group[0].name.rpartition(" ")[2]
    if width < _LABELLED_SHARE or len(short) > 9:
        return box
    middle = _percent(left + width / 2)
    return f"{box}<text x='{middle}' y='50%' dy='.35em'>{escape(short)}</text>"


def _rect(left: float, width: float, name: str, title: str) -> str:
    return (
        f"<rect x='{_percent(left)}' width='{_percent(width)}' height='100%' class='{name}'>"
        f"<title>{escape(title)}</title></rect>"
    )


def _legend(entries: Iterable[tuple[str, str]], mark: str = "line") -> str:
    items = (f"<span><i class='{mark} {_css(name)}'></i>{escape(t)}</span>" for name, t in entries)
    return f"<p class='legend'>{''.join(items)}</p>"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3f}".rstrip("0").rstrip(".") + "%"


def _top(fraction: float) -> str:
    return _percent(1 - fraction)


def _css(name: str) -> str:
    """A name as CSS classes; spaces separate classes, all else that is not a word goes."""
    return "".join(c if c.isalnum() or c in "_- " else "-" for c in name)


# --- scales -----------------------------------------------------------------------------------


def _finite(points: Points) -> list[tuple[float, float]]:
    return sorted((s, v) for s, v in points if math.isfinite(v))


def _loss_scale(values: Sequence[float], baseline: float | None) -> Scale:
    """Logarithmic when losses span more than a factor of eight; from zero when close to it."""
    values = [*values, *([] if baseline is None else [baseline])]
    low, high = min(values), max(values)
    if low > 0 and high > 8 * low:
        return Scale(low / 1.1, high * 1.1, log=True)
    margin = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return Scale(0.0 if 0 <= low < 0.5 * high else low - margin, high + margin)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9))
