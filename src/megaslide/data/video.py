"""Video files as arrays: what really decodes, upright, in the right colours.

Headers lie (frame counts, durations, frame rates), phones store portrait video sideways, and most
wrong colours come from an untagged matrix. So frames are counted by decoding them, times come from
timestamps, rotation is applied, and every file written here carries its colour tags. The contact
sheet of `sheets.py` is offered here too: callers read, write and show video in one breath.

Shapes: T frames, H height, W width; frames are uint8 RGB `[T, H, W, 3]` throughout.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from megaslide.data.sheets import contact_sheet
from megaslide.errors import InputError

__all__ = [
    "Frames",
    "UnreadableVideoError",
    "VideoInfo",
    "contact_sheet",
    "header_fps",
    "iterate_frames",
    "probe",
    "read_clip",
    "read_windows",
    "resample",
    "write_video",
]

Frames = np.ndarray
"""uint8 RGB `[T, H, W, 3]`."""

# ITU-T H.273 code points, which PyAV hands through as integers.
_BT709, _UNSPECIFIED, _LIMITED_RANGE = 1, 2, 1
_HD_HEIGHT = 720
_VARIABLE_RATE = 1.5
"""Longest over median gap between frames from which a frame rate counts as variable."""


class UnreadableVideoError(InputError):
    """A file that cannot serve as a clip; `reason` says why without repeating the path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}", "repair, re-encode or remove this file")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VideoInfo:
    """What decoding a file from end to end found."""

    frames: int
    """Frames that decode."""
    header_frames: int
    """Frames the header announces; 0 where it does not say."""
    height: int
    """Pixels, upright (after rotation)."""
    width: int
    pixel_aspect: float
    """Width over height of one pixel as it should be displayed."""
    rotation: int
    """Degrees counter-clockwise by which stored frames are turned: 0, 90, 180 or 270."""
    fps: float
    """Mean frame rate from the timestamps; 0 where there is one frame only."""
    variable_rate: bool
    """True where the gaps between frames are uneven."""
    times: np.ndarray
    """Seconds from the first frame, float64 `[T]`, never decreasing."""


def probe(path: Path) -> VideoInfo:
    """Decode the whole file and report what is in it; keeps no frame.

    Raises:
        UnreadableVideoError: empty, damaged or missing file, or one without a video stream.
    """
    times: list[float | None] = []
    last: Any = None
    with _open_video(path) as (container, stream):
        for last in _decode(path, container, stream):
            times.append(last.time)
        if last is None:
            raise UnreadableVideoError(path, "no frame decodes")
        rotation, rate = _rotation(last), stream.average_rate
        aspect, header_frames = float(stream.sample_aspect_ratio or 1), stream.frames
    height, width = last.height, last.width
    if rotation % 180:
        height, width, aspect = width, height, 1 / aspect
    seconds = _frame_times(times, float(rate or 0))
    gaps = np.diff(seconds)
    return VideoInfo(
        frames=len(times),
        header_frames=header_frames,
        height=height,
        width=width,
        pixel_aspect=aspect,
        rotation=rotation,
        fps=round(float(len(gaps) / seconds[-1]), 6) if len(gaps) and seconds[-1] > 0 else 0.0,
        variable_rate=bool(len(gaps) and gaps.max() > _VARIABLE_RATE * np.median(gaps)),
        times=seconds,
    )


def resample(info: VideoInfo, target_fps: float) -> np.ndarray:
    """Indices of the source frames shown at 0, 1/fps, 2/fps, ... seconds, int64 `[T']`.

    A frame is shown until the next one's timestamp, so variable frame rates come out even. The
    last frame counts for one median gap. A tolerance of a millisecond absorbs timestamps that the
    container rounded to milliseconds.

    Raises:
        ValueError: target_fps not above zero.
    """
    if target_fps <= 0:
        raise ValueError(f"target_fps={target_fps} is not above 0")
    gap = float(np.median(np.diff(info.times))) if info.frames > 1 else 0.0
    tolerance = min(1e-3, 0.1 * gap, 0.1 / target_fps) + 1e-9
    duration = info.times[-1] + gap
    count = max(1, int(np.ceil((duration - tolerance) * target_fps)))
    instants = np.arange(count) / target_fps
    shown = np.searchsorted(info.times, instants + tolerance, side="right") - 1
    return np.maximum(shown, 0)


