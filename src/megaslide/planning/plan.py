"""Will it fit, how long does a step take, and what bounds it: costs x rates, on the engine's clock.

`costs` counts what a step does, a `Machine` says how fast that is done, and `simulate` lets the
engine arrange it. Nothing else is assumed. Bytes of state, staging and device arenas are the
engine's own arithmetic, so they are exact; seconds are as good as the machine's rates, and each
rate says where it comes from.

Bytes, seconds, FLOP (a multiply and an add are two).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megaslide.planning.costs import ModelCosts, UnitCosts
from megaslide.planning.devices import Device
from megaslide.planning.simulate import Load, Schedule, Simulated, UnitLoad, simulate
from megaslide.streaming.layout import UnitLayout
from megaslide.streaming.records import StateFormat, planned_bytes
from megaslide.streaming.store import StorePlan, StoreSettings, Tier

EFFICIENCY = 0.7
"""Share of a datasheet's matrix rate that well-shaped training kernels reach; an assumption."""
SERVER_ADAMW_BYTES_S = 150e9
"""What AdamW's pass gets of a server's memory, 8 channels of DDR5 at about half; an assumption."""
GRADIENT_PASSES = 4
"""Times that the fp32 gradient buffer is touched: cleared, added to (read, write), rounded from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a plan is made for; None is unknown and never too small."""

    name: str
    flop_s: float
    """What blocks reach."""
    peak_flop_s: float
    """What MFU is a share of."""
    memory_bytes_s: float
    """Of the device."""
    link_bytes_s: float
    """Each direction."""
    adamw_bytes_s: float
    """Bytes of state and gradients that the optimizer reads and writes."""
    disk_bytes_s: float | None = None
    """Reading and writing at once, together."""
    device_bytes: int | None = None
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    ram_besides: Mapping[str, int] = field(default_factory=dict)
    """Bytes of RAM, by kind, that the run takes besides what is planned."""
    device_is_host: bool = False
    """Whether what is on the device takes RAM as well, as on the CPU."""
    basis: Mapping[str, str]
    """Where the rates come from, by rate."""


