"""Which part of a clip becomes a sample: its bucket, its windows of frames, its crop.

Buckets are sizes TxHxW in pixels that the codec and the model's patches divide exactly. A size that
does not is cropped down, and a clip loses what its bucket's aspect ratio cannot hold; both are said
in words here, so that the index and the report can repeat them.

Shapes: T frames, H height, W width of a bucket in pixels; frames are uint8 RGB `[H, W, 3]`.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megaslide.config import Triple, parse_triple
from megaslide.data.codecs import Codec
from megaslide.errors import InputError

FrameChoice = Literal["head", "middle", "random", "uniform"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A clip size that divides into whole patches of latents."""

    size: Triple
    """(T, H, W) in pixels."""
    latent_shape: Triple

    @property
    def name(self) -> str:
        """`TxHxW` in pixels."""
        return "x".join(map(str, self.size))


@dataclass(frozen=True, slots=True)
class Crop:
    """The centred part of a frame that has the bucket's aspect ratio."""

    box: tuple[float, float, float, float]
    """left, top, right, bottom in source pixels."""
    size: tuple[int, int]
    """(H, W) of the bucket."""
    enlarged: float
    """Bucket pixels per source pixel along the axis that grows most; above 1 nothing is gained."""

    def apply(self, frame: np.ndarray) -> np.ndarray:
        """Scale a frame `[h, w, 3]` to cover the bucket and cut the centre: `[H, W, 3]`."""
        height, width = self.size
        image_module = _pillow()
        image = image_module.fromarray(frame)
        resized = image.resize((width, height), image_module.Resampling.BICUBIC, box=self.box)
        return np.asarray(resized)


def fit_buckets(
    sizes: Sequence[str], codec: Codec, patch_size: Triple
) -> tuple[list[Bucket], list[str]]:
    """The usable buckets in the order given, and notes on every size that was changed.

    Raises:
        InputError: a size smaller than one patch.
    """
    buckets: list[Bucket] = []
    notes: list[str] = []
    for text in sizes:
        try:
            size = codec.fit_size(parse_triple(text), patch_size)
        except InputError as error:
            raise InputError(f"data.buckets {text}: {error.problem}", error.fix) from None
        bucket = Bucket(size, codec.latent_shape(size))
        if bucket.name != text:
            notes.append(f"bucket {text} -> {bucket.name}: {_rule(codec, patch_size)}")
        if bucket in buckets:
            notes.append(f"bucket {text} is there twice as {bucket.name}; kept once")
        else:
            buckets.append(bucket)
    return buckets, notes


def choose_bucket(
    buckets: Sequence[Bucket], frames: int, height: int, width: int, pixel_aspect: float = 1.0
) -> Bucket | None:
    """The bucket with the most frames that the clip fills, then of the closest aspect ratio.

    Ties go to the largest that needs no enlarging, else to the smallest. None where the clip is too
    short for all.
    """
    filled = [bucket for bucket in buckets if bucket.size[0] <= frames]
    longest = max((bucket.size[0] for bucket in filled), default=0)
    aspect = width * pixel_aspect / height

    def misfit(bucket: Bucket) -> tuple[float, bool, int]:
        _, h, w = bucket.size
        enlarged = crop_to(bucket, height, width, pixel_aspect).enlarged > 1
        return round(abs(math.log(w / h / aspect)), 6), enlarged, h * w * (1 if enlarged else -1)

    return min((b for b in filled if b.size[0] == longest), key=misfit, default=None)


def crop_to(bucket: Bucket, height: int, width: int, pixel_aspect: float = 1.0) -> Crop:
    """The largest centred part of a frame with the bucket's displayed aspect ratio."""
    _, bucket_height, bucket_width = bucket.size
    wanted = bucket_width / bucket_height / pixel_aspect  # in source pixels
    used_width, used_height = min(width, height * wanted), min(height, width / wanted)
    left, top = (width - used_width) / 2, (height - used_height) / 2
    return Crop(
        box=(left, top, left + used_width, top + used_height),
        size=(bucket_height, bucket_width),
        enlarged=max(bucket_width / used_width, bucket_height / used_height),
    )


def choose_windows(
    frames: int, length: int, choice: FrameChoice, count: int, *, key: str, seed: int
) -> list[int]:
    """First frames of the windows of `length` frames cut from a clip of `frames`, ascending.

    `head` and `middle` give one; `uniform` spreads `count` from end to end (one: the middle);
    `random` draws `count` different ones, the same for the same `key` and `seed` on every machine.
    A clip with fewer than `count` different windows gives all it has.

    Raises:
        ValueError: a window longer than the clip.
    """
    last = frames - length
    if last < 0 or count < 1:
        raise ValueError(f"{count} windows of {length} frames do not fit {frames} frames")
    if choice == "head":
        return [0]
    if choice == "middle" or (choice == "uniform" and count == 1):
        return [last // 2]
    if choice == "uniform":
        return sorted({round(number * last / (count - 1)) for number in range(count)})
    return sorted(sorted(range(last + 1), key=lambda start: _rank(key, seed, start))[:count])


def _rank(key: str, seed: int, start: int) -> bytes:
    return hashlib.blake2b(f"{key}/{seed}/{start}".encode(), digest_size=8).digest()


def _rule(codec: Codec, patch_size: Triple) -> str:
    bt, bh, bw = codec.block
    pt, ph, pw = patch_size
    step, least = bt * math.lcm(pt, codec.frame_step), bt * (pt - 1) + 1
    frames = f"{step}n+{least}" if step > pt else f"multiples of {pt}"
    return (
        f"codec block {bt}x{bh}x{bw} and patch {pt}x{ph}x{pw} need {frames} frames, "
        f"height a multiple of {bh * ph}, width a multiple of {bw * pw}"
    )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("resizing clips needs Pillow: pip install 'megaslide[train]'") from None
    return Image
