"""A converted model as a folder: the original's tensors copied one by one, the new ones added.

The model is never built with its weights, so one that does not fit the memory converts too. What
training needs of the pipeline besides (its scheduler, and which expert is for which noise) comes
along; autoencoder and text encoders stay where they are.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megaslide.config import AttentionConfig
from megaslide.errors import InputError
from megaslide.models.pretrained.conversion import ENTRY, added_parameters, converted_config
from megaslide.models.pretrained.loading import build_on_meta
from megaslide.models.pretrained.source import PIPELINE, SCHEDULER, Source
from megaslide.weights import CONFIG_NAME, MAX_SHARD_BYTES, TensorSpec, WeightFiles, write_weights


@dataclass(frozen=True, kw_only=True)
class ConvertedFolder:
    """What was written."""

    folder: Path
    """Holds config.json and the weights."""
    base_parameters: int
    added_parameters: int
    converted: int
    """Attention modules that are local now."""


def write_converted(
    source: Source,
    out: Path,
    settings: AttentionConfig,
    *,
    subfolder: str = "transformer",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ConvertedFolder:
    """Write `source` with its attention converted to `out/subfolder`.

    The values of the new parameters are those of `torch.manual_seed(0)`, in the dtype of their
    block's projections: the same conversion twice gives the same files.

    Args:
        source: the original, which is only read.
        out: made if need be; may hold another expert of the same pipeline.
        settings: kind, window, layers, offsets.
        subfolder: name of the transformer's folder.
        max_shard_bytes: larger models are written as several files and an index.

    Raises:
        InputError: `out` holds a model there already, or the model cannot be converted.
    """
    folder = out / subfolder
    if (folder / CONFIG_NAME).exists():
        raise InputError(f"{folder}: holds a model already", "give another folder")
    changed = converted_config(source, settings)
    if changed is source:
        kinds = "set attention.kind to deformable, neighborhood or swin"
        raise InputError(
            f"attention.kind={settings.kind}: nothing of {source.folder} would change",
            "it is converted so already: use it as it is" if ENTRY in source.config else kinds,
        )
    files = WeightFiles(source.folder)
    base = files.specs()
    added, modules = _added(changed, base)
    specs = base | {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in added.items()}
    write_weights(folder, specs, chain(files.read(base), added.items()), max_shard_bytes)
    _copy_pipeline(source, out)
    # Last, because a folder without it is no model: what was interrupted is not taken for whole.
    (folder / CONFIG_NAME).write_text(json.dumps(dict(changed.config), indent=2) + "\n")
    return ConvertedFolder(
        folder=folder,
        base_parameters=_count(base),
        added_parameters=_count(specs) - _count(base),
        converted=modules,
    )


def _added(changed: Source, base: Mapping[str, TensorSpec]) -> tuple[dict[str, Tensor], int]:
    """First values of the new parameters, and in how many attention modules they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_on_meta(changed, torch.float32)
    names = added_parameters(model)
    shapes = {n: p.shape for n, p in model.named_parameters() if n not in names}
    _require_whole(changed, base, shapes)
    added = {
        name: parameter.detach().to(_dtype_beside(name, base))
        for name, parameter in model.named_parameters()
        if name in names
    }
    return added, sum(1 for _ in _local_modules(model))


def _local_modules(model: torch.nn.Module) -> Iterator[str]:
    return (name for name, _ in model.named_modules() if name.endswith(".dsa"))


def _dtype_beside(name: str, base: Mapping[str, TensorSpec]) -> torch.dtype:
    """The dtype of the weights of the attention module that a new parameter belongs to."""
    prefix = name.partition(".dsa.")[0] + ".to_"
    return next(spec.dtype for key, spec in base.items() if key.startswith(prefix))


def _require_whole(
    changed: Source, base: Mapping[str, TensorSpec], shapes: Mapping[str, torch.Size]
) -> None:
    """The files hold the model that config.json describes; better said now than after the copy."""
    wrong = sorted(
        name
        for name in base.keys() | shapes.keys()
        if name not in base or name not in shapes or base[name].shape != tuple(shapes[name])
    )
    if wrong:
        raise InputError(
            f"{changed.folder}: {len(wrong)} tensors do not fit config.json, first {wrong[0]!r}",
            "take config.json and weights from one save",
        )


def _copy_pipeline(source: Source, out: Path) -> None:
    """The files beside the transformer that say how it is trained."""
    for name in (SCHEDULER, Path(PIPELINE)):
        there = source.folder.parent / name
        if there.is_file():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(there, out / name)


def _count(specs: Mapping[str, TensorSpec]) -> int:
    return sum(torch.Size(spec.shape).numel() for spec in specs.values())
