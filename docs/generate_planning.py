"""Writes docs/planning.md: what the MegaSlide-DiT paper claims, beside what its machine allows.

    python docs/generate_planning.py

Every figure is computed by `megaslide.planning` or read from a benchmark's JSON; only the paper's
own claims are typed here, as `PAPER`. Takes half a minute; a slow test holds the page to it.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from megaslide.planning.costs import ModelCosts
from megaslide.planning.devices import device_named
from megaslide.planning.plan import EFFICIENCY, Choice, Machine, Plan, accelerator, make_plan
from megaslide.planning.subject import Subject, subject_of
from megaslide.streaming.records import FORMATS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "planning.md"
STREAMING = ROOT / "benchmarks" / "results" / "streaming.json"
MEMORY = ROOT / "benchmarks" / "results" / "memory.json"
PLANS = ROOT / "benchmarks" / "results" / "plan.json"
PAPER = {
    "step_s": 3.1, "mfu": 0.61, "mfu_without_overlap": 0.28, "mfu_optimizer_on_device": 0.15,
    "gain": 2.11, "gain_at": "28.4 B",
}  # fmt: skip
"""MegaSlide-DiT (2026), abstract and ablations; its authors have withdrawn the headline figures."""
RAM = 1536 * 10**9
PER_FRAME = (1, 512, 512)
"""A clip of n such frames has 1024 n tokens where nothing is compressed in time."""
LONG = (256, 1088, 1920)
CHUNK = 4
FRAMES = (16, 32, 64, 128, 256)
INTRODUCTION = """# Planning

<!-- Written by docs/generate_planning.py. Do not edit. -->

`megaslide plan WHAT` says whether a run fits a machine, what a step takes, what bounds it, and what
one change would do. WHAT is a config, a preset's name, or the folder of a diffusers pipeline:

```bash
megaslide plan configs/tiny.yaml                          # on this machine, which is measured
megaslide plan 14b --gpu h200 --ram 512GB                 # on one that is not at hand
megaslide plan /models/Wan2.1-T2V-14B --gpu rtx5090 --ram 256GB offload.state_format=split8
megaslide plan 105b --gpu h200 --ram 1536GB --frames 256 --height 1088 --width 1920 --json
megaslide plan 14b --gpu rtx4090 --ram 256GB --html plan.html   # memory bars and a timeline
```

`megaslide train` makes the same plan for this machine before it reads data. What cannot fit stops
there, with the bytes that are missing and the changes that would fit. What the config leaves open
is decided by the plan, logged, and saved with the run:

| key of `offload` | `auto` becomes |
| --- | --- |
| `slots` (`auto` by default) | 2, or up to 4 where that shortens a step by more than a percent |
| `activations` (`auto` by default) | `device` where they fit, else `host` |
| `tier`, `gradient_tier` | `ram` where it is large enough, else `disk` |
| `state_format` | `split`; `split8`, which rounds the moments, only where `split` fits nowhere |

Rates are measured briefly at every start, or taken from `offload.rates`, a file that `megaslide
info --probe --json rates.json` wrote. On the CPU a step takes longer than planned, because little
of it runs at the rate of large matrix products; the bytes hold. A model whose forward looks at the
values of its inputs has no plan: training warns and goes on, and the engine refuses by itself.

Bytes are exact: they are the engine's own arithmetic. Seconds come from a simulated step, in which
the engine itself runs a skeleton of the model on a clock, at the machine's rates. For an
accelerator that is not at hand these are its datasheet's, at an assumed efficiency of
{efficiency:g} (`--efficiency`); the output says of each rate where it comes from.
{accuracy}
## The paper's model

