"""Which parameters travel together, and where each lies in its unit's flat region.

A *unit* is what one copy moves: a block, or the resident unit (everything outside the blocks).
Its trainable parameters come first, fp32 before bf16, then the frozen ones, so that the optimizer
sees at most two contiguous segments and the gradient region is a prefix of the weight region.
Every parameter starts on a multiple of `ALIGN` elements; the padding is zero and stays zero. Every
group of equal dtype starts on a multiple of `PAGE` bytes, so that direct I/O can move any group
alone. Together these are what sharding over ranks will need: element range [r*s, (r+1)*s) of a
segment, s a multiple of `ALIGN`, is contiguous in each region of the state (weights, masters,
moments, 8-bit scales, gradients), and no parameter's block of 8-bit codes straddles two ranks.

A parameter that more than one unit uses (tied weights) belongs to the resident unit, so that it
has one state and one copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

ALIGN = 256
"""Elements. A multiple of what shares one scale in the 8-bit formats, and whole cache lines in
every dtype."""
PAGE = 4096
"""Bytes. The largest alignment that direct I/O asks for on common devices, and a page of memory."""
TRAINABLE_DTYPES = (torch.float32, torch.bfloat16)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is `size` or more."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSlice:
    """One parameter inside its unit's regions."""

    name: str
    """Full name in the model's state dict."""
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    byte_offset: int
    """Where its weight starts in the unit's weight region."""
    element_offset: int
    """Where its gradient and moments start, in elements; -1 if frozen."""

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def weight(self, region: torch.Tensor) -> torch.Tensor:
        """Its weight as a view of a uint8 weight region `[nbytes]`."""
        return region[self.byte_offset :][: self.nbytes].view(self.dtype).view(self.shape)

    def element(self, region: torch.Tensor) -> torch.Tensor:
        """Its entries of a region `[num_elements]`, in its own shape."""
        return region[self.element_offset :][: self.numel].view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A contiguous run of trainable parameters of one dtype."""

    dtype: torch.dtype
    byte_offset: int
    element_offset: int
    numel: int

    def weight(self, region: torch.Tensor) -> torch.Tensor:
        """`[numel]` view of a uint8 region laid out like the unit's weights."""
        nbytes = self.numel * self.dtype.itemsize
        return region[self.byte_offset :][:nbytes].view(self.dtype)

    def element(self, region: torch.Tensor) -> torch.Tensor:
        """`[numel]` view of a region of one entry per trainable element."""
        return region[self.element_offset :][: self.numel]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitLayout:
    """The flat regions of one unit."""

    name: str
    parameters: tuple[ParameterSlice, ...]
    segments: tuple[Segment, ...]
    weight_nbytes: int
    """Bytes of the weight region; what one H2D copy moves."""
    gradient_nbytes: int
    """Bytes of the gradient region: the trainable prefix of the weight region."""
    num_elements: int
    """Trainable elements, padding included."""

    @property
    def trainable(self) -> tuple[ParameterSlice, ...]:
        return tuple(p for p in self.parameters if p.trainable)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterUse:
    """A place in the module tree that holds a parameter: `owner._parameters[key]`."""

    owner: nn.Module
    key: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A layout and the places in the model that read it."""

    layout: UnitLayout
    module: nn.Module
    uses: tuple[tuple[ParameterUse, ParameterSlice], ...]
    external: tuple[ParameterUse, ...] = ()
    """Places inside the block whose parameter belongs to the resident unit."""


def find_blocks(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The repeated blocks by full name, in definition order.

    Without `names`, every `ModuleList` that is a direct child of the model and holds a tenth or
    more of its parameters. Names may be lists of blocks or single blocks.

    Raises:
        ValueError: a name that is not there, or nothing found.
    """
    if names is None:
        total = sum(p.numel() for p in model.parameters())
        names = [
            name
            for name, child in model.named_children()
            if isinstance(child, nn.ModuleList)
            and sum(p.numel() for p in child.parameters()) * 10 >= total > 0
        ]
    modules = dict(model.named_modules())
    blocks: dict[str, nn.Module] = {}
    for name in names:
        if name not in modules:
            raise ValueError(f"blocks={name!r} is no module of {type(model).__name__}")
        module = modules[name]
        children = module.named_children() if isinstance(module, nn.ModuleList) else [("", module)]
        blocks |= {f"{name}.{child}" if child else name: block for child, block in children}
    if not blocks:
        lists = [n for n, m in modules.items() if isinstance(m, nn.ModuleList)]
        raise ValueError(
            f"no repeated blocks found in {type(model).__name__}; pass blocks=[...], "
            f"one or more of its module lists {lists}"
        )
    return blocks


