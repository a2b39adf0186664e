"""What a training step of a model costs, from shapes alone.

Per streamed unit (the resident unit and each block): parameters, bytes, FLOP, and the activations
that wait for the backward pass. Blocks and units are the engine's own (`streaming.layout`), state
and device bytes are the engine's own arithmetic (`streaming.store`, `streaming.memory`), so a plan
made from this cannot differ from what runs. Nothing of the model is allocated.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from megaslide.errors import InputError
from megaslide.planning.dry_run import Call, Pass, Work, dry_run
from megaslide.streaming.chunks import require_cuttable
from megaslide.streaming.layout import Unit, UnitLayout, find_blocks, plan_units
from megaslide.streaming.memory import planned_device_bytes
from megaslide.streaming.store import StorePlan, StoreSettings, plan_store

__all__ = ["ModelCosts", "UnitCosts", "UnknownCostsError", "model_costs"]


class UnknownCostsError(InputError):
    """A forward that depends on the values of its inputs, so that shapes do not tell its costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """One unit's part of a training step on the given inputs."""

    name: str
    calls: int
    """Times that the forward of the model runs it; 1 for the resident unit."""
    parameters: int
    trainable_parameters: int
    weight_bytes: int
    """What one copy to the device moves, the layout's padding included."""
    gradient_bytes: int
    """What one copy from the device moves."""
    forward_flop: int
    """Of all its calls."""
    backward_flop: int
    """Of all its calls, without recompute; forward and backward are otherwise plain autograd's."""
    recompute_flop: int
    """One more forward for a block that has a backward; nothing for the resident unit, which keeps
    its activations."""
    boundary_bytes: int
    """Inputs that it alone receives, which wait from its forward to its backward; none for frozen
    blocks before which nothing learns."""
    working_bytes: int
    """A block: what autograd keeps between its recompute and its backward, inputs not counted,
    the most of its calls and of the chunks that a call is computed in. The resident unit: what it
    keeps from forward to backward. Temporaries of single operations come on top."""

    @property
    def flop(self) -> int:
        """Of a whole training step."""
        return self.forward_flop + self.recompute_flop + self.backward_flop


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    """A model's units; the resident one is first, then the blocks in definition order."""

    units: tuple[UnitCosts, ...]
    order: tuple[int, ...]
    """Units of the blocks in the order in which the forward calls them."""
    shared_bytes: int
    """Inputs that several calls of blocks receive, such as the text and rotary tables; each is on
    the device once, from forward to backward."""
    layouts: tuple[UnitLayout, ...] = field(repr=False)
    """Of the units, in the same order."""

    @property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.units)

    @property
    def trainable_parameters(self) -> int:
        return sum(unit.trainable_parameters for unit in self.units)

    @property
    def forward_flop(self) -> int:
        return sum(unit.forward_flop for unit in self.units)

    @property
    def backward_flop(self) -> int:
        return sum(unit.backward_flop for unit in self.units)

    @property
    def recompute_flop(self) -> int:
        return sum(unit.recompute_flop for unit in self.units)

    @property
    def flop(self) -> int:
        """Of a whole training step, recompute included."""
        return sum(unit.flop for unit in self.units)

    @property
    def boundary_bytes(self) -> int:
        """What waits from forward to backward for the blocks, what they share included."""
        return self.shared_bytes + sum(unit.boundary_bytes for unit in self.units)

    def store(self, settings: StoreSettings) -> StorePlan:
        """What the store will hold, by kind and tier."""
        return plan_store(self.layouts, settings)

    def arenas(self, slots: int = 2) -> dict[str, int]:
        """Bytes of the device's arenas by kind: weights and gradients in flight."""
        return planned_device_bytes(self.layouts, slots)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the layouts, as JSON-ready types."""
        return {
            "units": [asdict(unit) for unit in self.units],
            "order": list(self.order),
            "shared_bytes": self.shared_bytes,
        }


def model_costs(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    *,
    call: Callable[..., Any] | None = None,
    blocks: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    frames_per_chunk: int | None = None,
) -> ModelCosts:
    """Count a training step of `model` on `inputs`.

    Blocks are recomputed in backward, as they stream. For a step of m micro-batches give one as
    inputs: FLOP and the activations that wait (`boundary_bytes`, and `working_bytes` of the
    resident unit) are m times as much, weights, gradients and `working_bytes` of blocks are not.
    Where shapes do not tell, the most is taken: every token of a mask counts. Operators count as
    their native kernels work, whether those are built here or not.

    Args:
        model: any module with repeated blocks, on the meta device or not; unchanged afterwards.
        inputs: arguments of its forward, by name or by position; of tensors only shapes, strides
            and dtypes count, so they may be on the meta device.
        call: what is called with the inputs instead of the model itself and runs it, such as a
            denoiser around it.
        blocks: names as in `megaslide.stream`; None finds them.
        dtype: compute dtype of trainable parameters as in `megaslide.stream`; None keeps theirs.
        frames_per_chunk: as in `megaslide.stream`. A block's FLOP are then the sum over its chunks,
            attention of the frames that two of them are given counted twice, and its
            `working_bytes` those of the largest chunk.

    Raises:
        InputError: `frames_per_chunk` for blocks that cannot be computed in chunks.
        ValueError: no blocks found, or a name that is not there.
        UnknownCostsError: the forward depends on values of its inputs, which shapes do not tell.
    """
    resident, streamed = plan_units(model, find_blocks(model, blocks), dtype)
    units = [resident, *streamed]
    if frames_per_chunk is not None:
        require_cuttable({unit.layout.name: unit.module for unit in streamed})
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    try:
        done = dry_run(call or model, args, kwargs, model, units, frames_per_chunk)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnknownCostsError(
            f"{type(model).__name__}: its forward asks for values of its tensors ({error}), which "
            "shapes alone do not tell",
            "leave out the input whose values it looks at, if it can do without; its costs cannot "
            "be known beforehand otherwise",
        ) from error
    return _summed(units, done)


def _summed(units: Sequence[Unit], done: Pass) -> ModelCosts:
    receivers = Counter(storage for call in done.calls for storage in call.inputs)
    shared = {
        storage: nbytes
        for call in done.calls
        for storage, nbytes in call.inputs.items()
        if receivers[storage] > 1
    }
    costs = [_unit_costs(units[0], [done.resident], boundary=0)]
    for number, unit in enumerate(units[1:], start=1):
        calls = [call for call in done.calls if call.unit == number]
        own = sum(_own_bytes(call, shared) for call in calls)
        work = [call.work for call in calls]
        costs.append(_unit_costs(unit, work, boundary=own))
    return ModelCosts(
        units=tuple(costs), order=tuple(call.unit for call in done.calls),
        shared_bytes=sum(shared.values()), layouts=tuple(unit.layout for unit in units),
    )  # fmt: skip


def _own_bytes(call: Call, shared: Mapping[int, int]) -> int:
    return sum(nbytes for storage, nbytes in call.inputs.items() if storage not in shared)


def _unit_costs(unit: Unit, calls: Sequence[Work], *, boundary: int) -> UnitCosts:
    layout = unit.layout
    return UnitCosts(
        name=layout.name,
        calls=len(calls),
        parameters=sum(p.numel for p in layout.parameters),
        trainable_parameters=sum(p.numel for p in layout.trainable),
        weight_bytes=layout.weight_nbytes,
        gradient_bytes=layout.gradient_nbytes,
        forward_flop=sum(work.forward_flop for work in calls),
        backward_flop=sum(work.backward_flop for work in calls),
        recompute_flop=sum(work.recompute_flop for work in calls),
        boundary_bytes=boundary,
        working_bytes=max((work.working_bytes for work in calls), default=0),
    )
