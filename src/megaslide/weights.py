"""A model on disk in the diffusers layout, so that tools that read such folders read ours.

A folder holds config.json (with `_class_name`) and either one safetensors file or several with an
index. Writing goes shard by shard from an iterator and reading tensor by tensor, so that a model
that barely fits the host's memory, or does not, can be saved and loaded: one tensor at a time is
held. safetensors' own writer wants all tensors of a file at once, so the (simple) format is
written here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaslide.errors import InputError

CONFIG_NAME = "config.json"
WEIGHTS_STEM = "diffusion_pytorch_model"
WEIGHTS_NAME = f"{WEIGHTS_STEM}.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""diffusers' default."""
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""safetensors' names."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a file's header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_config(folder: Path, class_name: str, values: Mapping[str, Any]) -> None:
    """Write config.json with `values` and the class that reads them; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"_class_name": class_name, **values}, indent=2) + "\n"
    (folder / CONFIG_NAME).write_text(text)


def write_weights(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors unchanged, replacing earlier weights in `folder`; makes the folder.

    Args:
        specs: every tensor by name, in the order in which `tensors` yields them.
        tensors: names and CPU tensors; one at a time is held.
        max_shard_bytes: more than this goes into several files and an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{WEIGHTS_STEM}*.safetensors*"):
        stale.unlink()
    sizes = {name: spec.nbytes for name, spec in specs.items()}
    shards = _split(sizes, max_shard_bytes)
    files = [WEIGHTS_NAME]
    if len(shards) > 1:
        count = len(shards)
        files = [f"{WEIGHTS_STEM}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        _write_index(folder / INDEX_NAME, dict(zip(files, shards, strict=True)), sizes)
    source = iter(tensors)
    for file, names in zip(files, shards, strict=True):
        shard = (next(source) for _ in names)
        write_safetensors(folder / file, {name: specs[name] for name in names}, shard)


def write_safetensors(
    path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write one file; `tensors` gives each of `specs` once, in any order, one held at a time.

    Raises:
        ValueError: a tensor that is not as its spec says, or that is missing.
    """
    # Large items first, as safetensors does, so that every tensor is aligned to its own items.
    ordered = sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in ordered:
        entry = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape)}
        header[name] = entry | {"data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    missing = set(specs)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            if specs.get(name) != TensorSpec(tuple(tensor.shape), tensor.dtype):
                raise ValueError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}")
            _write_tensor(file, 8 + len(text) + header[name]["data_offsets"][0], tensor)
            missing.discard(name)
    if missing:
        raise ValueError(f"{path}: {sorted(missing)[0]!r} was not given")


class WeightFiles:
    """A folder's weights, read by name; nothing stays open or in memory between calls.

    Raises:
        InputError: missing or damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}
        """The file of each tensor."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_files(folder):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a dict: it has no iterator)
                    self.files[name] = path
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor, file by file.

        Raises:
            InputError: a dtype that is not known here.
        """
        known = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        found: dict[str, TensorSpec] = {}
        for path in dict.fromkeys(self.files.values()):
            with _opened(path) as file:
                for name in (n for n, home in self.files.items() if home == path):
                    dtype = file.get_slice(name).get_dtype()
                    if dtype not in known:
                        raise InputError(f"{path}: {name!r} is {dtype}", f"use {sorted(known)}")
                    found[name] = TensorSpec(self.shapes[name], known[dtype])
        return found

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors, file by file.

        A file is mapped while it is read from and no longer, because what is mapped counts as
        the process's memory.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for path, members in by_file.items():
            with _opened(path) as file:
                for name in members:
                    yield name, file.get_tensor(name)


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor, Path]]:
    """Yield (name, tensor, file) of every tensor in the folder's weight files.

    Raises:
        InputError: missing or damaged files.
    """
    weights = WeightFiles(folder)
    for name, tensor in weights.read(weights.files):
        yield name, tensor, weights.files[name]


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


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise InputError(f"{path}: damaged: {error}", "copy or save the file again") from None


def _write_tensor(file: BinaryIO, offset: int, tensor: Tensor) -> None:
    file.seek(offset)
    flat = tensor.detach().contiguous().reshape(-1)
    file.write(flat.view(torch.uint8).numpy().data)


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
