"""`megaslide plan`: what a run needs and what a step takes, before anything is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megaslide.cli.display import Meter, console, count, grid, print_json, size, status
from megaslide.cli.refusals import require_no_folder, writes_to
from megaslide.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from megaslide.config import Triple
    from megaslide.planning.plan import Machine, Plan
    from megaslide.planning.subject import Subject


DISK_BYTES_S = 5e9
"""Of one NVMe drive, where the machine is not at hand; an assumption."""


def plan(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="Config, preset, or folder of a model.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Values that replace the file's."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Accelerator, such as h200; without it, this machine.")
    ] = None,
    ram: Annotated[str | None, typer.Option(metavar="SIZE", help="RAM, such as 1536GB.")] = None,
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="Free disk: 4TB.")] = None,
    efficiency: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Share of its peak that it reaches.")
    ] = None,
    frames: Annotated[int | None, typer.Option(min=1)] = None,
    height: Annotated[int | None, typer.Option(min=1)] = None,
    width: Annotated[int | None, typer.Option(min=1)] = None,
    compression: Annotated[
        str, typer.Option(metavar="TxHxW", help="Pixels per latent voxel, if no codec says.")
    ] = "4x8x8",
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page: memory, timeline.")
    ] = None,
) -> None:
    """Tell whether a run fits, how long a step takes, what to change."""
    from dataclasses import replace

    from megaslide.planning.choosing import alternatives, choose
    from megaslide.planning.subject import subject_of

    if efficiency is not None and gpu is None:
        raise InputError("--efficiency without --gpu", "this machine is measured; name a --gpu")
    require_no_folder(html, "plan.html")
    with status("counting what a step does"):
        clip = _clip(frames, height, width)
        subject = subject_of(what, overrides or [], clip=clip, compression=_triple(compression))
        costs = subject.costs()
    machine = _machine(subject, gpu, ram, disk, efficiency)
    machine = replace(machine, ram_besides=subject.besides(costs))
    with status("simulating a step"):
        found = choose(subject.choices, costs, machine, clips=subject.clips)
    if as_json:
        print_json({"tokens": subject.tokens * found.choice.micro_batches, **found.to_dict()})
    if as_json and html is None:
        return
    with status("simulating other choices"):
        others = alternatives(subject, found)
    if html is not None:
        _write(html, subject, found, others)
    if not as_json:
        for part in (grid(_facts(subject, found)), _lanes(found), _others(found, others)):
            console().print(part)


# -- what was asked -------------------------------------------------------------------------------


def _clip(frames: int | None, height: int | None, width: int | None) -> "Triple | None":
    from megaslide.planning.subject import CLIP

    given = (frames, height, width)
    if given == (None, None, None):
        return None
    t, h, w = (n if n is not None else usual for n, usual in zip(given, CLIP, strict=True))
    return t, h, w


def _triple(text: str) -> "Triple":
    from megaslide.config import parse_triple

    try:
        return parse_triple(text)
    except ValueError as error:
        raise InputError(f"--compression {text}: {error}", "write it as 4x8x8") from None


def _bytes(option: str, text: str | None) -> int | None:
    """Bytes of `1536GB` (10⁹) or `1.5TiB` (2⁴⁰)."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    if text is None:
        return None
    fix = "write a number and a unit: 512GB, 1.5TiB"
    if text.strip()[-1:].isdigit():
        raise InputError(f"{option} {text!r} has no unit", fix)
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise InputError(f"{option} {text!r} is no size", fix) from None


