"""3D-DSA on the CPU beside grid_sample and dense attention: time, memory, fraction of the limit.

    python benchmarks/bench_attention.py [--tokens 2048 4096 16384] [--threads 1 2] [--json FILE]

The peers: the operator as one would write it with torch's grid_sample in fp32, which holds every
sample, and dense scaled_dot_product_attention of the same dtype, which answers another question at
a cost quadratic in tokens. Outputs and gradients are compared first. Then ours and dense attention
take turns and medians are reported; grid_sample, which takes seconds, runs fewer times.

`extra_bytes` is by how much the peak of resident memory rises above what stands before the call
and the results that it leaves. `limit_fraction` compares with a matrix product of torch that does
the same operations at the best rate that one reaches here in this dtype: forward 4, backward 10
per voxel that a query reads and number of head_dim, and the two together for forward+backward.

Offsets are what the model's bound allows at most: independent for every token, raw values from the
normal distribution, bounded at `RANGE` voxels. Real ones are smoother and cost less.

Shapes: q, k, v [1, T, H, W, heads, d]; offsets [1, T, H, W, 1, 3 | 12 | K, 3].
"""

import argparse
import ctypes
import gc
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F

from megaslide.models.offsets import bound_offsets
from megaslide.ops import library
from megaslide.ops.deformable_attention import deformable_attention, offset_channels
from megaslide.planning.hardware import package_version, probe

HEADS, HEAD_DIM, WINDOW = 4, 64, (3, 7, 7)
RANGE = (1.0, 3.0, 3.0)
SIZES = {2048: (8, 16, 16), 4096: (16, 16, 16), 8192: (8, 32, 32), 16384: (16, 32, 32),
         65536: (16, 64, 64)}  # fmt: skip
KINDS: tuple[Any, ...] = ("none", "shift", "affine", "tap")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Run = Callable[[], Tensor]


def make_case(size: tuple[int, int, int], kind: str, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    case: dict[str, Any] = {n: torch.randn(1, *size, HEADS, HEAD_DIM).to(dtype) for n in "qkv"}
    case |= {"window": WINDOW, "offsets": None}
    if kind != "none":
        raw = torch.randn(1, *size, 1, offset_channels(kind, WINDOW))  # type: ignore[arg-type]
        case |= {"offsets": bound_offsets(raw, kind, WINDOW, RANGE), "kind": kind}  # type: ignore[arg-type]
    for x in case.values():
        if isinstance(x, Tensor):
            x.requires_grad_()
    return case


# ---- the peers -------------------------------------------------------------------------------


def grid_sample_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, *, window: Any, kind: str = "none"
) -> Tensor:
    """The operator from its definition: K keys and values sampled per query and head."""
    size = torch.tensor(q.shape[1:4])
    grid = torch.cartesian_prod(*(torch.arange(int(n)) for n in size)).reshape(*size, 3)
    last = (size - torch.tensor(window)).float()
    start = (grid - torch.tensor(window) // 2).clamp(torch.zeros(3), last)  # [T,H,W,3]
    tap = torch.cartesian_prod(*(torch.arange(n) for n in window)).float()  # [K,3]
    delta = torch.zeros(())
    if kind in ("shift", "affine"):
        assert offsets is not None
        start = (start + offsets[0, ..., 0, :3]).clamp(torch.zeros(3), last)
    if kind == "affine":
        assert offsets is not None
        centred = tap - (torch.tensor(window) - 1) / 2
        delta = centred @ offsets[0, ..., 0, 3:].unflatten(-1, (3, 3))
    if kind == "tap":
        assert offsets is not None
        delta = offsets[0, ..., 0, :, :]
    position = (start.unsqueeze(-2) + tap + delta).flatten(0, 2)  # [N,K,3]
    points = (2 * position / (size - 1).clamp_min(1) - 1).flip(-1)[None, :, :, None]  # [1,N,K,1,3]
    keys, values = (
        F.grid_sample(
            x[0].permute(3, 4, 0, 1, 2),  # [heads,d,T,H,W]
            points.expand(q.shape[4], -1, -1, -1, -1), padding_mode="border", align_corners=True,
        ).squeeze(-1)
        for x in (k, v)
    )  # fmt: skip
    query = q[0].flatten(0, 2).transpose(0, 1)  # [heads,N,d]
    scores = torch.einsum("hnd,hdnk->hnk", query, keys) * q.shape[5] ** -0.5
    out = torch.einsum("hnk,hdnk->hnd", scores.softmax(-1), values)
    return out.transpose(0, 1).reshape(q.shape)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(1, 3).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)


