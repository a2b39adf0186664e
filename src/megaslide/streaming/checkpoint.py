"""The store's state as files, unit by unit, so that saving never needs a second copy in RAM.

Weights use the diffusers layout (`config.json`, `diffusion_pytorch_model*.safetensors`, an index
when there are several shards). The rest of the state is one safetensors file per unit with
per-parameter names, so that it does not depend on how a version lays out its arenas.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from megaslide.errors import InputError
from megaslide.streaming.layout import ParameterSlice
from megaslide.streaming.store import Store

WEIGHTS = "diffusion_pytorch_model"
MAX_SHARD_BYTES = 5 * 1000**3  # diffusers' default


def save_weights(model: nn.Module, store: Store, folder: Path) -> None:
    """Write config.json (when the model can) and the weights the store serves now."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_config"):
        model.save_config(folder)
    shards = list(_shards(store))
    if len(shards) == 1:
        _save(shards[0], folder / f"{WEIGHTS}.safetensors")
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{WEIGHTS}-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, folder / file)
        where |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def load_weights(store: Store, folder: Path) -> None:
    """Fill the store from `save_weights`' files; masters become the saved weights."""
    places = {p.name: (i, p) for i, u in enumerate(store.units) for p in u.parameters}
    missing = set(places)
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                _load_weight(store, places.get(name), name, tensors.get_tensor(name), file)
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
    kinds = [k for k in ("exp_avg", "exp_avg_sq", "ema") if k in store.nbytes]
    state = {kind: parameter.element(store.moments(unit, kind)) for kind in kinds}
    residual = store.parameter_residual(unit, parameter)
    return state if residual is None else {**state, "residual": residual}


def _shards(store: Store) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, weight in store.named_weights():
        if shard and size + weight.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = weight
        size += weight.nbytes
    yield shard


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


def _weight_files(folder: Path) -> list[Path]:
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / f"{WEIGHTS}.safetensors"
    if not single.exists():
        raise InputError(f"{folder}: no {WEIGHTS}.safetensors", "give a folder with saved weights")
    return [single]


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
