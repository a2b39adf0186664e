"""The study's figures, drawn from the JSONs alone; every seed is a mark of its own.

Each function returns a matplotlib figure, or None where the results it needs are not there yet.
"""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.quality.arms import BASE, LONGER, arms
from benchmarks.quality.plan import LARGER_WINDOWS
from benchmarks.quality.study import HELD_OUT_SEED, LEVELS
from benchmarks.quality.tables import (
    BASELINE,
    Result,
    Row,
    base_steps,
    rows_of,
    select,
    sprite_loss,
    strongest_block,
)
from benchmarks.quality.worlds import WORLDS, draw

WINDOW = BASE["window"]
SPEEDS = ("still", "slow", "base", "fast", "faster")
_WINDOW_MARKERS = dict(zip(LARGER_WINDOWS, "s^", strict=True))
_FAMILIES = {"dense": 7, "swin": 5, "fixed": 0, "shift": 1, "tap": 2, "affine": 3}
STYLE: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
"""Of matplotlib, while a figure is drawn."""


def loss_by_level(results: Sequence[Result]) -> Figure | None:
    """Validation loss against noise level in the base world, of all cells and of the sprite's."""
    own = select(results, world="base")
    if not own:
        return None
    figure = _figure(9, 4)
    for axes, key, title in zip(
        figure.subplots(1, 2),
        ("loss_by_level", "sprite_loss_by_level"),
        ("all cells", "cells of the sprite"),
        strict=True,
    ):
        labelled: set[str] = set()
        for result in (r for r in own if r["arm"] in _FAMILIES):
            name = result["arm"]
            values = [result[key][str(level)] for level in LEVELS]
            label = None if name in labelled else name
            labelled.add(name)
            axes.plot(LEVELS, values, "o-", ms=3, lw=1, alpha=0.8, color=_colour(name), label=label)
        axes.set(title=title, xlabel="noise level sigma", ylabel="validation loss")
    axes.legend(frameon=False)
    return figure


def equal_budgets(results: Sequence[Result]) -> Figure | None:
    """Base world: loss after equal steps, over parameters, over CPU time."""
    own = select(results, world="base")
    if not own:
        return None
    rows = rows_of(own, "base")
    figure = _figure(11, 0.9 + 0.28 * max(len(rows), 6))
    steps, parameters, times = figure.subplots(1, 3)
    _dots(steps, {row.arm: row.losses for row in rows})
    steps.set(title=f"after {base_steps(own)} steps (but for -longer)", xlabel="validation loss")
    for axes, label, x in (
        (parameters, "thousand parameters", lambda r: [r.parameters / 1e3] * len(r.losses)),
        (times, "CPU seconds of training", lambda r: r.train_cpu_s),
    ):
        _scatter(axes, [(row, x(row)) for row in rows])
        axes.set(xlabel=label, ylabel="validation loss")
    return figure


def _scatter(axes: Axes, points: Sequence[tuple[Row, Sequence[float]]]) -> None:
    """One mark per seed, the names of some arms beside their means."""
    for row, x in points:
        axes.plot(x, row.losses, "o", ms=5, alpha=0.8, color=_colour(row.arm))
        at = (float(np.mean(x)), row.mean)
        if row.arm not in (*_FAMILIES, *LONGER):
            continue  # close to others: named in the panel beside
        axes.annotate(row.arm, at, fontsize=6, xytext=(4, 0), textcoords="offset points")


def loss_over_time(results: Sequence[Result]) -> Figure | None:
    """Curves of the base world over steps and over CPU seconds."""
    own = [r for r in select(results, world="base") if r["arm"] in _FAMILIES]
    if not own:
        return None
    figure = _figure(9, 3.6)
    for axes, key, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("step", "cpu_s"),
        ("optimizer step", "CPU seconds of training"),
        strict=True,
    ):
        for result in own:
            x, y = zip(*((p[key], p["loss"]) for p in result["curve"]), strict=True)
            name = result["arm"] if result["seed"] == min(r["seed"] for r in own) else None
            axes.plot(x, y, ".-", lw=1, alpha=0.8, color=_colour(result["arm"]), label=name)
        axes.set(xlabel=label, ylabel="validation loss", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False)
    return figure


