"""Samples as files: a clip each, a contact sheet, and a record of what they were made with.

Shapes: frames [T, H, W, 3].
"""

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaslide.config import SampleConfig
from megaslide.data.sheets import contact_sheet
from megaslide.data.video import write_video

logger = logging.getLogger(__name__)

Frames = np.ndarray
"""uint8 RGB [T, H, W, 3]."""

_SLUG_LENGTH = 48


def save_samples(
    frames: Sequence[Frames],
    prompts: Sequence[str],
    folder: Path,
    fps: float,
    settings: SampleConfig | None = None,
) -> list[Path]:
    """Write `00_prompt-slug.mp4` per clip, `contact_sheet.png` and `prompts.json` into `folder`.

    Each file appears under its name only when complete, so a viewer or a dashboard that polls the
    folder never opens half of one.

    Args:
        frames: uint8 RGB [T, H, W, 3] per prompt.
        prompts: one per clip; written in full to `prompts.json`.
        folder: created if missing; files of the same name are replaced.
        fps: frames per second.
        settings: recorded in `prompts.json`, to make the samples again.

    Returns:
        Paths of the mp4 files, one per prompt, in order.

    Raises:
        ValueError: no clips, or their number is not that of the prompts.
    """
    if not frames or len(frames) != len(prompts):
        raise ValueError(f"{len(frames)} clips for {len(prompts)} prompts; need 1 or more, equal")
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{index:02d}_{slug(prompt)}.mp4" for index, prompt in enumerate(prompts)]
    paths = [
        _complete(folder / name, partial(write_video, frames=clip, fps=fps))
        for name, clip in zip(names, frames, strict=True)
    ]
    _complete(folder / "contact_sheet.png", partial(contact_sheet, frames, labels=prompts))
    record = _record(frames, prompts, names, fps, settings)
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    _complete(folder / "prompts.json", lambda path: path.write_text(text, encoding="utf-8"))
    logger.info("wrote %d samples to %s", len(paths), folder)
    return paths


def to_frames(pixels: torch.Tensor) -> Frames:
    """Pixels [3, T, H, W] in [-1, 1], values outside clamped, as uint8 [T, H, W, 3].

    Rounds to the nearest level: truncation would darken every clip by half a level.
    """
    levels = ((pixels.float() + 1) * 127.5).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu().numpy()


def slug(prompt: str) -> str:
    """Letters, digits and hyphens of a prompt, lower case, for a file name of bounded length."""
    words = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")
    return words[:_SLUG_LENGTH].strip("-") or "empty"


def _complete(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write under a hidden name of the same suffix (which selects the format), then rename."""
    unfinished = path.with_name(f".partial-{path.name}")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _record(
    frames: Sequence[Frames],
    prompts: Sequence[str],
    names: Sequence[str],
    fps: float,
    settings: SampleConfig | None,
) -> dict[str, Any]:
    samples = [
        {"file": name, "prompt": prompt, "size": list(clip.shape[:3])}
        for name, prompt, clip in zip(names, prompts, frames, strict=True)
    ]
    recorded = None if settings is None else settings.model_dump(mode="json", exclude={"prompts"})
    return {"fps": fps, "settings": recorded, "samples": samples}