def accelerator(
    device: Device, *, efficiency: float = EFFICIENCY, bf16: bool = True
) -> Machine:  # fmt: skip
    """A known accelerator in a server; the room for state is for the caller to say.

    Args:
        bf16: what the run computes in; of fp32 no rate is known, so the basis says whose it is.
    """
    peak = "the peak" if bf16 else "the peak of bf16, which this run's fp32 does not reach"
    return Machine(
        name=device.name, flop_s=efficiency * device.bf16_flop_s, peak_flop_s=device.bf16_flop_s,
        memory_bytes_s=device.memory_bytes_s, link_bytes_s=device.link_bytes_s,
        adamw_bytes_s=SERVER_ADAMW_BYTES_S, device_bytes=device.memory_bytes,
        basis={
            "compute": f"{efficiency:g} of {peak} (assumed): {device.source}",
            "link": "its standard's data rate, each direction",
            "adamw": f"{SERVER_ADAMW_BYTES_S / 1e9:g} GB/s of host memory (assumed)",
        },
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is open to choose; the fields are options of `megaslide.stream`."""

    state_format: StateFormat = "split"
    slots: int = 2
    micro_batches: int = 1
    activations: str = "device"
    tier: Tier = "ram"
    gradient_tier: Tier = "ram"
    clip: bool = True
    ema: bool = False

    def __str__(self) -> str:
        state = f"state in {self.tier} as {self.state_format}"
        many = "es" if self.micro_batches > 1 else ""
        return f"{state}, inputs on {self.activations}, {self.micro_batches} micro-batch{many}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One choice on one machine. Bytes are known at once, time when it is asked for."""

    machine: Machine
    choice: Choice
    costs: ModelCosts
    clips: int
    """In one micro-batch."""
    store: StorePlan
    device: Mapping[str, int]
    """Bytes on the device at the peak, by kind; `working` is one block's, an estimate."""
    ram: Mapping[str, int]
    disk: Mapping[str, int]
    synchronous: bool
    """Whether every copy is waited for where it starts."""

    @cached_property
    def simulated(self) -> Simulated:
        """A step, by the engine itself on a clock."""
        choice = self.choice
        schedule = Schedule(
            slots=choice.slots, micro_batches=choice.micro_batches, clip=choice.clip,
            activations=choice.activations, tier=choice.tier, gradient_tier=choice.gradient_tier,
            synchronous=self.synchronous,
        )  # fmt: skip
        units = range(len(self.costs.units))
        return simulate([_load(self.costs, u, self.machine, choice) for u in units], schedule)

    @property
    def flop(self) -> int:
        """Of a step, recompute included."""
        return self.costs.flop * self.choice.micro_batches

    @property
    def mfu(self) -> float:
        """Forward and backward FLOP of the model, recompute left out, over the peak."""
        useful = (self.costs.flop - self.costs.recompute_flop) * self.choice.micro_batches
        return useful / (self.simulated.step_s * self.machine.peak_flop_s)

    @property
    def pace_s(self) -> float:
        """Seconds per clip."""
        return self.simulated.step_s / (self.choice.micro_batches * self.clips)

    @property
    def places(self) -> dict[str, tuple[dict[str, int], int | None]]:
        """Bytes needed by kind, and bytes that are there or None, by place."""
        machine, ram = self.machine, dict(self.ram)
        if machine.device_is_host:
            ram["device"] = sum(self.device.values())
        return {
            "device": (dict(self.device), machine.device_bytes), "RAM": (ram, machine.ram_bytes),
            "disk": (dict(self.disk), machine.disk_bytes),
        }  # fmt: skip

    @property
    def untold(self) -> list[str]:
        """Places that are needed and of which nobody said how much there is."""
        return [name for name, (needs, room) in self.places.items() if needs and room is None]

    @property
    def shortfall(self) -> dict[str, int]:
        """Bytes that are missing, by place; empty where everything fits."""
        missing = {
            name: sum(needs.values()) - room
            for name, (needs, room) in self.places.items()
            if room is not None
        }
        return {name: nbytes for name, nbytes in missing.items() if nbytes > 0}

    def to_dict(self) -> dict[str, Any]:
        """The figures, JSON-ready."""
        lanes, step_s = self.simulated.lanes, self.simulated.step_s
        steps = lanes.seconds / step_s
        return {
            "machine": self.machine.name,
            "params": self.costs.parameters,
            "state_bytes": sum(n for k, n in self.store.kinds.items() if k != "gradients"),
            "h2d_bytes_per_step": round(lanes.nbytes["h2d"] / steps),
            "d2h_bytes_per_step": round(lanes.nbytes["d2h"] / steps),
            "flop_per_step": self.flop,
            "step_s": step_s,
            "busy_s": {lane: s / steps for lane, s in lanes.busy_s.items()},
            "bound": self.simulated.bound,
            "overlap": lanes.overlap,
            "mfu": self.mfu,
            "device_peak_bytes": sum(self.device.values()),
            "device_bytes": dict(self.device),
            "ram_bytes": dict(self.ram),
            "disk_bytes": dict(self.disk),
            "fits": not self.shortfall,
            "shortfall": self.shortfall,
            "choice": {name: getattr(self.choice, name) for name in Choice.__slots__},
            "basis": dict(self.machine.basis),
        }


def make_plan(
    costs: ModelCosts, machine: Machine, choice: Choice, *, clips: int = 1,
    synchronous: bool = False,
) -> Plan:  # fmt: skip
    """Plan a step; `costs` are those of one micro-batch, which has so many clips."""
    store = costs.store(_settings(choice))
    away = _inputs_away(costs, choice)
    return Plan(
        machine=machine, choice=choice, costs=costs, clips=clips, store=store,
        device=_device_bytes(costs, choice),
        ram={"state": store.ram_bytes, **machine.ram_besides}
        | ({"inputs": away} if choice.activations == "host" else {}),
        disk=({"state": store.disk_bytes} if store.disk_bytes else {})
        | ({"inputs": away} if choice.activations == "disk" else {}),
        synchronous=synchronous,
    )  # fmt: skip


def _settings(choice: Choice) -> StoreSettings:
    return StoreSettings(
        tier=choice.tier, gradient_tier=choice.gradient_tier,
        state_format=choice.state_format, ema=choice.ema, disk_path=Path(),
    )  # fmt: skip


def _inputs_away(costs: ModelCosts, choice: Choice) -> int:
    """Bytes of boundary activations that leave; the last block's stay."""
    last = costs.units[costs.order[-1]].boundary_bytes
    own = sum(unit.boundary_bytes for unit in costs.units)
    return choice.micro_batches * (own - last)


def _device_bytes(costs: ModelCosts, choice: Choice) -> dict[str, int]:
    """Peak by kind. Where inputs leave the device, two blocks' are still there, of the one that
    computes and the one that leaves or returns, and the gradient of one."""
    blocks, count = costs.units[1:], choice.micro_batches
    inputs = sum(unit.boundary_bytes for unit in blocks)
    if choice.activations != "device":
        inputs = min(inputs, 3 * max(unit.boundary_bytes for unit in blocks))
    return costs.arenas(choice.slots) | {
        "inputs": count * (inputs + costs.shared_bytes),
        "working": max(unit.working_bytes for unit in blocks)
        + count * costs.units[0].working_bytes,
    }


def _load(costs: ModelCosts, index: int, machine: Machine, choice: Choice) -> UnitLoad:
    unit, layout = costs.units[index], costs.layouts[index]

    def moved(nbytes: int, rate: float | None) -> Load:
        return Load(seconds=nbytes / rate if rate else 0.0, nbytes=nbytes)

    touched = 4 * GRADIENT_PASSES * layout.num_elements / machine.memory_bytes_s
    inputs = unit.boundary_bytes * choice.micro_batches
    slowest = machine.link_bytes_s
    if choice.activations == "disk" and machine.disk_bytes_s:
        slowest = min(slowest, machine.disk_bytes_s)
    kinds = planned_bytes([layout], state_format=choice.state_format, ema=choice.ema)
    state = sum(n for kind, n in kinds.items() if kind != "gradients")
    gradients = kinds.get("gradients", 0) if choice.gradient_tier == "disk" else 0
    disk = machine.disk_bytes_s
    return UnitLoad(
        **_compute(unit, machine),
        clear_s=touched / 2, round_s=touched / 2,
        h2d=moved(unit.weight_bytes, machine.link_bytes_s),
        d2h=moved(unit.gradient_bytes, machine.link_bytes_s),
        adamw=moved(_adamw_bytes(layout, choice), machine.adamw_bytes_s),
        activation=moved(inputs, slowest),
        disk_weights=moved(unit.weight_bytes, disk),
        disk_read=moved(state + gradients, disk),
        disk_write=moved(state, disk),
        disk_gradients=moved(gradients, disk),
    )  # fmt: skip


def _compute(unit: UnitCosts, machine: Machine) -> dict[str, float]:
    passes = ("forward", "recompute", "backward")
    return {f"{name}_s": getattr(unit, f"{name}_flop") / machine.flop_s for name in passes}


def _adamw_bytes(layout: UnitLayout, choice: Choice) -> int:
    """Everything is read, and all but the gradients written."""
    if not layout.trainable:
        return 0
    kinds = planned_bytes([layout], state_format=choice.state_format, ema=choice.ema)
    return 2 * sum(kinds.values()) - kinds["gradients"]
