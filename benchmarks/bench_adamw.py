"""AdamW on the host: bandwidth beside STREAM's triad, and time beside torch's and others' updates.

    python benchmarks/bench_adamw.py [--elements N] [--threads T] [--rounds R] [--json FILE]

Everyone updates the same state: bf16 weights and gradients, fp32 masters. Who knows only fp32
parameters needs two casts around his update, which a user pays and which therefore count. Results
are compared with torch.optim.AdamW's first; then all take turns within one run, and medians are
divided.
A ratio a_over_b says how many times as fast a is (for the triad: bytes per second), so more is
better. Null: not installed (pip install 'megaslide[peers]') or of no use on the CPU; `absent` says
which.
"""

import argparse
import ctypes
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.adamw import BLOCK8, AdamWSettings, AdamWState, adamw_
from megaslide.ops.adamw.reference import join_master, split_master_
from megaslide.planning.hardware import package_version, probe
from megaslide.planning.rates import ADAMW_BYTES, TRIAD_BYTES, triad_

SETTINGS = AdamWSettings(lr=1e-5)
RELATIVE = 1e-6
PEERS = ("deepspeed", "bitsandbytes", "torchao")
BYTES = {"triad": TRIAD_BYTES, "split": ADAMW_BYTES, "split8": 8 + 6 + 16 / BLOCK8}
"""Read and written per element; split8 reads a code for each moment and writes it."""


