"""Flow measures on clips of known motion; the warping error against loops in float64."""

import numpy as np
import pytest
from scipy import ndimage

from megaslide.evaluation.results import Missing

cv2 = pytest.importorskip("cv2")

from megaslide.evaluation.flow import FlowMeter, lengths, top_length, warp_error  # noqa: E402


def scene(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Blobs of several sizes, float `[H, W, 3]` in [0, 255]."""
    rng = np.random.default_rng(seed)
    layers = [
        ndimage.gaussian_filter(rng.normal(size=(height, width, 3)), (s, s, 0)) for s in (1.5, 4)
    ]
    field = sum(layer / layer.std() for layer in layers)
    return np.clip(128 + 45 * field, 0, 255)


def panned(frames: int, step: tuple[float, float], size: tuple[int, int] = (96, 128)) -> np.ndarray:
    """A window that moves over a larger scene by `step` (y, x) pixels per frame."""
    margin = 60
    wide = scene(size[0] + 2 * margin, size[1] + 2 * margin)
    spectrum = np.fft.fft2(wide, axes=(0, 1))
    down, right = (np.fft.fftfreq(n)[:, None] for n in wide.shape[:2])
    clip = []
    for t in range(frames):
        phase = np.exp(2j * np.pi * t * (step[0] * down + step[1] * right.T))
        moved = np.fft.ifft2(spectrum * phase[..., None], axes=(0, 1)).real
        clip.append(moved[margin:-margin, margin:-margin])
    return np.clip(np.stack(clip), 0, 255).round().astype(np.uint8)


def measured(frames: np.ndarray, fps: float = 8) -> FlowMeter:
    meter = FlowMeter(fps)
    for frame in frames:
        meter.add(frame)
    return meter


def test_a_known_shift_has_its_length_and_is_explained_by_the_flow() -> None:
    meter = measured(panned(5, (1.5, 2.0)))
    figures = meter.figures()
    assert figures["flow.magnitude"] == pytest.approx(2.5, rel=0.05)
    assert figures["flow.visible_fraction"] > 0.9
    assert figures["flow.warp_error"] < 2e-4
    assert figures["proxy.dynamic_degree_dis"] == 1.0  # 2.5 > 6 * 96 / 256
    assert meter.flags() == []
    unaligned = np.diff(panned(5, (1.5, 2.0)).astype(float) / 255, axis=0)
    assert figures["flow.warp_error"] < 0.05 * np.mean(unaligned**2)


def test_magnitude_is_in_pixels_of_the_clip_however_large() -> None:
    meter = measured(panned(3, (0.0, 6.0), size=(512, 560)))
    assert meter.figures()["flow.magnitude"] == pytest.approx(6.0, rel=0.06)


def test_clips_that_hardly_move_are_static() -> None:
    still = np.repeat(panned(1, (0, 0)), 6, axis=0)
    assert measured(still).flags() == ["static"]
    assert measured(still).figures()["proxy.dynamic_degree_dis"] == 0.0
    assert measured(still).figures()["flow.magnitude"] < 0.01
    trembling = panned(1, (0, 0))[0]
    barely = np.stack([np.roll(trembling, t % 2, axis=1) for t in range(6)])
    assert measured(barely).flags() == ["static"]  # 1 pixel < 3 * 96 / 256
    assert measured(panned(16, (0, 1.0))).flags() == []  # as slow, but it gets somewhere


def test_speed_counts_per_eighth_of_a_second() -> None:
    slow = panned(13, (0, 0.9))
    assert measured(slow, fps=8).figures()["proxy.dynamic_degree_dis"] == 0.0
    assert measured(slow, fps=32).figures()["proxy.dynamic_degree_dis"] == 1.0
    short = measured(slow[:3], fps=32).figures()["proxy.dynamic_degree_dis"]
    assert isinstance(short, Missing)
    assert "5 frames" in short.reason


def test_unrelated_frames_are_occluded() -> None:
    frames = np.stack([scene(96, 128, seed) for seed in range(4)]).astype(np.uint8)
    meter = measured(frames)
    assert "occluded" in meter.flags()
    assert meter.figures()["flow.visible_fraction"] < 0.7


def test_warp_error_equals_loops_in_float64() -> None:
    rng = np.random.default_rng(4)
    height, width = 9, 11
    earlier, later = rng.integers(0, 256, (2, height, width, 3)).astype(np.uint8)
    noise = rng.normal(0, 1, (2, height, width, 2))
    # OpenCV places samples at multiples of 1/32; flow that is one already leaves nothing to round.
    forward = (np.round(32 * ([1.3, -0.7] + 0.2 * noise[0])) / 32).astype(np.float32)
    back = ([-1.3, 0.7] + 0.6 * noise[1]).astype(np.float32)

    def sample(image: np.ndarray, x: float, y: float) -> np.ndarray:
        i, j = min(int(y), height - 2), min(int(x), width - 2)
        a, b = y - i, x - j
        rows = [(1 - b) * image[k, j] + b * image[k, j + 1] for k in (i, i + 1)]
        return (1 - a) * rows[0] + a * rows[1]

    squares, visible = [], 0
    for y in range(height):
        for x in range(width):
            u, v = (float(f) for f in forward[y, x])
            if not (0 <= x + u <= width - 1 and 0 <= y + v <= height - 1):
                continue
            p, q = sample(back.astype(np.float64), x + u, y + v)
            if (u + p) ** 2 + (v + q) ** 2 >= 0.01 * (u * u + v * v + p * p + q * q) + 0.5:
                continue
            visible += 1
            warped = sample(later.astype(np.float64), x + u, y + v)
            squares += list(((earlier[y, x] - warped) / 255) ** 2)
    assert 10 < visible < height * width - 10
    error, share = warp_error(cv2, earlier, later, forward, back)
    assert share == pytest.approx(visible / (height * width))
    assert error == pytest.approx(np.mean(squares), rel=1e-5)


def test_nothing_visible_is_no_error_at_all() -> None:
    black = np.zeros((8, 8, 3), np.uint8)
    away = np.full((8, 8, 2), 100, np.float32)
    error, share = warp_error(cv2, black, black, away, away)
    assert np.isnan(error)
    assert share == 0


def test_top_length_is_the_mean_of_the_longest() -> None:
    flow = np.zeros((10, 10, 2), np.float32)
    flow[0, :5, 0] = [3, 6, 9, 12, 0]
    flow[0, :5, 1] = [4, 8, 12, 16, 0]
    assert top_length(flow, 0.05) == pytest.approx((5 + 10 + 15 + 20 + 0) / 5)
    assert top_length(flow, 0.02) == pytest.approx((15 + 20) / 2)
    assert lengths(flow)[0, 1] == pytest.approx(10)
