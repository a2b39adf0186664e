"""A part of somebody's pipeline: an autoencoder, an encoder or a tokenizer, in its folder.

What latents and embeddings depend on is in such files, so a cache must know them again: not by
their path, which may be another on the next machine, but by their content.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaslide.errors import InputError
from megaslide.hub import download
from megaslide.weights import CONFIG_NAME, read_json

PIPELINE = "model_index.json"
TRANSFORMERS = ("transformer", "transformer_2")
_CONFIGS = (PIPELINE, *(f"{folder}/{CONFIG_NAME}" for folder in TRANSFORMERS))
WITHOUT_CONFIG = ("tokenizer", "image_processor")
"""Beginnings of the names of folders that need no config.json."""
_PIECES, _PIECE_BYTES = 64, 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A component's folder and what is said of it."""

    folder: Path
    config: Mapping[str, Any]
    """config.json; empty for a tokenizer or image processor."""

    @property
    def config_file(self) -> Path:
        return self.folder / CONFIG_NAME

    @property
    def class_name(self) -> str:
        """As diffusers names it (`_class_name`), or transformers (`architectures`)."""
        names = self.config.get("architectures") or [""]
        return str(self.config.get("_class_name") or names[0])

    def fingerprint(self) -> str:
        """Digest of the folder's files: their names, sizes, and pieces spread over each.

        Pieces, because text encoders have tens of gigabytes; two sets of weights of one size differ
        nearly everywhere.
        """
        digest = hashlib.blake2b(digest_size=8)
        for path in sorted(p for p in self.folder.iterdir() if p.is_file()):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size};".encode())
            with path.open("rb") as file:
                for offset in _offsets(size):
                    file.seek(offset)
                    digest.update(file.read(_PIECE_BYTES))
        return digest.hexdigest()


def find_components(
    name_or_path: str, subfolders: tuple[str, ...], *, key: str, revision: str | None = None
) -> tuple[Component, ...]:
    """Components of one pipeline.

    Args:
        name_or_path: the pipeline's folder, or its id on the hub.
        subfolders: which.
        key: of the configuration that names the pipeline, for messages.
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: not there, or without its config.json.
    """
    root = pipeline_folder(name_or_path, subfolders, revision)
    return tuple(_component(root, subfolder, key) for subfolder in subfolders)


def pipeline_folder(name_or_path: str, subfolders: tuple[str, ...], revision: str | None) -> Path:
    """The pipeline's folder on this machine, downloaded where it is an id on the hub."""
    root = Path(name_or_path).expanduser()
    if root.exists():
        return root
    return download(name_or_path, [*(f"{name}/*" for name in subfolders), *_CONFIGS], revision)


def transformer_config(root: Path, key: str) -> dict[str, Any]:
    """config.json of a pipeline's transformer, which says what family the pipeline is of.

    Where only model_index.json is there, just the class name.

    Raises:
        InputError: the folder says nothing of a transformer.
    """
    for name in TRANSFORMERS:
        if (path := root / name / CONFIG_NAME).is_file():
            return read_json(path, "copy the file again")
    index = root / PIPELINE
    entry = read_json(index, f"give {key} the folder of a whole pipeline").get("transformer")
    if not isinstance(entry, list) or len(entry) != 2:
        raise InputError(f"{index}: names no transformer", f"give {key} a video pipeline's folder")
    return {"_class_name": entry[1]}


def _component(root: Path, subfolder: str, key: str) -> Component:
    folder = root / subfolder
    if not folder.is_dir():
        found = (
            sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        )
        raise InputError(
            f"{folder}: no such folder; {root} has {found or 'no folders'}",
            f"set {key}.pretrained_model_name_or_path to a pipeline that has it",
        )
    if subfolder.startswith(WITHOUT_CONFIG):
        return Component(folder=folder, config={})
    fix = "give a folder in the diffusers layout, as save_pretrained writes it"
    return Component(folder=folder, config=read_json(folder / CONFIG_NAME, fix))


def _offsets(size: int) -> list[int]:
    if size <= _PIECES * _PIECE_BYTES:
        return list(range(0, size, _PIECE_BYTES))
    return [piece * (size - _PIECE_BYTES) // (_PIECES - 1) for piece in range(_PIECES)]


def load_component(component: Component, cls: Any, **options: Any) -> Any:
    """The component's model by its class, whole, for inference.

    Raises:
        InputError: it does not load, or some of its weights are not there.
    """
    try:
        model, report = cls.from_pretrained(component.folder, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{component.folder}: {component.class_name} does not load: {error}",
            "copy the folder again, whole",
        ) from None
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"{component.folder}: {len(missing)} weights are missing, first {missing[0]!r}",
            "take config.json and weights from one save",
        )
    return model.eval().requires_grad_(False)
