"""Moving digits: clips whose every position is known, for checking that a model learned motion.

A handwritten digit (scikit-learn's 8x8 scans, smoothly enlarged) flies over a smooth random
background at constant sub-pixel velocity and bounces off the walls. The sprite is evaluated as one
continuous function at every frame's exact position, so it neither shimmers nor jumps between
pixels. The trajectory is written next to the clips as ground truth.

Shapes: T frames, H height, W width; frames are uint8 RGB `[T, H, W, 3]`, positions are float64
`[T, 2]` in (y, x) pixels, of the sprite's centre, y downwards.
"""

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megaslide.data.video import Frames, write_video

DIRECTIONS = {
    "right": (0, 1),
    "right and down": (1, 1),
    "down": (1, 0),
    "left and down": (1, -1),
    "left": (0, -1),
    "left and up": (-1, -1),
    "up": (-1, 0),
    "right and up": (-1, 1),
}
"""Caption of each direction and its (y, x) step, y downwards."""
SPRITE_SHARE = 0.42
"""Side of the sprite, its blank margin included, over the shorter side of the frame."""
_CELLS = 8 + 2
"""Cells along a side: the scan's 8 and a blank margin, into which strokes at its edge fade."""
_CRF = 8
"""At these sizes usual h264 settings smear the digit; 8 keeps it within a few grey levels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpriteClip:
    """One clip and the truth about it."""

    frames: Frames
    positions: np.ndarray
    """Centre of the sprite per frame, (y, x) in pixels, float64 `[T, 2]`."""
    velocity: tuple[float, float]
    """Pixels per frame (y, x) at the first frame; components flip sign at walls."""
    label: int
    """The digit, 0 to 9."""
    direction: str
    """Direction at the first frame, one of eight."""
    caption: str


def sprite_clip(
    *,
    frames: int,
    size: tuple[int, int],
    seed: int,
    index: int = 0,
    speed: tuple[float, float] = (1.0, 3.0),
    speed_words: bool = False,
) -> SpriteClip:
    """Draw clip number `index` of the data set `seed`; the same arguments give the same pixels.

    Args:
        frames: T.
        size: (H, W) in pixels, each 16 or more.
        seed: names the data set.
        index: number of the clip in it.
        speed: least and greatest speed in pixels per frame; drawn evenly between them.
        speed_words: end the caption with "slowly" or "quickly" (below or above the mean speed).

    Raises:
        ValueError: frames below 1, size below 16, or speeds not 0 <= least <= greatest.
        ImportError: scikit-learn is missing.
    """
    height, width = size
    if frames < 1 or min(size) < 16 or not 0 <= speed[0] <= speed[1]:
        raise ValueError(
            f"frames={frames}, size={size}, speed={speed}: need frames >= 1, sides >= 16, "
            "0 <= speed[0] <= speed[1]"
        )
    rng = np.random.default_rng([seed, index])
    images, labels = _digits()
    choice = int(rng.integers(len(images)))
    direction = tuple(DIRECTIONS)[int(rng.integers(len(DIRECTIONS)))]
    pixels_per_frame = float(rng.uniform(*speed))
    step = np.asarray(DIRECTIONS[direction], dtype=np.float64)
    velocity = step / np.linalg.norm(step) * pixels_per_frame
    side = SPRITE_SHARE * min(size)
    positions = _trajectory(rng, np.asarray(size, dtype=np.float64), side, velocity, frames)
    background, colour = _background(rng, height, width), _bright_colour(rng)
    alphas = np.stack([_draw(images[choice], position, side, size) for position in positions])
    shown = background + alphas[..., None] * (colour - background)
    word = f" {'slowly' if pixels_per_frame < sum(speed) / 2 else 'quickly'}" if speed_words else ""
    return SpriteClip(
        frames=(shown * 255).round().astype(np.uint8),
        positions=positions,
        velocity=(float(velocity[0]), float(velocity[1])),
        label=int(labels[choice]),
        direction=direction,
        caption=f"digit {labels[choice]} moving {direction}{word}",
    )


def parse_caption(caption: str) -> tuple[int, str] | None:
    """(digit, direction) that a caption of this module asks for; None for any other text."""
    words = "|".join(sorted(DIRECTIONS, key=len, reverse=True))
    found = re.match(rf"digit ([0-9]) moving ({words})( slowly| quickly)?$", caption.strip())
    return (int(found[1]), found[2]) if found else None


@lru_cache(maxsize=2)
def digit_gallery(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Every digit as it is drawn at `side` pixels: opacities `[1797, side, side]` and labels.

    Raises:
        ImportError: scikit-learn is missing.
    """
    images, labels = _digits()
    centre = np.full(2, (side - 1) / 2)
    return np.stack([_draw(image, centre, side, (side, side)) for image in images]), labels


