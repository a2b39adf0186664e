"""Measures of moving digits: where the digit is, which one it is, whether it moves as it should.

Two questions. With a reference whose trajectory is known: is the digit where it should be (the
reference's own digit is found in every frame by normalised cross-correlation)? Without one: does
it keep the domain's law, and the caption (the digit is what is brighter than any background)?

Shapes: T frames; frames are uint8 RGB `[H, W, 3]`; positions are float64 `[T, 2]` in (y, x)
pixels, y downwards.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megaslide.data.sprites import DIRECTIONS, SPRITE_SHARE, digit_gallery
from megaslide.evaluation.flow import opencv
from megaslide.evaluation.paths import fit_path
from megaslide.evaluation.pixels import luma
from megaslide.evaluation.results import Figure, Missing

CAPTION_FIGURES = (
    "motion.path_residual",
    "motion.speed",
    "motion.direction_cos",
    "motion.direction_agrees",
    "motion.presence",
    "motion.ident",
)
REFERENCE_FIGURES = ("motion.pos_err", "motion.vel_err", "motion.vel_rel", "motion.ncc")

SLOWEST = 0.25
"""Pixels per frame below which a path has no direction."""
_DARKEST, _RAMP = 140.0, 50.0
"""No background of the domain is brighter than 140 of 255, no digit darker than 191."""
_LEAST_AREA = 0.02
"""Bright pixels over the area of the digit's box, below which no digit is seen."""
_FEWEST_FRAMES = 4
_TEMPLATE_SHARE = 0.85
"""Side of the template over the side of the digit's box, whose outermost cells are blank."""
_GALLERY_SIDE = 27
_GRID = 12
"""Samples along a side that the classifier sees."""


class CaptionMotion:
    """How well a clip keeps the law of motion and its caption.

    Args:
        label: the digit that the caption asks for.
        direction: one of `sprites.DIRECTIONS`.
    """

    def __init__(self, label: int, direction: str) -> None:
        _classifier()  # where scikit-learn is missing, this says so before any frame is read
        self._label = label
        step = np.asarray(DIRECTIONS[direction], dtype=np.float64)
        self._direction = step / np.linalg.norm(step)
        self._positions: list[np.ndarray] = []
        self._labels: list[int] = []
        self._size = (0, 0)

    def add(self, frame: np.ndarray) -> None:
        self._size = frame.shape[:2]
        bright = opacity(frame)
        centre = centroid(bright)
        self._positions.append(np.full(2, np.nan) if centre is None else centre)
        if centre is not None:
            self._labels.append(classify(bright, centre))

    def figures(self) -> dict[str, Figure]:
        frames, seen = len(self._positions), len(self._labels)
        right = sum(label == self._label for label in self._labels)
        found: dict[str, Figure] = {
            "motion.presence": seen / frames,
            "motion.ident": right / frames,
        }
        if seen < _FEWEST_FRAMES:
            unseen = Missing(f"a digit is seen in {seen} of {frames} frames; a path needs 4")
            return dict.fromkeys(CAPTION_FIGURES, unseen) | found
        path = fit_path(np.stack(self._positions), self._size, SPRITE_SHARE * min(self._size))
        moves = path.speed >= SLOWEST
        cosine = float(self._direction @ path.velocity) / path.speed if moves else 0.0
        return found | {
            "motion.path_residual": path.residual,
            "motion.speed": path.speed,
            "motion.direction_cos": cosine,
            "motion.direction_agrees": float(cosine >= math.cos(math.pi / 8)),
        }

    def flags(self) -> list[str]:
        return []


@dataclass(frozen=True, slots=True, eq=False)
class KnownMotion:
    """A reference clip of the domain and the truth about it."""

    positions: np.ndarray
    """Of the digit's box, `[T, 2]`."""
    template: np.ndarray
    """The digit's luma, float32 `[s, s]`, s odd."""


def known_motion(frames: np.ndarray, positions: np.ndarray) -> KnownMotion:
    """The digit of a reference clip: the mean of its frames about the known positions.

    Args:
        frames: uint8 RGB `[T, H, W, 3]`.
        positions: `[T, 2]`.
    """
    cv2 = opencv()
    side = int(_TEMPLATE_SHARE * SPRITE_SHARE * min(frames.shape[1:3]))
    side -= 1 - side % 2
    patches = [
        cv2.getRectSubPix(luma(frame), (side, side), (float(x), float(y)))
        for frame, (y, x) in zip(frames, positions, strict=True)
    ]
    return KnownMotion(positions, np.asarray(np.mean(patches, axis=0, dtype=np.float32)))