What follows is arithmetic about the MegaSlide-DiT paper's 105-billion-parameter model on one H200
and PCIe 5.0 x16, with {ram} of RAM. It is a projection: nobody measured it here.
"""


@cache
def costs_of(preset: str, frames: int) -> ModelCosts:
    return subject_of(preset, clip=(frames, *PER_FRAME[1:]), compression=(1, 8, 8)).costs()


@cache
def machine(efficiency: float = EFFICIENCY) -> Machine:
    return replace(accelerator(device_named("h200"), efficiency=efficiency), ram_bytes=RAM)


def page() -> str:
    """The whole page as Markdown."""
    text = INTRODUCTION.format(efficiency=EFFICIENCY, accuracy=accuracy(), ram=gb(RAM))
    parts = [*state(), *steps(), *long_video(), *by_frames(), *ablations(), *sizes(), *claims()]
    return text + "\n".join(_wrapped(part) for part in parts)


def _wrapped(part: str) -> str:
    """Paragraphs to the width of the other pages; tables as they are."""
    return "\n".join(line if line.startswith("|") else fill(line, 100) for line in part.split("\n"))


def accuracy() -> str:
    if not PLANS.exists():
        return ""
    found = json.loads(PLANS.read_text())
    text = (
        f"Predicted beside measured on {found['machine']['cpu']} with emulated links and "
        f"disks, {len(found['rows'])} configurations: median error "
        f"{percent(found['step_error_median'])}, largest {percent(found['step_error_max'])}; "
        f"bytes exact in {'all' if found['peak_bytes_exact'] else 'not all'} "
        "(`megaslide bench plan`). What a real disk gives from second to second is less certain. "
    )
    if ratios := found.get("choice_over_best", {}).values():
        slower = percent(max(1.0, *ratios) - 1)
        text += (
            f"Of every choice that a config may leave open, measured for {len(ratios)} models, "
            f"what the planner chooses is at most {slower} slower than the best.\n"
        )
    return _wrapped(text.rstrip() + "\n")


def state() -> Iterable[str]:
    costs = costs_of("105b", 1)
    yield f"\n### State\n\n{costs.parameters / 1e9:.1f} B parameters. Persistent bytes by format:\n"
    rows = []
    for name in FORMATS:
        plan = make_plan(costs, machine(), Choice(state_format=name))
        figures = plan.to_dict()
        lacks = gb(plan.shortfall["RAM"]) if "RAM" in plan.shortfall else "nothing"
        per = figures["state_bytes"] / costs.parameters
        rows.append([name, gb(figures["state_bytes"]), f"{per:.1f}", gb(sum(plan.ram.values())),
                     lacks])  # fmt: skip
    yield table(["format", "state", "per parameter", "RAM with gradients", "lacks"], rows)
    new = subject_of("105b").besides(costs)
    yield (
        "\nA run that begins with a new model holds its weights in fp32 besides, until the store "
        f"has a copy: {gb(sum(new.values()))} more. `megaslide plan 105b` counts them."
    )


def steps() -> Iterable[str]:
    yield "\n### Tokens and time\n\nA step by tokens, 3D-DSA with a 3x7x7 window:\n"
    rows = []
    for frames in (1, 3, 8, 16, 32, 64):
        plan = make_plan(costs_of("105b", frames), machine(), Choice())
        figures = plan.to_dict()
        rows.append([f"{1024 * frames:,}", seconds(figures["step_s"]), figures["bound"],
                     *(seconds(figures["busy_s"][lane]) for lane in ("compute", "h2d", "adamw")),
                     percent(plan.mfu)])  # fmt: skip
    yield table(["tokens", "step", "bound", "compute", "h2d", "AdamW", "MFU"], rows)
    link = make_plan(costs_of("105b", 1), machine(), Choice()).to_dict()
    floor = link["h2d_bytes_per_step"] / machine().link_bytes_s
    yield (
        f"\nWeights cross the link twice and gradients once: {gb(link['h2d_bytes_per_step'])} down "
        f"and {gb(link['d2h_bytes_per_step'])} up, so no step is shorter than {seconds(floor)} on "
        f"this link, whatever the tokens. The paper's {PAPER['step_s']} s per step is not possible "
        "on the machine that it describes."
    )


def long_video() -> Iterable[str]:
    yield "\n### 256 frames of 1088x1920\n"
    subject = subject_of("105b", clip=LONG, compression=(1, 8, 8))
    rows = []
    for kind in ("dense", "deformable"):
        override = [f"attention.kind={kind}"]
        one = subject_of("105b", override, clip=LONG, compression=(1, 8, 8)).costs()
        plan = make_plan(one, machine(), Choice(activations="host"))
        best = make_plan(one, machine(1.0), Choice(activations="host"))
        parts = "" if kind == "dense" else gb(in_chunks(CHUNK).units[1].working_bytes)
        rows.append([kind, f"{plan.flop:.3g}", seconds(plan.simulated.step_s),
                     seconds(best.simulated.step_s), gb(one.units[1].boundary_bytes),
                     gb(one.boundary_bytes), gb(one.units[1].working_bytes),
                     parts or "not possible"])  # fmt: skip
    yield f"{subject.tokens:,} tokens, inputs of blocks on the host:\n"
    yield table(["attention", "FLOP per step", "step", "at peak rate", "one boundary", "all",
                 "one block's working set", f"in chunks of {CHUNK} frames"], rows)  # fmt: skip
    config = subject.network.config
    samples = 2 * 2 * subject.tokens * math.prod(config.window) * config.hidden_size
    yield (
        f"\nAn implementation that materialises its samples, as the published code does, holds "
        f"{gb(samples)} of sampled keys and values in bf16 for one attention layer with this "
        "window. The working set above is what autograd keeps for one block whose tokens are "
        "processed at once; it does not fit either, so a block must be computed in parts, as "
        f"`offload.frames_per_chunk={CHUNK}` does. Every chunk is given the frames that its taps "
        f"can reach too, which makes a step {percent(in_chunks(CHUNK).flop / one.flop - 1)} more "
        "work."
    )


@cache
def in_chunks(frames: int) -> ModelCosts:
    overrides = [f"offload.frames_per_chunk={frames}"]
    return subject_of("105b", overrides, clip=LONG, compression=(1, 8, 8)).costs()


def by_frames() -> Iterable[str]:
    yield (
        "\n### Memory by frames\n\nWhat autograd keeps of one block for its backward pass, frames "
        "of 512x512 with 1,024 tokens each, bf16:\n"
    )
    rows = []
    for frames in FRAMES:
        kept = {kind: block_bytes(kind, frames) for kind in ("dense", "swin", "deformable")}
        config = of_frames("deformable", frames).network.config
        tokens = of_frames("deformable", frames).tokens
        samples = 2 * 2 * tokens * math.prod(config.window) * config.hidden_size
        scores = 2 * config.num_attention_heads * tokens**2
        rows.append([str(frames), gb(kept["dense"]), gb(kept["dense"] + scores), gb(kept["swin"]),
                     gb(kept["deformable"] + samples), gb(kept["deformable"])])  # fmt: skip
    yield table(["frames", "dense, fused", "dense, scores stored", "shifted windows",
                 "deformable, samples stored", "deformable, ours"], rows)  # fmt: skip
    yield (
        "\nOnly stored scores grow with the square of the frames; fused dense attention pays in "
        "time, not in memory. Stored samples grow like ours, by a constant factor that depends on "
        "the window. All is arithmetic: the three kinds counted on tensors without data, and to "
        "them the bf16 scores, or the sampled keys and values, of one layer."
    )
    if MEMORY.exists():
        yield from measured_memory(json.loads(MEMORY.read_text()))


def measured_memory(found: dict[str, Any]) -> Iterable[str]:
    kinds = ("dense", "swin", "grid_sample", "deformable")
    yield (
        f"\nMeasured on {found['machine']['cpu']} (`megaslide bench memory`): by how much memory "
        f"rises in the forward and backward of one attention call, fp32, {found['heads']} heads of "
        f"{found['head_dim']}, {found['side']}x{found['side']} tokens a frame:\n"
    )
    rows = []
    for row in found["rows"]:
        taken = (row["extra_bytes"][kind] for kind in kinds)
        rows.append([str(row["frames"]), *("not run" if n is None else mb(n) for n in taken)])
    yield table(["frames", "dense, fused", "shifted windows", "deformable, samples stored",
                 "deformable, ours"], rows)  # fmt: skip


def of_frames(kind: str, frames: int) -> Subject:
    size = (frames, *PER_FRAME[1:])
    return subject_of("105b", [f"attention.kind={kind}"], clip=size, compression=(1, 8, 8))


def block_bytes(kind: str, frames: int) -> int:
    return of_frames(kind, frames).costs().units[1].working_bytes


@cache
def overlap_plans() -> dict[str, tuple[Plan, float]]:
    """Plans of the 105 B model at 16,384 tokens by what is left out, with the paper's MFU."""
    costs, here = costs_of("105b", 16), machine()
    state_bytes = make_plan(costs, here, Choice()).to_dict()["state_bytes"]
    moved = 2 * costs.parameters * 14 - 2 * costs.parameters
    through_link = replace(here, adamw_bytes_s=moved * here.link_bytes_s / state_bytes)
    return {
        "overlapped": (make_plan(costs, here, Choice()), PAPER["mfu"]),
        "every copy waited for": (
            make_plan(costs, here, Choice(), synchronous=True), PAPER["mfu_without_overlap"]
        ),
        "state through the link to an optimizer on the device": (
            make_plan(costs, through_link, Choice()), PAPER["mfu_optimizer_on_device"]
        ),
    }  # fmt: skip


