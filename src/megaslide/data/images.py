"""An image as the first frame of a clip, cropped and scaled as training clips are.

Shapes: C h w of latents; H W in pixels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaslide.config import Triple
from megaslide.data.buckets import Bucket, crop_to
from megaslide.data.codecs import Codec
from megaslide.data.first_frames import FirstFrames
from megaslide.errors import InputError


def encode_image(path: Path, codec: Codec, size: Triple) -> torch.Tensor:
    """Latents `[1, C, 1, h, w]` of an image as the first frame of a clip of `size` (T, H, W).

    A codec maps the first frame of a clip to a latent frame of its own, so the image alone is all
    that it takes.

    Raises:
        InputError: no image there.
        ImportError: Pillow is missing.
    """
    return codec.encode(_pixels(path, size))


def add_images(
    text: Mapping[str, dict[str, torch.Tensor]],
    images: FirstFrames,
    paths: Sequence[str],
    size: Triple,
) -> None:
    """Add conditions on first frames to the arguments of a sampler, on both sides of guidance.

    Args:
        text: by side, tensors with a row per prompt; on their device are those that are added.
        images: makes the conditions.
        paths: an image for all prompts, or one for each.
        size: T, H, W of the clips.

    Raises:
        InputError: no image there, or not as many as prompts.
    """
    first = next(iter(text["conditioning"].values()))
    require_images(paths, len(first))
    made = []
    for path in paths:
        frame = _pixels(Path(path), size)  # [1, 3, 1, H, W]
        made.append(images.encode(frame.expand(-1, -1, size[0], -1, -1)))
    images.close()  # their memory is the model's
    for key in made[0]:
        rows = torch.cat([each[key] for each in made]).to(first.device)
        for side in text.values():
            side[key] = rows.expand(len(first), *rows.shape[1:])


def require_images(paths: Sequence[str], prompts: int) -> None:
    """InputError where there is neither one image nor one per prompt."""
    if len(paths) not in (1, prompts):
        raise InputError(
            f"sample.images: {len(paths)} images for {prompts} prompts",
            "give one, or one for each",
        )


def _pixels(path: Path, size: Triple) -> torch.Tensor:
    """[1, 3, 1, H, W] in [-1, 1]."""
    first = (1, *size[1:])
    image = _read(path)
    height, width = image.shape[:2]
    crop = crop_to(Bucket(size=first, latent_shape=first), height, width)
    frame = torch.from_numpy(crop.apply(image).copy())
    return frame.permute(2, 0, 1)[None, :, None].float() / 127.5 - 1


def _read(path: Path) -> np.ndarray:
    """uint8 RGB [H, W, 3], upright."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("images need Pillow: pip install 'megaslide[train]'") from error
    try:
        with Image.open(path) as image:
            upright: Any = ImageOps.exif_transpose(image)
            return np.asarray(upright.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        problem = f"{path}: not an image that can be read: {error}"
        raise InputError(problem, "give a PNG or JPEG") from None
