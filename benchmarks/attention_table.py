"""What the rows of `bench_attention` say, for a screen of 80 columns, and the ratios they are for.

A ratio a_over_b says how many times as fast a is; the least and the most of all rows.
"""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
COLUMNS = "{:>6} {:>4} {:>6} {:>2} {:>5} {:>9} {:>8} {:>8} {:>9} {:>7}"
HEAD = ("tokens", "", "kind", "th", "", "ms", "x sample", "x dense", "extra/qkvo", "of limit")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "forward": "fwd", "forward+backward": "f+b"}


def table(rows: list[Row]) -> str:
    """One line per row; `x sample` and `x dense`: times as fast as grid_sample and as SDPA."""
    lines = [COLUMNS.format(*HEAD).rstrip()]
    for row in rows:
        peers = (_times(row[name], row["ours_ms"]) for name in ("grid_sample_ms", "sdpa_ms"))
        lines.append(COLUMNS.format(
            row["tokens"], SHORT[row["dtype"]], row["kind"], row["threads"],
            SHORT[row["direction"]], f"{row['ours_ms']:.1f}", *peers,
            f"{row['extra_bytes'] / row['qkvo_bytes']:.2f}", f"{row['limit_fraction']:.2f}",
        ))  # fmt: skip
    return "\n".join(lines)


def ratios(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """(least, most) of each ratio over the rows that have both sides, by direction."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in _ratios_of(row, rows):
            found.setdefault(f"{name}, {row['direction']}", []).append(value)
    return {name: (min(values), max(values)) for name, values in sorted(found.items())}


def _ratios_of(row: Row, rows: list[Row]) -> Iterator[tuple[str, float]]:
    own = row["ours_ms"]
    for name in ("grid_sample", "sdpa"):
        if row[f"{name}_ms"] is not None:
            yield f"{row['dtype']}_over_{name}", row[f"{name}_ms"] / own
    if row["kind"] == "affine":
        yield from _against("shift_over_affine", _same(row, rows, kind="shift"), own, swap=True)
        yield from _against("affine_over_tap", _same(row, rows, kind="tap"), own)
    if row["dtype"] == "bfloat16":
        same = _same(row, rows, dtype="float32")
        yield from _against(f"bfloat16_over_float32_{row['kind']}", same, own)
    if row["tokens"] == 16384:
        name = f"time_of_64k_over_16k_{row['kind']}"
        yield from _against(name, _same(row, rows, tokens=65536), own)


def _against(name: str, other: Row | None, own: float, swap: bool = False) -> Iterator[Any]:
    if other is not None:
        ratio = other["ours_ms"] / own
        yield name, 1 / ratio if swap else ratio


def _same(row: Row, rows: list[Row], **but: Any) -> Row | None:
    """The row of the same setting, but for these."""
    keys = ("tokens", "dtype", "kind", "threads", "direction")
    wanted = {key: row[key] for key in keys} | but
    return next((r for r in rows if all(r[k] == v for k, v in wanted.items())), None)


def _times(peer: float | None, own: float) -> str:
    return "-" if peer is None else f"{peer / own:.1f}"
