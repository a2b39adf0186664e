"""Moving digits: each way to be wrong moves the figure that should catch it, and not the others."""

import numpy as np
import pytest
from scipy import ndimage

pytest.importorskip("cv2")

from megaslide.data.sprites import SpriteClip, parse_caption, sprite_clip
from megaslide.evaluation.digits import (
    CAPTION_FIGURES,
    REFERENCE_FIGURES,
    CaptionMotion,
    ReferenceMotion,
    centroid,
    highest,
    known_motion,
    opacity,
)
from megaslide.evaluation.results import Missing

CLIPS = [
    sprite_clip(frames=16, size=(64, 64), seed=1, index=index, speed=(2, 5)) for index in range(4)
]


def against_caption(frames: np.ndarray, clip: SpriteClip, **asked):
    meter = CaptionMotion(asked.get("label", clip.label), asked.get("direction", clip.direction))
    for frame in frames:
        meter.add(frame)
    return meter.figures()


def against_truth(frames: np.ndarray, clip: SpriteClip):
    meter = ReferenceMotion(known_motion(clip.frames, clip.positions))
    for frame in frames:
        meter.add(frame)
    return meter.figures()


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.caption)
def test_the_truth_is_right_by_every_measure(clip: SpriteClip) -> None:
    truth, caption = against_truth(clip.frames, clip), against_caption(clip.frames, clip)
    assert truth["motion.pos_err"] < 0.3
    assert truth["motion.vel_rel"] < 0.1
    assert truth["motion.ncc"] > 0.9
    assert caption["motion.path_residual"] < 0.3
    assert caption["motion.speed"] == pytest.approx(np.hypot(*clip.velocity), rel=0.05)
    assert caption["motion.direction_cos"] > 0.99
    assert caption["motion.direction_agrees"] == 1
    assert caption["motion.presence"] == 1
    assert caption["motion.ident"] >= 0.9
    assert set(truth) == set(REFERENCE_FIGURES)
    assert set(caption) == set(CAPTION_FIGURES)


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.caption)
def test_a_frozen_clip_has_relative_velocity_error_one_and_no_direction(clip: SpriteClip) -> None:
    frozen = np.repeat(clip.frames[:1], 16, axis=0)
    truth, caption = against_truth(frozen, clip), against_caption(frozen, clip)
    assert truth["motion.vel_rel"] == pytest.approx(1, abs=1e-3)
    assert truth["motion.pos_err"] == pytest.approx(
        np.linalg.norm(clip.positions - clip.positions[0], axis=1).mean(), abs=0.3
    )
    assert caption["motion.direction_cos"] == 0
    assert caption["motion.direction_agrees"] == 0
    assert caption["motion.ident"] >= 0.9


def test_a_constant_displacement_is_a_position_error_only() -> None:
    clip = sprite_clip(frames=8, size=(64, 64), seed=11, speed=(0.0, 1.0), index=3)
    moved = np.roll(clip.frames, (3, 4), axis=(1, 2))
    truth = against_truth(moved, clip)
    assert truth["motion.pos_err"] == pytest.approx(5, abs=0.2)
    assert truth["motion.vel_err"] < 0.15


def test_disorder_is_found_by_path_and_truth() -> None:
    clip = CLIPS[1]
    shuffled = clip.frames[np.random.default_rng(0).permutation(16)]
    assert against_truth(shuffled, clip)["motion.vel_rel"] > 1.5
    assert against_caption(shuffled, clip)["motion.path_residual"] > 3


def test_backwards_goes_against_the_caption_but_keeps_the_law() -> None:
    clip = sprite_clip(frames=6, size=(64, 64), seed=2, index=0, speed=(2, 3))
    backwards = against_caption(clip.frames[::-1], clip)
    assert backwards["motion.direction_cos"] < -0.95
    assert backwards["motion.direction_agrees"] == 0
    assert backwards["motion.path_residual"] < 0.3


def test_a_wrong_digit_and_a_wrong_direction_are_told() -> None:
    clip = CLIPS[2]
    other = against_caption(clip.frames, clip, label=(clip.label + 1) % 10)
    assert other["motion.ident"] < 0.2
    turned = {"right": "down", "down": "left", "left": "up", "up": "right"}
    direction = " and ".join(turned[word] for word in clip.direction.split(" and "))
    ordered = {"down and left": "left and down", "up and right": "right and up"}
    ordered |= {"down and right": "right and down", "up and left": "left and up"}
    figures = against_caption(clip.frames, clip, direction=ordered.get(direction, direction))
    assert figures["motion.direction_agrees"] == 0
    assert abs(figures["motion.direction_cos"]) < 0.1


def test_blurred_and_vanished_digits_are_not_right() -> None:
    clip = CLIPS[0]
    soft = np.stack([ndimage.gaussian_filter(f, (3, 3, 0)) for f in clip.frames])
    assert against_truth(soft, clip)["motion.ncc"] < 0.9
    assert against_caption(soft, clip)["motion.ident"] < 0.5
    gone = clip.frames.copy()
    gone[3:] = 60
    figures = against_caption(gone, clip)
    assert figures["motion.presence"] == pytest.approx(3 / 16)
    assert isinstance(figures["motion.path_residual"], Missing)
    assert "3 of 16 frames" in figures["motion.path_residual"].reason


def test_another_length_is_not_compared() -> None:
    figures = against_truth(CLIPS[0].frames[:9], CLIPS[0])
    assert {str(f) for f in figures.values()} == {
        "not measured: the clip has 9 frames, the reference 16"
    }


def test_the_centre_is_that_of_the_bright_pixels() -> None:
    frame = np.full((40, 50, 3), 100, np.uint8)
    frame[10:16, 20:30] = 230
    assert centroid(opacity(frame)).tolist() == [12.5, 24.5]
    assert centroid(opacity(np.full((40, 50, 3), 130, np.uint8))) is None


def test_the_peak_of_a_parabola_is_found_between_pixels() -> None:
    y, x = np.meshgrid(np.arange(9), np.arange(11), indexing="ij")
    scores = 1 - 0.01 * (y - 4.3) ** 2 - 0.02 * (x - 6.6) ** 2
    where, score = highest(scores)
    assert where == pytest.approx([4.3, 6.6])
    assert score == pytest.approx(scores.max())
    assert highest(y + 0.0 * x)[0].tolist() == [8, 0]  # at the border no parabola


def test_captions_are_read_back() -> None:
    for clip in CLIPS:
        assert parse_caption(clip.caption) == (clip.label, clip.direction)
    assert parse_caption("digit 7 moving left and up quickly\n") == (7, "left and up")
    for text in ("a red kite", "digit 12 moving up", "digit 1 moving up a hill", ""):
        assert parse_caption(text) is None