def loss_by_speed(results: Sequence[Result]) -> Figure | None:
    """Loss of the sprite's cells over the baseline's of the same seed, against the speed."""
    names = [n for n in SPEEDS if select(results, world=n, arm=BASELINE)]
    if len(names) < 2:
        return None
    figure = _figure(6.5, 4)
    axes = figure.subplots()
    for place, (arm, marker) in enumerate({"affine": "o", **_WINDOW_MARKERS}.items()):
        points = [
            (sum(WORLDS[world].speed) / 2 + 0.08 * (place - 1), 100 * (ratio - 1))
            for world in names
            for ratio in _over_baseline(results, world, arm)
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, marker, ms=5, alpha=0.8, color=_colour(arm), label=arm)
    axes.axhline(0, lw=0.8, color="0.6")
    axes.axvline(WINDOW[1] // 2, ls=":", color="0.5", lw=1)
    axes.set(xlabel=f"cells per frame (dotted: reach of `{BASELINE}`)")
    axes.set(title="cells of the sprite", ylabel=f"loss, % above `{BASELINE}` of the same seed")
    axes.legend(frameon=False)
    return figure


def _over_baseline(results: Sequence[Result], world: str, arm: str) -> list[float]:
    """Loss of the sprite's cells over the baseline's, of the seeds that both have."""
    base = {r["seed"]: sprite_loss(r) for r in select(results, world=world, arm=BASELINE)}
    own = select(results, world=world, arm=arm)
    return [sprite_loss(r) / base[r["seed"]] for r in own if r["seed"] in base]


def other_worlds(results: Sequence[Result]) -> Figure | None:
    """Loss in worlds with a cut and with crossing sprites, and of longer clips than trained on."""
    panels: list[tuple[str, dict[str, list[float]]]] = []
    for world in ("textured", "cut", "crossing"):
        if rows := rows_of(results, world):
            panels.append((f"trained and measured: {world}", {r.arm: r.losses for r in rows}))
    for world in ("long", "longer"):
        losses = _elsewhere(results, world)
        if losses:
            frames = WORLDS[world].frames
            panels.append((f"trained on 6 frames, measured on {frames}", losses))
    if not panels:
        return None
    panels.sort(key=lambda panel: len(panel[1]))  # alike in height, so alike in a row
    rows = [panels[at : at + 3] for at in range(0, len(panels), 3)]
    heights = [max(0.9 + 0.28 * max(len(losses) for _, losses in row), 2.4) for row in rows]
    figure = _figure(11, sum(heights))
    places = [
        axes
        for part, row in zip(
            figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0],
            rows,
            strict=True,
        )
        for axes in np.atleast_1d(part.subplots(1, len(row)))
    ]
    for axes, (title, losses) in zip(places, panels, strict=True):
        _dots(axes, losses)
        axes.set_title(title, fontsize=8)
        axes.set(xlabel="validation loss")
    return figure


def offset_correlations(results: Sequence[Result]) -> Figure | None:
    """Correlation of the windows' shear and slide with the true velocity, controls beside it."""
    own = [r for r in select(results, world="base") if r["offsets"] is not None]
    own = [r for r in own if r["arm"] != "affine-held"]
    if not own:
        return None
    names = [name for name in arms() if select(own, arm=name)]
    figure = _figure(9, 1.2 + 0.5 * len(names))
    controls = {"sprite": ("o", "C3"), "other_clip": ("x", "0.5"), "background": ("+", "C0")}
    for axes, quantity in zip(figure.subplots(1, 2, sharey=True), ("shear", "slide"), strict=True):
        for (where, (marker, colour)), shift in zip(controls.items(), (0, 0.2, -0.2), strict=True):
            points = [
                (block[quantity][where], names.index(r["arm"]) + shift)
                for r in own
                for block in r["offsets"]["blocks"]
                if block[quantity][where] is not None
            ]
            if points:
                x, y = zip(*points, strict=True)
                label = where.replace("_", " ")
                axes.plot(x, y, marker, ms=4, ls="", color=colour, alpha=0.7, label=label)
        axes.axvline(0, color="0.6", lw=0.8)
        axes.set(xlim=(-1, 1), xlabel=f"correlation of {quantity} with the velocity")
        axes.set_yticks(range(len(names)), names)
    axes.legend(frameon=False, fontsize=7)
    return figure


