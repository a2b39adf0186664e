"""Listing clips: both layouts, every caption policy, and a reason for every file left out."""

import json
import os
import unicodedata
from pathlib import Path

import pytest

from megaslide.data.sources import find_sources
from megaslide.errors import InputError


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def captions(folder: Path, **kwargs: object) -> dict[str, str]:
    found = find_sources(folder, **kwargs)  # type: ignore[arg-type]
    return {source.clip_id: source.caption for source in found.sources}


def test_folder_of_pairs(tmp_path: Path) -> None:
    names = ["a.mp4", "B.MOV", "c.MKV", "d.webm", "e.Avi", "f.m4v", "sub/g.mp4", "猫 é.mp4"]
    touch(tmp_path, *names)
    for name in names:
        caption = (tmp_path / name).with_suffix(".TXT" if name == "a.mp4" else ".txt")
        caption.write_text(f"  clip {name}\n", encoding="utf-8-sig" if name == "B.MOV" else "utf-8")
    touch(tmp_path, ".DS_Store", ".hidden/x.mp4", "trajectories.jsonl", "cache/z.mp4")
    found = captions(tmp_path, exclude=tmp_path / "cache")
    assert found == {name: f"clip {name}" for name in names}
    assert find_sources(tmp_path, exclude=tmp_path / "cache").skipped == []


