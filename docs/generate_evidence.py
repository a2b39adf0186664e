"""Fills the tables of pages that show results: of the study, and of benchmarks.

    python -m docs.generate_evidence

The prose is written by hand; what stands between `<!-- NAME -->` and `<!-- end -->` is not. A test
holds the pages to the results.
"""

import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.quality.arms import LONGER
from benchmarks.quality.plan import LARGER_WINDOWS, MAIN
from benchmarks.quality.report import losses_table, markdown, samples_table
from benchmarks.quality.study import Settings, is_current, read_results
from benchmarks.quality.tables import (
    Result,
    Row,
    against,
    of_sprite,
    rows_of,
    select,
    strongest_block,
    worlds_of,
)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MOVING = "affine"
"""The kind of moving windows that was trained in every world."""


def pages() -> dict[Path, str]:
    """Each page with its tables as the results have them."""
    return {
        ROOT / "docs" / name: filled(ROOT / "docs" / name, blocks)
        for name, blocks in BLOCKS.items()
    }


def filled(page: Path, blocks: dict[str, Callable[[], str]]) -> str:
    """The text of a page, what stands in its blocks made anew.

    Raises:
        ValueError: it does not have one block of each name.
    """
    text = page.read_text()
    for name, make in blocks.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        if text.count(start) != 1:
            raise ValueError(f"{page}: needs one block {start.strip()} ... {end}")
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{make()}\n\n{end}{rest.partition(end)[2]}"
    return text


def speed() -> str:
    """3D-DSA on the CPU: times with all threads, and how many times the peers' that is."""
    found = json.loads((RESULTS / "attention.json").read_text())
    most = max(row["threads"] for row in found["rows"])
    rows = [r for r in found["rows"] if r["threads"] == most and r["direction"] != "forward"]
    lines = [
        [f"{r['tokens']:,}", r["dtype"], r["kind"], f"{r['ours_ms']:.0f}",
         *(times(r[peer], r["ours_ms"]) for peer in ("grid_sample_ms", "sdpa_ms")),
         f"{r['extra_bytes'] / r['qkvo_bytes']:.2f}", f"{r['limit_fraction']:.2f}"]
        for r in rows
    ]  # fmt: skip
    head = ["tokens", "dtype", "offsets", "ms", "x grid_sample", "x dense", "extra memory",
            "of the limit"]  # fmt: skip
    window, machine = "x".join(map(str, found["window"])), found["machine"]["cpu"]
    note = (
        f"{machine}, {most} threads, {found['heads']} heads of {found['head_dim']}, window "
        f"{window}, forward and backward."
    )
    return f"{note}\n\n{markdown(head, lines)}"


def times(peer: float | None, own: float) -> str:
    return "-" if peer is None else f"{peer / own:.1f}"


def study() -> str:
    return losses_table(current(), "base")


def larger() -> str:
    return losses_table(current(), "base", large=True)


PAIRS = (
    *((f"{arm}+r", arm) for arm in ("fixed", "shift", "affine", "tap", "dense", "swin")),
    *((f"{arm}-heads", arm) for arm in ("shift", "affine", "tap")),
    *(("affine-355", than) for than in ("affine", "fixed-355")),
    *(("fixed-reach", than) for than in ("fixed-355", "affine")),
    *((arm, than) for arm in LARGER_WINDOWS for than in ("shift", "affine", "tap")),
)


def pairs() -> str:
    """Arms of the base world beside each other."""
    known = {row.arm: row for row in rows_of(current(), "base")}
    lines = [
        [arm, than, four(known[arm].losses), four(known[than].losses),
         against(known[arm], known[than]), cpu_ratio(known[arm], known[than])]
        for arm, than in PAIRS
        if arm in known and than in known
    ]  # fmt: skip
    head = ["arm", "against", "loss by seed", "loss of the other", "verdict", "CPU time"]
    return markdown(head, lines)


def cpu_ratio(row: Row, other: Row) -> str:
    """How many times the other's CPU time, means."""
    return f"x {statistics.fmean(row.train_cpu_s) / statistics.fmean(other.train_cpu_s):.2f}"


def samples() -> str:
    return samples_table(current(), "base")


