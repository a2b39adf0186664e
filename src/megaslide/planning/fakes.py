"""Tensors without data in a model's places, and what tells two of its blocks apart.

All of it is for use within a `FakeTensorMode`: what is made here has a shape, strides, a dtype and
a storage with an identity, and takes no memory.
"""

import dataclasses
import functools
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megaslide.streaming.layout import ParameterUse, Unit

Tensor = torch.Tensor


class Saved:
    """The storages that autograd keeps for its backward.

    Args:
        known: tensors whose storages are there anyway and do not count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {storage_of(t) for t in known}
        self._held: dict[int, Tensor] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        def pack(tensor: Tensor) -> Tensor:
            self._held.setdefault(storage_of(tensor), tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def nbytes(self, without: Collection[int] = ()) -> int:
        """Bytes of the storages kept, each once."""
        left = self._known.union(without)
        kept = [t for key, t in self._held.items() if key not in left]
        return sum(t.untyped_storage().nbytes() for t in kept)


def fake_parameters(unit: Unit) -> dict[str, Tensor]:
    """By name, as the engine has them on the device: in their compute dtypes."""
    return {
        p.name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.trainable)
        for p in unit.layout.parameters
    }


def fake_like(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)


@contextmanager
def placed(places: Sequence[tuple[ParameterUse, Tensor]]) -> Iterator[None]:
    before = [(use, use.owner._parameters[use.key]) for use, _ in places]
    for use, tensor in places:
        parameters: dict[str, Any] = use.owner._parameters
        parameters[use.key] = tensor
    try:
        yield
    finally:
        for use, parameter in before:
            use.owner._parameters[use.key] = parameter


@contextmanager
def fake_buffers(model: nn.Module) -> Iterator[None]:
    before = [(m._buffers, key, b) for m in model.modules() for key, b in m._buffers.items()]
    for buffers, key, buffer in before:
        buffers[key] = fake_like(buffer)
    try:
        yield
    finally:
        for buffers, key, buffer in before:
            buffers[key] = buffer


def parameter_at(use: ParameterUse) -> Tensor:
    parameter = use.owner._parameters[use.key]
    assert parameter is not None
    return parameter


def storage_of(tensor: Tensor) -> int:
    """Identity of its memory, valid while some tensor on it lives."""
    return tensor.untyped_storage()._cdata


def geometry_of(tensor: Tensor) -> Hashable:
    offset, needs = tensor.storage_offset(), tensor.requires_grad
    return tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, needs


def settings_of(block: nn.Module) -> Hashable:
    """Classes and plain attributes of a block's modules: what its forward may depend on."""
    return tuple(
        (path, type(module), plain({k: v for k, v in vars(module).items() if k[0] != "_"}))
        for path, module in block.named_modules()
    )


def plain(value: Any) -> Hashable:
    """Something hashable that differs where the values do, or the type where none can tell."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return tuple((str(k), plain(v)) for k, v in value.items())
    if isinstance(value, functools.partial):
        return plain((value.func, value.args, value.keywords))
    if dataclasses.is_dataclass(value):
        return repr(value)
    return type(value), getattr(value, "__qualname__", None)
