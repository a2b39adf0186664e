"""The persistent state: every weight, master and moment of the model, in RAM or on disk.

The store is the only owner of the model's state; the device holds copies that may be dropped at
any time. Allocation happens once and is exactly what `planned_bytes` says: in RAM one arena per
kind of state (so that page-locking is a handful of calls), on disk one file of records.
An fp32 parameter is its own master and crosses the link as it is; a frozen one is its weight only.
Bytes per trainable bf16 parameter, gradients not counted:

- `master` 14: bf16 weight, fp32 master, two fp32 moments;
- `split` 12: bf16 weight and a 16-bit residual, which restore the fp32 master exactly, moments;
- `split8` 6: as split, with 8-bit moments that share one fp32 scale per `BLOCK8` elements.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from megaslide.ops.adamw.reference import join_master, split_master_
from megaslide.streaming.budget import available_disk, available_ram, require_room
from megaslide.streaming.disk import RecordFile
from megaslide.streaming.lanes import Event, Lanes
from megaslide.streaming.layout import ParameterSlice, UnitLayout
from megaslide.streaming.memory import host_memory
from megaslide.streaming.records import FORMATS, Piece, Record, StateFormat, planned_bytes
from megaslide.streaming.staging import COUNTS, DiskRecords, Memory, Pieces, staging_sizes
from megaslide.tracing import Trace

Tier = Literal["ram", "disk"]
CHUNK = 1 << 20  # elements that are set at a time: temporaries are small beside any block


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSettings:
    """Where the state lives and in which form.

    Raises:
        ValueError: an unknown value, or the disk tier without a folder.
    """

    tier: Tier = "ram"
    """`ram`, or `disk` for state that is larger."""
    state_format: StateFormat = "split"
    """See the module's text."""
    gradient_tier: Tier = "ram"
    """Where gradients wait for the update; `disk` only with tier `disk`."""
    disk_path: Path | None = None
    """Folder for the disk tier; what is in it needs no backup and goes with the process."""
    disk_gb_s: float | None = None
    """Emulated bandwidth of the disk, both directions together, in 1e9 bytes per second."""
    ema: bool = False
    """Keep a moving average of the masters, 4 more bytes per parameter."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tier", get_args(Tier)), ("gradient_tier", get_args(Tier)), ("state_format", FORMATS),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}; one of {', '.join(allowed)}")
        if self.tier == "disk" and self.disk_path is None:
            raise ValueError("tier='disk' needs disk_path, a folder on a local disk")
        if self.tier == "ram" and self.gradient_tier == "disk":
            raise ValueError("gradient_tier='disk' needs tier='disk'")


class UnitState:
    """One unit's state as memory: uint8 regions by kind, and its parameters in them."""

    def __init__(self, record: Record, memory: Memory) -> None:
        self.record, self.memory = record, memory

    def weight(self, parameter: ParameterSlice) -> torch.Tensor:
        """The parameter's weight, a view in its compute dtype and shape."""
        return parameter.weight(self.memory["weights"])

    def part(self, kind: str, parameter: ParameterSlice) -> torch.Tensor | None:
        """A trainable parameter's state of one kind, a view; None where it has none.

        In the parameter's shape, or `[ceil(numel / BLOCK8)]` for scales.
        """
        region, at = self.record.regions.get(kind), self.record.locate(parameter)
        if region is None:
            return None
        entries = region.entries(self.memory[kind], at.segment, at.start, at.stop)
        return entries if entries is None or region.per > 1 else entries.view(parameter.shape)

    def read_master(self, parameter: ParameterSlice) -> torch.Tensor:
        """A copy of a trainable parameter's fp32 master, in its own shape."""
        master, residual = self.part("master", parameter), self.part("residual", parameter)
        if master is not None:
            return master.clone()
        weight = self.weight(parameter)
        return weight.clone() if residual is None else join_master(weight, residual)

    def write(self, parameter: ParameterSlice, value: torch.Tensor) -> None:
        """Set a parameter; a trainable one by its fp32 master, and its EMA to the same."""
        if not parameter.trainable:
            self.weight(parameter).copy_(value)
            return
        values, weight = value.detach().reshape(-1), self.weight(parameter).view(-1)
        kept = {k: self.part(k, parameter) for k in ("residual", "master", "ema")}
        flat = {kind: part.view(-1) for kind, part in kept.items() if part is not None}
        for start in range(0, values.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            entries = {kind: entries[part] for kind, entries in flat.items()}
            _write_master(values[part].to("cpu", torch.float32), weight[part], **entries)

    def average_weights(self) -> torch.Tensor:
        """The weight region with the moving average in place of the trainable weights, a copy."""
        region = self.memory["weights"].clone()
        for index, segment in enumerate(self.record.layout.segments):
            ema = self.record.regions["ema"].entries(self.memory["ema"], index, 0, segment.numel)
            assert ema is not None
            segment.weight(region).copy_(ema)
        return region


def _write_master(
    values: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None, **same: Any
) -> None:  # fmt: skip
    """Set the weight, and its residual if it has one, to fp32 `values`; and `same` to equal them.

    Without a residual a bf16 weight is rounded half up all the same, as the optimizer rounds it.
    """
    if weight.dtype == torch.float32:
        weight.copy_(values)
    else:
        split_master_(values.contiguous(), weight, residual)
    for target in same.values():
        target.copy_(values)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What a store of these settings allocates, known without allocating."""

    kinds: dict[str, int]
    """Bytes of state and gradients by kind, page padding included."""
    in_ram: frozenset[str]
    """The kinds that are in RAM; the others are on disk."""
    staging: dict[str, int]
    """Bytes of RAM through which the disk's state passes."""

    @property
    def ram_bytes(self) -> int:
        return sum(self.kinds[k] for k in self.in_ram) + sum(self.staging.values())

    @property
    def disk_bytes(self) -> int:
        return sum(n for kind, n in self.kinds.items() if kind not in self.in_ram)


def plan_store(units: Sequence[UnitLayout], settings: StoreSettings) -> StorePlan:
    """The plan that `Store(units, settings)` follows."""
    kinds = planned_bytes(units, state_format=settings.state_format, ema=settings.ema)
    in_ram = set(kinds) if settings.tier == "ram" else set()
    in_ram |= {"gradients"} & set(kinds) if settings.gradient_tier == "ram" else set()
    staging: dict[str, int] = {}
    if settings.tier == "disk":
        records = [Record(u, settings.state_format, ema=settings.ema) for u in units]
        sizes = staging_sizes(records, frozenset(kinds) - in_ram)
        staging = {sort: COUNTS[sort] * size for sort, size in sizes.items()}
    return StorePlan(kinds, frozenset(in_ram), staging)


class Store:
    """State of all units; unit `i` is `units[i]` everywhere.

    Raises:
        InputError: RAM or disk is too small; said before anything is allocated.
    """

    def __init__(
        self, units: Sequence[UnitLayout], settings: StoreSettings | None = None,
        lanes: Lanes | None = None,
    ) -> None:  # fmt: skip
        self.units, self.settings = list(units), settings or StoreSettings()
        self.plan = plan_store(units, self.settings)
        _require_room(units, self.settings)
        state_format, ema = self.settings.state_format, self.settings.ema
        self._records = [Record(u, state_format, ema=ema) for u in units]
        self.arenas = {kind: host_memory(self.plan.kinds[kind]) for kind in self.plan.in_ram}
        """The uint8 host buffers of the kinds that are in RAM."""
        self._starts = _arena_starts(self._records, self.plan.in_ram)
        self._disk = (
            self._open_disk(lanes or Lanes(Trace())) if self.settings.tier == "disk" else None
        )
        self._serve_ema = False
        self.steps = [{p.name: 0 for p in unit.trainable} for unit in units]
        """Updates done so far, per unit and parameter name; torch counts per parameter too."""

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held by kind, in RAM or on disk."""
        held = {kind: arena.nbytes for kind, arena in self.arenas.items()}
        return held | (self._disk.nbytes if self._disk else {})

    @property
    def state_bytes(self) -> int:
        """Bytes that persist from step to step, wherever they are."""
        return sum(n for kind, n in self.nbytes.items() if kind != "gradients")

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All host memory that the store holds: arenas and the disk tier's staging."""
        return [*self.arenas.values(), *(self._disk.buffers if self._disk else [])]

    @property
    def crossing(self) -> list[torch.Tensor]:
        """Those that copies may touch; masters and moments are for the CPU alone."""
        arenas = [a for kind, a in self.arenas.items() if kind in ("weights", "gradients")]
        return [*arenas, *(self._disk.buffers if self._disk else [])]

    @property
    def optimizer_kinds(self) -> list[str]:
        """Kinds of state that persist besides the weights."""
        return [kind for kind in self.plan.kinds if kind not in ("weights", "gradients")]

    @property
    def value_kinds(self) -> list[str]:
        """Kinds of state that a parameter's value decides: all but moments and gradients."""
        return [k for k in self.plan.kinds if k in ("weights", "master", "residual", "ema")]

    # Weights, on their way to the device ------------------------------------------------------

    def weights(self, unit: int) -> torch.Tensor:
        """The unit's weight region, uint8 `[weight_nbytes]`: what an H2D copy reads.

        For one thread, the one that issues H2D copies; on the disk tier the region is valid until
        its next call.
        """
        if self._serve_ema:
            with self.unit(unit, ("weights", "ema")) as state:
                region = state.average_weights()
        elif self._disk is not None:
            region = self._disk.weights(unit)
        else:
            region = self._region(unit, "weights")
        return region[: self.units[unit].weight_nbytes]

    def read_ahead(self, units: Sequence[int], updated: Callable[[int], Event]) -> None:
        """Say which weights will be asked for next, soonest first; each is read once `updated`."""
        if self._disk is not None and not self._serve_ema:
            self._disk.read_ahead(units, updated)

    def forget(self, unit: int) -> None:
        """Say that the unit is about to be updated: what was read ahead of it is void."""
        if self._disk is not None:
            self._disk.forget(unit)

    @contextmanager
    def serving_ema(self) -> Iterator[None]:
        """Within the context `weights` serves the moving average; nothing is overwritten."""
        if not self.settings.ema:
            raise RuntimeError("no moving average is kept; pass ema_decay to megaslide.stream")
        self._serve_ema = True
        try:
            yield
        finally:
            self._serve_ema = False

    # Gradients --------------------------------------------------------------------------------

    def landing_memory(self, unit: int) -> torch.Tensor:
        """What `landing` will give where that is known before: RAM. Empty on the disk tier."""
        if "gradients" not in self.arenas:
            return torch.empty(0, dtype=torch.uint8)
        return self._region(unit, "gradients")[: self.units[unit].gradient_nbytes]

    @contextmanager
    def landing(self, unit: int, *, keep: bool) -> Iterator[torch.Tensor]:
        """Within, the unit's gradient region to be written, uint8 `[gradient_nbytes]`.

        With `keep` it holds what landed before, to be added to.
        """
        if "gradients" in self.arenas:
            yield self.landing_memory(unit)
        else:
            assert self._disk is not None
            with self._disk.landing(unit, keep=keep) as region:
                yield region[: self.units[unit].gradient_nbytes]

    # AdamW ------------------------------------------------------------------------------------

    def pieces(self, unit: int, following: int | None = None) -> Pieces:
        """The unit's state, piece by piece, to be updated in place.

        Yields each piece with its entries by kind (`weights`, `gradients`, moments, …), 1-D typed
        views that are valid until the iterator advances. `following` is the unit that will be
        updated next, so that the disk tier can begin to read it.
        """
        if self._disk is None:
            for piece in self._records[unit].pieces():
                yield piece, self._ram_piece(unit, piece)
            return
        with closing(self._disk.pieces(unit, following)) as pieces:
            for piece, memory in pieces:
                yield piece, {**memory, **self._ram_piece(unit, piece)}

    # Whole units, for filling, saving and looking ---------------------------------------------

    @contextmanager
    def unit(
        self, unit: int, kinds: Sequence[str] | None = None, *, write: bool = False
    ) -> Iterator[UnitState]:
        """One unit's state (all kinds, or some) as memory.

        On the disk tier that is a copy, written back after the context if `write`.
        """
        regions = self._records[unit].regions
        memory: Memory = {}
        for kind in kinds or [k for k in regions if k != "gradients"]:
            if kind in self.arenas:
                memory[kind] = self._region(unit, kind)
            elif kind in regions:
                assert self._disk is not None
                memory[kind] = host_memory(regions[kind].nbytes)
                self._disk.read(unit, kind, memory[kind])
        yield UnitState(self._records[unit], memory)
        if write and self._disk is not None:
            for kind in memory.keys() - self.arenas.keys():
                self._disk.write(unit, kind, memory[kind])

    def gradient(self, unit: int) -> torch.Tensor:
        """The unit's gradient region as it is now, uint8 `[gradient_nbytes]`."""
        with self.unit(unit, ("gradients",)) as state:
            region = state.memory.get("gradients", torch.empty(0, dtype=torch.uint8))
        return region[: self.units[unit].gradient_nbytes]

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor in the compute dtype) of every parameter; EMA's while it is served."""
        for index, layout in enumerate(self.units):
            kinds = ("weights", "ema") if self._serve_ema else ("weights",)
            with self.unit(index, kinds) as state:
                region = state.average_weights() if self._serve_ema else state.memory["weights"]
                for parameter in layout.parameters:
                    yield parameter.name, parameter.weight(region)

    def finish(self) -> None:
        """Wait until all that was handed over is stored; RuntimeError if that failed."""
        if self._disk is not None:
            self._disk.finish()

    def close(self) -> None:
        """Give the disk back; only a store in RAM can be read afterwards."""
        if self._disk is not None:
            self._disk.close()

    def _open_disk(self, lanes: Lanes) -> DiskRecords:
        folder = self.settings.disk_path
        assert folder is not None
        file = RecordFile(folder, self.plan.disk_bytes, gb_per_s=self.settings.disk_gb_s)
        kinds = frozenset(self.plan.kinds) - self.plan.in_ram
        return DiskRecords(file, self._records, kinds, lanes)

    def _ram_piece(self, unit: int, piece: Piece) -> Memory:
        memory: Memory = {}
        for kind, region in self._records[unit].regions.items():
            if kind in self.arenas:
                arena = self._region(unit, kind)
                entries = region.entries(arena, piece.segment, piece.start, piece.stop)
                if entries is not None:
                    memory[kind] = entries
        return memory

    def _region(self, unit: int, kind: str) -> torch.Tensor:
        region = self._records[unit].regions.get(kind)
        if region is None:
            return torch.empty(0, dtype=torch.uint8)
        return self.arenas[kind][self._starts[unit][kind] :][: region.nbytes]


def _arena_starts(records: Sequence[Record], kinds: frozenset[str]) -> list[dict[str, int]]:
    """Per unit, where each kind's region begins in that kind's arena."""
    at = dict.fromkeys(kinds, 0)
    result: list[dict[str, int]] = []
    for record in records:
        result.append({kind: at[kind] for kind in record.regions if kind in kinds})
        for kind in result[-1]:
            at[kind] += record.regions[kind].nbytes
    return result


def _require_room(units: Sequence[UnitLayout], settings: StoreSettings) -> None:
    plans = {f: plan_store(units, replace(settings, state_format=f)) for f in FORMATS}
    chosen = settings.state_format
    disk = "set offload.tier=disk" if settings.tier == "ram" else "set offload.gradient_tier=disk"
    require_room(
        "RAM", available_ram(), {f: plan.ram_bytes for f, plan in plans.items()}, chosen,
        f"{disk}, or take a smaller model",
    )  # fmt: skip
    if settings.disk_path is not None and settings.tier == "disk":
        require_room(
            f"disk of {settings.disk_path}", available_disk(settings.disk_path),
            {f: plan.disk_bytes for f, plan in plans.items()}, chosen,
            "free space there, or set offload.disk_path to another disk",
        )  # fmt: skip
