"""A model on disk in the diffusers layout, so that tools that read such folders read ours.

A folder holds config.json (with `_class_name`) and either one safetensors file or several with an
index. Writing goes shard by shard from an iterator and reading tensor by tensor, so that a model
that barely fits the host's memory can be saved and loaded without a second copy of it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megaslide.errors import InputError

CONFIG_NAME = "config.json"
WEIGHTS_STEM = "diffusion_pytorch_model"
WEIGHTS_NAME = f"{WEIGHTS_STEM}.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""diffusers' default."""


def write_config(folder: Path, class_name: str, values: Mapping[str, Any]) -> None:
    """Write config.json with `values` and the class that reads them; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"_class_name": class_name, **values}, indent=2) + "\n"
    (folder / CONFIG_NAME).write_text(text)


def write_weights(
    folder: Path,
    sizes: Mapping[str, int],
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors unchanged, replacing earlier weights in `folder`; makes the folder.

    Args:
        sizes: bytes of every tensor by name, in the order in which `tensors` yields them.
        tensors: names and contiguous CPU tensors; at most one shard of them is held at a time.
        max_shard_bytes: more than this goes into several files and an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{WEIGHTS_STEM}*.safetensors*"):
        stale.unlink()
    shards = _split(sizes, max_shard_bytes)
    files = [WEIGHTS_NAME]
    if len(shards) > 1:
        count = len(shards)
        files = [f"{WEIGHTS_STEM}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        _write_index(folder / INDEX_NAME, dict(zip(files, shards, strict=True)), sizes)
    source = iter(tensors)
    for file, names in zip(files, shards, strict=True):
        shard = dict(next(source) for _ in names)
        save_file(shard, folder / file, metadata={"format": "pt"})


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor, Path]]:
    """Yield (name, tensor, file) of every tensor in the folder's weight files.

    Raises:
        InputError: missing or damaged files.
    """
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (not a dict: it has no iterator)
                    yield key, file.get_tensor(key), path
        except SafetensorError as error:
            raise InputError(f"{path}: damaged: {error}", "copy or save the file again") from None


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: unreadable, not JSON, or not an object; with `fix` as the advice.
    """
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", fix) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON: {error}", fix) from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: the top level is a {type(values).__name__}, not an object", fix)
    return values


def _split(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, nbytes in sizes.items():
        if shards[-1] and used + nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += nbytes
    return shards


def _write_index(path: Path, shards: Mapping[str, list[str]], sizes: Mapping[str, int]) -> None:
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=2) + "\n")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the folder's weights.

    Raises:
        InputError: no weights in this layout, or an index that names files which are not there.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    fix = f"the folder needs {WEIGHTS_NAME}, or {INDEX_NAME} with its files"
    index = read_json(folder / INDEX_NAME, fix)
    files = [folder / name for name in sorted(set(index.get("weight_map", {}).values()))]
    if missing := [path.name for path in files if not path.is_file()]:
        raise InputError(f"{folder}: files {missing} of the index are missing", "copy them there")
    return files