def _machine(
    subject: "Subject", gpu: str | None, ram: str | None, disk: str | None,
    efficiency: float | None,
) -> "Machine":  # fmt: skip
    from dataclasses import replace

    from megaslide.planning.plan import EFFICIENCY, accelerator

    room = {"ram_bytes": _bytes("--ram", ram), "disk_bytes": _bytes("--disk", disk)}
    if gpu is None:
        return _here(subject, {name: n for name, n in room.items() if n is not None})
    from megaslide.planning.devices import device_named

    bf16 = subject.dtype.itemsize == 2
    machine = accelerator(device_named(gpu), efficiency=efficiency or EFFICIENCY, bf16=bf16)
    if budget := subject.offload.device_budget_gb:
        room["device_bytes"] = min(int(budget * 1e9), machine.device_bytes or 0)
    basis = {**machine.basis, "disk": f"{DISK_BYTES_S / 1e9:g} GB/s, one NVMe drive (assumed)"}
    return replace(machine, **room, disk_bytes_s=DISK_BYTES_S, basis=basis)  # type: ignore[arg-type]


def _here(subject: "Subject", room: dict[str, int]) -> "Machine":
    from dataclasses import replace

    from megaslide.planning.here import machine_here
    from megaslide.planning.rates import measure_rates

    with Meter("measuring this machine") as meter:
        machine = machine_here(
            subject,
            state_folder=Path(subject.offload.disk_path or "."),
            measure=lambda folder: measure_rates(folder or Path(), meter),
        )
    return replace(machine, **room)  # type: ignore[arg-type]


# -- what is shown --------------------------------------------------------------------------------


def _write(path: Path, subject: "Subject", plan: "Plan", others: "list[tuple[str, Plan]]") -> None:
    from megaslide.planning.page import write_html

    with writes_to(path):
        write_html(path, subject, plan, others)
    typer.echo(f"written: {path}", err=True)


def _facts(subject: "Subject", plan: "Plan") -> dict[str, str]:
    t, h, w = subject.latents
    figures, choice = plan.to_dict(), plan.choice
    clips = f"{choice.micro_batches} x {subject.clips} clips of {t}x{h}x{w} latents"
    facts = {
        "model": f"{subject.network.name}, {count(plan.costs.parameters)} parameters",
        "batch": f"{clips}, {count(subject.tokens * choice.micro_batches)} tokens",
        "choice": f"{choice}, {choice.slots} slots",
        "machine": plan.machine.name,
        "verdict": _verdict(plan),
    }
    for place, (parts, _) in plan.places.items():
        if parts:
            inside = ", ".join(f"{name} {size(n)}" for name, n in parts.items())
            facts[place] = f"{size(sum(parts.values()))}: {inside}"
    facts |= {
        "step": f"{_seconds(figures['step_s'])}, {plan.flop:.3g} FLOP, MFU {100 * plan.mfu:.1f} %",
        **{f"rate of {name}": words for name, words in plan.machine.basis.items()},
    }
    return facts


def _verdict(plan: "Plan") -> str:
    if plan.shortfall:
        missing = ", ".join(f"{size(n)} of {place}" for place, n in plan.shortfall.items())
        return f"does not fit: lacks {missing}"
    told = f" (not told how much {' and '.join(plan.untold)} there is)" if plan.untold else ""
    return f"fits{told}; a step is bound by {plan.simulated.bound}"


def _lanes(plan: "Plan") -> "Table":
    """Per lane of a step: time and bytes."""
    from rich.table import Table

    figures, lanes = plan.to_dict(), plan.simulated.lanes
    steps = lanes.seconds / figures["step_s"]
    table = Table("lane", "busy per step", "of the step", "bytes per step", box=None)
    for lane, seconds in sorted(figures["busy_s"].items(), key=lambda item: -item[1]):
        moved = lanes.nbytes.get(lane, 0) / steps
        share = f"{100 * seconds / figures['step_s']:.0f} %"
        table.add_row(lane, _seconds(seconds), share, size(int(moved)) if moved else "")
    return table


def _others(plan: "Plan", others: "list[tuple[str, Plan]]") -> "Table":
    from rich.table import Table

    table = Table("one change", "pace", "lacks", box=None)
    for words, other in others:
        missing = ", ".join(f"{size(n)} {place}" for place, n in other.shortfall.items())
        table.add_row(words, f"{plan.pace_s / other.pace_s:.2f}x", missing or "nothing")
    return table


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
