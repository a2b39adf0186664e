"""How far plans are from what happens: step times and bytes, predicted and measured.

    python benchmarks/bench_plan.py [--json FILE] [--plot FILE.png] [--from FILE]

For each size of model, what a block's work takes is profiled on a model of three blocks with
nothing overlapped; the simulated engine then predicts deeper models on emulated links of all
speeds, and on emulated disks: what a real one gives from second to second is another question
(`bench disk`). Profile and measurement alternate, because a shared machine drifts. A correctness
gate comes first: the streamed model must train as plain PyTorch does. At last every choice that a
config may leave open is measured for some configurations, beside what the planner chooses.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench_streaming import Net, require_parity
from plan_choices import sweep

from megaslide.planning.hardware import probe
from megaslide.planning.profile import profile
from megaslide.planning.simulate import Load, Schedule, UnitLoad, simulate
from megaslide.streaming import StreamedModel, TransferHooks, stream
from megaslide.streaming.layout import UnitLayout
from megaslide.streaming.memory import planned_device_bytes
from megaslide.streaming.records import planned_bytes
from megaslide.streaming.store import StoreSettings, plan_store

STEPS, WARM_STEPS = 5, 2
PROFILED_DEPTH = 3
DETAILS = ("rows", "choices", "machine")
"""Keys that are too long for a screen."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration."""

    dim: int
    tokens: int
    depth: int
    link_gb_s: float
    slots: int = 2
    micro_batches: int = 1
    clip: bool = True
    activations: str = "device"
    tier: str = "ram"
    gradient_tier: str = "ram"
    disk_gb_s: float | None = None

    def build(self, depth: int, **options: Any) -> StreamedModel:
        torch.manual_seed(0)
        return stream(
            Net(self.dim, depth), micro_batch_size=1, lr=1e-5, slots=self.slots,
            max_grad_norm=1.0 if self.clip else None, activations=self.activations,
            tier=self.tier, gradient_tier=self.gradient_tier, disk_path=tempfile.gettempdir(),
            disk_gb_s=self.disk_gb_s, **options,
        )  # fmt: skip


CASES = [
    Case(dim=512, tokens=256, depth=12, link_gb_s=0.5),
    Case(dim=512, tokens=256, depth=12, link_gb_s=0.5, clip=False),
    Case(dim=512, tokens=256, depth=24, link_gb_s=0.15),
    Case(dim=512, tokens=256, depth=24, link_gb_s=0.15, slots=4),
    Case(dim=512, tokens=256, depth=24, link_gb_s=0.15, micro_batches=2),
    Case(dim=512, tokens=256, depth=12, link_gb_s=0.3, micro_batches=4),
    Case(dim=512, tokens=512, depth=12, link_gb_s=0.2, activations="host"),
    Case(dim=512, tokens=512, depth=12, link_gb_s=0.1, activations="host", micro_batches=2),
    Case(dim=768, tokens=256, depth=12, link_gb_s=0.3),
    Case(dim=768, tokens=256, depth=12, link_gb_s=0.3, slots=3, micro_batches=2, clip=False),
    Case(dim=768, tokens=256, depth=16, link_gb_s=0.6, tier="disk", disk_gb_s=0.8),
    Case(dim=768, tokens=256, depth=16, link_gb_s=0.6, tier="disk", disk_gb_s=0.5, micro_batches=2),
    Case(
        dim=1024,
        tokens=128,
        depth=12,
        link_gb_s=0.6,
        tier="disk",
        disk_gb_s=0.6,
        gradient_tier="disk",
    ),
    Case(dim=1024, tokens=128, depth=12, link_gb_s=0.4),
    Case(dim=1024, tokens=128, depth=12, link_gb_s=0.4, clip=False, slots=3),
]


def step_of(model: StreamedModel, case: Case, batch: int) -> Any:
    x = torch.randn(batch, case.tokens, 8)

    def step() -> None:
        loss = model(x).square().mean()
        with model.final_backward():
            loss.backward()
        model.step()

    return step


def profiled(case: Case) -> list[UnitLoad]:
    """Loads of the resident unit and of one block, in RAM on a link as fast as memory."""
    plain = replace(case, tier="ram", gradient_tier="ram", activations="device")
    model = plain.build(PROFILED_DEPTH, hooks=TransferHooks(synchronous=True))
    loads = profile(model, step_of(model, case, 1))
    model.close()
    return [loads[0], loads[PROFILED_DEPTH - 1]]


