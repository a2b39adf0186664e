"""The persistent state: every weight, master and moment of the model, in a few large arenas.

The store is the only owner of the model's state; the device holds copies that may be dropped at
any time. Allocation happens once, in one arena per kind (so that page-locking is a handful of
calls), and is exactly what `planned_bytes` says.

Per trainable element: bf16 parameters keep a bf16 weight, a 16-bit residual and two fp32 moments
(`split`, 12 bytes); fp32 parameters keep the fp32 master, which is what crosses the link, and two
fp32 moments (12 bytes). Frozen parameters keep their weight only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megaslide.ops.adamw.reference import join_master, split_master_
from megaslide.streaming.layout import ParameterSlice, Segment, UnitLayout


def planned_bytes(units: Sequence[UnitLayout], *, ema: bool = False) -> dict[str, int]:
    """Bytes of each arena for these units, before anything is allocated."""
    elements = sum(u.num_elements for u in units)
    split = sum(s.numel for u in units for s in u.segments if s.dtype == torch.bfloat16)
    return {
        "weights": sum(u.weight_nbytes for u in units),
        "residual": 2 * split,
        "exp_avg": 4 * elements,
        "exp_avg_sq": 4 * elements,
        "ema": 4 * elements if ema else 0,
        "gradients": sum(u.gradient_nbytes for u in units),
    }


class Store:
    """State of all units in host RAM; unit `i` is `units[i]` everywhere."""

    def __init__(self, units: Sequence[UnitLayout], *, ema: bool = False) -> None:
        self.units = list(units)
        sizes = planned_bytes(units, ema=ema)
        self.arenas = {kind: torch.zeros(n, dtype=torch.uint8) for kind, n in sizes.items() if n}
        """The uint8 host buffers by kind; everything else is a view of one of them."""
        self._has_ema = ema
        self._serve_ema = False
        self.steps = [{p.name: 0 for p in unit.trainable} for unit in units]
        """Updates done so far, per unit and parameter name; torch counts per parameter too."""
        self._element_starts = _starts(u.num_elements for u in units)
        self._weight_starts = _starts(u.weight_nbytes for u in units)
        self._gradient_starts = _starts(u.gradient_nbytes for u in units)
        self._residual_starts = _starts(_split_elements(u) for u in units)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes actually held, by arena."""
        return {kind: arena.nbytes for kind, arena in self.arenas.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes that persist from step to step: all arenas but the gradients'."""
        return sum(n for kind, n in self.nbytes.items() if kind != "gradients")

    def weights(self, unit: int) -> torch.Tensor:
        """The unit's weight region, uint8 `[weight_nbytes]`: what an H2D copy reads."""
        if self._serve_ema:
            return self._ema_weights(unit)
        return self._region("weights", self._weight_starts[unit], self.units[unit].weight_nbytes)

    def gradient(self, unit: int) -> torch.Tensor:
        """The unit's gradient region, uint8 `[gradient_nbytes]`: where a D2H copy lands."""
        nbytes = self.units[unit].gradient_nbytes
        return self._region("gradients", self._gradient_starts[unit], nbytes)

    def moments(self, unit: int, kind: str) -> torch.Tensor:
        """`exp_avg`, `exp_avg_sq` or `ema` of the unit, fp32 `[num_elements]`."""
        nbytes = 4 * self.units[unit].num_elements
        region = self._region(kind, 4 * self._element_starts[unit], nbytes)
        return region.view(torch.float32)

    def residual(self, unit: int, segment: Segment) -> torch.Tensor | None:
        """int16 `[numel]` low half of a bf16 segment's master; None for fp32 segments."""
        if segment.dtype != torch.bfloat16:
            return None
        before = sum(
            s.numel for s in self.units[unit].segments
            if s.dtype == torch.bfloat16 and s.element_offset < segment.element_offset
        )  # fmt: skip
        start = 2 * (self._residual_starts[unit] + before)
        return self._region("residual", start, 2 * segment.numel).view(torch.int16)

    def parameter_residual(self, unit: int, parameter: ParameterSlice) -> torch.Tensor | None:
        """int16 low half of one trainable parameter's master, in its shape; None for fp32."""
        segment, part = self._locate(unit, parameter)
        residual = self.residual(unit, segment)
        return None if residual is None else residual[part].view(parameter.shape)

    def read_master(self, unit: int, parameter: ParameterSlice) -> torch.Tensor:
        """A copy of a trainable parameter's fp32 master, in its own shape."""
        segment, part = self._locate(unit, parameter)
        weight = segment.weight(self._raw_weights(unit))[part]
        residual = self.residual(unit, segment)
        master = weight.clone() if residual is None else join_master(weight, residual[part])
        return master.view(parameter.shape)

    def write_master(self, unit: int, parameter: ParameterSlice, master: torch.Tensor) -> None:
        """Set a trainable parameter from its fp32 master (and a fresh EMA from the same)."""
        segment, part = self._locate(unit, parameter)
        flat = master.detach().to("cpu", torch.float32).reshape(-1).contiguous()
        weight = segment.weight(self._raw_weights(unit))[part]
        residual = self.residual(unit, segment)
        if residual is None:
            weight.copy_(flat)
        else:
            split_master_(flat, weight, residual[part])
        if self._has_ema:
            parameter.element(self.moments(unit, "ema")).copy_(flat.view(parameter.shape))

    def write_frozen(self, unit: int, parameter: ParameterSlice, value: torch.Tensor) -> None:
        parameter.weight(self._raw_weights(unit)).copy_(value)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view in the compute dtype) of every parameter; EMA's while it is served."""
        for index, unit in enumerate(self.units):
            region = self.weights(index)
            for parameter in unit.parameters:
                yield parameter.name, parameter.weight(region)

    @contextmanager
    def serving_ema(self) -> Iterator[None]:
        """Within the context `weights` serves the moving average; nothing is overwritten."""
        if not self._has_ema:
            raise RuntimeError("no moving average is kept; pass ema_decay to megaslide.stream")
        self._serve_ema = True
        try:
            yield
        finally:
            self._serve_ema = False

    def _raw_weights(self, unit: int) -> torch.Tensor:
        return self._region("weights", self._weight_starts[unit], self.units[unit].weight_nbytes)

    def _ema_weights(self, unit: int) -> torch.Tensor:
        region = self._raw_weights(unit).clone()
        ema = self.moments(unit, "ema")
        for segment in self.units[unit].segments:
            segment.weight(region).copy_(segment.element(ema))
        return region

    def _locate(self, unit: int, parameter: ParameterSlice) -> tuple[Segment, slice]:
        for segment in self.units[unit].segments:
            start = parameter.element_offset - segment.element_offset
            if 0 <= start < segment.numel:
                return segment, slice(start, start + parameter.numel)
        raise ValueError(f"{parameter.name} is frozen; it has no master")

    def _region(self, kind: str, start: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return self.arenas[kind][start : start + nbytes]


def _split_elements(unit: UnitLayout) -> int:
    return sum(s.numel for s in unit.segments if s.dtype == torch.bfloat16)


def _starts(sizes: Iterator[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts
