"""One PNG that shows many clips: the quickest way to see what a data set or a model contains.

Each clip is a row of evenly spaced frames under its caption. The caption has its own line above
the frames instead of lying on them, so that it never hides content and stays readable.

Shapes: T frames, H height, W width; clips are uint8 RGB `[T, H, W, 3]`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

_MARGIN, _GAP = 12, 4
_PAPER, _INK = (255, 255, 255), (32, 32, 36)


def contact_sheet(
    clips: Sequence[np.ndarray],
    path: Path,
    *,
    labels: Sequence[str] = (),
    columns: int = 8,
    frame_height: int = 112,
) -> Path:
    """Draw `columns` evenly spaced frames of each clip, one row a clip, and save a PNG.

    Small frames are enlarged by whole factors without smoothing, so that what is shown is what is
    in the pixels; large ones are reduced.

    Args:
        clips: uint8 RGB `[T, H, W, 3]` each; sizes may differ.
        path: where the PNG goes; parent folders are created.
        labels: one line of text per clip; wrapped to the width of the sheet. May be empty.
        columns: frames shown per clip, at most; a clip with fewer shows all of its own.
        frame_height: height of a row in pixels, about.

    Returns:
        `path`.

    Raises:
        ValueError: no clips, or a number of labels other than that of clips.
        ImportError: Pillow is missing.
    """
    if not clips or (labels and len(labels) != len(clips)):
        raise ValueError(f"{len(labels)} labels for {len(clips)} clips; need 1 or more, and equal")
    image_module, draw_module, font = _pillow(max(13, frame_height // 7))
    rows = [_row(clip, columns, frame_height, image_module) for clip in clips]
    width = max(row.width for row in rows)
    texts = [_wrap(label, width, font) for label in labels or [""] * len(rows)]
    line = font.getbbox("Ag")[3] + 4
    heights = [
        row.height + line * len(text) + _MARGIN for row, text in zip(rows, texts, strict=True)
    ]
    sheet = image_module.new("RGB", (width + 2 * _MARGIN, sum(heights) + _MARGIN), _PAPER)
    draw: ImageDraw.ImageDraw = draw_module.Draw(sheet)
    top = _MARGIN
    for row, text, height in zip(rows, texts, heights, strict=True):
        for number, words in enumerate(text):
            draw.text((_MARGIN, top + number * line), words, fill=_INK, font=font)
        sheet.paste(row, (_MARGIN, top + line * len(text)))
        top += height
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, format="PNG")
    return path


def _row(clip: np.ndarray, columns: int, frame_height: int, image_module: Any) -> "Image.Image":
    count = min(columns, len(clip))
    picked = clip[np.linspace(0, len(clip) - 1, count).round().astype(int)]
    height, width = clip.shape[1:3]
    if height <= frame_height:
        size = tuple(side * round(frame_height / height) for side in (width, height))
        method = image_module.Resampling.NEAREST
    else:
        size = (max(1, round(width * frame_height / height)), frame_height)
        method = image_module.Resampling.LANCZOS
    row = image_module.new("RGB", (count * (size[0] + _GAP) - _GAP, size[1]), _PAPER)
    for column, frame in enumerate(picked):
        row.paste(
            image_module.fromarray(frame).resize(size, method), (column * (size[0] + _GAP), 0)
        )
    return row


def _wrap(text: str, width: int, font: Any) -> list[str]:
    """Lines no wider than `width` pixels; a single word may be."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _pillow(font_size: int) -> tuple[Any, Any, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ImportError("contact sheets need Pillow: pip install 'megaslide[train]'") from None
    return Image, ImageDraw, ImageFont.load_default(size=font_size)