def read_windows(
    path: Path,
    windows: Iterable[np.ndarray],
    transform: Callable[[np.ndarray], np.ndarray] = lambda frame: frame,
) -> Iterator[Frames]:
    """Yield one array per window of source frame indices, in one pass over the file.

    Only frames that a pending window needs are held, after `transform`, so a long video never
    sits in memory. Windows are yielded in the order given, which must be that of their last frame.

    Args:
        path: the video.
        windows: each a non-decreasing int array `[T]`, starting with the earliest.
        transform: applied to each upright RGB frame `[H, W, 3]` once.

    Raises:
        UnreadableVideoError: also when the file ends before the last window does.
    """
    pending = [np.asarray(window) for window in windows]
    held: dict[int, np.ndarray] = {}
    frames = enumerate(iterate_frames(path))
    while pending:
        window = pending.pop(0)
        needed = set(window.tolist()).union(*(later.tolist() for later in pending))
        while int(window[-1]) not in held:
            index, frame = next(frames, (-1, None))
            if frame is None:
                raise UnreadableVideoError(path, f"ends before frame {int(window[-1])}")
            if index in needed:
                held[index] = transform(frame)
        yield np.stack([held[int(index)] for index in window])
        first = min((int(later[0]) for later in pending), default=0)
        held = {index: frame for index, frame in held.items() if pending and index >= first}


def read_clip(path: Path, *, start: int = 0, frames: int | None = None) -> Frames:
    """The clip's upright RGB frames, uint8 `[T, H, W, 3]`; all of them when `frames` is None.

    Raises:
        UnreadableVideoError: damaged file, or fewer than `start + frames` frames.
        ValueError: negative start, or frames below 1.
    """
    if start < 0 or (frames is not None and frames < 1):
        raise ValueError(f"start={start}, frames={frames}: need start >= 0 and frames >= 1")
    if frames is not None:
        return next(read_windows(path, [np.arange(start, start + frames)]))
    kept = [frame for index, frame in enumerate(iterate_frames(path)) if index >= start]
    if not kept:
        raise UnreadableVideoError(path, f"ends before frame {start}")
    return np.stack(kept)


def header_fps(path: Path) -> float:
    """Mean frame rate as the header states it; 0 where it does not."""
    with _open_video(path) as (_, stream):
        return float(stream.average_rate or 0)


