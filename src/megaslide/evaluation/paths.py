"""The best path of a digit: constant velocity, reflected at the walls.

A generated clip has no true trajectory to compare with, but the domain has a law. How far the
tracked positions are from the nearest path that keeps the law says whether motion was learned; the
path's first velocity can be held against the caption.

Shapes: T frames; positions are float64 `[T, 2]`, (y, x) in pixels, nan where nothing was tracked.
"""

from dataclasses import dataclass
from types import ModuleType

import numpy as np

_STARTS = 3
"""Best points of the grid from which the fit goes on; neighbours of a bounce can tie."""
_OFFSET_SHARE = 0.25
"""How far a digit's centre of mass may lie off the middle of its box, over the box's side."""


@dataclass(frozen=True, slots=True)
class Path:
    """The fitted path."""

    residual: float
    """Root mean square distance of the positions from it, pixels."""
    velocity: tuple[float, float]
    """(y, x) pixels per frame at the first frame."""

    @property
    def speed(self) -> float:
        return float(np.hypot(*self.velocity))


def fit_path(positions: np.ndarray, size: tuple[int, int], side: float) -> Path:
    """Fit a path of constant velocity with reflections to tracked positions.

    The axes are independent. Per axis, the model is `side / 2 + c + fold(p + v t)`, where `fold`
    reflects at 0 and `size - side`, and c, at most a quarter of `side`, is where the tracked point
    lies in the box.

    Args:
        positions: `[T, 2]` with at least three rows that are not nan.
        size: (H, W) in pixels.
        side: of the square that stays within the frame.

    Raises:
        ValueError: fewer than three positions.
    """
    seen = np.isfinite(positions).all(axis=1)
    if seen.sum() < 3:
        raise ValueError(f"{int(seen.sum())} positions; a path needs 3 or more")
    times = np.flatnonzero(seen).astype(np.float64)
    squares, velocity = 0.0, []
    for axis, length in enumerate(size):
        along = positions[seen, axis] - side / 2
        error, speed = _fit_axis(times, along, max(length - side, 1e-6), _OFFSET_SHARE * side)
        squares += error
        velocity.append(speed)
    return Path(float(np.sqrt(squares)), (velocity[0], velocity[1]))


def fold(travelled: np.ndarray, room: float) -> np.ndarray:
    """Reflect at 0 and `room`: a triangle wave of period 2 room."""
    wrapped = np.mod(travelled, 2 * room)
    return np.minimum(wrapped, 2 * room - wrapped)


def _fit_axis(
    times: np.ndarray, along: np.ndarray, room: float, offset: float
) -> tuple[float, float]:
    """(mean squared error, first velocity) of the best fold(p + v t) + c, |c| <= offset."""

    def error(point: np.ndarray) -> float:
        return float(_errors(point[0], point[1:2, None], times, along, room, offset)[0])

    optimize = _optimize()
    starts = _grid(times, along, room, offset)
    steps = np.asarray([[0, 0], [0.3 / (1 + times[-1]), 0], [0, 0.3]])
    options = {"xatol": 1e-6, "fatol": 1e-9}
    fits = [
        optimize.minimize(
            error, start, method="Nelder-Mead",
            options={**options, "initial_simplex": start + steps},
        )
        for start in starts
    ]  # fmt: skip
    best = min(fits, key=lambda fit: fit.fun)
    speed, phase = best.x
    ahead, start = fold(np.asarray([phase + speed, phase]), room)
    # Of the first step, not of the first instant: a start at a wall may reflect at once.
    return float(best.fun), float(np.copysign(speed, ahead - start))


def _grid(times: np.ndarray, along: np.ndarray, room: float, offset: float) -> list[np.ndarray]:
    """The best few (v, p) of a grid fine enough to be near every local minimum.

    A fall is a rise that starts in the other half of the period, so v >= 0 is enough.
    """
    duration = times[-1] + 1
    fastest = min(room, 1.5 * float(np.max(np.abs(np.diff(along) / np.diff(times)))) + 1)
    speeds = np.arange(0, fastest, 1 / duration)
    phases = np.arange(0, 2 * room, 1.0)
    table = np.stack(
        [_errors(v, phases[:, None], times, along, room, offset) for v in speeds]
    )  # [V, P]
    order = np.argsort(table, axis=None)[: 40 * _STARTS]
    chosen: list[np.ndarray] = []
    for index in order:
        point = np.asarray([speeds[index // len(phases)], phases[index % len(phases)]])
        far = all(np.abs(point - other).max() > 2 for other in chosen)
        if far and len(chosen) < _STARTS:
            chosen.append(point)
    return chosen


def _errors(
    speed: float,
    phases: np.ndarray,
    times: np.ndarray,
    along: np.ndarray,
    room: float,
    offset: float,
) -> np.ndarray:
    """Mean squared errors `[P]` of starting at each of `phases` [P, 1], c being the best."""
    difference = along - fold(phases + speed * times, room)
    centre = np.clip(difference.mean(axis=1, keepdims=True), -offset, offset)
    return np.asarray(np.mean((difference - centre) ** 2, axis=1))


def _optimize() -> ModuleType:
    try:
        from scipy import optimize
    except ImportError:
        raise ImportError("fitting paths needs SciPy: pip install 'megaslide[eval]'") from None
    return optimize