class ReferenceMotion:
    """Tracked against known motion."""

    def __init__(self, truth: KnownMotion) -> None:
        self._cv2: Any = opencv()
        self._truth = truth
        self._positions: list[np.ndarray] = []
        self._ncc: list[float] = []

    def add(self, frame: np.ndarray) -> None:
        scores = self._cv2.matchTemplate(
            luma(frame), self._truth.template, self._cv2.TM_CCOEFF_NORMED
        )
        corner, peak = highest(scores)
        self._positions.append(corner + (self._truth.template.shape[0] - 1) / 2)
        self._ncc.append(peak)

    def figures(self) -> dict[str, Figure]:
        tracked, known = np.stack(self._positions), self._truth.positions
        if len(tracked) != len(known):
            lengths = f"the clip has {len(tracked)} frames, the reference {len(known)}"
            return dict.fromkeys(REFERENCE_FIGURES, Missing(lengths))
        steps = np.diff(known, axis=0)
        speed = _mean_length(steps)
        velocity = _mean_length(np.diff(tracked, axis=0) - steps)
        still = Missing("the reference's digit does not move")
        return {
            "motion.pos_err": _mean_length(tracked - known),
            "motion.vel_err": velocity,
            "motion.vel_rel": velocity / speed if speed > 0 else still,
            "motion.ncc": float(np.mean(self._ncc)),
        }

    def flags(self) -> list[str]:
        return []


def opacity(frame: np.ndarray) -> np.ndarray:
    """How much of each pixel is digit, `[H, W]` in [0, 1]: the rest is darker in some channel."""
    darkest = frame.min(axis=-1).astype(np.float64)
    return np.asarray(np.clip((darkest - _DARKEST) / _RAMP, 0, 1))


def centroid(bright: np.ndarray) -> np.ndarray | None:
    """(y, x) centre of mass of `[H, W]`; None where there is too little for a digit."""
    total = bright.sum()
    if total < _LEAST_AREA * (SPRITE_SHARE * min(bright.shape)) ** 2:
        return None
    rows, columns = bright.sum(axis=1), bright.sum(axis=0)
    y, x = rows @ np.arange(len(rows)), columns @ np.arange(len(columns))
    return np.asarray([y / total, x / total])


def classify(bright: np.ndarray, centre: np.ndarray) -> int:
    """The digit, 0 to 9, around its centre of mass, by three nearest neighbours."""
    side = SPRITE_SHARE * min(bright.shape)
    return int(_classifier().predict(_sampled(bright, centre, side)[None])[0])


@lru_cache(maxsize=1)
def _classifier() -> Any:
    from sklearn.neighbors import KNeighborsClassifier

    drawn, labels = digit_gallery(_GALLERY_SIDE)
    centres = [centroid_of_drawn(image) for image in drawn]
    features = [
        _sampled(image, centre, _GALLERY_SIDE) for image, centre in zip(drawn, centres, strict=True)
    ]
    return KNeighborsClassifier(3).fit(np.stack(features), labels)


def centroid_of_drawn(image: np.ndarray) -> np.ndarray:
    """(y, x) centre of mass of a gallery's digit `[side, side]`."""
    rows, columns = image.sum(axis=1), image.sum(axis=0)
    places = np.arange(len(image))
    return np.asarray([rows @ places, columns @ places]) / image.sum()


def _sampled(bright: np.ndarray, centre: np.ndarray, side: float) -> np.ndarray:
    """The box of `side` pixels about `centre` as unit-length features `[_GRID * _GRID]`."""
    from scipy import ndimage

    step = side / _GRID
    smooth = ndimage.uniform_filter(bright, max(1, round(step)))
    offsets = (np.arange(_GRID) - (_GRID - 1) / 2) * step
    grid = np.meshgrid(centre[0] + offsets, centre[1] + offsets, indexing="ij")
    values = ndimage.map_coordinates(smooth, grid, order=1, mode="constant").ravel()
    return np.asarray(values / max(float(np.linalg.norm(values)), 1e-9))


def highest(scores: np.ndarray) -> tuple[np.ndarray, float]:
    """(y, x) of the highest score of `[h, w]`, to sub-pixels by a parabola per axis; the score."""
    row, column = np.unravel_index(int(np.argmax(scores)), scores.shape)
    down = _vertex(scores[:, column], int(row))
    across = _vertex(scores[row, :], int(column))
    return np.asarray([row + down, column + across]), float(scores[row, column])


def _vertex(line: np.ndarray, index: int) -> float:
    """Offset from `index` of the top of the parabola through it and its neighbours."""
    if not 0 < index < len(line) - 1:
        return 0.0
    before, here, after = (float(v) for v in line[index - 1 : index + 2])
    curvature = before - 2 * here + after
    return 0.5 * (before - after) / curvature if curvature < 0 else 0.0


def _mean_length(vectors: np.ndarray) -> float:
    return float(np.linalg.norm(vectors, axis=1).mean())
