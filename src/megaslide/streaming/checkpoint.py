"""The store's state as files, unit by unit, so that saving never needs a second copy in RAM.

Weights use the diffusers layout. The rest of the state is one safetensors file per unit with
per-parameter names, so that it does not depend on how a version lays out its arenas.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from megaslide.errors import InputError
from megaslide.streaming.layout import ParameterSlice
from megaslide.streaming.store import Store
from megaslide.weights import MAX_SHARD_BYTES, read_weights, write_weights


def save_weights(model: nn.Module, store: Store, folder: Path) -> None:
    """Write config.json (when the model can) and the weights the store serves now."""
    folder.mkdir(parents=True, exist_ok=True)
    save_config = getattr(model, "save_config", None)
    if callable(save_config):
        save_config(folder)
    sizes = {p.name: p.nbytes for unit in store.units for p in unit.parameters}
    write_weights(folder, sizes, store.named_weights(), MAX_SHARD_BYTES)


def load_weights(store: Store, folder: Path) -> None:
    """Fill the store from `save_weights`' files; masters become the saved weights."""
    places = {p.name: (i, p) for i, u in enumerate(store.units) for p in u.parameters}
    missing = set(places)
    for name, value, file in read_weights(folder):
        _load_weight(store, places.get(name), name, value, file)
        missing.discard(name)
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} of {len(places)} parameters are missing, "
            f"first {sorted(missing)[0]!r}",
            "give a checkpoint of this model and configuration",
        )


def save_optimizer(store: Store, folder: Path) -> None:
    """Write residuals, moments, EMA and step counts of every trainable parameter."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, unit in enumerate(store.units):
        tensors = {
            f"{kind}.{parameter.name}": tensor
            for parameter in unit.trainable
            for kind, tensor in _state(store, index, parameter).items()
        }
        _save(tensors, folder / f"unit-{index:05d}.safetensors")
    (folder / "steps.json").write_text(json.dumps(store.steps))


def load_optimizer(store: Store, folder: Path) -> None:
    """Restore `save_optimizer`'s files into a store whose weights are loaded already."""
    for index, unit in enumerate(store.units):
        file = folder / f"unit-{index:05d}.safetensors"
        if not file.exists():
            raise InputError(f"{file}: missing; the optimizer state is incomplete")
        with safe_open(file, framework="pt") as tensors:
            for parameter in unit.trainable:
                for kind, target in _state(store, index, parameter).items():
                    target.copy_(_tensor(tensors, f"{kind}.{parameter.name}", target, file))
    store.steps[:] = json.loads((folder / "steps.json").read_text())


def _state(store: Store, unit: int, parameter: ParameterSlice) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for kind in ("exp_avg", "exp_avg_sq", "ema"):
        if kind in store.nbytes:
            state[kind] = parameter.element(store.moments(unit, kind))
    residual = store.parameter_residual(unit, parameter)
    if residual is not None:
        state["residual"] = residual
    return state


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


def _load_weight(
    store: Store, place: tuple[int, ParameterSlice] | None, name: str, value: torch.Tensor,
    file: Path,
) -> None:  # fmt: skip
    if place is None:
        raise InputError(f"{file}: holds {name!r}, which this model does not have")
    unit, parameter = place
    if value.shape != parameter.shape:
        raise InputError(
            f"{file}: {name!r} is {tuple(value.shape)}, this model has {tuple(parameter.shape)}",
            "give a checkpoint of this model and configuration",
        )
    if parameter.trainable:
        store.write_master(unit, parameter, value)
    else:
        store.write_frozen(unit, parameter, value)


def _tensor(tensors: safe_open, key: str, like: torch.Tensor, file: Path) -> torch.Tensor:
    if key not in tensors.keys():  # noqa: SIM118 (not a dict)
        raise InputError(f"{file}: no {key!r}; it was saved with another configuration")
    tensor = tensors.get_tensor(key)
    if tensor.shape != like.shape:
        raise InputError(f"{file}: {key!r} is {tuple(tensor.shape)}, expected {tuple(like.shape)}")
    return tensor