def ablations() -> Iterable[str]:
    yield "\n### Overlap, and where the optimizer runs\n\nThe same model at 16,384 tokens:\n"
    rows = [[name, seconds(plan.simulated.step_s), percent(plan.mfu), percent(claim)]
            for name, (plan, claim) in overlap_plans().items()]  # fmt: skip
    yield table(["", "step", "MFU, projected", "MFU, the paper's"], rows)
    yield (
        "\nIn the last row an update takes as long as its state takes on the link, down and up at "
        "once, and is taken not to slow the weights on the same link: a bound in its favour."
    )


def sizes() -> Iterable[str]:
    yield "\n### What overlap gains, by size\n\nAt 8,192 tokens, projected:\n"
    rows = []
    for preset in ("1b", "5b", "14b", "30b", "105b"):
        costs = costs_of(preset, 8)
        plans = [make_plan(costs, machine(), Choice(), synchronous=s) for s in (False, True)]
        rows.append([preset, *(seconds(p.simulated.step_s) for p in plans), gain(plans)])
    yield table(["size", "overlapped", "waited for", "gain"], rows)
    yield (
        f"\nThe paper reports {PAPER['gain']} at {PAPER['gain_at']}. By this arithmetic the gain "
        "hardly depends on size, because the work of all lanes grows alike; it depends on how "
        "near to each other the lanes are."
    )
    if STREAMING.exists():
        found = json.loads(STREAMING.read_text())
        yield (
            f"\nMeasured with an emulated link on {found['machine']['cpu']}, compute and transfer "
            f"balanced: {found['async_over_sync']:.2f} (`megaslide bench streaming`)."
        )
    yield ""


