"""The cache on disk: self-describing shards of latents, captions' embeddings, and their index.

A finished clip is written at once to a file of its own under `pending/` and packed into a shard
when enough have gathered, so a killed run loses the one clip it was working on. Every file carries
the records of its clips and appears under its final name only when complete; `index.json` is
derived from them and replaced last, so a cache is either the old one or the new one.

    cache_dir/index.json                   settings, samples, skipped files, notes
    cache_dir/shard-00000.safetensors      a tensor per clip, [windows, C, t, h, w] float32; those
                                           of its first frames, NAME, as <content>.NAME
    cache_dir/text-<hash>.safetensors      tokens [S, D] float32 of all captions, offsets [M + 1],
                                           and where the model takes it pooled [M, P] float32
    cache_dir/pending/<content>.safetensors

Clips are addressed by the sha256 of their file's content: renaming a file or rewriting its caption
costs nothing, and two copies share one entry.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megaslide.errors import InputError
from megaslide.locks import exclusive

FORMAT = 1
"""Version of the layout above."""
INDEX = "index.json"
SHARD_BYTES = 256 * 2**20
"""Pending bytes from which a shard is packed."""
_PENDING, _SUFFIX = "pending", ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRecord:
    """What was done to one clip; stored beside its latents."""

    bucket: str
    """`TxHxW` in pixels."""
    latent_shape: list[int]
    """[C, t, h, w] of each window."""
    starts: list[int]
    """First frame of each window, after resampling."""
    frames_decoded: int
    done: str
    """In words: decoded, resampled, turned, cropped."""
    events: dict[str, str]
    """Anything worth a note in the report, by kind."""


class LatentCache:
    """Clips already encoded with the present settings, and where new ones go.

    Args:
        folder: the cache; created when absent.
        settings: everything latents depend on, as JSON values.
        order: contents in the order they will be added, so that shards come out the same whether or
            not a run was interrupted.

    Raises:
        InputError: the cache was made with other settings, or the folder holds something else.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        order: Sequence[str],
    ) -> None:
        self.folder, self.settings = folder, dict(settings)
        self._begin()
        self.clips: dict[str, ClipRecord] = {}
        self.shard_of: dict[str, str] = {}
        for shard in sorted(folder.glob(f"shard-*{_SUFFIX}")):
            records = _read_records(shard)
            self.clips |= records
            self.shard_of |= dict.fromkeys(records, shard.name)
        self._pending: dict[str, Path] = {}
        self._pending_bytes = 0
        rank = {content: number for number, content in enumerate(order)}
        files = (folder / _PENDING).glob(f"*{_SUFFIX}")
        for file in sorted(files, key=lambda f: (rank.get(f.stem, -1), f.name)):
            self._adopt(file)

    def add(self, content: str, record: ClipRecord, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep one clip's tensors, each with a row per window; on disk when this returns.

        `latents` are [windows, C, t, h, w]; others are conditions on its first frames.
        """
        path = self.folder / _PENDING / f"{content}{_SUFFIX}"
        named = {tensor_name(content, key): value.contiguous() for key, value in tensors.items()}
        _write_tensors(path, named, {content: record})
        self.clips[content] = record
        self._keep(content, path)
        if self._pending_bytes >= SHARD_BYTES:
            self.pack()

    def pack(self) -> None:
        """Move pending clips into the next shard."""
        if not self._pending:
            return
        tensors: dict[str, torch.Tensor] = {}
        for path in self._pending.values():
            tensors |= _read_tensors(path)
        number = 1 + max((int(name[6:11]) for name in self.shard_of.values()), default=-1)
        name = f"shard-{number:05d}{_SUFFIX}"
        _write_tensors(self.folder / name, tensors, {c: self.clips[c] for c in self._pending})
        self.shard_of |= dict.fromkeys(self._pending, name)
        for path in self._pending.values():
            path.unlink()
        self._pending.clear()
        self._pending_bytes = 0

    def captions(self) -> dict[str, dict[str, torch.Tensor]]:
        """What the last finished run made of each caption: `tokens` [L, D], and `pooled` [1, P]."""
        index = read_index(self.folder)
        name = index.get("text")
        if name is None or not (self.folder / name).exists():
            return {}
        text = _read_tensors(self.folder / name)
        rows = {"": 0} | {sample["caption"]: sample["text"] for sample in index["samples"]}
        first, last = text["offsets"][:-1].tolist(), text["offsets"][1:].tolist()
        found = {}
        for caption, row in rows.items():
            found[caption] = {"tokens": text["tokens"][first[row] : last[row]]}
            if "pooled" in text:
                found[caption]["pooled"] = text["pooled"][row : row + 1]
        return found

    def finish(self, index: Mapping[str, Any], text: Mapping[str, torch.Tensor]) -> None:
        """Pack, write the captions' embeddings, and replace the index that ties all together."""
        self.pack()
        digest = hashlib.sha256()
        for tensor in text.values():
            digest.update(tensor.numpy().data)
        name = f"text-{digest.hexdigest()[:16]}{_SUFFIX}"
        if not (self.folder / name).exists():
            _write_tensors(self.folder / name, dict(text), {})
        self._write_index({"complete": True, "text": name, **index})
        for other in self.folder.glob(f"text-*{_SUFFIX}"):
            if other.name != name:
                other.unlink()

    def _begin(self) -> None:
        """Create the folder, or check that it is this cache and clear what a killed run left."""
        if (self.folder / INDEX).exists():
            made = read_index(self.folder)["settings"]
            check_settings(self.folder, made, self.settings)
            for key in made.keys() - self.settings.keys():
                raise InputError(
                    f"cache {self.folder} was made with data.{key}.name={made[key]['name']}, which "
                    "clips added now would lack",
                    f"set data.{key} as it was, or another data.cache_dir",
                )
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise InputError(
                f"data.cache_dir: {self.folder} holds files but no {INDEX}, so it is not a cache",
                "give an empty or new folder",
            )
        (self.folder / _PENDING).mkdir(parents=True, exist_ok=True)
        for leftover in (*self.folder.glob("*.tmp"), *(self.folder / _PENDING).glob("*.tmp")):
            leftover.unlink()
        if not (self.folder / INDEX).exists():
            self._write_index({"complete": False})

    def _adopt(self, file: Path) -> None:
        records = _read_records(file)
        if file.stem in self.shard_of:
            file.unlink()  # packed just before the kill
        else:
            self.clips |= records
            self._keep(file.stem, file)

    def _keep(self, content: str, file: Path) -> None:
        self._pending[content] = file
        self._pending_bytes += file.stat().st_size

    def _write_index(self, index: Mapping[str, Any]) -> None:
        whole = {"format": FORMAT, "settings": self.settings, **index}
        with _complete(self.folder / INDEX) as temporary:
            temporary.write_text(json.dumps(whole, indent=1, ensure_ascii=False), encoding="utf-8")


def preparing(folder: Path) -> contextlib.AbstractContextManager[bool]:
    """Keep other processes from preparing the cache in `folder`, which is created when absent.

    Raises:
        InputError: another is at it.
    """
    taken = InputError(
        f"data.cache_dir: {folder} is being prepared by another process",
        "wait until that has finished",
    )
    return exclusive(folder, taken)


def tensor_name(content: str, key: str) -> str:
    """Name in a shard of a clip's `latents`, or of a condition on its first frames."""
    return content if key == "latents" else f"{content}.{key}"


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a cache, complete or not.

    Raises:
        InputError: there is none, or it is not ours, or of another format.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder}: no {INDEX}", "run `megaslide prepare` first") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"{path}: damaged", "delete the cache and prepare it again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else None
        raise InputError(
            f"{path}: format {found!r}, this version reads {FORMAT}",
            "delete the cache and prepare it again",
        )
    return index


