"""Small clips of real video for measurements that would otherwise see nothing but moving digits.

They come from the sample films of `megaslide.data.footage` and one more film of the same package.
No clip crosses a cut. What is held out shares no frame with what is trained on: two scenes are held
out whole, and of every other scene the last quarter. So few scenes give few different pictures;
crops and strides multiply clips, not scenes, and this is said wherever a figure is shown.

Shapes: T frames, H height, W width; frames are uint8 RGB `[T, H, W, 3]`.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaslide.data.buckets import Crop
from megaslide.data.footage import SCENES, Scene, footage_path
from megaslide.data.video import Frames, iterate_frames, probe

SHOTS = (
    *SCENES,
    Scene(
        "carphone", "carphone_pristine.mp4", 0, None,
        "a man in a suit with a red bow tie talks inside a moving car",
    ),
)  # fmt: skip
UNSEEN = ("bus-roof", "taxi")
"""Scenes of which nothing is trained on."""
LAST = 4
"""One part in this many of every other scene is held out, at least one clip, at its end."""
STRIDES = (1, 2)
"""Source frames from one frame of a clip to the next."""
HEIGHT = 144
"""Pixels that films are reduced to, with square pixels; the lowest film has as many."""
CROPS = (72, 144)
"""Least and largest side of the square crops in pixels of a film so reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Frames `start` up to `stop` (exclusive) of one scene's film, all of one use."""

    scene: Scene
    start: int
    stop: int
    held_out: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealClip:
    """One clip and where it was cut from."""

    frames: Frames
    caption: str
    part: Part
    indices: tuple[int, ...]
    """Its frames' numbers in the film, ascending."""
    box: tuple[float, float, float, float]
    """left, top, right, bottom of its crop in the reduced film."""


def parts(length: int) -> list[Part]:
    """Every part of every scene that holds a clip of `length` frames."""
    found = []
    for scene in SHOTS:
        stop = len(reduced_film(scene.source)) if scene.stop is None else scene.stop
        last = max((stop - scene.start) // LAST, length)
        split = scene.start if scene.name in UNSEEN else max(scene.start, stop - last)
        for start, end, held_out in ((scene.start, split, False), (split, stop, True)):
            if end - start >= length:
                found.append(Part(scene=scene, start=start, stop=end, held_out=held_out))
    return found


def real_clips(
    count: int, *, frames: int, side: int, seed: int, held_out: bool
) -> Iterator[RealClip]:
    """`count` square clips; parts are drawn as often as they have frames.

    Args:
        count: clips.
        frames: of a clip.
        side: its height and width in pixels.
        seed: what decides all draws, with `held_out`.
        held_out: cut from what is held out, instead of from what is trained on.
    """
    rng = np.random.default_rng([seed, int(held_out)])
    choices = [part for part in parts(frames) if part.held_out == held_out]
    weights = np.array([part.stop - part.start for part in choices], dtype=np.float64)
    for number in rng.choice(len(choices), size=count, p=weights / weights.sum()):
        yield _cut(choices[number], frames, side, rng)


def described(clips: Sequence[RealClip]) -> list[dict[str, Any]]:
    """By part: its scene, file, frames and use, and how many of `clips` were cut from it."""
    return [
        {
            "scene": part.scene.name,
            "file": part.scene.source,
            "frames": [part.start, part.stop],
            "held_out": part.held_out,
            "clips": count,
        }
        for part, count in Counter(clip.part for clip in clips).items()
    ]


def _cut(part: Part, frames: int, side: int, rng: np.random.Generator) -> RealClip:
    room = part.stop - part.start
    stride = int(rng.choice([s for s in STRIDES if s * (frames - 1) < room]))
    start = part.start + int(rng.integers(room - stride * (frames - 1)))
    indices = range(start, start + stride * (frames - 1) + 1, stride)
    film = reduced_film(part.scene.source)
    height, width = film.shape[1:3]
    square = int(rng.integers(CROPS[0], CROPS[1] + 1))
    left, top = (int(rng.integers(room - square + 1)) for room in (width, height))
    box = (left, top, left + square, top + square)
    crop = Crop(box=box, size=(side, side), enlarged=side / square)
    return RealClip(
        frames=np.stack([crop.apply(film[index]) for index in indices]),
        caption=part.scene.caption, part=part, indices=tuple(indices), box=box,
    )  # fmt: skip


@functools.cache
def reduced_film(name: str) -> Frames:
    """A whole film, `HEIGHT` pixels high, with square pixels."""
    path = footage_path(name)
    info = probe(path)
    width = round(HEIGHT * info.width * info.pixel_aspect / info.height)
    whole = Crop(
        box=(0, 0, info.width, info.height), size=(HEIGHT, width), enlarged=HEIGHT / info.height
    )
    return np.stack([whole.apply(frame) for frame in iterate_frames(path)])
