"""One clip from file to latents, with a record in words of everything done to it.

Shapes: T frames, H height, W width in pixels; C t h w of latents; frames are uint8 RGB
`[T, H, W, 3]`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megaslide.config import DataConfig
from megaslide.data.buckets import Bucket, choose_bucket, choose_windows, crop_to
from megaslide.data.cache import ClipRecord
from megaslide.data.codecs import Codec
from megaslide.data.first_frames import FirstFrames
from megaslide.data.video import UnreadableVideoError, VideoInfo, probe, read_windows, resample

EVENTS = {
    "resampled": "resampled to data.target_fps",
    "variable": "have a variable frame rate, kept frame by frame; set data.target_fps to even it",
    "turned": "turned upright by their rotation tag",
    "cropped": "lose part of the picture to the bucket's aspect ratio",
    "enlarged": "enlarged, being smaller than the bucket",
    "header": "decode to another number of frames than their header announces",
    "windows": "hold fewer different windows than data.windows_per_clip",
}
"""Kinds of `ClipRecord.events` and how the report says them."""


def encode_clip(
    path: Path, content: str, config: DataConfig, codec: Codec, buckets: Sequence[Bucket],
    images: FirstFrames | None = None,
) -> tuple[ClipRecord, dict[str, torch.Tensor]]:  # fmt: skip
    """Decode, resample, crop and encode one clip: its record, and tensors with a row per window.

    They are `latents` [windows, C, t, h, w], and what `images` makes of each first frame.

    Raises:
        UnreadableVideoError: damaged, or too short for every bucket.
    """
    info = probe(path)
    shown = _shown_frames(info, config.target_fps)
    bucket = choose_bucket(buckets, len(shown), info.height, info.width, info.pixel_aspect)
    if bucket is None:
        raise UnreadableVideoError(path, _too_short(info, shown, config.target_fps, buckets))
    crop = crop_to(bucket, info.height, info.width, info.pixel_aspect)
    length = bucket.size[0]
    starts = choose_windows(
        len(shown),
        length,
        config.frame_choice,
        config.windows_per_clip,
        key=content,
        seed=config.seed,
    )
    windows = [shown[start : start + length] for start in starts]
    rows = [_encode(frames, codec, images) for frames in read_windows(path, windows, crop.apply)]
    events = _events(info, shown, bucket, config, len(starts))
    record = ClipRecord(
        bucket=bucket.name,
        latent_shape=[codec.channels, *bucket.latent_shape],
        starts=starts,
        frames_decoded=info.frames,
        done="; ".join([_decoded(info), *events.values(), f"windows from frames {starts}"]),
        events=events,
    )
    return record, {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def _encode(
    frames: np.ndarray, codec: Codec, images: FirstFrames | None
) -> dict[str, torch.Tensor]:
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2).float() / 127.5 - 1  # [3, T, H, W]
    encoded = {"latents": codec.encode(pixels[None])}
    if images is not None:
        encoded |= images.encode(pixels[None])
    return {key: value.cpu() for key, value in encoded.items()}


def _shown_frames(info: VideoInfo, target_fps: float | None) -> np.ndarray:
    """Indices of the source frames in use; all of them where the frame rate already fits."""
    if target_fps is None or (not info.variable_rate and abs(info.fps / target_fps - 1) < 1e-3):
        return np.arange(info.frames)
    return resample(info, target_fps)


def _decoded(info: VideoInfo) -> str:
    return f"{info.frames} frames of {info.width}x{info.height} at {info.fps:.4g} fps decode"


def _too_short(
    info: VideoInfo, shown: np.ndarray, target_fps: float | None, buckets: Sequence[Bucket]
) -> str:
    need = min(bucket.size[0] for bucket in buckets)
    resampled = ""
    if len(shown) != info.frames:
        resampled = f", {len(shown)} after resampling from {info.fps:.4g} to {target_fps:.4g} fps"
    return f"too short: {info.frames} frames decode{resampled}; the shortest bucket needs {need}"


def _events(
    info: VideoInfo, shown: np.ndarray, bucket: Bucket, config: DataConfig, windows: int
) -> dict[str, str]:
    """What is worth saying about this clip, by kind (the keys of `EVENTS`)."""
    events: dict[str, str] = {}
    if len(shown) != info.frames or np.any(shown != np.arange(info.frames)):
        events["resampled"] = (
            f"{info.frames} frames at {info.fps:.4g} fps -> {len(shown)} at {config.target_fps:.4g}"
        )
    elif info.variable_rate:
        events["variable"] = f"variable frame rate, {info.fps:.4g} on average"
    if info.rotation:
        events["turned"] = f"turned {info.rotation} degrees counter-clockwise"
    if info.header_frames not in (0, info.frames):
        events["header"] = f"header announces {info.header_frames} frames, {info.frames} decode"
    events |= _crop_events(info, bucket)
    asked = config.windows_per_clip if config.frame_choice in ("random", "uniform") else 1
    if windows < asked:
        events["windows"] = f"{windows} windows of {asked}"
    return events


def _crop_events(info: VideoInfo, bucket: Bucket) -> dict[str, str]:
    crop = crop_to(bucket, info.height, info.width, info.pixel_aspect)
    left, top, right, bottom = crop.box
    used, target = f"{right - left:.0f}x{bottom - top:.0f}", f"{crop.size[1]}x{crop.size[0]}"
    events = {}
    if left >= 0.5 or top >= 0.5:
        events["cropped"] = f"centre {used} of {info.width}x{info.height} scaled to {target}"
    if crop.enlarged > 1:
        events["enlarged"] = f"{used} enlarged {crop.enlarged:.3g} times to {target}"
    return events