def new_state(master: Tensor, *, coded: bool) -> AdamWState:
    n = len(master)
    weight, residual = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    split_master_(master, weight, residual)
    dtype = torch.uint8 if coded else torch.float32
    scale = [torch.zeros(-(-n // BLOCK8)) if coded else None for _ in range(2)]
    return AdamWState(
        weight=weight,
        residual=residual,
        exp_avg=torch.zeros(n, dtype=dtype),
        exp_avg_sq=torch.zeros(n, dtype=dtype),
        exp_avg_scale=scale[0],
        exp_avg_sq_scale=scale[1],
    )


def check_results(threads: int) -> None:
    """The correctness gate: 10 steps of torch.optim.AdamW, and split8 with the reference's bits.

    Not torch's bits, because its square root depends on the processor.
    """
    master = torch.randn(200_003)
    plain = torch.nn.Parameter(master.clone())
    torch_s = {"lr": SETTINGS.lr, "weight_decay": SETTINGS.weight_decay, "eps": SETTINGS.eps}
    optimizer = torch.optim.AdamW([plain], **torch_s, foreach=False)
    split = new_state(master, coded=False)
    coded, expected = new_state(master, coded=True), new_state(master, coded=True)
    for step in range(1, 11):
        grad = torch.randn(len(master)).bfloat16()
        plain.grad = grad.float()
        optimizer.step()
        adamw_(split, grad, SETTINGS, step=step, threads=threads, backend="native")
        adamw_(coded, grad, SETTINGS, step=step, threads=threads, backend="native")
        adamw_(expected, grad, SETTINGS, step=step, backend="reference")
    assert split.residual is not None
    error = (join_master(split.weight, split.residual) - plain.detach()).norm() / plain.norm()
    if error > RELATIVE:
        raise RuntimeError(f"split is {error:.1e} from torch.optim.AdamW, above {RELATIVE}")
    for name in ("weight", "residual", "exp_avg", "exp_avg_sq"):
        if not torch.equal(getattr(coded, name), getattr(expected, name)):
            raise RuntimeError(f"split8 differs from the reference in {name}")


# ---- contenders: each returns a function that does one update -----------------------------------


def triad(n: int, threads: int) -> Callable[[], None]:
    a, b, c = torch.zeros(n), torch.ones(n), torch.ones(n)
    return lambda: triad_(a, b, c, threads)


def ours(grad: Tensor, threads: int, *, coded: bool) -> Callable[[], None]:
    state, step = new_state(torch.ones(len(grad)), coded=coded), 0

    def run() -> None:
        nonlocal step
        step += 1
        adamw_(state, grad, SETTINGS, step=step, threads=threads, backend="native")

    return run


def with_casts(grad: Tensor, build: Callable[[list[Tensor]], Any]) -> Callable[[], None]:
    """An fp32 optimizer behind bf16 gradients and in front of bf16 weights."""
    master = torch.nn.Parameter(torch.ones(len(grad)))
    master.grad = torch.zeros(len(grad))
    weight, optimizer = master.detach().bfloat16(), build([master])

    def run() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        optimizer.step()
        weight.copy_(master.detach())

    return run


def torch_fused(grad: Tensor) -> Callable[[], None]:
    return with_casts(grad, lambda p: torch.optim.AdamW(p, lr=SETTINGS.lr, fused=True))


def deepspeed(grad: Tensor) -> Callable[[], None]:
    optimizer = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return with_casts(grad, lambda p: optimizer(p, lr=SETTINGS.lr, adamw_mode=True))


def bnb8(grad: Tensor) -> Callable[[], None]:
    optimizer = importlib.import_module("bitsandbytes.optim").AdamW8bit
    return with_casts(grad, lambda p: optimizer(p, lr=SETTINGS.lr))


def torchao8(grad: Tensor) -> Callable[[], None]:
    optimizer = importlib.import_module("torchao.optim").AdamW8bit
    return with_casts(grad, lambda p: optimizer(p, lr=SETTINGS.lr))


# ---- the run --------------------------------------------------------------------------------


def contenders(n: int, threads: int) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """Name to update, and name to the reason for whoever is not here."""
    grad = (1e-3 * torch.randn(n)).bfloat16()
    present: dict[str, Callable[[], None]] = {
        "triad": triad(n, threads),
        "split": ours(grad, threads, coded=False),
        "split8": ours(grad, threads, coded=True),
        "torch_fused": torch_fused(grad),
    }
    absent = {}
    for name, build in (("deepspeed", deepspeed), ("bnb8", bnb8), ("torchao8", torchao8)):
        try:
            present[name] = build(grad)
            present[name]()
        except Exception as error:  # whatever a foreign package raises on this machine
            present.pop(name, None)
            absent[name] = f"{type(error).__name__}: {error}"
    return present, absent


def seconds_each(updates: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Everyone once per round, so that a disturbance of the machine meets all alike."""
    taken: dict[str, list[float]] = {name: [] for name in updates}
    for update in updates.values():
        update()
    for _ in range(rounds):
        for name, update in updates.items():
            start = time.perf_counter()
            update()
            taken[name].append(time.perf_counter() - start)
    return taken


def measure(n: int, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    check_results(threads)
    updates, absent = contenders(n, threads)
    taken = seconds_each(updates, rounds)
    median = {name: statistics.median(values) for name, values in taken.items()}

    def faster(a: str, b: str) -> float | None:
        return median[b] / median[a] if b in median else None

    rate = {name: BYTES[name] * n / median[name] / 1e9 for name in BYTES}
    name = library.load().megaslide_instruction_set
    name.restype = ctypes.c_char_p
    machine = probe()
    return {
        "split_over_triad": rate["split"] / rate["triad"],
        "split_over_torch_fused": faster("split", "torch_fused"),
        "split_over_deepspeed": faster("split", "deepspeed"),
        "split8_over_split": faster("split8", "split"),
        "split8_over_bnb8": faster("split8", "bnb8"),
        "split8_over_torchao8": faster("split8", "torchao8"),
        "absent": absent,
        "elements": n,
        "threads": threads,
        "rounds": rounds,
        "isa": name().decode(),
        "gb_per_s": rate,
        "median_s": median,
        "fastest_s": {name: min(values) for name, values in taken.items()},
        "packages": {p: package_version(p) for p in ("torch", *PEERS)},
        "commit": machine.commit,
        "machine": machine.provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    result = measure(arguments.elements, arguments.threads, arguments.rounds)
    text = json.dumps(result, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