def write_sprites(
    folder: Path,
    *,
    count: int,
    frames: int,
    size: tuple[int, int] = (64, 64),
    seed: int = 0,
    fps: float = 8.0,
    speed: tuple[float, float] = (1.0, 3.0),
    speed_words: bool = False,
) -> Path:
    """Write `count` clips as `sprite-00000.mp4` + `.txt`, and `trajectories.jsonl`.

    Each line of `trajectories.jsonl` has file_name, label, caption, direction, velocity (y, x in
    pixels per frame) and positions (`[T, 2]`, y, x in pixels).

    Returns:
        `folder`.

    Raises:
        ValueError: count below 1, or as `sprite_clip`.
        ImportError: scikit-learn or PyAV is missing.
    """
    if count < 1:
        raise ValueError(f"count={count} is below 1")
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(count):
        clip = sprite_clip(
            frames=frames, size=size, seed=seed, index=index, speed=speed, speed_words=speed_words
        )
        path = write_video(folder / f"sprite-{index:05d}.mp4", clip.frames, fps, crf=_CRF)
        path.with_suffix(".txt").write_text(clip.caption + "\n", encoding="utf-8")
        lines.append(json.dumps(_truth(path, clip)))
    (folder / "trajectories.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _truth(path: Path, clip: SpriteClip) -> dict[str, Any]:
    return {
        "file_name": path.name,
        "label": clip.label,
        "caption": clip.caption,
        "direction": clip.direction,
        "velocity": list(clip.velocity),
        "positions": clip.positions.round(4).tolist(),
    }


def _trajectory(
    rng: np.random.Generator, size: np.ndarray, side: float, velocity: np.ndarray, frames: int
) -> np.ndarray:
    """Positions `[T, 2]`; starts on the far side of where it is heading, so it has room to move."""
    low, room = side / 2, np.maximum(size - side, 0)
    share = rng.uniform(0.0, 0.4, size=2)
    share = np.where(velocity > 0, share, np.where(velocity < 0, 1 - share, 0.3 + share))
    travelled = share * room + np.arange(frames)[:, None] * velocity
    # Reflection at both walls is a triangle wave with period 2 * room.
    folded = np.mod(travelled, np.maximum(2 * room, 1e-9))
    return low + np.minimum(folded, 2 * room - folded)


def _draw(
    digit: np.ndarray, position: np.ndarray, side: float, size: tuple[int, int]
) -> np.ndarray:
    """Opacity `[H, W]` in [0, 1] of the digit centred at `position`, by cubic interpolation."""
    ndimage = _scikit_learn()[1]
    centre = (_CELLS + 1) / 2  # of the array, which has one more blank cell on each side
    axes = [
        (np.arange(n) - p) * _CELLS / side + centre for n, p in zip(size, position, strict=True)
    ]
    grid = np.meshgrid(*axes, indexing="ij")
    alpha = ndimage.map_coordinates(digit, grid, order=3, mode="constant")
    # A steeper ramp turns the scan's grey halo into a crisp, anti-aliased edge.
    return np.clip((alpha - 0.2) / 0.75, 0.0, 1.0)


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Smooth, coloured field `[H, W, 3]` in [0.1, 0.55]: a few waves longer than the frame."""
    y, x = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    field = np.zeros((height, width, 3))
    for _ in range(3):
        fy, fx = rng.uniform(-0.5, 0.5, size=2)
        phase, weight = rng.uniform(0, 2 * math.pi), rng.uniform(-1, 1, size=3)
        field += np.cos(2 * math.pi * (fy * y + fx * x) + phase)[..., None] * weight
    return 0.1 + 0.225 * (1 + np.tanh(0.8 * field)) * rng.uniform(0.7, 1.0, size=3)


def _bright_colour(rng: np.random.Generator) -> np.ndarray:
    """A light tint: brightest channel 1, none below 0.75, so the digit always stands out."""
    tint = rng.uniform(0.75, 1.0, size=3)
    return tint / tint.max()


@lru_cache(maxsize=1)
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Scans with blank margins, `[1797, 12, 12]` in [0, 1], and their labels `[1797]`."""
    bunch = _scikit_learn()[0].load_digits()
    return np.pad(bunch.images / 16.0, ((0, 0), (2, 2), (2, 2))), bunch.target


def _scikit_learn() -> tuple[Any, Any]:
    try:
        from scipy import ndimage
        from sklearn import datasets
    except ImportError:
        raise ImportError(
            "moving digits need scikit-learn: pip install 'megaslide[demo]'"
        ) from None
    return datasets, ndimage