def test_accents_in_either_unicode_form_pair_up(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")
    touch(tmp_path, f"{decomposed}.mp4")
    (tmp_path / f"{composed}.txt").write_text("coffee")
    assert list(captions(tmp_path).values()) == ["coffee"]


def test_everything_else_is_listed(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "a.txt", "orphan.txt", "photo.jpg", "README")
    skipped = {skip.path: skip.reason for skip in find_sources(tmp_path).skipped}
    assert skipped.keys() == {"orphan.txt", "photo.jpg", "README"}
    assert skipped["orphan.txt"] == "caption without a clip of the same name"
    assert "extension .jpg is not one of .mp4" in skipped["photo.jpg"]
    assert "(none)" in skipped["README"]


@pytest.mark.parametrize("kind", ["absent", "empty", "latin1"])
def test_missing_captions_follow_the_policy(tmp_path: Path, kind: str) -> None:
    touch(tmp_path, "a.mp4", "b.mp4", "a.txt")
    content = {"empty": b" \n", "latin1": "caf\u00e9".encode("latin-1")}.get(kind)
    if content is not None:
        (tmp_path / "b.txt").write_bytes(content)
    why = {"absent": "no b.txt beside it", "empty": "b.txt is empty", "latin1": "not UTF-8"}[kind]
    with pytest.raises(InputError, match=f"1 of 2 clips have no caption: b.mp4: .*{why}") as caught:
        find_sources(tmp_path)
    assert "data.missing_caption" in str(caught.value)
    assert captions(tmp_path, missing_caption="empty") == {"a.mp4": "x", "b.mp4": ""}
    assert "1 clips without a caption" in find_sources(tmp_path, missing_caption="empty").notes[0]
    found = find_sources(tmp_path, missing_caption="skip")
    assert [source.clip_id for source in found.sources] == ["a.mp4"]
    assert [(s.path, why in s.reason) for s in found.skipped] == [("b.mp4", True)]


@pytest.mark.parametrize("video", ["video", "file_name", "file_path", "video_path", "path"])
@pytest.mark.parametrize("text", ["caption", "text", "prompt"])
def test_metadata_keys(tmp_path: Path, video: str, text: str) -> None:
    touch(tmp_path, "clips/a.mp4", "clips/b.MP4")
    rows = [{video: f"clips/{name}", text: f"about, {name}"} for name in ("b.MP4", "a.mp4")]
    jsonl, table = tmp_path / "metadata.jsonl", tmp_path / "metadata.csv"
    jsonl.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    expected = {"clips/b.MP4": "about, b.MP4", "clips/a.mp4": "about, a.mp4"}
    assert captions(jsonl) == captions(tmp_path) == expected
    assert list(captions(jsonl)) == list(expected)  # in the order listed
    jsonl.unlink()
    lines = [f"{video},{text},other", *(f'{r[video]},"{r[text]}",1' for r in rows)]
    table.write_text("\n".join(lines), encoding="utf-8-sig")
    assert captions(table) == captions(tmp_path) == expected


def test_metadata_problems_name_the_line(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "unlisted.mp4")
    path = tmp_path / "metadata.jsonl"
    for text, match in [
        ('{"file_name": "a.mp4", "caption": "x"}\n{oops', "line 2: not JSON"),
        ('["a.mp4"]', "line 1: not a JSON object"),
        ('{"clip": "a.mp4"}', r"no path among its keys \(clip\)"),
        ('{"file_name": "a.mp4"}', "line 1 has no caption/text/prompt"),
        (r'{"file_name": "a.mp4", "caption": "cut \ud83d"}', r"line 1: .ud83d is half a character"),
    ]:
        path.write_text(text)
        with pytest.raises(InputError, match=match):
            find_sources(path)
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(InputError, match="not UTF-8"):
        find_sources(path)
    path.write_text(
        '{"file_name": "gone.mp4", "caption": "y"}\n{"file_name": "a.mp4", "caption": "x"}'
    )
    found = find_sources(path)
    assert [skip.path for skip in found.skipped] == ["gone.mp4"]
    assert "line 1, not there" in found.skipped[0].reason
    assert found.notes == ["1 videos beside metadata.jsonl are not listed in it"]
    touch(tmp_path, "metadata.csv")
    with pytest.raises(InputError, match="holds both"):
        find_sources(tmp_path)


def test_a_line_of_a_csv_ends_with_a_newline_only(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4")
    texts = ["red\u2028over\x85the\x0bsea", "blue"]
    rows = "\n".join(["path,text", f"a.mp4,{texts[0]}", f"b.mp4,{texts[1]}"])
    (tmp_path / "metadata.csv").write_text(rows, encoding="utf-8")
    assert list(captions(tmp_path).values()) == texts


def test_names_that_are_not_utf8_are_written_out(tmp_path: Path) -> None:
    stem = os.fsdecode(b"caf\xe9")
    touch(tmp_path, f"{stem}.mp4", f"{stem}.txt", f"x{stem}.mp4", f"y{stem}.jpg")
    (tmp_path / f"{stem}.txt").write_text("coffee")
    found = find_sources(tmp_path, missing_caption="skip")
    assert [(s.clip_id, s.path.name) for s in found.sources] == [(r"caf\xe9.mp4", f"{stem}.mp4")]
    assert {skip.path for skip in found.skipped} == {r"xcaf\xe9.mp4", r"ycaf\xe9.jpg"}
    assert "".join(skip.reason for skip in found.skipped).isascii()


def test_links_are_used_or_listed(tmp_path: Path) -> None:
    folder = touch(tmp_path / "clips", "a.txt", "c.mp4")
    touch(tmp_path, "elsewhere/more/x.mp4", "a.mp4")
    for name, target in [
        ("a.mp4", "../a.mp4"), ("more", "../elsewhere/more"), ("c.txt", "gone"), ("d.mp4", "gone"),
    ]:  # fmt: skip
        (folder / name).symlink_to(target)
    (folder / "a.txt").write_text("a")
    (folder / "d.txt").write_text("d")
    found = find_sources(folder, missing_caption="skip")
    assert [source.clip_id for source in found.sources] == ["a.mp4", "d.mp4"]
    reasons = {skip.path: skip.reason for skip in found.skipped}
    assert reasons.keys() == {"more", "c.mp4"}
    assert "link to a folder" in reasons["more"]
    assert "No such file" in reasons["c.mp4"]


def test_unusable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist") as caught:
        find_sources(tmp_path / "nowhere")
    assert ".mp4 .mov .mkv .webm .avi .m4v" in str(caught.value)
    with pytest.raises(InputError, match="no clips found") as caught:
        find_sources(tmp_path)
    assert str(tmp_path) in str(caught.value)
    touch(tmp_path, "a.jpg", "b.jpg")
    with pytest.raises(InputError, match=r"no clips found \(2 other files\)"):
        find_sources(tmp_path)
    for cache in (tmp_path, tmp_path.parent):
        with pytest.raises(InputError, match=r"data\.cache_dir: .* holds data\.path"):
            find_sources(tmp_path, exclude=cache)
    with pytest.raises(InputError, match="single file"):
        find_sources(tmp_path / "a.jpg")
