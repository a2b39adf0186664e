"""The store's state as files, unit by unit, so that no second copy of the model is ever in RAM.

Weights use the diffusers layout. The rest of the state is one safetensors file per unit with
per-parameter names, so that it does not depend on how a version lays out its regions.
"""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from megaslide.errors import InputError
from megaslide.streaming.layout import ParameterSlice
from megaslide.streaming.store import Store, UnitState
from megaslide.weights import (
    MAX_SHARD_BYTES,
    TensorSpec,
    WeightFiles,
    write_safetensors,
    write_weights,
)

STEPS = "steps.json"


def save_weights(model: nn.Module, store: Store, folder: Path) -> None:
    """Write config.json (when the model can) and the weights the store serves now."""
    folder.mkdir(parents=True, exist_ok=True)
    save_config = getattr(model, "save_config", None)
    if callable(save_config):
        save_config(folder)
    specs = {p.name: _spec(p.shape, p.dtype) for unit in store.units for p in unit.parameters}
    write_weights(folder, specs, store.named_weights(), MAX_SHARD_BYTES)


def load_weights(store: Store, folder: Path, keep: Collection[str] = ()) -> None:
    """Fill the store from `save_weights`' files; masters become the saved weights.

    Args:
        keep: parameters that the files do not have; they stay what they are.

    Raises:
        InputError: files are missing, damaged or of another model; nothing was changed.
    """
    files = WeightFiles(folder)
    expected = {p.name: p for unit in store.units for p in unit.parameters if p.name not in keep}
    _check(files, expected)
    for index, unit in enumerate(store.units):
        parameters = {p.name: p for p in unit.parameters if p.name in expected}
        with store.unit(index, store.value_kinds, write=True) as state:
            for name, value in files.read(parameters):
                state.write(parameters[name], value)


def save_optimizer(store: Store, folder: Path) -> None:
    """Write masters or residuals, moments, EMA and step counts of every trainable parameter."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, unit in enumerate(store.units):
        with store.unit(index, store.optimizer_kinds) as state:
            tensors = {
                f"{kind}.{parameter.name}": tensor
                for parameter in unit.trainable
                for kind, tensor in _parts(store, state, parameter).items()
            }
            specs = {name: _spec(t.shape, t.dtype) for name, t in tensors.items()}
            write_safetensors(_unit_file(folder, index), specs, tensors.items())
    (folder / STEPS).write_text(json.dumps(store.steps))


def load_optimizer(store: Store, folder: Path) -> None:
    """Restore `save_optimizer`'s files into a store whose weights are loaded already.

    Raises:
        InputError: a file is missing, or was saved with another model or state format.
    """
    for index, unit in enumerate(store.units):
        file = _unit_file(folder, index)
        if not file.exists():
            raise InputError(f"{file}: missing; the optimizer state is incomplete")
        with (
            safe_open(file, framework="pt") as tensors,
            store.unit(index, store.optimizer_kinds, write=True) as state,
        ):
            for parameter in unit.trainable:
                for kind, target in _parts(store, state, parameter).items():
                    target.copy_(_tensor(tensors, f"{kind}.{parameter.name}", target, file))
    store.steps[:] = json.loads((folder / STEPS).read_text())


def _parts(store: Store, state: UnitState, parameter: ParameterSlice) -> dict[str, torch.Tensor]:
    parts = {kind: state.part(kind, parameter) for kind in store.optimizer_kinds}
    return {kind: part for kind, part in parts.items() if part is not None}


def _unit_file(folder: Path, index: int) -> Path:
    return folder / f"unit-{index:05d}.safetensors"


def _spec(shape: torch.Size, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(tuple(shape), dtype)


def _check(files: WeightFiles, parameters: dict[str, ParameterSlice]) -> None:
    fix = "give a checkpoint of this model and configuration"
    for name, file in files.files.items():
        if name not in parameters:
            raise InputError(f"{file}: holds {name!r}, which this model does not have", fix)
        found, expected = files.shapes[name], tuple(parameters[name].shape)
        if found != expected:
            raise InputError(f"{file}: {name!r} is {found}, this model has {expected}", fix)
    if missing := parameters.keys() - files.files.keys():
        raise InputError(
            f"{files.folder}: {len(missing)} of {len(parameters)} parameters are missing, "
            f"first {sorted(missing)[0]!r}",
            fix,
        )


def _tensor(tensors: safe_open, key: str, like: torch.Tensor, file: Path) -> torch.Tensor:
    fix = "resume with the offload.state_format and train.use_ema that it was saved with"
    if key not in tensors.keys():  # noqa: SIM118 (not a dict)
        raise InputError(f"{file}: no {key!r}; it was saved with another configuration", fix)
    tensor = tensors.get_tensor(key)
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise InputError(
            f"{file}: {key!r} is {tensor.dtype} {tuple(tensor.shape)}, expected {like.dtype} "
            f"{tuple(like.shape)}",
            fix,
        )
    return tensor
