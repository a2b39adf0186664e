"""Moving digits: the written trajectory is where the digit is, and the caption says so."""

import json
from pathlib import Path

import numpy as np
import pytest

from megaslide.config import DataConfig
from megaslide.data.prepare import prepare
from megaslide.data.sprites import sprite_clip, write_sprites
from megaslide.data.video import read_clip


def brightness_centre(frames: np.ndarray) -> np.ndarray:
    """Centre of what is brighter than any background, (y, x) per frame `[T, 2]`."""
    mask = np.clip(frames.min(-1).astype(float) - 140, 0, 50)
    y, x = np.meshgrid(*(np.arange(n) for n in frames.shape[1:3]), indexing="ij")
    total = mask.sum((1, 2))
    return np.stack([(mask * y).sum((1, 2)) / total, (mask * x).sum((1, 2)) / total], axis=1)


def test_digit_is_where_the_trajectory_says() -> None:
    errors = []
    for index in range(12):
        clip = sprite_clip(frames=16, size=(64, 96), seed=3, index=index)
        assert clip.frames.shape == (16, 64, 96, 3)
        offset = brightness_centre(clip.frames) - clip.positions
        # A digit's centre of mass lies off the middle of its box, by the same amount throughout.
        errors.append(offset - offset.mean(0))
        assert np.abs(offset.mean(0)).max() < 5
    # Positions rounded to whole pixels would give 0.29, frames off by one above 1.
    assert np.sqrt(np.mean(np.square(errors))) < 0.15


@pytest.mark.parametrize("index", range(12))
def test_motion_is_constant_between_walls_and_matches_the_caption(index: int) -> None:
    clip = sprite_clip(
        frames=60, size=(64, 64), seed=4, index=index, speed=(2, 4), speed_words=True
    )
    side = 0.42 * 64
    assert clip.positions.min() >= side / 2 - 1e-9
    assert clip.positions.max() <= 64 - side / 2 + 1e-9
    steps = np.diff(clip.positions, axis=0)
    np.testing.assert_allclose(steps[0], clip.velocity)
    assert 2 <= np.linalg.norm(clip.velocity) <= 4
    speeds = np.abs(clip.velocity)
    bounces = (np.abs(steps) < speeds - 1e-6).any(1)
    assert np.abs(np.abs(steps[~bounces]) - speeds).max() < 1e-9
    assert 1 <= bounces.sum() <= 20
    words = [w for w in ("right", "left", "up", "down") if w in clip.caption]
    vy, vx = clip.velocity
    assert ("right" in words, "left" in words) == (vx > 0, vx < 0)
    assert ("down" in words, "up" in words) == (vy > 0, vy < 0)
    assert clip.caption.endswith("quickly" if np.hypot(vy, vx) >= 3 else "slowly")
    assert clip.caption.startswith(f"digit {clip.label} moving {clip.direction}")


def test_same_seed_same_pixels_and_all_directions_and_digits_occur() -> None:
    def clip(seed: int, index: int) -> np.ndarray:
        return sprite_clip(frames=4, size=(32, 32), seed=seed, index=index).frames

    assert np.array_equal(clip(0, 1), clip(0, 1))
    assert not np.array_equal(clip(0, 1), clip(0, 2))
    assert not np.array_equal(clip(0, 1), clip(1, 1))
    clips = [sprite_clip(frames=1, size=(16, 16), seed=0, index=i) for i in range(120)]
    assert len({c.direction for c in clips}) == 8
    assert {c.label for c in clips} == set(range(10))


def test_written_files(tmp_path: Path) -> None:
    folder = write_sprites(tmp_path / "s", count=3, frames=8, size=(48, 64), seed=7)
    lines = (folder / "trajectories.jsonl").read_text().splitlines()
    assert len(lines) == 3
    for index, line in enumerate(lines):
        clip = sprite_clip(frames=8, size=(48, 64), seed=7, index=index)
        truth = json.loads(line)
        assert truth["file_name"] == f"sprite-{index:05d}.mp4"
        assert truth["label"] == clip.label
        np.testing.assert_allclose(truth["positions"], clip.positions, atol=1e-4)
        path = folder / truth["file_name"]
        assert path.with_suffix(".txt").read_text().strip() == truth["caption"] == clip.caption
        back = read_clip(path).astype(float)
        assert back.shape == clip.frames.shape
        assert np.sqrt(((back - clip.frames) ** 2).mean()) < 4
    config = DataConfig(path=str(folder), cache_dir=str(tmp_path / "cache"), buckets=("8x48x64",))
    report = prepare(config)
    assert (report.clips, report.skipped) == (3, [])


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for arguments, match in [
        ({"frames": 0}, "frames=0"),
        ({"size": (8, 64)}, r"size=\(8, 64\)"),
        ({"speed": (3.0, 1.0)}, r"speed=\(3.0, 1.0\)"),
    ]:
        with pytest.raises(ValueError, match=match):
            sprite_clip(**({"frames": 4, "size": (32, 32), "seed": 0} | arguments))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count=0"):
        write_sprites(tmp_path, count=0, frames=4)
