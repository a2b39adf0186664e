"""How a model's own parameters come into the store, block by block.

A block's tensors leave the module as soon as the store has them, so a model that is in RAM never
needs twice its weights. One that would not fit there is built on the meta device; its blocks then
come into being one at a time, are initialised, stored and dropped, or stay zero until a checkpoint
is loaded.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import nn

from megaslide.streaming.layout import ParameterSlice, ParameterUse, Unit
from megaslide.streaming.store import Store

Initialiser = Callable[[nn.Module], object]
"""Sets the parameters that a module holds itself, as in `nn.Module.apply`."""


def reset_parameters(module: nn.Module) -> None:
    """torch's own initialisation of a module that holds parameters.

    Raises:
        ValueError: the module has no `reset_parameters`; write an initialiser that knows it.
    """
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(
            f"{type(module).__name__} holds parameters and has no reset_parameters(); "
            "pass an init_weights to megaslide.stream that sets them"
        )
    reset()


def fill_store(store: Store, units: Sequence[Unit], init_weights: Initialiser | None) -> None:
    """Store every unit's parameters; those of blocks become placeholders on the meta device."""
    for index, unit in enumerate(units):
        if init_weights is not None:
            _initialise(unit, init_weights)
        held = {p.name: use.owner._parameters[use.key] for use, p in unit.uses}
        values = {name: v for name, v in held.items() if v is not None and not v.is_meta}
        if values:
            with store.unit(index, store.value_kinds, write=True) as state:
                for parameter in unit.layout.parameters:
                    if parameter.name in values:
                        state.write(parameter, values[parameter.name].detach())
        _to_meta(unit)
        _trim_heap()


def _initialise(unit: Unit, init_weights: Initialiser) -> None:
    """Give the unit's meta parameters memory and first values; tied places share them."""
    on_meta = [(use, p) for use, p in unit.uses if _held(use).is_meta]
    fresh: dict[str, nn.Parameter] = {}
    for use, piece in on_meta:
        if piece.name not in fresh:
            fresh[piece.name] = _in_memory(piece, _held(use).dtype)
        use.owner._parameters[use.key] = fresh[piece.name]
    with torch.no_grad():
        for owner in {id(use.owner): use.owner for use, _ in on_meta}.values():
            init_weights(owner)


def _to_meta(unit: Unit) -> None:
    """Leave placeholders: shapes stay visible, and reading one outside its block is an error."""
    for use, piece in unit.uses:
        empty = torch.empty(piece.shape, dtype=piece.dtype, device="meta")
        use.owner._parameters[use.key] = nn.Parameter(empty, requires_grad=piece.trainable)


def _in_memory(piece: ParameterSlice, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(piece.shape, dtype=dtype), requires_grad=piece.trainable)


def _trim_heap() -> None:
    """Return freed memory to the system: glibc would keep a part of every block, in sum all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _held(use: ParameterUse) -> nn.Parameter:
    parameter = use.owner._parameters[use.key]
    assert parameter is not None
    return parameter
