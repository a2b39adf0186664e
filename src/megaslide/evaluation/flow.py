"""Measures of motion from optical flow that needs no weights: OpenCV's DIS.

The warping error asks whether each frame is the next one moved back along the flow. A clip that
hides pixels, or does not move, gets a good one for nothing: hence the visible fraction and the
magnitude beside it, and the flags.

Shapes: frames are uint8 RGB `[H, W, 3]`; flow is float32 `[h, w, 2]` in (x, y) pixels of the
reduced frame, whose shorter side is 256 at most.
"""

from types import ModuleType
from typing import Any

import numpy as np

from megaslide.evaluation.pixels import stride_at
from megaslide.evaluation.results import Figure, Missing

SHORTER_SIDE = 256
SMALLEST_SIDE = 16
"""DIS matches patches of 8 pixels on a pyramid; below this there is nothing to match."""
OCCLUDED_FLAG = 0.7
_MOVES, _MOVING_SHARE = 6 / 256, 0.05
_BARELY_MOVES, _STILL_SHARE = 3 / 256, 0.02
"""Flow over the shorter side, per frame at 8 fps, of the share of pixels that moves most: VBench's
dynamic_degree and its static_filter."""
FIGURES = (
    "flow.warp_error",
    "flow.visible_fraction",
    "flow.magnitude",
    "proxy.dynamic_degree_dis",
)


def opencv() -> ModuleType:
    """The module `cv2`.

    Raises:
        ImportError: with the install command.
    """
    try:
        import cv2
    except ImportError:
        raise ImportError("optical flow needs OpenCV: pip install 'megaslide[eval]'") from None
    return cv2