def on_machine(load: UnitLoad, layout: UnitLayout, case: Case) -> UnitLoad:
    """The load on the case's link and disk; a copy takes what the slower of link and memory do."""
    kinds = planned_bytes([layout])
    gradients = kinds.pop("gradients")

    def linked(own: Load) -> Load:
        return replace(own, seconds=max(own.seconds, own.nbytes / (case.link_gb_s * 1e9)))

    def stored(nbytes: int) -> Load | None:
        if case.disk_gb_s is None:
            return None
        return Load(seconds=nbytes / (case.disk_gb_s * 1e9), nbytes=nbytes)

    inputs = 4 * case.micro_batches * case.tokens * case.dim
    spilled = gradients if case.gradient_tier == "disk" else 0
    return replace(
        load, h2d=linked(load.h2d), d2h=linked(load.d2h),
        activation=linked(Load(seconds=0.0, nbytes=inputs)),
        disk_weights=stored(kinds["weights"]), disk_read=stored(sum(kinds.values()) + spilled),
        disk_write=stored(sum(kinds.values())), disk_gradients=stored(spilled),
    )  # fmt: skip


def predicted(case: Case, loads: Sequence[UnitLoad], model: StreamedModel) -> float:
    layouts = [model.store.units[0], model.store.units[1]]
    resident, block = (on_machine(*pair, case) for pair in zip(loads, layouts, strict=True))
    schedule = Schedule(
        slots=case.slots, micro_batches=case.micro_batches, clip=case.clip,
        activations=case.activations, tier=case.tier, gradient_tier=case.gradient_tier,
    )  # type: ignore[arg-type] # fmt: skip
    return simulate([resident, *[block] * case.depth], schedule).step_s


def measured(model: StreamedModel, case: Case) -> float:
    """Median seconds of a step in steady state."""
    step, seconds = step_of(model, case, case.micro_batches), []
    for number in range(WARM_STEPS + STEPS):
        start = time.perf_counter()
        step()
        if number >= WARM_STEPS:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def bytes_exact(model: StreamedModel, case: Case) -> bool:
    """Whether device arenas and the store are as planned."""
    units = model.store.units
    settings = StoreSettings(
        tier=case.tier, gradient_tier=case.gradient_tier, disk_path=Path(),
    )  # type: ignore[arg-type] # fmt: skip
    plan = plan_store(units, settings)
    arenas = {k: n for k, n in model.device_bytes.items() if k != "activations"}
    held = sum(buffer.nbytes for buffer in model.store.buffers)
    return arenas == planned_device_bytes(units, case.slots) and held == plan.ram_bytes


def run(cases: Sequence[Case]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        model = case.build(case.depth, link_gb_s=case.link_gb_s)
        before = profiled(case)
        seconds = measured(model, case)
        guesses = [predicted(case, loads, model) for loads in (before, profiled(case))]
        guess = statistics.mean(guesses)
        exact = bytes_exact(model, case)
        model.close()
        rows.append({
            **vars(case), "predicted_s": guess, "measured_s": seconds,
            "error": guess / seconds - 1, "bytes_exact": exact, "profiles_s": guesses,
        })  # fmt: skip
        print(f"{case}\n  predicted {guess:.3f} s, measured {seconds:.3f} s, "
              f"{100 * rows[-1]['error']:+.1f} %", flush=True)  # fmt: skip
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=(6.5, 6))
    marks = itertools.cycle("osd^v")
    for tier in ("ram", "disk"):
        chosen = [row for row in rows if row["tier"] == tier]
        x, y = ([row[key] for row in chosen] for key in ("measured_s", "predicted_s"))
        axes.loglog(
            x,
            y,
            next(marks),
            label={"ram": "state in RAM", "disk": "state on disk"}[tier],
            alpha=0.8,
        )
    ends = [min(row["measured_s"] for row in rows), max(row["measured_s"] for row in rows)]
    axes.plot(ends, ends, color="0.3", linewidth=1)
    axes.fill_between(ends, [0.85 * e for e in ends], [1.15 * e for e in ends], color="0.9")
    axes.set(xlabel="measured, s per step", ylabel="predicted, s per step")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.legend(title="grey: within 15 %")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--tier", choices=("ram", "disk"), help="only cases of this tier")
    parser.add_argument("--plot", type=Path, help="draw predictions over measurements, PNG")
    parser.add_argument("--from", type=Path, dest="earlier", help="plot this JSON, measure nothing")
    arguments = parser.parse_args()
    if arguments.earlier:
        if not arguments.plot:
            parser.error("--from draws a plot: name it with --plot FILE.png")
        plot(json.loads(arguments.earlier.read_text())["rows"], arguments.plot)
        return
    torch.set_num_threads(1)  # copies and AdamW have the other cores
    require_parity()
    rows = run([case for case in CASES if arguments.tier in (None, case.tier)])
    errors = [abs(row["error"]) for row in rows]
    choices = sweep()
    result = {
        "step_error_median": statistics.median(errors),
        "step_error_max": max(errors),
        "peak_bytes_exact": all(row["bytes_exact"] for row in rows),
        "rows": rows,
        "choice_over_best": {each["name"]: each["choice_over_best"] for each in choices},
        "choices": choices,
        "threads": torch.get_num_threads(),
        "machine": probe().provenance(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
    print(json.dumps({k: v for k, v in result.items() if k not in DETAILS}, indent=2))


if __name__ == "__main__":
    main()