def check(kind: str, dtype: torch.dtype) -> None:
    """The correctness gate: output and all gradients against grid_sample in fp32."""
    case = make_case((4, 9, 11), kind, dtype)
    seed = torch.randn(case["q"].shape).to(dtype)
    names = [n for n, x in case.items() if isinstance(x, Tensor)]
    plain = {n: case[n].detach().float().requires_grad_() for n in names}
    expected = [grid_sample_attention(**case | plain)]
    expected += torch.autograd.grad(expected[0], list(plain.values()), seed.float())
    found = [deformable_attention(**case, backend="native")]
    found += torch.autograd.grad(found[0], [case[n] for n in names], seed)
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    for name, x, y in zip(["out", *names], found, expected, strict=True):
        error = ((x.float() - y).norm() / y.norm()).item()
        if not error <= bound:
            raise RuntimeError(f"{kind} {dtype}: {name} differs by {error:.1e} (at most {bound})")


# ---- measuring -------------------------------------------------------------------------------


def directed(run: Run, inputs: list[Tensor], backward: bool) -> Callable[[], Any]:
    """One call: the forward alone without grad, or the forward and all gradients."""
    if not backward:
        return torch.no_grad()(run)
    seed: list[Tensor] = []

    def both() -> Any:
        out = run()
        if not seed:
            seed.append(torch.randn(out.shape).to(out.dtype))
        return torch.autograd.grad(out, inputs, seed[0])

    return both


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def medians(
    runs: dict[str, Callable[[], Any]], rounds: int, most: float = 60.0
) -> dict[str, float]:
    """Everyone once per round, so that a disturbance meets all alike; fewer where it takes long."""
    first = {name: seconds(run) for name, run in runs.items()}
    rounds = max(1, min(rounds, int(most / (sum(first.values()) + 1e-9))))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _, name in itertools.product(range(rounds), runs):
        taken[name].append(seconds(runs[name]))
    return {name: statistics.median(values) for name, values in taken.items()}


def extra_bytes(run: Callable[[], Any]) -> int:
    """Peak of resident memory during the call, less what stands before it and what it leaves."""
    process, peak, done = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(2e-4)

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free but kept would hide what the call takes
    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    result = run()
    done.set()
    watcher.join()
    kept = [result] if isinstance(result, Tensor) else list(result)
    return max(0, peak - before - sum(x.nbytes for x in kept))


def matmul_flops(dtype: torch.dtype) -> float:
    """The best rate of a square matrix product, in operations per second."""
    best = 0.0
    for n in (512, 1024, 2048):
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
        a @ b
        best = max(best, 2 * n**3 / min(seconds(lambda a=a, b=b: a @ b) for _ in range(5)))
    return best


def voxels_read(kind: str) -> int:
    """Distinct voxels a query must read: all 8 corners of taps that may part, 1 without offsets."""
    mixes = {"none": 0, "shift": 1}
    if kind in mixes:
        return (WINDOW[0] + mixes[kind]) * (WINDOW[1] + mixes[kind]) * (WINDOW[2] + mixes[kind])
    return 8 * WINDOW[0] * WINDOW[1] * WINDOW[2]


