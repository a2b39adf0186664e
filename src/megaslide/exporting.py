"""A checkpoint as a folder for others: weights, config.json and scheduler, and nothing of training.

Tensors are read and written one at a time, so a model that was trained out of a store on disk
exports on the same machine. In fp32 the values are those that training keeps between steps, the
masters or their average, and not the bf16 ones that it computed with.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from megaslide import runs
from megaslide.config import Config, load_config
from megaslide.errors import InputError
from megaslide.models.network import saved_network
from megaslide.models.pretrained.original_keys import original_keys
from megaslide.ops.adamw.reference import join_master
from megaslide.weights import (
    CONFIG_NAME,
    MAX_SHARD_BYTES,
    TensorSpec,
    WeightFiles,
    read_json,
    write_safetensors,
    write_weights,
)

Weights = Literal["ema", "raw"]
Layout = Literal["diffusers", "original"]
Tensors = Iterator[tuple[str, Tensor]]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCHEDULER = Path("scheduler") / "scheduler_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    """The folder of config.json and the weights; in the original layout the file."""
    class_name: str
    checkpoint: Path
    weights: Weights
    parameters: int
    nbytes: int
    from_masters: bool
    """Whether values come from the fp32 state of training where the saved weights are bf16."""
    converted: bool
    """Whether attention was converted, so that diffusers alone loads the base model."""


def export(
    source: Path,
    out: Path,
    *,
    weights: Weights | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    layout: Layout = "diffusers",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write a run's transformer to `out`, for `from_pretrained(out, subfolder="transformer")`.

    A second expert goes to `out/transformer_2`, beside the first one's. Parts that a class keeps in
    fp32 stay so in bf16.

    Args:
        source: a run's folder (its latest checkpoint) or a `checkpoint-N`.
        out: made if need be.
        weights: averaged or not; None takes averaged ones where the checkpoint has them.
        dtype: of floating-point tensors; None leaves each as it was saved.
        layout: `original` writes one file, `transformer.safetensors`, with the names of the model's
            original repository.
        max_shard_bytes: larger models are written as several files and an index.

    Raises:
        InputError: no complete checkpoint, no averaged weights where asked for, a model in `out`
            already, or one whose original names are not known.
    """
    checkpoint = runs.find_checkpoint(source)
    config = load_config(checkpoint / runs.CONFIG)
    saved = checkpoint / runs.weights_folder(
        checkpoint, None if weights is None else weights == "ema"
    )
    pretrained = config.model.pretrained_model_name_or_path is not None
    target = out / (config.model.subfolder if pretrained else "transformer")
    values = read_json(saved / CONFIG_NAME, "give a whole checkpoint")
    files = WeightFiles(saved)
    held = files.specs()
    specs = held if dtype is None else _wanted(held, _dtypes(saved, config, DTYPES[dtype]))
    state = _FineState(checkpoint / "optimizer", averaged=saved.name == "ema")
    tensors = _tensors(files, specs, state)
    if layout == "original":
        target = target.with_name(f"{target.name}.safetensors")
        _write_original(target, str(values.get("_class_name")), specs, tensors)
    else:
        _write_folder(target, values, specs, tensors, max_shard_bytes)
        _copy(checkpoint / SCHEDULER, out / SCHEDULER)
    return Exported(
        path=target, class_name=str(values.get("_class_name")), checkpoint=checkpoint,
        weights="ema" if saved.name == "ema" else "raw",
        parameters=sum(torch.Size(spec.shape).numel() for spec in specs.values()),
        nbytes=sum(spec.nbytes for spec in specs.values()), from_masters=state.used,
        converted="attention" in values,
    )  # fmt: skip


def _write_folder(
    folder: Path, config: dict[str, Any], specs: dict[str, TensorSpec], tensors: Tensors,
    max_shard_bytes: int,
) -> None:  # fmt: skip
    if (folder / CONFIG_NAME).exists():
        raise InputError(f"{folder}: holds a model already", "give another folder")
    write_weights(folder, specs, tensors, max_shard_bytes)
    # Last, because a folder without it is no model: what was interrupted is not taken for whole.
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def _write_original(
    path: Path, class_name: str, specs: dict[str, TensorSpec], tensors: Tensors
) -> None:
    if path.exists():
        raise InputError(f"{path}: exists already", "give another folder")
    names = original_keys(class_name, specs)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".partial-{path.name}")
    try:
        renamed = {names[name]: spec for name, spec in specs.items()}
        write_safetensors(unfinished, renamed, ((names[name], t) for name, t in tensors))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


class _FineState:
    """The fp32 values behind bf16 weights, from the checkpoint's optimizer state."""

    def __init__(self, folder: Path, *, averaged: bool) -> None:
        self._kinds = ("ema",) if averaged else ("master", "residual")
        self._home: dict[str, Path] = {}
        self.used = False
        for path in sorted(folder.glob("unit-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._home |= dict.fromkeys(file.keys(), path)

    def refine(self, name: str, weight: Tensor) -> Tensor:
        """fp32 of a bf16 weight: its master, or its average; itself where it was not trained."""
        for kind in self._kinds:
            key = f"{kind}.{name}"
            if key not in self._home:
                continue
            with safe_open(self._home[key], framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
            self.used = True
            tensor = tensor.reshape(weight.shape)
            return join_master(weight, tensor) if kind == "residual" else tensor
        return weight.float()


def _tensors(files: WeightFiles, specs: dict[str, TensorSpec], state: _FineState) -> Tensors:
    for name, tensor in files.read(specs):
        wanted = specs[name].dtype
        if tensor.dtype == torch.bfloat16 and wanted == torch.float32:
            tensor = state.refine(name, tensor)
        yield name, tensor.to(wanted)


def _dtypes(saved: Path, config: Config, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What each parameter has in a model that is loaded in `dtype`."""
    model = saved_network(saved, config).build(dtype)
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def _wanted(held: dict[str, TensorSpec], dtypes: dict[str, torch.dtype]) -> dict[str, TensorSpec]:
    """The specs of the files, in the dtypes of the model where they are floating point."""
    return {
        name: TensorSpec(spec.shape, dtypes.get(name, spec.dtype))
        if spec.dtype.is_floating_point
        else spec
        for name, spec in held.items()
    }


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
