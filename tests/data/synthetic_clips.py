"""Small video files of known content, the broken ones included."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def drifting(frames: int, height: int, width: int, *, seed: int = 0) -> np.ndarray:
    """Smooth colours that drift, uint8 `[T, H, W, 3]`; frame t differs clearly from t + 1."""
    rng = np.random.default_rng(seed)
    phase = rng.uniform(0, 6, size=3)
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    waves = [np.sin(0.11 * x + 0.07 * (c + 1) * y + 0.35 * t + phase[c]) for c in range(3)]
    return ((np.stack(waves, axis=-1) * 0.4 + 0.5) * 255).round().astype(np.uint8)


def counting(frames: int, height: int = 32, width: int = 32) -> np.ndarray:
    """Frame t is a flat grey of 10 + 4·t: its index can be read back from one pixel."""
    grey = (10 + 4 * np.arange(frames)).astype(np.uint8)
    return np.broadcast_to(grey[:, None, None, None], (frames, height, width, 3)).copy()


def indices_of(frames: np.ndarray) -> list[int]:
    """Which frames of `counting` these are."""
    return [round((float(frame.mean()) - 10) / 4) for frame in frames]


def write_raw(
    path: Path,
    frames: np.ndarray,
    *,
    rate: float = 24,
    ticks: Sequence[int] | None = None,
    rotation: int = 0,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    aspect: Fraction | None = None,
) -> Path:
    """Encode without `megaslide`: `ticks` are timestamps in milliseconds, one per frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=Fraction(rate).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        if codec == "libx264":
            stream.options = {"crf": "4"}
        else:
            stream.bit_rate = 8_000_000
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if ticks is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        for number, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            if ticks is not None:
                frame.pts, frame.time_base = ticks[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_audio(path: Path) -> Path:
    """A file with a sound track only."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        samples = np.zeros((1, 44100), dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def truncate(source: Path, path: Path, share: float) -> Path:
    """The first `share` of a file's bytes."""
    data = source.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path
