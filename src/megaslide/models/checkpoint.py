"""Loading a model from a diffusers-layout folder, strictly.

A folder of another model, a missing tensor or a wrong shape is an error that names it, never a
model with some weights left at random.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from megaslide.errors import InputError
from megaslide.weights import CONFIG_NAME, TensorSpec, read_json, read_weights, write_weights

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")


def save_weights(model: nn.Module, folder: Path, max_shard_bytes: int) -> None:
    """Write every parameter and buffer of `model`, on any device, bit for bit."""
    state = model.state_dict()
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in state.items()}
    tensors = ((name, tensor.detach().cpu()) for name, tensor in state.items())
    write_weights(folder, specs, tensors, max_shard_bytes)


def read_config(
    folder: Path, *, class_name: str, parse: Callable[[dict[str, Any]], Parsed]
) -> Parsed:
    """Read config.json of `folder` and hand its values to `parse`.

    Raises:
        InputError: no such file, not JSON, of another class, or refused by `parse`.
    """
    path = folder / CONFIG_NAME
    values = read_json(path, "give a folder written by save_pretrained")
    found = values.get("_class_name")
    if found != class_name:
        raise InputError(f"{path}: holds a {found}, not a {class_name}", f"load it with {found}")
    try:
        return parse(values)
    except InputError as error:
        raise InputError(f"{path}: {error.problem}", error.fix) from None
    except TypeError as error:
        raise InputError(f"{path}: a value of the wrong type: {error}") from None


def load_weights(model: nn.Module, folder: Path) -> None:
    """Replace every parameter of `model` (which may be on `meta`) by the folder's tensors.

    Raises:
        InputError: missing or damaged files; missing, unexpected or misshapen tensors.
    """
    expected = model.state_dict()
    state = {name: tensor for name, tensor, _ in read_weights(folder)}
    _check_keys(folder, expected, state)
    model.load_state_dict(state, assign=True)
    logger.info("loaded %d tensors from %s", len(state), folder)


def _check_keys(folder: Path, expected: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    missing, unexpected = expected.keys() - state.keys(), state.keys() - expected.keys()
    if missing or unexpected:
        raise InputError(
            f"{folder}: weights do not fit config.json: {_some(missing)} missing, "
            f"{_some(unexpected)} unexpected",
            "take config.json and weights from one save",
        )
    for key, tensor in expected.items():
        if tensor.shape != state[key].shape:
            found, want = list(state[key].shape), list(tensor.shape)
            raise InputError(f"{folder}: tensor {key} is {found}; config.json asks for {want}")


def _some(keys: set[str]) -> str:
    shown = sorted(keys)[:3]
    return f"{len(keys)} ({', '.join(shown)}{', ...' if len(keys) > 3 else ''})" if keys else "none"
