"""An image as the first latent frame of a clip, cropped and scaled as training clips are.

Shapes: C h w of latents; H W in pixels.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaslide.config import Triple
from megaslide.data.buckets import Bucket, crop_to
from megaslide.data.codecs import Codec
from megaslide.errors import InputError


def encode_image(path: Path, codec: Codec, size: Triple) -> torch.Tensor:
    """Latents `[1, C, 1, h, w]` of an image as the first frame of a clip of `size` (T, H, W).

    A codec maps the first frame of a clip to a latent frame of its own, so the image alone is all
    that it takes.

    Raises:
        InputError: no image there.
        ImportError: Pillow is missing.
    """
    first = (1, *size[1:])
    bucket = Bucket(size=first, latent_shape=codec.latent_shape(first))
    image = _read(path)
    height, width = image.shape[:2]
    frame = torch.from_numpy(crop_to(bucket, height, width).apply(image).copy())
    pixels = frame.permute(2, 0, 1)[None, :, None].float() / 127.5 - 1  # [1, 3, 1, H, W]
    return codec.encode(pixels)


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