def windows_on_a_sprite(results: Sequence[Result]) -> Figure | None:
    """The taps of the query at the sprite's centre, plane by plane, over the frames they lie in.

    One row per arm, first seed, the block whose window follows best. A column shows one query
    frame; the dashed square is the fixed window, the dots are where the taps of its next plane in
    time went, drawn on the next frame.
    """
    shown = [
        r
        for name in ("shift", "tap", "affine")
        for r in sorted(select(results, world="base", arm=name), key=lambda r: r["seed"])[:1]
    ]
    if not shown:
        return None
    columns = WORLDS["base"].frames - 2
    figure = _figure(2.2 * columns, 2.4 * len(shown))
    for line, result in zip(
        figure.subplots(len(shown), columns, squeeze=False), shown, strict=True
    ):
        chosen = strongest_block(result)
        picture, taps, centres = _recorded(result, chosen)
        for frame, axes in enumerate(line, 1):
            _one_window(axes, picture[frame + 1], taps[frame], centres[frame])
            axes.set_title(f"query in frame {frame}, taps in {frame + 1}", fontsize=7)
        block = chosen // result["config"]["offset_groups"]
        line[0].set_ylabel(f"{result['arm']}, block {block}")
    return figure


FIGURES: dict[str, tuple[str, Callable[[Sequence[Result]], Figure | None]]] = {
    "loss_by_level": ("Validation loss by noise level; one line per seed.", loss_by_level),
    "equal_budgets": (
        "Loss after equal steps, by parameters, by CPU time; one dot per seed.",
        equal_budgets,
    ),
    "loss_over_time": ("The same models while they train; one line per seed.", loss_over_time),
    "loss_by_speed": (
        "By how far the sprite moves per frame: moving windows and larger fixed ones, beside the "
        "fixed window of the same seed.",
        loss_by_speed,
    ),
    "other_worlds": (
        "Still backgrounds, scene cuts, crossing sprites, longer clips.",
        other_worlds,
    ),
    "offset_correlations": (
        "Do windows move as the sprite does? One mark per block, group and seed. The control "
        "marks take the velocity of another clip, and tokens of the background.",
        offset_correlations,
    ),
    "windows_on_a_sprite": (
        "Where the taps of the query at the sprite's centre go in the next frame (dots), and the "
        "fixed window (dashed). First clip without a bounce; the block that follows best.",
        windows_on_a_sprite,
    ),
}


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def _colour(arm: str) -> str:
    family = arm.removesuffix("+r").split("-")[0]
    return f"C{_FAMILIES.get(family, 9)}"


def _dots(axes: Axes, losses: dict[str, list[float]]) -> None:
    """One line per arm, best at the top; a bar at the mean."""
    names = sorted(losses, key=lambda name: -float(np.mean(losses[name])))
    for line, name in enumerate(names):
        values = losses[name]
        axes.plot(values, [line] * len(values), "o", ms=5, alpha=0.8, color=_colour(name))
        axes.plot([np.mean(values)], [line], "|", ms=12, color=_colour(name))
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="x", lw=0.3)


def _elsewhere(results: Sequence[Result], world: str) -> dict[str, list[float]]:
    losses: dict[str, list[float]] = {}
    for result in select(results, world="base"):
        if world in result["elsewhere"]:
            losses.setdefault(result["arm"], []).append(result["elsewhere"][world])
    return losses


def _recorded(result: Result, index: int) -> tuple[Any, Any, Any]:
    """Pictures [T, H, W], taps [T][K](t, h, w) of a block and group, sprite centres [T, 2]."""
    windows, groups = result["offsets"]["windows"], result["config"]["offset_groups"]
    clips = draw(
        WORLDS["base"],
        result["settings"]["held_out"],
        torch.Generator().manual_seed(HELD_OUT_SEED),
    )
    clip = windows["clip"]
    still = clips.latents[clip].median(dim=1, keepdim=True).values
    picture = (clips.latents[clip] - still).norm(dim=0)
    at = clips.centre[clip].numpy()
    return picture.numpy(), np.asarray(windows["taps"][index // groups][index % groups]), at


def _one_window(axes: Axes, picture: Any, taps: Any, centre: Any) -> None:
    height, width = picture.shape
    axes.imshow(picture, cmap="Greys", vmin=0)
    start = [
        min(max(c - k // 2, 0), n - k) - 0.5
        for c, k, n in zip(centre, WINDOW[1:], picture.shape, strict=True)
    ]
    size = {"height": WINDOW[1], "width": WINDOW[2]}
    square = mpl.patches.Rectangle((start[1], start[0]), fill=False, ls="--", color="C0", **size)
    axes.add_patch(square)
    later = taps.reshape(WINDOW[0], -1, 3)[-1]  # [9, (t, h, w)]: the plane one frame later
    axes.plot(later[:, 2], later[:, 1], "o", ms=3, color="C3")
    axes.set(xticks=[], yticks=[], xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
