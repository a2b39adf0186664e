"""Full-parameter training of a model whose state is larger than RAM, on the disk tier.

    python benchmarks/bench_disk.py --params 3e9 --folder /fast/disk --json disk.json

The model is built on the meta device, initialised block by block, and trained on one fixed batch.
What is reported: losses, the process's peak resident memory, the time of a step, and beside it the
time that the slowest lane alone would need: disk (bytes moved / bandwidth measured in this run,
reading and writing at once), compute, AdamW. First, a gate: a small model of the same blocks must
give plain PyTorch's losses within RELATIVE.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megaslide.ops.adamw import AdamWSettings
from megaslide.planning.hardware import probe
from megaslide.planning.rates import disk_rates
from megaslide.streaming import StreamedModel, stream
from megaslide.streaming.filling import reset_parameters
from megaslide.streaming.gradients import Landed
from megaslide.streaming.lanes import Lanes
from megaslide.streaming.layout import find_blocks, plan_units
from megaslide.streaming.optimizer import StreamedAdamW
from megaslide.streaming.store import Store, StoreSettings
from megaslide.tracing import Trace

RELATIVE = 1e-6
MEASURED_BYTES = 8 << 30


class Block(nn.Module):
    """A pre-norm transformer block with 12 d^2 weights."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # [B, N, D]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Blocks between two projections."""

    def __init__(self, dim: int, depth: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(width, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 64) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=3e8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gradient-tier", choices=("ram", "disk"), default="ram")
    parser.add_argument("--state-format", choices=("master", "split", "split8"), default="split")
    parser.add_argument("--json", type=Path, default=Path("bench_disk.json"))
    options = parser.parse_args()
    require_parity(options.folder)
    result: dict[str, Any] = {"before_gb_s": disk_gb_s(options.folder)}
    result |= run(options)
    result["after_gb_s"] = disk_gb_s(options.folder)
    result |= slowest_lane(result)
    result["machine"] = probe().provenance()
    result["threads"] = torch.get_num_threads()
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=2))


def require_parity(folder: Path) -> None:
    """Stop unless a small model on disk trains exactly like plain PyTorch in RAM.

    On one thread: with more, plain PyTorch itself does not always repeat its last bit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    losses = []
    for streamed in (False, True):
        torch.manual_seed(0)
        model: Any = Transformer(128, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if streamed:
            model = stream(model, lr=1e-3, tier="disk", gradient_tier="disk", disk_path=folder)
        losses.append([])
        for _ in range(4):
            loss = objective(model, *batch(16, torch.float32))
            loss.backward()
            losses[-1].append(loss.item())
            if streamed:
                model.step()
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    torch.set_num_threads(threads)
    if not torch.allclose(torch.tensor(losses[1]), torch.tensor(losses[0]), RELATIVE, 0.0):
        raise SystemExit(f"gate failed: plain {losses[0]}, on disk {losses[1]}")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train and report; times are means over the steps, each with its own update."""
    dim = 2048 if options.params >= 1e9 else 1024
    depth = -(-int(options.params) // (12 * dim * dim))
    with torch.device("meta"):
        model = Transformer(dim, depth)
    torch.manual_seed(0)
    trace, start = Trace(), time.perf_counter()
    streamed = stream(
        model, dtype=torch.bfloat16, lr=1e-5, tier="disk", state_format=options.state_format,
        gradient_tier=options.gradient_tier, disk_path=options.folder,
        init_weights=reset_parameters, trace=trace,
    )  # fmt: skip
    filled, before = time.perf_counter(), trace.snapshot()
    losses = train(streamed, options.steps, options.tokens)
    seconds = time.perf_counter() - filled
    counters = trace.snapshot()
    per_step = {k: (counters[k] - before.get(k, 0.0)) / options.steps for k in counters}
    result = {
        "params": streamed.num_parameters,
        "state_bytes": streamed.state_bytes,
        "state_format": options.state_format,
        "gradient_tier": options.gradient_tier,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "fill_s": filled - start,
        "step_s": seconds / options.steps,
        "losses": losses,
        "tokens": options.tokens,
        "disk_bytes_per_step": sum(
            per_step[f"disk_{way}_bytes"] for way in ("weights", "read", "write")
        ),
        "compute_s": per_step["compute_s"],
        "adamw_s": streamed.num_parameters / adamw_parameters_per_s(options.state_format),
    }
    streamed.close()
    return result


def train(streamed: StreamedModel, steps: int, tokens: int) -> list[float]:
    losses = []
    x, y = batch(tokens, torch.bfloat16)
    for _ in range(steps):
        loss = objective(streamed, x, y)
        loss.backward()
        streamed.step()
        losses.append(loss.item())
    streamed.finish()
    with torch.no_grad():
        losses.append(objective(streamed, x, y).item())
    return losses


def batch(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(1, tokens, 64, generator=generator).to(dtype) for _ in range(2))
    return x, y


def objective(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).float().square().mean()


def slowest_lane(result: dict[str, Any]) -> dict[str, float]:
    per_byte = (1 / result["before_gb_s"] + 1 / result["after_gb_s"]) / 2 / 1e9  # seconds
    lanes = {
        "disk_s": result["disk_bytes_per_step"] * per_byte,
        "compute_s": result["compute_s"],
        "adamw_s": result["adamw_s"],
    }
    slowest = max(lanes.values())
    return lanes | {"slowest_lane_s": slowest, "step_over_lane": result["step_s"] / slowest}


def disk_gb_s(folder: Path) -> float:
    """Both ways together, after as much each way alone.

    So much because rented disks have credits: 2 GB were moved at 3.2 GB/s once, where a step of
    86 GB had 1.5 GB/s to itself.
    """
    return disk_rates(folder, MEASURED_BYTES, seconds=float("inf")).both_bytes_s / 1e9


def adamw_parameters_per_s(state_format: Any) -> float:
    """AdamW alone, on state in RAM."""
    model = Transformer(1024, 1)
    resident, blocks = plan_units(model, find_blocks(model, ["blocks"]), torch.bfloat16)
    settings = StoreSettings(state_format=state_format)
    store = Store([resident.layout, blocks[0].layout], settings)
    optimizer, names = StreamedAdamW(store, Lanes(Trace()), None), list(store.steps[1])
    landed = Landed(dict.fromkeys(names, torch.ones(())))
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        optimizer.launch(1, landed, AdamWSettings(lr=1e-4), 1.0)
        optimizer.finish()
        best = min(best, time.perf_counter() - start)
    optimizer.close()
    return store.units[1].num_elements / best


if __name__ == "__main__":
    main()
