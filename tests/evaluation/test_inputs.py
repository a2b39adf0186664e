"""Clips, prompts and references: what is found, and what is refused with a name and a fix."""

import json
from pathlib import Path

import pytest

from megaslide.errors import InputError
from megaslide.evaluation.inputs import (
    find_clips,
    find_prompts,
    find_references,
    read_prompts,
    read_trajectories,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.mp4", "more/b.WEBM", ".hidden/c.mp4", "notes.md"):
        file = tmp_path / "clips" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path / "clips"


def test_folders_are_searched_and_each_clip_is_found_once(folder: Path) -> None:
    expected = [folder / "a.mp4", folder / "more/b.WEBM"]
    assert find_clips([folder]) == expected
    assert find_clips([folder / "more", folder / "a.mp4", folder]) == expected[::-1]


def test_paths_without_clips_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in [
        (tmp_path / "empty", "no videos in this folder"),
        (tmp_path / "nothing", "does not exist"),
        (folder / "notes.md", "not a video by its name"),
    ]:
        with pytest.raises(InputError, match=words) as refusal:
            find_clips([folder, path])
        assert str(path) in str(refusal.value)
        assert ".mp4" in str(refusal.value)


# --- prompts ----------------------------------------------------------------------------------

TABLES = {
    "p.json": json.dumps({"a.mp4": "one", "more/b.WEBM": "two"}),
    "samples.json": json.dumps(
        {
            "fps": 8,
            "samples": [
                {"file": "a.mp4", "prompt": "one"},
                {"file": "b.WEBM", "prompt": "two"},
            ],
        }
    ),
    "p.jsonl": '{"file_name": "a.mp4", "caption": "one"}\n{"video": "b.WEBM", "text": "two"}\n',
    "p.csv": "file_name,caption\na.mp4,one\nb.WEBM,two\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_prompts_are_read_from_every_format(name: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(TABLES[name])
    clips = find_clips([folder])
    assert find_prompts(clips, file) == {clips[0]: "one", clips[1]: "two"}


def test_the_longest_path_that_agrees_wins(folder: Path, tmp_path: Path) -> None:
    (folder / "more/a.mp4").touch()
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"a.mp4": "outer", "more/a.mp4": "inner"}))
    prompts = find_prompts([folder / "a.mp4", folder / "more/a.mp4"], file)
    assert list(prompts.values()) == ["outer", "inner"]


def test_prompts_beside_the_clips(folder: Path) -> None:
    clips = find_clips([folder])
    assert find_prompts(clips, None) == {}
    (folder / "prompts.json").write_text(TABLES["p.json"])
    assert find_prompts(clips, None) == {clips[0]: "one"}
    (folder / "a.txt").write_text("sidecar\n")
    (folder / "more/metadata.csv").write_text("file_name,caption\nb.WEBM,two\n")
    assert find_prompts(clips, None) == {clips[0]: "sidecar", clips[1]: "two"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.json", "{", "not JSON"),
        ("p.json", "[1]", "not a table of prompts"),
        ("p.json", '{"other.mp4": "x"}', r"none of the 2 clips \(it has other.mp4"),
        ("p.json", "{}", "it has nothing"),
        ("p.yaml", "a: b", r"cannot be read from .yaml"),
        ("p.jsonl", "nonsense", "line 1: not JSON"),
        ("missing.json", None, "is not a file"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(
    name: str, text: str | None, words: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=words) as refusal:
        find_prompts(find_clips([folder]), file)
    assert name in str(refusal.value)
    assert "fix:" in str(refusal.value)


def test_empty_prompts_are_no_prompts(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('{"a.mp4": " ", "b.mp4": "x", "c.mp4": null}')
    assert read_prompts(file) == {"b.mp4": "x"}


# --- references -------------------------------------------------------------------------------


def trajectory(**changed: object) -> str:
    row = {"file_name": "a.mp4", "label": 3, "caption": "digit 3 moving up"}
    return json.dumps(row | {"positions": [[1, 2], [3, 4.5]]} | changed)


def test_references_are_found_by_name(folder: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    for name in ("a.mp4", "z.mp4"):
        (reference / name).touch()
    (reference / "trajectories.jsonl").write_text(trajectory() + "\n")
    clips = find_clips([folder])
    found = find_references(clips, reference)
    assert list(found) == clips[:1]
    truth = found[clips[0]].trajectory
    assert truth is not None
    assert truth.label == 3
    assert truth.positions.tolist() == [[1, 2], [3, 4.5]]
    (reference / "trajectories.jsonl").unlink()
    assert find_references(clips, reference)[clips[0]].trajectory is None


def test_a_wrong_set_of_references_is_refused(folder: Path, tmp_path: Path) -> None:
    clips = find_clips([folder])
    with pytest.raises(InputError, match="not a folder"):
        find_references(clips, tmp_path / "nothing")
    reference = tmp_path / "reference"
    reference.mkdir()
    with pytest.raises(InputError, match="no videos"):
        find_references(clips, reference)
    (reference / "z.mp4").touch()
    with pytest.raises(InputError, match=r"it has z.mp4; the clips are a.mp4, b.WEBM"):
        find_references(clips, reference)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (trajectory(positions=[1, 2, 3]), r"shape \(3,\)"),
        (trajectory(positions="far"), "ValueError"),
        (trajectory(label=None), "TypeError"),
        ('{"file_name": "a.mp4"}', "KeyError"),
        ("nonsense", "not JSON"),
    ],
)
def test_damaged_trajectories_are_refused(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "trajectories.jsonl"
    file.write_text(trajectory() + "\n" + line + "\n")
    with pytest.raises(InputError, match=words) as refusal:
        read_trajectories(file)
    assert "line 2" in str(refusal.value)
