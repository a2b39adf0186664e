"""What a cache depends on, said once: `prepare` writes it, the data set checks it.

Two kinds. Settings that change latents or embeddings make a cache useless when they change; choices
that only change which samples the index lists cost another `prepare`, but no encoding.
"""

from pathlib import Path
from typing import Any

from megaslide.config import DataConfig
from megaslide.data.codecs import build_codec
from megaslide.data.first_frames import build_first_frames
from megaslide.data.text import build_text_encoder

VERSION = 1
"""Counts changes to what decoding, resampling or cropping does to pixels."""


def cache_settings(config: DataConfig) -> dict[str, Any]:
    """What latents and embeddings depend on, apart from the clips and the model's patches."""
    random = config.frame_choice == "random"
    codec = build_codec(config.codec)
    images = build_first_frames(config, codec)
    several = random or config.frame_choice == "uniform"
    return {
        "version": VERSION,
        "codec": codec.settings(),
        "text": build_text_encoder(config.text).settings(),
        "buckets": list(config.buckets),
        "target_fps": config.target_fps,
        "frame_choice": config.frame_choice,
        "windows_per_clip": config.windows_per_clip if several else 1,
        "seed": config.seed if random else None,
        **({} if images is None else {"image": images.settings()}),
    }


def cache_selection(config: DataConfig) -> dict[str, Any]:
    """What only the index depends on: changing it costs another `prepare`, but no encoding."""
    return {
        "path": str(Path(config.path).resolve()),
        "missing_caption": config.missing_caption,
        "validation_split": config.validation_split,
    }
