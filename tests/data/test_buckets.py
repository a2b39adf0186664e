"""Which bucket, which windows, which crop: by hand-worked cases and properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaslide.data.buckets import choose_bucket, choose_windows, crop_to, fit_buckets
from megaslide.data.codecs import dct_codec
from megaslide.errors import InputError


def names(*sizes: str, block: tuple[int, int, int] = (1, 8, 8)) -> tuple[list[str], list[str]]:
    buckets, notes = fit_buckets(sizes, dct_codec(block, 16), (1, 2, 2))
    return [bucket.name for bucket in buckets], notes


def test_buckets_that_do_not_divide_are_cropped_and_said() -> None:
    fitted, notes = names("8x65x64", "16x64x96")
    assert fitted == ["8x64x64", "16x64x96"]
    assert notes == [
        "bucket 8x65x64 -> 8x64x64: codec block 1x8x8 and patch 1x2x2 need multiples of 1 frames, "
        "height a multiple of 16, width a multiple of 16"
    ]
    fitted, notes = names("8x64x64", "5x64x64", block=(4, 8, 8))
    assert fitted == ["5x64x64"]
    assert "8x64x64 -> 5x64x64" in notes[0]
    assert "4n+1 frames" in notes[0]
    assert "twice as 5x64x64" in notes[1]
    with pytest.raises(InputError, match=r"data\.buckets 8x8x64: .*smaller than one patch"):
        names("8x8x64")


def test_bucket_rule_matches_what_fits() -> None:
    buckets, notes = fit_buckets(["12x32x32"], dct_codec((4, 8, 8), 16), (2, 1, 1))
    assert buckets[0].size == (5, 32, 32)
    assert "8n+5 frames" in notes[0]


@pytest.mark.parametrize(
    ("frames", "height", "width", "expected"),
    [
        (8, 64, 64, "8x64x64"),  # exactly as long as the bucket
        (7, 64, 64, None),
        (15, 64, 64, "8x64x64"),
        (16, 64, 64, "16x64x96"),  # more frames go before a better aspect ratio
        (8, 720, 1280, "8x64x128"),
        (8, 1280, 720, "8x96x64"),
        (8, 480, 640, "8x128x128"),
        (8, 300, 300, "8x128x128"),  # the largest of two square ones that fits
        (8, 100, 100, "8x64x64"),  # and the smaller where the larger would enlarge
    ],
)
def test_best_bucket(frames: int, height: int, width: int, expected: str | None) -> None:
    sizes = ["8x64x64", "8x64x128", "8x96x64", "16x64x96", "8x128x128"]
    buckets, _ = fit_buckets(sizes, dct_codec((1, 8, 8), 16), (1, 2, 2))
    chosen = choose_bucket(buckets, frames, height, width)
    assert (chosen.name if chosen else None) == expected


def test_pixel_aspect_counts() -> None:
    buckets, _ = fit_buckets(["8x64x64", "8x64x128"], dct_codec((1, 8, 8), 16), (1, 2, 2))
    for aspect, expected in [(1.0, "8x64x64"), (2.0, "8x64x128")]:
        chosen = choose_bucket(buckets, 8, 100, 100, aspect)
        assert chosen is not None
        assert chosen.name == expected
        assert crop_to(chosen, 100, 100, aspect).box == (0, 0, 100, 100)


def test_crop_is_the_centre_and_keeps_the_aspect_ratio() -> None:
    buckets, _ = fit_buckets(["1x64x64"], dct_codec((1, 8, 8), 16), (1, 1, 1))
    frame = np.zeros((72, 128, 3), dtype=np.uint8)
    frame[:, 28:100] = [255, 0, 0]  # exactly the centred square
    frame[28:44, 56:72] = [255, 255, 0]
    crop = crop_to(buckets[0], 72, 128)
    assert crop.box == (28, 0, 100, 72)
    assert crop.enlarged == pytest.approx(64 / 72)
    out = crop.apply(frame)
    assert out.shape == (64, 64, 3)
    assert out[..., 0].min() > 240  # next to nothing from beyond the square bleeds in
    rows, columns = np.nonzero(out[..., 1] > 128)
    centre = (rows.mean() + columns.mean()) / 2
    assert centre == pytest.approx(31.5, abs=0.6)
    assert np.ptp(rows) == np.ptp(columns)
    small = crop_to(buckets[0], 32, 40)
    assert small.box == (4, 0, 36, 32)
    assert small.enlarged == 2


@pytest.mark.parametrize(
    ("choice", "count", "expected"),
    [("head", 3, [0]), ("middle", 1, [6]), ("uniform", 1, [6]), ("uniform", 3, [0, 6, 12])],
)
def test_windows(choice: str, count: int, expected: list[int]) -> None:
    assert choose_windows(20, 8, choice, count, key="k", seed=0) == expected  # type: ignore[arg-type]


def test_random_windows_depend_on_content_and_seed_only() -> None:
    def draw(key: str, seed: int) -> list[int]:
        return choose_windows(100, 8, "random", 5, key=key, seed=seed)

    assert draw("a", 0) == draw("a", 0) == [10, 55, 57, 74, 86]
    assert len({tuple(draw(key, seed)) for key in "ab" for seed in (0, 1)}) == 4
    starts = [start for n in range(200) for start in draw(str(n), 0)]
    assert min(starts) == 0
    assert max(starts) == 92
    assert abs(np.mean(starts) - 46) < 4


@given(
    frames=st.integers(1, 60),
    length=st.integers(1, 60),
    count=st.integers(1, 9),
    choice=st.sampled_from(["head", "middle", "random", "uniform"]),
)
def test_windows_lie_inside_and_differ(frames: int, length: int, count: int, choice: str) -> None:
    if length > frames:
        with pytest.raises(ValueError, match="do not fit"):
            choose_windows(frames, length, choice, count, key="k", seed=0)  # type: ignore[arg-type]
        return
    starts = choose_windows(frames, length, choice, count, key="k", seed=0)  # type: ignore[arg-type]
    assert starts == sorted(set(starts))
    assert min(starts) >= 0
    assert max(starts) + length <= frames
    several = choice in ("random", "uniform")
    assert len(starts) == (min(count, frames - length + 1) if several else 1)
