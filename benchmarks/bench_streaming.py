"""How much of the transfer streaming hides, on an emulated link.

    python benchmarks/bench_streaming.py [--json FILE]

Blocks are real matrix products on one thread; the link's bandwidth is then set from the measured
compute time, so that transfer and compute stand in the wanted ratio on any machine. `sync` is the
same engine with every copy waited for where it is started. A correctness gate comes first.
"""

import argparse
import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megaslide.planning.hardware import probe
from megaslide.streaming import StreamedModel, TransferHooks, stream
from megaslide.tracing import TraceSummary, summarize

DIM, DEPTH, TOKENS, STEPS, SLOTS = 512, 40, 256, 3, 2
"""As deep as the models this is for (Wan 2.1 14B has 40 blocks), because at the end of a step the
link waits for about three blocks, however many there are: nothing may load before the norm of all
gradients is known. With one micro-batch AdamW takes longer than this model's forward pass, so that
the case in which compute dominates has COMPUTE_BOUND of them."""
COMPUTE_BOUND = 4
MICRO_BATCHES = (1, 4, 16)
ROUNDS = 3
RELATIVE = 1e-6


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Net(nn.Module):
    def __init__(self, dim: int = DIM, depth: int = DEPTH) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, dim), nn.Linear(dim, 8)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build(**options: Any) -> StreamedModel:
    torch.manual_seed(0)
    return stream(Net(), micro_batch_size=1, slots=SLOTS, lr=1e-4, **options)


def step(model: StreamedModel, batch: int, tokens: int) -> float:
    """One optimizer step on `batch` micro-batches of `tokens` tokens; the loss."""
    x = torch.randn(batch, tokens, 8, generator=torch.Generator().manual_seed(batch))
    loss = model(x).square().mean()
    loss.backward()
    model.step()
    return loss.item()


@dataclass(frozen=True)
class Measured:
    """What some steps of one model took."""

    step_s: float
    lanes: TraceSummary
    bytes_as_counted: bool


def measure(batch: int = 1, **options: Any) -> Measured:
    """Median seconds per step, what the lanes did in all of them, and whether bytes add up."""
    model = build(**options)
    step(model, batch, TOKENS)  # fills the slots and the caches
    before, seconds = model.trace.snapshot(), []
    for _ in range(STEPS):
        start = time.perf_counter()
        step(model, batch, TOKENS)
        seconds.append(time.perf_counter() - start)
    summary = summarize(before, model.trace.snapshot())
    model.close()
    return Measured(statistics.median(seconds), summary, bytes_identity(model))


def require_parity() -> None:
    """Streamed over a slow link is plain PyTorch; refuses to measure anything else."""
    torch.manual_seed(0)
    plain, streamed = Net(dim=64), stream(_seeded(), micro_batch_size=1, lr=1e-4, link_gb_s=0.5)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    for _ in range(3):
        x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(2))
        loss = plain(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        got = step(streamed, 2, 16)
        if abs(got - loss.item()) > RELATIVE * abs(loss.item()):
            raise SystemExit(f"gate: streamed loss {got}, plain PyTorch {loss.item()}")
    streamed.close()


def _seeded() -> Net:
    torch.manual_seed(0)
    return Net(dim=64)


def bytes_identity(model: StreamedModel) -> bool:
    """Weights twice less what is in slots at the turn, gradients once, per step.

    The first slots and the resident unit are loaded once more, for a step that never comes.
    """
    resident, block = model.store.units[:2]
    steps = STEPS + 1
    down = (steps * (2 * DEPTH - SLOTS) + SLOTS) * block.weight_nbytes
    down += (steps + 1) * resident.weight_nbytes
    up = steps * sum(unit.gradient_nbytes for unit in model.store.units)
    moved = model.trace.counters
    return moved["h2d_bytes"] == down and moved["d2h_bytes"] == up


def link_for(compute_s: float, share: float) -> float:
    """GB/s at which all copies of a step, one after another, take `share` of its compute."""
    model = build()
    block = model.store.units[1].weight_nbytes
    model.close()
    return (2 * DEPTH - SLOTS + DEPTH) * block / (share * compute_s) / 1e9


def both_ways(link_gb_s: float) -> tuple[float, float]:
    """Seconds per step overlapped, and with every copy waited for, one right after the other."""
    waiting = TransferHooks(synchronous=True)
    return measure(link_gb_s=link_gb_s).step_s, measure(link_gb_s=link_gb_s, hooks=waiting).step_s


def run() -> dict[str, Any]:
    require_parity()
    compute_s = measure().lanes.busy_s["compute"] / STEPS
    balanced = link_for(compute_s, 1.0)
    pairs = [both_ways(balanced) for _ in range(ROUNDS)]
    compute_bound = measure(COMPUTE_BOUND, link_gb_s=balanced)
    # With 1 micro-batch the link takes four times the compute, so that tokens come free at first.
    slow = link_for(compute_s, 4.0)
    counts = {count: measure(count, link_gb_s=slow) for count in MICRO_BATCHES}
    transfer_bound = counts[1]
    return {
        "async_over_sync": statistics.median(sync / overlapped for overlapped, sync in pairs),
        "overlap_compute_bound": compute_bound.lanes.overlap,
        "overlap_transfer_bound": transfer_bound.lanes.overlap,
        "bytes_identity": all(measured.bytes_as_counted for measured in counts.values()),
        "tokens_per_s": {str(n): n * TOKENS / at.step_s for n, at in counts.items()},
        "depth": DEPTH,
        "compute_s": compute_s,
        "balanced_link_gb_s": balanced,
        "step_s": [{"async": overlapped, "sync": sync} for overlapped, sync in pairs],
        "gate": f"losses of 3 steps within {RELATIVE} of plain PyTorch",
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "machine": probe().provenance(),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # copies and AdamW have the other cores
    text = json.dumps(run(), indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
