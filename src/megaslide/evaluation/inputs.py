"""What is evaluated: the clips, their prompts, and the references with known motion.

Prompts come from the file given, else from what lies beside a clip: `name.txt`, or the
`prompts.json` that `megaslide sample` writes, or a `metadata.jsonl` / `metadata.csv`. A reference
is the clip of the same file name in the folder given; its `trajectories.jsonl`, as the moving
digits have it, says where the digit is.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaslide.data.sources import (
    CAPTION_KEYS,
    EXTENSIONS,
    PATH_KEYS,
    first_text,
    metadata_rows,
)
from megaslide.errors import InputError

TRAJECTORIES = "trajectories.jsonl"
_BESIDE = ("prompts.json", "metadata.jsonl", "metadata.csv")
_SUFFIXES = " ".join(EXTENSIONS)
_PROMPT_FORMATS = (
    'a .json of {"clip.mp4": "prompt"}, the prompts.json of `megaslide sample`, or a .jsonl or '
    ".csv with file_name and caption"
)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The truth about a reference clip of moving digits."""

    label: int
    caption: str
    positions: np.ndarray
    """(y, x) of the digit's box in pixels, float64 `[T, 2]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The counterpart of a clip."""

    path: Path
    trajectory: Trajectory | None
    """None where the folder has no trajectory of it."""


def find_clips(paths: Sequence[Path]) -> list[Path]:
    """Video files given, and those in the folders given, searched recursively; each once.

    Raises:
        InputError: a path that does not exist, a file that is no video by its name, or a folder
            without videos.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        for clip in _clips_at(path):
            found.setdefault(clip.resolve(), clip)
    return list(found.values())


def _clips_at(path: Path) -> list[Path]:
    if path.is_dir():
        clips = sorted(file for file in path.rglob("*") if _is_clip(file, path))
        if not clips:
            raise InputError(f"{path}: no videos in this folder", f"give clips ({_SUFFIXES})")
        return clips
    if not path.exists():
        raise InputError(f"{path} does not exist", f"give clips ({_SUFFIXES}) or their folder")
    if path.suffix.lower() not in EXTENSIONS:
        raise InputError(f"{path}: not a video by its name", f"give one of {_SUFFIXES}")
    return [path]


def _is_clip(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not hidden and file.is_file() and file.suffix.lower() in EXTENSIONS


# --- prompts ----------------------------------------------------------------------------------


def find_prompts(clips: Sequence[Path], file: Path | None) -> dict[Path, str]:
    """Prompts by clip; clips without one are not in it.

    Raises:
        InputError: the file cannot be read, or names none of the clips.
    """
    if file is None:
        tables = {folder: _tables_in(folder) for folder in {clip.parent for clip in clips}}
        beside = ((clip, _prompt_beside(clip, tables[clip.parent])) for clip in clips)
        return {clip: prompt for clip, prompt in beside if prompt}
    table = read_prompts(file)
    found = {clip: prompt for clip in clips if (prompt := _listed(clip, table))}
    if not found:
        names = ", ".join(list(table)[:3]) or "nothing"
        raise InputError(
            f"{file}: names none of the {len(clips)} clips (it has {names}; the first clip is "
            f"{clips[0].name})",
            "name the clips in it as their files are named",
        )
    return found


def read_prompts(file: Path) -> dict[str, str]:
    """Prompts by file name, as written.

    Raises:
        InputError: missing, unreadable, or in none of the formats.
    """
    if not file.is_file():
        raise InputError(f"{file} is not a file", f"give {_PROMPT_FORMATS}")
    suffix = file.suffix.lower()
    if suffix in (".jsonl", ".csv"):
        rows = [row for _, row in metadata_rows(file)]
    elif suffix == ".json":
        rows = _json_rows(file)
    else:
        raise InputError(f"{file}: prompts cannot be read from {suffix}", f"give {_PROMPT_FORMATS}")
    pairs = ((first_text(row, (*PATH_KEYS, "file")), first_text(row, CAPTION_KEYS)) for row in rows)
    return {Path(name).as_posix(): prompt for name, prompt in pairs if name and prompt}


def _json_rows(file: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error})", f"give {_PROMPT_FORMATS}") from None
    if isinstance(value, dict) and isinstance(value.get("samples"), list):
        value = value["samples"]
    if isinstance(value, dict):
        value = [{"file": name, "prompt": prompt} for name, prompt in value.items()]
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise InputError(f"{file}: not a table of prompts", f"give {_PROMPT_FORMATS}")
    return value


def _listed(clip: Path, table: dict[str, str]) -> str | None:
    """The prompt of the entry that agrees with most of the clip's path, from its end."""
    parts = clip.resolve().parts
    for start in range(len(parts)):
        key = Path(*parts[start:]).as_posix()
        if key in table:
            return table[key]
    return None


def _prompt_beside(clip: Path, table: dict[str, str]) -> str | None:
    sidecar = clip.with_suffix(".txt")
    if sidecar.is_file():
        try:
            return sidecar.read_text(encoding="utf-8-sig").strip() or None
        except UnicodeDecodeError as error:
            raise InputError(
                f"{sidecar}: not UTF-8 (byte {error.start})", "save it as UTF-8"
            ) from None
    return _listed(clip, table)


def _tables_in(folder: Path) -> dict[str, str]:
    tables = [read_prompts(folder / name) for name in _BESIDE if (folder / name).is_file()]
    return {name: prompt for table in reversed(tables) for name, prompt in table.items()}


# --- references -------------------------------------------------------------------------------


def find_references(clips: Sequence[Path], folder: Path) -> dict[Path, Reference]:
    """Counterparts by clip; clips without one are not in it.

    Raises:
        InputError: no such folder, no counterpart at all, or a damaged `trajectories.jsonl`.
    """
    if not folder.is_dir():
        raise InputError(f"--reference {folder}: not a folder", "give the folder of the references")
    by_name = {path.name: path for path in reversed(_clips_at(folder))}
    known = read_trajectories(folder / TRAJECTORIES)
    found = {
        clip: Reference(by_name[clip.name], known.get(clip.name))
        for clip in clips
        if clip.name in by_name
    }
    if not found:
        raise InputError(
            f"--reference {folder}: has none of the {len(clips)} clips' names (it has "
            f"{_some(by_name)}; the clips are {_some(clip.name for clip in clips)})",
            "give the folder whose clips have the same file names",
        )
    return found


def read_trajectories(file: Path) -> dict[str, Trajectory]:
    """Trajectories by file name, as `data.sprites` writes them; empty where there is no file."""
    if not file.is_file():
        return {}
    found = {}
    for line, row in metadata_rows(file):
        try:
            positions = np.asarray(row["positions"], dtype=np.float64)
            trajectory = Trajectory(int(row["label"]), str(row["caption"]), positions)
            name = str(row["file_name"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{file}, line {line}: {error!r}", "write the clips again") from None
        if positions.ndim != 2 or positions.shape[1] != 2:
            raise InputError(
                f"{file}, line {line}: positions have shape {positions.shape}, not [T, 2]",
                "write the clips again",
            )
        found[name] = trajectory
    return found


def _some(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - 3} more" if len(every) > 3 else ""
    return ", ".join(every[:3]) + more
