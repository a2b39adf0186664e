"""Which files are clips, and what their captions are.

Two layouts are read, the ones every video trainer shares: a folder of `clip.mp4` + `clip.txt`, and
a `metadata.jsonl` or `metadata.csv`. Nothing is dropped silently: whatever is not used is listed
with its reason, because a data set that shrinks unnoticed is the most expensive bug of all.
Hidden files (a leading dot) are the one exception.
"""

import csv
import io
import json
import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaslide.errors import InputError

EXTENSIONS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")
"""Accepted in any letter case."""
PATH_KEYS = ("video", "file_name", "file_path", "video_path", "path")
CAPTION_KEYS = ("caption", "text", "prompt")
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
_COMPANIONS = (*METADATA_NAMES, "trajectories.jsonl")
"""Files that belong in a data folder without being clips."""

MissingCaption = Literal["error", "empty", "skip"]


@dataclass(frozen=True, slots=True)
class Source:
    """A file meant as a clip."""

    path: Path
    clip_id: str
    """Its path as the user wrote it, relative to the data folder, with forward slashes."""
    caption: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that is not used."""

    path: str
    reason: str


@dataclass(slots=True)
class SourceList:
    """Every source in a fixed order, and what was left out or decided on the way."""

    sources: list[Source] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A listed clip before the caption policy; `why` says what is wrong with its caption."""

    path: Path
    clip_id: str
    caption: str | None
    why: str


def find_sources(
    path: Path, *, missing_caption: MissingCaption = "error", exclude: Path | None = None
) -> SourceList:
    """List the clips of a folder (searched recursively) or of a metadata file.

    Args:
        path: a folder, or a metadata.jsonl / .csv; a folder that holds one is read through it.
        missing_caption: `error` refuses clips without a caption, `empty` gives them the empty one,
            `skip` leaves them out.
        exclude: a folder below `path` that is not searched (the cache).

    Raises:
        InputError: no clips there, unreadable metadata, or under `error` a missing caption.
    """
    if not path.exists():
        raise InputError(f"data.path: {path} does not exist", f"give {_ACCEPTED}")
    found = SourceList()
    metadata = _metadata_of(path)
    if metadata is not None:
        entries = list(_from_metadata(metadata, found))
    elif path.is_dir():
        if exclude is not None and path.resolve().is_relative_to(exclude.resolve()):
            raise InputError(f"data.cache_dir: {exclude} holds data.path", "give another folder")
        entries = list(_from_folder(path, exclude, found))
    else:
        raise InputError(f"data.path: {path} is a single file", f"give {_ACCEPTED}")
    if not entries:
        where = metadata or path
        raise InputError(f"{where}: no clips found{_counts(found)}", f"give {_ACCEPTED}")
    _apply_policy(entries, missing_caption, found)
    return found


_ACCEPTED = (
    f"a folder of clips ({' '.join(EXTENSIONS)}) each with a .txt caption of the same name, "
    f"or a metadata.jsonl / metadata.csv"
)