# ---- the run ---------------------------------------------------------------------------------


def measure_kind(tokens: int, dtype_name: str, kind: str, threads: int, backward: bool,
                 rounds: int, peers: bool, peak: float) -> dict[str, Any]:  # fmt: skip
    dtype = DTYPES[dtype_name]
    case = make_case(SIZES[tokens], kind, dtype)
    inputs = [x for x in case.values() if isinstance(x, Tensor)]
    plain = {
        n: x.detach().float().requires_grad_() for n, x in case.items() if isinstance(x, Tensor)
    }
    qkv = [case[n] for n in "qkv"]
    runs = {
        "ours": directed(lambda: deformable_attention(**case, backend="native"), inputs, backward)
    }
    runs["sdpa"] = directed(lambda: dense_attention(*qkv), qkv, backward)
    runs["ours"]()  # what later calls reuse is not counted
    extra = extra_bytes(runs["ours"])
    if tokens > 16384:
        del runs["sdpa"]
    took = medians(runs, rounds)
    if peers:
        sampled = directed(
            lambda: grid_sample_attention(**case | plain), list(plain.values()), backward
        )
        took["grid_sample"] = min(seconds(sampled) for _ in range(1 if tokens > 4096 else 2))
    flops = (14 if backward else 4) * voxels_read(kind) * HEAD_DIM * tokens * HEADS
    return {
        "tokens": tokens,
        "dtype": dtype_name,
        "kind": kind,
        "threads": threads,
        "direction": "forward+backward" if backward else "forward",
        "ours_ms": 1e3 * took["ours"],
        "grid_sample_ms": 1e3 * took["grid_sample"] if "grid_sample" in took else None,
        "sdpa_ms": 1e3 * took["sdpa"] if "sdpa" in took else None,
        "extra_bytes": extra,
        "qkvo_bytes": 4 * case["q"].nbytes,
        "limit_fraction": flops / peak / took["ours"],
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    for kind, dtype in itertools.product(arguments.kinds, DTYPES.values()):
        check(kind, dtype)
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        peaks = {name: matmul_flops(dtype) for name, dtype in DTYPES.items()}
        cases = itertools.product(arguments.tokens, DTYPES, arguments.kinds, (False, True))
        for tokens, dtype, kind, backward in cases:
            # fp32 whatever our dtype, and hardly different between kinds: measured once for each.
            peers = kind in arguments.grid_sample and dtype == "float32" and tokens <= 16384
            row = measure_kind(tokens, dtype, kind, threads, backward, arguments.rounds, peers,
                               peaks[dtype])  # fmt: skip
            rows.append(row)
            if arguments.progress:
                print(json.dumps(row), flush=True)
        fill_grid_sample(rows)
    name = library.load().megaslide_instruction_set
    name.restype = ctypes.c_char_p
    machine = probe(Path.cwd())
    return {
        "rows": rows,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "window": WINDOW,
        "offset_range": RANGE,
        "rounds": arguments.rounds,
        "isa": name().decode(),
        "packages": {p: package_version(p) for p in ("torch", "megaslide")},
        "commit": machine.commit,
        "machine": machine.to_dict(),
    }


def fill_grid_sample(rows: list[dict[str, Any]]) -> None:
    """A bf16 row stands beside the fp32 grid_sample of its own kind, where that was measured."""
    keys = ("tokens", "kind", "threads", "direction")
    known = {tuple(r[k] for k in keys): r["grid_sample_ms"] for r in rows if r["grid_sample_ms"]}
    for row in rows:
        row["grid_sample_ms"] = known.get(tuple(row[k] for k in keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", choices=SIZES, default=[2048, 4096, 16384])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--grid-sample", nargs="*", choices=KINDS, default=["affine"],
        help="kinds for which grid_sample is run too (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--progress", action="store_true", help="print each row as it is measured")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    result = measure(arguments)
    text = json.dumps(result, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