def plan_units(
    model: nn.Module, blocks: dict[str, nn.Module], dtype: torch.dtype | None = None
) -> tuple[Unit, list[Unit]]:
    """The resident unit and one unit per block, in definition order.

    `dtype` replaces the compute dtype of trainable floating-point parameters; None keeps each
    parameter's own.
    """
    distinct = {id(block): (name, block) for name, block in blocks.items()}
    uses = {key: list(_uses(block, name)) for key, (name, block) in distinct.items()}
    places = list(_uses(model, ""))
    inside = {(id(u.owner), u.key) for block in uses.values() for u in block}
    shared = _shared_parameters(places, uses)
    resident_uses = [
        u for u in places if (id(u.owner), u.key) not in inside or id(_parameter(u)) in shared
    ]
    resident = _unit("resident", model, resident_uses, dtype)
    streamed = []
    for key, (name, block) in distinct.items():
        own = [u for u in uses[key] if id(_parameter(u)) not in shared]
        outside = [u for u in uses[key] if id(_parameter(u)) in shared]
        streamed.append(_unit(name, block, own, dtype, external=outside))
    return resident, streamed


def _uses(module: nn.Module, prefix: str) -> Iterator[ParameterUse]:
    """Every place that holds a parameter; tied parameters come once per place."""
    for path, owner in module.named_modules(prefix=prefix):
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                name = f"{path}.{key}" if path else key
                yield ParameterUse(owner=owner, key=key, name=name)


def _parameter(use: ParameterUse) -> nn.Parameter:
    parameter = use.owner._parameters[use.key]
    assert parameter is not None
    return parameter


def _shared_parameters(
    places: list[ParameterUse], blocks: dict[int, list[ParameterUse]]
) -> set[int]:
    """Ids of parameters that a block shares with another block or with the rest of the model."""
    block_of = {(id(u.owner), u.key): key for key, uses in blocks.items() for u in uses}
    users: dict[int, set[int]] = {}
    for use in places:
        users.setdefault(id(_parameter(use)), set()).add(block_of.get((id(use.owner), use.key), -1))
    return {parameter for parameter, units in users.items() if len(units) > 1}


def _unit(
    name: str,
    module: nn.Module,
    uses: list[ParameterUse],
    dtype: torch.dtype | None,
    external: Sequence[ParameterUse] = (),
) -> Unit:
    first_use = {id(_parameter(use)): use for use in reversed(uses)}
    parameters = {use.name: _parameter(use) for use in first_use.values()}
    ordered = {use.name: parameters[use.name] for use in uses if use.name in parameters}
    layout = _layout(name, ordered, dtype)
    slices = {p.name: p for p in layout.parameters}
    pairs = tuple((use, slices[first_use[id(_parameter(use))].name]) for use in uses)
    return Unit(layout=layout, module=module, uses=pairs, external=tuple(external))


def _layout(
    name: str, parameters: dict[str, nn.Parameter], dtype: torch.dtype | None
) -> UnitLayout:
    groups = _groups(parameters, dtype)
    slices: list[ParameterSlice] = []
    segments: list[Segment] = []
    nbytes = elements = gradient_nbytes = 0
    for (trainable, group_dtype), members in groups.items():
        nbytes = round_up(nbytes, PAGE)
        start_bytes, start_elements = nbytes, elements
        for parameter_name, parameter in members:
            slices.append(
                ParameterSlice(
                    name=parameter_name, shape=parameter.shape, dtype=group_dtype,
                    trainable=trainable, byte_offset=nbytes,
                    element_offset=elements if trainable else -1,
                )
            )  # fmt: skip
            padded = round_up(parameter.numel(), ALIGN)
            nbytes += padded * group_dtype.itemsize
            elements += padded if trainable else 0
        if trainable:
            gradient_nbytes = nbytes
            segments.append(
                Segment(
                    dtype=group_dtype, byte_offset=start_bytes, element_offset=start_elements,
                    numel=elements - start_elements,
                )
            )  # fmt: skip
    return UnitLayout(
        name=name, parameters=tuple(slices), segments=tuple(segments), weight_nbytes=nbytes,
        gradient_nbytes=gradient_nbytes, num_elements=elements,
    )  # fmt: skip


def _groups(
    parameters: dict[str, nn.Parameter], dtype: torch.dtype | None
) -> dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]]:
    """Parameters by (trainable, dtype): trainable fp32, trainable bf16, then frozen ones."""
    groups: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {
        (True, d): [] for d in TRAINABLE_DTYPES
    }
    for name, parameter in parameters.items():
        trainable = parameter.requires_grad
        kept = dtype if dtype is not None and trainable else parameter.dtype
        if trainable and kept not in TRAINABLE_DTYPES:
            raise ValueError(f"{name} is {kept}; trainable parameters are float32 or bfloat16")
        groups.setdefault((trainable, kept), []).append((name, parameter))
    return {key: members for key, members in groups.items() if members}
