"""What a model's folder holds and what training it would need.

Read from config.json and the headers of the weight files; the model is built without memory.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from megaslide.config import Config
from megaslide.errors import InputError
from megaslide.models.dit import VideoDiT
from megaslide.models.network import saved_network
from megaslide.models.pretrained import (
    CONVERTIBLE,
    FAMILIES,
    Source,
    build_on_meta,
    family_of,
    find_source,
)
from megaslide.streaming.layout import UnitLayout, find_blocks, plan_units
from megaslide.streaming.memory import planned_device_bytes
from megaslide.streaming.records import FORMATS, planned_bytes

SLOTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A transformer in a folder; sizes for training in bf16."""

    folder: str
    class_name: str
    family: str | None
    """How it is trained by the command line; None: in a loop of one's own."""
    refused: str | None
    """Why the command line does not train it, if so."""
    parameters: int
    blocks: dict[str, int]
    """How many each list of blocks has."""
    largest_block: str
    largest_block_bytes: int
    attention: dict[str, Any]
    """`kind: dense`, the `attention` entry of a converted model, or kind and window of ours."""
    convertible: int
    """Attention modules that `megaslide convert` would make local."""
    state_bytes: dict[str, int]
    """Of training, by `offload.state_format`."""
    device_bytes: int
    """On the device besides activations, with two slots."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(path: str, subfolder: str = "transformer") -> Description:
    """Describe the transformer in a pipeline's folder, its own folder, or a checkpoint.

    Raises:
        InputError: nothing there, something else there, or no blocks that could stream.
    """
    source = find_source(path, subfolder=subfolder)
    model = _build(source)
    units = _units(source, model)
    family, refused = _family(source)
    largest = max(units[1:], key=lambda unit: unit.weight_nbytes)
    return Description(
        folder=str(source.folder), class_name=source.class_name, family=family, refused=refused,
        parameters=sum(p.numel for unit in units for p in unit.parameters),
        blocks=_lists([unit.name for unit in units[1:]]),
        largest_block=largest.name, largest_block_bytes=largest.weight_nbytes,
        attention=_attention(source, model),
        convertible=0 if "attention" in source.config else _convertible(source, model),
        state_bytes={f: _state_bytes(units, f) for f in FORMATS},
        device_bytes=sum(planned_device_bytes(units, SLOTS).values()),
    )  # fmt: skip


def _attention(source: Source, model: nn.Module) -> dict[str, Any]:
    if isinstance(model, VideoDiT):
        return {"kind": model.config.attention_kind, "window": list(model.config.window)}
    attention = source.config.get("attention", {"kind": "dense"})
    return attention if isinstance(attention, dict) else {"kind": str(attention)}


def _build(source: Source) -> nn.Module:
    if source.class_name == VideoDiT.__name__:
        return saved_network(source.folder, Config()).build(torch.bfloat16)
    return build_on_meta(source, torch.bfloat16)


def _units(source: Source, model: nn.Module) -> list[UnitLayout]:
    try:
        resident, blocks = plan_units(model, find_blocks(model))
    except ValueError as error:
        raise InputError(f"{source.folder}: {error}", "stream it from Python") from None
    return [unit.layout for unit in (resident, *blocks)]


def _family(source: Source) -> tuple[str | None, str | None]:
    if source.class_name == VideoDiT.__name__:
        return source.class_name, None
    if source.class_name not in FAMILIES:
        return None, None
    try:
        return type(family_of(source.class_name)(source.config)).__name__, None
    except InputError as error:
        return FAMILIES[source.class_name].__name__, error.problem


def _lists(names: list[str]) -> dict[str, int]:
    lists = [name.rpartition(".")[0] for name in names]
    return {name: lists.count(name) for name in dict.fromkeys(lists)}


def _convertible(source: Source, model: nn.Module) -> int:
    site = CONVERTIBLE.get(source.class_name)
    if site is None:
        return 0
    return sum(len(list(model.get_submodule(name).children())) for name in site.modules)


def _state_bytes(units: list[UnitLayout], state_format: Any) -> int:
    kinds = planned_bytes(units, state_format=state_format, ema=False)
    return sum(nbytes for kind, nbytes in kinds.items() if kind != "gradients")