def claims() -> Iterable[str]:
    """The paper's figure, what arithmetic allows, what was measured here."""
    yield "### In one table\n"
    link = make_plan(costs_of("105b", 1), machine(), Choice()).to_dict()
    floor = link["h2d_bytes_per_step"] / machine().link_bytes_s
    plans = [make_plan(costs_of("30b", 8), machine(), Choice(), synchronous=s)
             for s in (False, True)]  # fmt: skip
    gained = "not measured: no result of `megaslide bench streaming`"
    if STREAMING.exists():
        found = json.loads(STREAMING.read_text())
        gained = f"{found['async_over_sync']:.2f}, emulated link, compute and transfer balanced"
    absent = "not measured: no GPU at hand"
    rows = [["step, 105 B", f"{PAPER['step_s']} s", f"{seconds(floor)} or more", absent]]
    rows += [[f"MFU, {name}", percent(claim), percent(plan.mfu), absent]
             for name, (plan, claim) in overlap_plans().items()]  # fmt: skip
    rows.append([f"gain of overlap at {PAPER['gain_at']}", str(PAPER["gain"]),
                 f"{gain(plans)} (preset 30b)", gained])  # fmt: skip
    yield table(["", "the paper", "arithmetic", "measured"], rows)
    yield ""


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def gain(plans: Sequence[Plan]) -> str:
    return f"{plans[1].simulated.step_s / plans[0].simulated.step_s:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e12:.2f} TB" if nbytes >= 1e12 else f"{nbytes / 1e9:.3g} GB"


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.2g} s"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


if __name__ == "__main__":
    PAGE.write_text(page())
