"""Contact sheets: the right frames, in place, under their labels."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from synthetic_clips import counting

from megaslide.data.video import contact_sheet


def opened(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_rows_hold_evenly_spread_frames_below_their_label(tmp_path: Path) -> None:
    clips = [counting(9, 32, 32), counting(3, 48, 20), counting(2, 300, 400)]
    path = contact_sheet(
        clips, tmp_path / "new" / "sheet.png", labels=["first", "", "third"], columns=5,
        frame_height=96,
    )  # fmt: skip
    sheet = opened(path)
    assert sheet.dtype == np.uint8
    flat = (sheet.max(2) == sheet.min(2)) & (sheet[..., 0] < 50)
    rows = np.flatnonzero(flat[:, 12:30].all(1))  # every row starts at the margin with grey 10
    tops = [rows[0], *(b for a, b in itertools.pairwise(rows) if b > a + 1)]
    assert len(tops) == 3
    first = [int(sheet[tops[0] + 40, 12 + 100 * n + 40, 0]) for n in range(5)]
    assert first == [10, 18, 26, 34, 42]  # frames 0, 2, 4, 6, 8 of 9, each enlarged to 96
    second = [int(sheet[tops[1] + 40, 12 + 44 * n + 20, 0]) for n in range(3)]
    assert second == [10, 14, 18]
    label = sheet[12 : tops[0], 12:100]
    assert (label < 100).any()  # ink
    assert tops[0] > 24


def test_long_labels_wrap_and_bad_arguments_are_refused(tmp_path: Path) -> None:
    clips = [counting(4)]
    short = len(opened(contact_sheet(clips, tmp_path / "a.png", labels=["few words"])))
    words = " ".join(["many"] * 80)
    long = len(opened(contact_sheet(clips, tmp_path / "b.png", labels=[words])))
    assert long > short + 40
    for labels in (["a", "b"], ["a"] * 3):
        with pytest.raises(ValueError, match="labels for 1 clips"):
            contact_sheet(clips, tmp_path / "c.png", labels=labels)
    with pytest.raises(ValueError, match="0 clips"):
        contact_sheet([], tmp_path / "c.png")
