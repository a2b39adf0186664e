"""Numbers as a person reads them: one rule per unit, so the page and the terminal agree.

A figure's key says its unit by its ending (`_bytes`, `_s`, `_ratio`, `_share`); a figure that the
tables here do not know is still shown, under its own key.
"""

from collections.abc import Callable, Mapping
from typing import Any


def format_bytes(value: float) -> str:
    """Decimal units, three significant digits: `1.47 TB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} B" if unit == "B" else f"{_digits(value)} {unit}"
        value /= 1000
    raise AssertionError("unreachable: the last unit always returns")


def format_seconds(value: float) -> str:
    """`340 µs`, `12.3 ms`, `4.56 s`, `3 min 20 s`, `2 h 05 min`."""
    if value == 0:
        return "0 s"
    if value >= 3600:
        minutes = round(value / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if value >= 99.5:
        seconds = round(value)
        return f"{seconds // 60} min {seconds % 60:02d} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 0.9995:
            return f"{_digits(value * factor)} {unit}"
    return f"{_digits(value * 1e6)} µs"


def format_count(value: float) -> str:
    """Exact to 999,999, then three significant digits: `23.4 million`."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(value) >= 0.9995 * size:
            return f"{_digits(value / size)} {word}"
    return f"{value:,.0f}"


def format_number(value: float) -> str:
    """Four significant digits, no exponent where it can be read without."""
    return f"{value:#.4g}".rstrip(".") if 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"


def format_ratio(value: float) -> str:
    return f"{_digits(value)}×"


def format_share(value: float) -> str:
    return f"{100 * value:.0f} %"


Format = Callable[[float], str]

LABELS: Mapping[str, str] = {
    "params": "parameters, all trained",
    "steps": "optimizer steps",
    "clips": "training clips",
    "tokens": "tokens per clip",
    "train_s": "training time",
    "step_s": "time per step",
    "wall_s": "time from start to report",
    "val_loss_first": "eval/loss at the start",
    "val_loss": "eval/loss at the end",
    "val_loss_zero": "eval/loss of predicting zero",
    "state_bytes": "weights and optimizer state, in host memory",
    "device_peak_bytes": "device memory, peak",
    "h2d_bytes": "weights to the device, per step",
    "d2h_bytes": "gradients to the host, per step",
}
"""Keys of a summary that have a better name than their own; all are optional."""

_BY_ENDING: tuple[tuple[str, Format], ...] = (
    ("_bytes", format_bytes),
    ("_s", format_seconds),
    ("_ratio", format_ratio),
    ("_share", format_share),
)


def label_of(key: str) -> str:
    """The known label of a figure, or its key in words without the unit."""
    if key in LABELS:
        return LABELS[key]
    ending = next((end for end, _ in _BY_ENDING if key.endswith(end)), "")
    return key.removesuffix(ending).replace("_", " ")


def text_of(key: str, value: Any) -> str:
    """A figure with its unit; text and truth values as they are, of several one in each line."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    for ending, formatted in _BY_ENDING:
        if key.endswith(ending):
            return formatted(value)
    return format_count(value) if isinstance(value, int) else format_number(value)


def _digits(value: float) -> str:
    """Three significant digits, without exponent."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
