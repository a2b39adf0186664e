"""Measures of the pixels alone: flickering as VBench defines it, sharpness, blur, repeats.

Each is a meter that sees every frame once, in order, so that a long video never sits in memory.

Shapes: frames are uint8 RGB `[H, W, 3]`; luma is float32 `[H, W]`, 0 to 255.
"""

import numpy as np

from megaslide.evaluation.results import Figure

REPEAT_LEVELS = 0.1
"""Mean difference, of 255 levels, below which a frame repeats the one before it. What h264 at CRF
30 leaves between repeats was below 0.09; the calmest pair of frames of real clips had 0.17."""
BLUR_FLAG = 0.65
"""Real clips and moving digits had 0.3 to 0.45; blurred by a Gaussian of 3 pixels, above 0.74."""
_BLUR_REACH = 9
"""Pixels of the mean that Crete et al. blur with."""
_LUMA = np.asarray([0.299, 0.587, 0.114], dtype=np.float32)
"""ITU-R BT.601, as OpenCV's grey."""


def stride_at(fps: float) -> int:
    """Frames from one to the next at about 8 per second, as VBench takes them; 1 for fps 0."""
    return max(1, round(fps / 8))


def luma(frame: np.ndarray) -> np.ndarray:
    """Grey levels `[H, W]`, float32."""
    return frame.astype(np.float32) @ _LUMA


class Flicker:
    """`vbench.temporal_flickering`, in the official code's order of float32 means."""

    def __init__(self) -> None:
        self._last: np.ndarray | None = None
        self._differences: list[np.float32] = []

    def add(self, frame: np.ndarray) -> None:
        current = frame.astype(np.float32)
        if self._last is not None:
            self._differences.append(np.abs(self._last - current).mean())
        self._last = current

    def figures(self) -> dict[str, Figure]:
        mean = np.mean(np.asarray(self._differences, dtype=np.float32)).item()
        return {"vbench.temporal_flickering": (255.0 - mean) / 255.0}

    def flags(self) -> list[str]:
        repeats = np.asarray(self._differences) < REPEAT_LEVELS
        return ["frozen"] if repeats.mean() >= 0.5 else []


class Sharpness:
    """`image.sharpness` and `image.blur`, means over every `stride`-th frame."""

    def __init__(self, stride: int = 1) -> None:
        self._stride, self._count = stride, 0
        self._sharpness: list[float] = []
        self._blur: list[float] = []

    def add(self, frame: np.ndarray) -> None:
        self._count += 1
        if (self._count - 1) % self._stride:
            return
        grey = luma(frame)
        self._sharpness.append(laplacian_variance(grey))
        self._blur.append(blur_effect(grey))

    def mean(self) -> float:
        """`image.sharpness` so far."""
        return float(np.mean(self._sharpness))

    def figures(self) -> dict[str, Figure]:
        return {
            "image.sharpness": self.mean(),
            "image.blur": float(np.mean(self._blur)),
        }

    def flags(self) -> list[str]:
        return ["blurred"] if np.mean(self._blur) > BLUR_FLAG else []


def laplacian_variance(grey: np.ndarray) -> float:
    """Variance of the 4-neighbour Laplacian of `[H, W]`, borders mirrored without repeating."""
    padded = np.pad(grey, 1, mode="reflect")
    rows = padded[:-2, 1:-1] + padded[2:, 1:-1]
    columns = padded[1:-1, :-2] + padded[1:-1, 2:]
    return float((rows + columns - 4 * grey).astype(np.float64).var())


def blur_effect(grey: np.ndarray) -> float:
    """Crete et al. 2007 on `[H, W]`: blurring what is sharp removes much, what is blurred little.

    Returns:
        0 (sharp) to 1 (blurred); 1 for a flat picture, which has nothing sharp in it.
    """
    return max(_blur_along(grey), _blur_along(grey.T))


def _blur_along(grey: np.ndarray) -> float:
    """Share of the differences between neighbours, down axis 0, that a mean leaves."""
    reach = _BLUR_REACH // 2
    padded = np.pad(grey.astype(np.float64), ((reach + 1, reach), (0, 0)), mode="edge")
    sums = np.cumsum(padded, axis=0)
    blurred = (sums[_BLUR_REACH:] - sums[:-_BLUR_REACH]) / _BLUR_REACH
    before, after = np.abs(np.diff(grey, axis=0)), np.abs(np.diff(blurred, axis=0))
    total = float(before.sum(dtype=np.float64))
    removed = float(np.maximum(before - after, 0).sum(dtype=np.float64))
    return 1 - removed / total if total > 0 else 1.0