class FlowMeter:
    """Warping error, visible fraction, magnitude and the dynamic-degree proxy of one clip.

    Args:
        fps: frames per second; VBench looks at about 8 frames per second, every
            round(fps / 8)-th. 0 (unknown) looks at every frame.
    """

    def __init__(self, fps: float) -> None:
        self._cv2 = opencv()
        self._dis = self._cv2.DISOpticalFlow_create(self._cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
        self._stride = stride_at(fps)
        self._scale = 1.0
        self._last: tuple[np.ndarray, np.ndarray] | None = None
        self._last_seen: np.ndarray | None = None
        self._first_seen: np.ndarray | None = None
        self._count = 0
        self._errors: list[float] = []
        self._visible: list[float] = []
        self._magnitudes: list[float] = []
        self._flows: list[tuple[float, float]] = []
        """Between frames at about 8 fps: the longest 5 % and the longest 2 %."""
        self._side = 0

    def add(self, frame: np.ndarray) -> None:
        small = self._reduce(frame)
        grey = self._cv2.cvtColor(small, self._cv2.COLOR_RGB2GRAY)
        if self._last is not None:
            forward = self.flow(self._last[1], grey)
            self._compare(self._last[0], small, forward, self.flow(grey, self._last[1]))
        if self._count % self._stride == 0:
            self._look(grey)
        self._last, self._count = (small, grey), self._count + 1

    def figures(self) -> dict[str, Figure]:
        errors = [error for error in self._errors if np.isfinite(error)]
        hidden = Missing("no pixel of any pair of frames is visible in both")
        return {
            "flow.warp_error": float(np.mean(errors)) if errors else hidden,
            "flow.visible_fraction": float(np.mean(self._visible)),
            "flow.magnitude": float(np.mean(self._magnitudes)) * self._scale,
            "proxy.dynamic_degree_dis": self._moves(),
        }

    def flags(self) -> list[str]:
        occluded = ["occluded"] if np.mean(self._visible) < OCCLUDED_FLAG else []
        return ["static"] * self._is_static() + occluded

    def flow(self, grey: np.ndarray, later: np.ndarray) -> np.ndarray:
        """Where each pixel of `grey` [h, w] uint8 goes in `later`: float32 [h, w, 2] in (x, y)."""
        return np.asarray(self._dis.calc(grey, later, None))

    def _reduce(self, frame: np.ndarray) -> np.ndarray:
        height, width = frame.shape[:2]
        self._scale = max(1.0, min(height, width) / SHORTER_SIDE)
        size = (round(width / self._scale), round(height / self._scale))
        self._side = min(size)
        if self._scale == 1.0:
            return frame
        return np.asarray(self._cv2.resize(frame, size, interpolation=self._cv2.INTER_AREA))

    def _compare(
        self, earlier: np.ndarray, later: np.ndarray, forward: np.ndarray, back: np.ndarray
    ) -> None:
        error, visible = warp_error(self._cv2, earlier, later, forward, back)
        self._errors.append(error)
        self._visible.append(visible)
        self._magnitudes.append(float(lengths(forward).mean(dtype=np.float64)))

    def _look(self, grey: np.ndarray) -> None:
        """One of the frames at about 8 fps at which VBench's rule looks."""
        if self._last_seen is None:
            self._first_seen = grey
        else:
            flow = self.flow(self._last_seen, grey)
            tops = top_length(flow, _MOVING_SHARE), top_length(flow, _STILL_SHARE)
            self._flows.append(tops)
        self._last_seen = grey

    def _moves(self) -> Figure:
        if not self._flows:
            return Missing(f"fewer than {self._stride + 1} frames, two at about 8 fps")
        needed = max(1, round(4 * (len(self._flows) + 1) / 16))
        return float(sum(top > _MOVES * self._side for top, _ in self._flows) >= needed)

    def _is_static(self) -> bool:
        """Few frames move, and the last is where the first was."""
        if not self._flows or self._first_seen is None or self._last_seen is None:
            return False
        least = _BARELY_MOVES * self._side
        allowed = round(2 * (len(self._flows) + 1) / 16)
        if sum(top > least for _, top in self._flows) > allowed:
            return False
        across = top_length(self.flow(self._first_seen, self._last_seen), _STILL_SHARE)
        return across <= max(1, 2 * allowed) * least


def warp_error(
    cv2: Any, earlier: np.ndarray, later: np.ndarray, forward: np.ndarray, back: np.ndarray
) -> tuple[float, float]:
    """(mean squared difference over visible pixels, share of visible pixels) of two frames.

    Args:
        cv2: OpenCV.
        earlier: uint8 [h, w, 3]; with `later`, compared in [0, 1].
        later: uint8 [h, w, 3].
        forward: flow from `earlier` to `later`.
        back: flow from `later` to `earlier`.

    Returns:
        The error is nan where no pixel is visible.
    """
    height, width = earlier.shape[:2]
    x, y = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    to_x, to_y = x + forward[..., 0], y + forward[..., 1]
    inside = (to_x >= 0) & (to_x <= width - 1) & (to_y >= 0) & (to_y <= height - 1)
    warped = cv2.remap(later.astype(np.float32), to_x, to_y, cv2.INTER_LINEAR)
    returned = cv2.remap(back, to_x, to_y, cv2.INTER_LINEAR)
    squares = lengths(forward) ** 2 + lengths(returned) ** 2
    visible = inside & (lengths(forward + returned) ** 2 < 0.01 * squares + 0.5)
    if not visible.any():
        return float("nan"), 0.0
    difference = (earlier.astype(np.float64) - warped)[visible] / 255
    return float(np.mean(difference**2)), float(visible.mean())


def lengths(flow: np.ndarray) -> np.ndarray:
    """Pixels `[h, w]`."""
    return np.hypot(flow[..., 0], flow[..., 1])


def top_length(flow: np.ndarray, share: float) -> float:
    """Mean length of the longest `share` of the flow, pixels."""
    longest = np.sort(lengths(flow), axis=None)[::-1]
    return float(longest[: max(1, int(len(longest) * share))].mean(dtype=np.float64))