def _metadata_of(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix.lower() in (".jsonl", ".csv") else None
    present = [path / name for name in METADATA_NAMES if (path / name).is_file()]
    if len(present) > 1:
        names = " and ".join(METADATA_NAMES)
        raise InputError(f"{path}: holds both {names}", "give the path of the one to use")
    return present[0] if present else None


def _from_folder(folder: Path, exclude: Path | None, found: SourceList) -> Iterator[_Entry]:
    """Entries of `clip.mp4` + `clip.txt`; everything else goes to `found.skipped`."""
    files = sorted(_visible_files(folder, exclude))
    captions = {_stem_key(file): file for file in files if file.suffix.lower() == ".txt"}
    clips = [file for file in files if file.suffix.lower() in EXTENSIONS]
    used = {_stem_key(clip) for clip in clips}
    for file in files:
        suffix = file.suffix.lower()
        name = _as_text(file.relative_to(folder).as_posix())
        if file.is_dir():
            found.skipped.append(Skipped(name, "a link to a folder, which is not followed"))
        elif suffix in EXTENSIONS:
            yield _Entry(file, name, *_read_caption(captions.get(_stem_key(file)), file))
        elif suffix == ".txt" and _stem_key(file) not in used:
            found.skipped.append(Skipped(name, "caption without a clip of the same name"))
        elif suffix != ".txt" and file.name not in _COMPANIONS:
            reason = (
                f"not a clip: extension {suffix or '(none)'} is not one of {' '.join(EXTENSIONS)}"
            )
            found.skipped.append(Skipped(name, reason))


def _visible_files(folder: Path, exclude: Path | None) -> Iterator[Path]:
    for file in folder.rglob("*"):
        inside = exclude is not None and file.resolve().is_relative_to(exclude.resolve())
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if (file.is_symlink() or file.is_file()) and not inside and not hidden:
            yield file


def _as_text(name: str) -> str:
    """A file's name with bytes that are not UTF-8, as old archives have them, written out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _stem_key(file: Path) -> tuple[Path, str]:
    """Folder and stem, in one Unicode form: archives made on a Mac decompose accents."""
    return file.parent, unicodedata.normalize("NFC", file.stem)


def _read_caption(file: Path | None, clip: Path) -> tuple[str | None, str]:
    """The caption, or None and why there is none."""
    if file is None:
        return None, f"no {_as_text(clip.stem)}.txt beside it"
    name = _as_text(file.name)
    try:
        text = file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        return None, f"{name} is not UTF-8 (byte {error.start})"
    except OSError as error:
        return None, f"{name} cannot be read ({error.strerror})"
    return (text, "") if text else (None, f"{name} is empty")


def _from_metadata(metadata: Path, found: SourceList) -> Iterator[_Entry]:
    """Entries of the listed files, in file order; files that do not exist are skipped."""
    listed = set()
    for line, row in metadata_rows(metadata):
        where = f"{metadata}, line {line}"
        name = first_text(row, PATH_KEYS)
        if name is None:
            keys = ", ".join(map(str, row))
            raise InputError(
                f"{where}: no path among its keys ({keys})", f"name it {' or '.join(PATH_KEYS)}"
            )
        file = metadata.parent / name
        if not file.is_file():
            found.skipped.append(Skipped(name, f"listed in {metadata.name} line {line}, not there"))
            continue
        listed.add(file.resolve())
        why = f"{metadata.name} line {line} has no {'/'.join(CAPTION_KEYS)}"
        yield _Entry(file, Path(name).as_posix(), first_text(row, CAPTION_KEYS), why)
    others = [
        file
        for file in metadata.parent.iterdir()
        if file.suffix.lower() in EXTENSIONS and file.resolve() not in listed
    ]
    if others:
        found.notes.append(f"{len(others)} videos beside {metadata.name} are not listed in it")


def metadata_rows(metadata: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) pairs of a JSONL or CSV file."""
    try:
        text = metadata.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{metadata}: not UTF-8 (byte {error.start})", "save it as UTF-8"
        ) from None
    if metadata.suffix.lower() == ".csv":
        reader = csv.DictReader(io.StringIO(text), strict=True)
        try:
            for row in reader:
                yield reader.line_num, {str(key).strip(): value for key, value in row.items()}
        except csv.Error as error:
            raise InputError(f"{metadata}, line {reader.line_num}: {error}", "repair it") from None
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _json_object(line, f"{metadata}, line {number}")


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg})", "write one object per line") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: not a JSON object", 'write {"file_name": ..., "caption": ...}')
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise InputError(f"{where}: {half} is half a character", "write both or none") from None
    return row


def first_text(row: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    """First non-blank text among `keys`."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return None


def _apply_policy(entries: list[_Entry], policy: MissingCaption, found: SourceList) -> None:
    missing = [entry for entry in entries if entry.caption is None]
    if missing and policy == "error":
        shown = "; ".join(f"{entry.clip_id}: {entry.why}" for entry in missing[:3])
        more = f"; and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"{len(missing)} of {len(entries)} clips have no caption: {shown}{more}",
            "write the captions, or set data.missing_caption to empty or skip",
        )
    for entry in entries:
        if entry.caption is None and policy == "skip":
            found.skipped.append(Skipped(entry.clip_id, f"no caption: {entry.why}"))
        else:
            found.sources.append(Source(entry.path, entry.clip_id, entry.caption or ""))
    if missing and policy == "empty":
        found.notes.append(f"{len(missing)} clips without a caption get the empty one")


def _counts(found: SourceList) -> str:
    return f" ({len(found.skipped)} other files)" if found.skipped else ""
