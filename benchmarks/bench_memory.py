"""Peak memory of one attention call against the number of frames, by kind, on the CPU.

    python benchmarks/bench_memory.py [--frames 16 32 64 128 256] [--json FILE]

Forward and backward of the operator alone, fp32, SIDE x SIDE tokens a frame: dense and shifted
windows through torch's fused attention, the deformable operator written with grid_sample, which
holds every sample, and ours. What is measured is by how much resident memory rises at most above
what stands before the call, results left out. grid_sample runs up to LARGEST_SAMPLES bytes of
samples; above that it would take the memory of the machine. The gate comes first: ours against
grid_sample, outputs and gradients.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_attention import (
    HEAD_DIM,
    HEADS,
    WINDOW,
    check,
    dense_attention,
    extra_bytes,
    grid_sample_attention,
    make_case,
)
from torch import Tensor

from megaslide.models.attention import shifted_window_attention
from megaslide.ops.deformable_attention import deformable_attention
from megaslide.planning.hardware import probe

SIDE = 8
LARGEST_SAMPLES = 15 * 10**8


def sample_bytes(tokens: int) -> int:
    """Of the keys and values that an implementation with samples holds."""
    return 2 * 4 * tokens * math.prod(WINDOW) * HEADS * HEAD_DIM


def there_and_back(run: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], list[Tensor]]:
    """One call: the forward and all gradients."""

    def call() -> list[Tensor]:
        out = run()
        return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    return call


def runs_of(frames: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Every kind that can run at this size."""
    case = make_case((frames, SIDE, SIDE), "affine", torch.float32)
    inputs = [x for x in case.values() if isinstance(x, Tensor)]
    qkv = [case[name] for name in "qkv"]

    def swin() -> Tensor:
        return shifted_window_attention(*qkv, window=WINDOW, shifted=True)

    runs = {
        "dense": there_and_back(lambda: dense_attention(*qkv), qkv),
        "swin": there_and_back(swin, qkv),
        "deformable": there_and_back(
            lambda: deformable_attention(**case, backend="native"), inputs
        ),
    }
    if sample_bytes(frames * SIDE**2) <= LARGEST_SAMPLES:
        runs["grid_sample"] = there_and_back(lambda: grid_sample_attention(**case), inputs)
    return runs


def measure(frames: int) -> dict[str, Any]:
    found: dict[str, int | None] = {"grid_sample": None}
    for name, run in runs_of(frames).items():
        if name != "grid_sample":
            run()  # what later calls reuse is not counted
        found[name] = extra_bytes(run)
    tokens = frames * SIDE**2
    return {"frames": frames, "tokens": tokens, "sample_bytes": sample_bytes(tokens),
            "extra_bytes": found}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    check("affine", torch.float32)
    rows = []
    for frames in arguments.frames:
        rows.append(measure(frames))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "rows": rows, "window": WINDOW, "heads": HEADS, "head_dim": HEAD_DIM, "side": SIDE,
        "threads": torch.get_num_threads(), "machine": probe().provenance(),
    }  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