def longer() -> str:
    """Losses of the base world's models on clips of other lengths, by seed."""
    worlds = ("long", "longer")
    lines = []
    small, large = (rows_of(current(), "base", large=size) for size in (False, True))
    for row in (*small, *large):
        own = sorted(select(current(), world="base", arm=row.arm), key=lambda r: r["seed"])
        cells = (four(r["elsewhere"][world] for r in own) for world in worlds)
        lines.append([row.arm, four(row.losses), *cells])
    return markdown(["arm", "6 frames", "12 frames", "24 frames"], lines)


def worlds() -> str:
    """Mean losses of the main arms in every world, and how the moving window compares with each."""
    shown, lines = (*MAIN, *LARGER_WINDOWS, *LONGER), []
    for world in worlds_of(current()):
        rows = {row.arm: row for row in rows_of(current(), world)}
        if MOVING not in rows:
            continue
        moving = rows[MOVING]
        for row in (row for name, row in rows.items() if name in shown):
            sprite = of_sprite(row)
            lines.append(
                [world, row.arm, f"{row.mean:.4f}", f"{sprite.mean:.4f}",
                 f"{statistics.fmean(row.train_cpu_s):.0f}", against(moving, row),
                 against(of_sprite(moving), sprite)]
            )  # fmt: skip
    head = ["world", "arm", "loss", "sprite's cells", "CPU s", f"{MOVING} is", "sprite's cells"]
    return markdown(head, lines)


def offsets() -> str:
    """Correlations of the block whose windows follow best, with the two controls."""
    lines = []
    for result in select(current(), world="base"):
        if result["offsets"] is None or result["arm"] == "affine-held":
            continue
        index = strongest_block(result)
        for name in ("shear", "slide"):
            found = result["offsets"]["blocks"][index][name]
            cells = (found[where] for where in ("sprite", "other_clip", "background"))
            shown = ("-" if value is None else f"{value:.2f}" for value in cells)
            block = str(index // result["config"]["offset_groups"])
            lines.append([result["arm"], str(result["seed"]), block, name, *shown])
    head = ["arm", "seed", "block", "", "velocity", "of another clip", "at the background"]
    return markdown(head, lines)


def adaptation(name: str = "adaptation") -> str:
    found = json.loads((RESULTS / f"{name}.json").read_text())
    steps = found["settings"]["steps"]
    lines = [
        [
            arm,
            four(own["at_conversion"]),
            four(own["at_the_end"]),
            four(own["gap_to_dense"]),
            own["verdict"],
            f"{1e3 * own['step_cpu_s']:.0f}",
        ]
        for arm, own in found["summary"].items()
    ]
    head = [
        "attention",
        "at conversion",
        f"after {steps} steps",
        "above dense",
        "",
        "CPU ms per step",
    ]
    pretrained = sorted({row["seed"]: row["pretrained_loss"] for row in found["rows"]}.items())
    before = four(loss for _, loss in pretrained)
    steps_before = found["settings"]["pretraining_steps"]
    note = f"Dense, pretrained for {steps_before} steps: {before} (one number per seed)."
    return f"{note}\n\n{markdown(head, lines)}"


def adaptation_real() -> str:
    """The same on real clips, and of which scenes they are, by use."""
    cut = json.loads((RESULTS / "adaptation_real.json").read_text())["clips"]
    lines = [
        [
            part["scene"],
            part["file"],
            f"{part['frames'][0]} to {part['frames'][1] - 1}",
            "held out" if part["held_out"] else "trained on",
            str(part["clips"]),
        ]
        for part in sorted(cut["parts"], key=lambda p: (p["file"], p["frames"]))
    ]
    head = ["scene", "file", "frames", "", "clips of all seeds"]
    return f"{adaptation('adaptation_real')}\n\n{markdown(head, lines)}"


@functools.cache
def current() -> list[Result]:
    """Results of the study as its settings, worlds and arms are today."""
    every = read_results((RESULTS / "quality").glob("*.json"))
    return [result for result in every if is_current(result, Settings())]


def four(values: Any) -> str:
    return " ".join(f"{value:.4f}" for value in values)


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "attention.md": {"speed": speed},
    "evidence.md": {
        "study": study,
        "pairs": pairs,
        "larger": larger,
        "samples": samples,
        "worlds": worlds,
        "longer": longer,
        "offsets": offsets,
        "adaptation": adaptation,
        "adaptation_real": adaptation_real,
    },
}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