def iterate_frames(path: Path, *, plain: bool = False) -> Iterator[np.ndarray]:
    """Every frame that decodes, upright, uint8 RGB `[H, W, 3]`, one at a time.

    Args:
        path: the video.
        plain: convert colours as libswscale does when told nothing, which is what OpenCV's reader
            shows: for figures that must equal those of programs built on it.
    """
    from av.video.reformatter import VideoReformatter

    converter = VideoReformatter()
    with _open_video(path) as (container, stream):
        for frame in _decode(path, container, stream):
            how = {} if plain else _careful(frame)
            rgb = converter.reformat(frame, format="rgb24", **how)
            yield np.ascontiguousarray(np.rot90(rgb.to_ndarray(), _rotation(frame) // 90))


def write_video(path: Path, frames: Frames, fps: float, *, crf: int = 14) -> Path:
    """Write uint8 RGB frames `[T, H, W, 3]` as h264, tagged BT.709 limited range.

    Even sizes become yuv420p, which every browser plays. Odd sizes become yuv444p, which Chromium
    plays, because 4:2:0 would force a resize.

    Args:
        path: an .mp4, .mov or .mkv; parent folders are created.
        frames: uint8 RGB.
        fps: frames per second.
        crf: x264's quality, 0 (lossless) to 51; 14 is visually lossless at usual sizes.

    Raises:
        ValueError: wrong dtype or shape, no frames, or fps not above 0.
    """
    _check_frames(frames)
    if fps <= 0:
        raise ValueError(f"fps={fps} is not above 0")
    av = _av()
    height, width = frames.shape[1:3]
    path.parent.mkdir(parents=True, exist_ok=True)
    # The index at the front lets browsers start before the whole file has arrived.
    options = {"movflags": "+faststart"} if path.suffix.lower() in (".mp4", ".mov") else {}
    with av.open(os.fspath(path), "w", options=options) as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options={"crf": str(crf)})
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        context = stream.codec_context
        context.color_range = _LIMITED_RANGE
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        for packet in _encode(stream, frames):
            container.mux(packet)
    return path


def _encode(stream: Any, frames: Frames) -> Iterator[Any]:
    for array in frames:
        rgb = _av().VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
        yield from stream.encode(
            rgb.reformat(
                format=stream.pix_fmt,
                dst_colorspace=_BT709,
                dst_color_range=_LIMITED_RANGE,
                interpolation=_smooth_chroma(),
            )
        )
    yield from stream.encode(None)


def _check_frames(frames: Frames) -> None:
    shape = getattr(frames, "shape", None)
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8:
        raise ValueError(f"frames are {getattr(frames, 'dtype', type(frames))}; need uint8 numpy")
    if frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise ValueError(f"frames have shape {shape}; need [T, H, W, 3] with T, H, W >= 1")


@contextmanager
def _open_video(path: Path) -> Iterator[tuple[Any, Any]]:
    """The opened container and its first real video stream (never cover art)."""
    av = _av()
    if path.is_file() and path.stat().st_size == 0:
        raise UnreadableVideoError(path, "the file is empty (0 bytes)")
    try:
        container = av.open(os.fspath(path))
    except (av.FFmpegError, OSError) as error:
        reason = f"is not a readable video ({error.strerror or error})"
        raise UnreadableVideoError(path, reason) from None
    with container:
        cover = av.stream.Disposition.attached_pic
        streams = [s for s in container.streams.video if not s.disposition & cover]
        if not streams:
            kinds = ", ".join(sorted({s.type for s in container.streams})) or "nothing"
            raise UnreadableVideoError(path, f"has no video stream (only: {kinds})")
        yield container, streams[0]


def _decode(path: Path, container: Any, stream: Any) -> Iterator[Any]:
    av = _av()
    count, first = 0, ""
    try:
        for frame in container.decode(stream):
            size = f"{frame.width}x{frame.height}"
            first = first or size
            if size != first:
                reason = f"changes its size: frame {count} is {size}, not {first} as the first"
                raise UnreadableVideoError(path, reason)
            count += 1
            yield frame
    except (av.FFmpegError, OSError) as error:
        reason = f"is damaged: decoding fails after {count} frames ({error.strerror or error})"
        raise UnreadableVideoError(path, reason) from None


def _rotation(frame: Any) -> int:
    """Counter-clockwise quarter turns of the display matrix, in degrees 0 to 270."""
    return round((frame.rotation or 0) / 90) * 90 % 360


def _careful(frame: Any) -> dict[str, Any]:
    """How to convert a frame's colours so that they are right and smooth."""
    return {"src_colorspace": _matrix(frame), "interpolation": _smooth_chroma()}


def _matrix(frame: Any) -> Any:
    """Colour matrix to decode with: the tag; where absent, what browsers assume by height."""
    from av.video.reformatter import Colorspace

    if frame.colorspace != _UNSPECIFIED:
        return None
    return Colorspace.ITU709 if frame.height >= _HD_HEIGHT else Colorspace.ITU601


def _smooth_chroma() -> int:
    """Interpolation of colour planes; libswscale's default repeats each chroma sample in blocks."""
    from av.video.reformatter import Interpolation as Flag

    return int(Flag.BICUBIC | Flag.FULL_CHR_H_INT | Flag.FULL_CHR_H_INP | Flag.ACCURATE_RND)


def _frame_times(times: list[float | None], rate: float) -> np.ndarray:
    """Seconds from the first frame; counted at the header's rate where timestamps are missing."""
    stamps = [time for time in times if time is not None]
    if len(stamps) == len(times):
        seconds = np.maximum.accumulate(np.asarray(stamps, dtype=np.float64))
        return seconds - seconds[0]
    return np.arange(len(times)) / (rate or 25.0)


def _av() -> ModuleType:
    try:
        import av
        import av.stream
    except ImportError:
        raise ImportError(
            "reading and writing video needs PyAV: pip install 'megaslide[train]'"
        ) from None
    return av
