"""One clip, every measure, one pass over its frames."""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from megaslide.data.sprites import parse_caption
from megaslide.data.video import UnreadableVideoError, header_fps, iterate_frames
from megaslide.evaluation.digits import (
    CAPTION_FIGURES,
    REFERENCE_FIGURES,
    CaptionMotion,
    ReferenceMotion,
    known_motion,
)
from megaslide.evaluation.flow import FIGURES as FLOW_FIGURES
from megaslide.evaluation.flow import SMALLEST_SIDE, FlowMeter
from megaslide.evaluation.inputs import TRAJECTORIES, Reference
from megaslide.evaluation.pixels import Flicker, Sharpness, stride_at
from megaslide.evaluation.results import ClipResult, Figure, Missing


class Meter(Protocol):
    """Sees every frame once, in order."""

    def add(self, frame: np.ndarray) -> None: ...

    def figures(self) -> dict[str, Figure]: ...

    def flags(self) -> list[str]: ...


class Unmeasured:
    """Stands where a meter cannot be."""

    def __init__(self, names: Iterable[str], reason: str) -> None:
        self._names, self._missing = tuple(names), Missing(reason)

    def add(self, frame: np.ndarray) -> None:
        pass

    def figures(self) -> dict[str, Figure]:
        return dict.fromkeys(self._names, self._missing)

    def flags(self) -> list[str]:
        return []


def measure_clip(path: Path, prompt: str | None, reference: Reference | Missing) -> ClipResult:
    """Every figure that needs no official package.

    Args:
        path: the clip.
        prompt: its caption, where it has one.
        reference: its counterpart, or why it has none.

    Raises:
        UnreadableVideoError: damaged, fewer than two frames, or frames of several sizes.
    """
    fps = header_fps(path)
    frames = iterate_frames(path, plain=True)
    first = next(frames, None)
    if first is None:
        raise UnreadableVideoError(path, "no frame decodes")
    height, width = first.shape[:2]
    sharpness = Sharpness(stride_at(fps))
    meters: list[Meter] = [Flicker(), sharpness, _flow((height, width), fps)]
    meters.append(_caption_motion(prompt, reference))
    meters.append(_reference_motion((height, width), prompt, reference))
    count = _show(path, first, frames, meters)
    result = ClipResult(path=path, frames=count, height=height, width=width, fps=fps, prompt=prompt)
    for meter in meters:
        result.figures |= meter.figures()
        result.flags += meter.flags()
    if "blurred" not in result.flags and sharpness.mean() < 0.5 * _sharpness_of(reference):
        result.flags.append("blurred")
    return result


def _show(
    path: Path, first: np.ndarray, others: Iterable[np.ndarray], meters: Sequence[Meter]
) -> int:
    """Show every frame to every meter; how many there were."""
    count = 0
    for frame in chain([first], others):
        for meter in meters:
            meter.add(frame)
        count += 1
    if count < 2:
        raise UnreadableVideoError(path, "has 1 frame; measures of time need 2 or more")
    return count


def _flow(size: tuple[int, int], fps: float) -> Meter:
    if min(size) < SMALLEST_SIDE:
        reason = f"frames of {size[1]}x{size[0]}; the flow needs {SMALLEST_SIDE} pixels or more"
        return Unmeasured(FLOW_FIGURES, reason)
    try:
        return FlowMeter(fps)
    except ImportError as error:
        return Unmeasured(FLOW_FIGURES, str(error))


def _caption_motion(prompt: str | None, reference: Reference | Missing) -> Meter:
    """The prompt says how the digit moves; without one, the reference's caption does."""
    truth = None if isinstance(reference, Missing) else reference.trajectory
    caption = prompt if prompt is not None else truth.caption if truth else None
    if caption is None:
        return Unmeasured(CAPTION_FIGURES, "no prompt")
    asked = parse_caption(caption)
    if asked is None:
        return Unmeasured(CAPTION_FIGURES, "the prompt is not one of moving digits")
    try:
        return CaptionMotion(*asked)
    except ImportError as error:
        return Unmeasured(CAPTION_FIGURES, str(error))


def _reference_motion(
    size: tuple[int, int], prompt: str | None, reference: Reference | Missing
) -> Meter:
    if isinstance(reference, Missing):
        return Unmeasured(REFERENCE_FIGURES, reference.reason)
    truth = reference.trajectory
    if truth is None:
        return Unmeasured(REFERENCE_FIGURES, f"{reference.path} has no line in {TRAJECTORIES}")
    asked, shown = parse_caption(prompt or ""), parse_caption(truth.caption)
    if asked is not None and asked != shown:
        texts = f"the prompt is {prompt!r}, the reference shows {truth.caption!r}"
        return Unmeasured(REFERENCE_FIGURES, texts)
    try:
        frames = np.stack(list(iterate_frames(reference.path, plain=True)))
        if frames.shape[1:3] != size:
            sizes = f"{size[1]}x{size[0]}, the reference {_size(frames[0])}"
            return Unmeasured(REFERENCE_FIGURES, f"the clip is {sizes}")
        if len(frames) != len(truth.positions):
            lengths = f"{len(frames)} frames and {len(truth.positions)} positions"
            return Unmeasured(REFERENCE_FIGURES, f"the reference has {lengths}")
        return ReferenceMotion(known_motion(frames, truth.positions))
    except (UnreadableVideoError, ImportError) as error:
        return Unmeasured(REFERENCE_FIGURES, str(error).partition("\n")[0])


def _sharpness_of(reference: Reference | Missing) -> float:
    """`image.sharpness` of a reference; 0 where there is none to compare with."""
    if isinstance(reference, Missing):
        return 0.0
    try:
        sharpness = Sharpness(stride_at(header_fps(reference.path)))
        for frame in iterate_frames(reference.path, plain=True):
            sharpness.add(frame)
    except UnreadableVideoError:
        return 0.0
    return sharpness.mean()


def _size(frame: np.ndarray) -> str:
    return f"{frame.shape[1]}x{frame.shape[0]}"
