"""Small clips of real films: of one shot each, and held out without a frame of the training's."""

import numpy as np
import pytest
import real_clips
from PIL import Image

from megaslide.data.footage import footage_path
from megaslide.data.video import iterate_frames, read_clip

CUT = 30
"""Mean grey-level difference of adjacent small frames from which they belong to different shots."""
COUNT, LENGTH, SIDE = 40, 17, 64
CARPHONE = "carphone_pristine.mp4"


@pytest.fixture(scope="module")
def clips() -> dict[bool, list[real_clips.RealClip]]:
    """Clips by whether they are held out."""
    return {held_out: cut(held_out, seed=3) for held_out in (False, True)}


def cut(held_out: bool, seed: int, count: int = COUNT) -> list[real_clips.RealClip]:
    return list(
        real_clips.real_clips(count, frames=LENGTH, side=SIDE, seed=seed, held_out=held_out)
    )


def test_no_frame_is_both_trained_on_and_held_out(
    clips: dict[bool, list[real_clips.RealClip]],
) -> None:
    frames = {
        held_out: {(clip.part.scene.source, index) for clip in own for index in clip.indices}
        for held_out, own in clips.items()
    }
    assert not frames[False] & frames[True]
    scenes = {held_out: {c.part.scene.name for c in own} for held_out, own in clips.items()}
    assert not scenes[False] & set(real_clips.UNSEEN)
    assert scenes[True] >= set(real_clips.UNSEEN)
    assert scenes[True] > scenes[False], "the rest is held out by time"
    for name in scenes[False]:
        first, last = (
            [index for c in clips[held_out] if c.part.scene.name == name for index in c.indices]
            for held_out in (False, True)
        )
        assert max(first) < min(last)


def test_no_clip_crosses_a_cut(clips: dict[bool, list[real_clips.RealClip]]) -> None:
    """Cuts are found anew, by how much whole frames differ."""
    for clip in (*clips[False], *clips[True]):
        film = real_clips.reduced_film(clip.part.scene.source)
        between = film[clip.indices[0] : clip.indices[-1] + 1, ::4, ::4].astype(np.int16)
        steps = np.abs(np.diff(between, axis=0)).mean(axis=(1, 2, 3))
        assert steps.max() < CUT, (clip.part.scene.name, clip.indices)


def test_the_added_film_is_one_shot() -> None:
    small = np.stack([f[::4, ::4].astype(np.int16) for f in iterate_frames(footage_path(CARPHONE))])
    assert np.abs(np.diff(small, axis=0)).mean(axis=(1, 2, 3)).max() < CUT


def test_clips_have_the_size_and_different_strides_and_crops(
    clips: dict[bool, list[real_clips.RealClip]],
) -> None:
    for own in clips.values():
        for clip in own:
            assert clip.frames.shape == (LENGTH, SIDE, SIDE, 3)
            assert clip.frames.dtype == np.uint8
            left, top, right, bottom = clip.box
            film = real_clips.reduced_film(clip.part.scene.source)
            assert right - left == bottom - top >= SIDE, "square and never enlarged"
            assert left >= 0
            assert top >= 0
            assert right <= film.shape[2]
            assert bottom <= film.shape[1]
    train = clips[False]
    assert {np.diff(clip.indices).max() for clip in train} == set(real_clips.STRIDES)
    assert len({(clip.part.scene.source, clip.indices, clip.box) for clip in train}) == COUNT


def test_pixels_are_those_of_the_film(clips: dict[bool, list[real_clips.RealClip]]) -> None:
    clip = next(
        c for c in clips[False] if c.part.scene.source == CARPHONE and np.diff(c.indices).max() == 2
    )
    film = read_clip(footage_path(CARPHONE))
    wide = film.shape[2] / real_clips.reduced_film(CARPHONE).shape[2]  # film pixels in a square one
    left, top, right, bottom = clip.box
    box = (left * wide, top, right * wide, bottom)
    for position in (0, LENGTH - 1):
        frames = (Image.fromarray(film[clip.indices[0] + step]) for step in range(2 * LENGTH - 1))
        own = [f.resize((SIDE, SIDE), Image.Resampling.BOX, box=box) for f in frames]
        differences = np.stack(own).astype(float) - clip.frames[position]
        errors = np.abs(differences).mean(axis=(1, 2, 3))
        assert errors.argmin() == 2 * position
        assert errors.min() < 4


def test_a_seed_gives_the_same_clips_and_another_seed_others(
    clips: dict[bool, list[real_clips.RealClip]],
) -> None:
    again, other = cut(False, 3, count=4), cut(False, 4, count=4)
    boxes = [[(clip.indices, clip.box) for clip in own] for own in (again, other)]
    assert boxes[0] != boxes[1]
    for one, same in zip(again, cut(False, 3, count=4), strict=True):
        np.testing.assert_array_equal(one.frames, same.frames)
    assert not {c.indices for c in again} & {c.indices for c in cut(True, 3, count=4)}


def test_films_are_told_with_their_pixels_square() -> None:
    assert real_clips.reduced_film(CARPHONE).shape == (120, 144, 193, 3)
    assert real_clips.reduced_film("bikes.mp4").shape == (250, 144, 339, 3)