def open_tensors(path: Path) -> Any:
    """A memory-mapped safetensors file of the cache.

    Raises:
        InputError: missing or damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: {error}", "delete the cache and prepare it again") from None


def check_settings(folder: Path, made: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a cache made with other settings, naming every one that differs.

    Raises:
        InputError: `wanted` has a key whose value is not the one in `made`.
    """
    made_flat, wanted_flat = dict(_flat(made)), dict(_flat(wanted))
    differing = [
        f"{key} is {made_flat.get(key)!r} there, {value!r} now"
        for key, value in wanted_flat.items()
        if made_flat.get(key) != value
    ]
    if differing:
        raise InputError(
            f"cache {folder} was made with other settings: {'; '.join(differing)}",
            "set another data.cache_dir, or delete this one to have it made again",
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], records: Mapping[str, ClipRecord]
) -> None:
    plain = {content: dataclasses.asdict(record) for content, record in records.items()}
    # One key only: safetensors writes several in random order, and equal caches should be equal.
    metadata = {"records": json.dumps(plain, ensure_ascii=False)}
    with _complete(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def _read_records(path: Path) -> dict[str, ClipRecord]:
    plain = json.loads(open_tensors(path).metadata()["records"])
    return {content: ClipRecord(**record) for content, record in plain.items()}


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    file = open_tensors(path)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextlib.contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """Write under a temporary name; the final name appears with the whole, flushed content."""
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
