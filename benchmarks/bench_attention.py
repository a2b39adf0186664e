"""3D-DSA on the CPU beside grid_sample and dense attention: time, memory, fraction of the limit.

    python benchmarks/bench_attention.py [--tokens N ...] [--threads N ...] [--json FILE]

The peers: the operator as one would write it with torch's grid_sample in fp32, which holds every
sample, and dense scaled_dot_product_attention of the same dtype, which answers another question at
a cost quadratic in tokens. Outputs and gradients are compared first. Then all take turns, each
forward and then backward, and medians are reported: of `--rounds`, or of as many as fit in
`BUDGET_S` seconds, though of three at least for ours. grid_sample costs the same whatever the
offsets and computes in fp32 whatever our dtype: it is measured once, with `PEER_KIND` offsets.

`extra_bytes` is by how much the peak of resident memory rises above what stands before the call
and the results that it leaves. `limit_fraction` is the least time that the operations can take over
the time measured. Counted are those that cannot be left out: per voxel of which a query samples
something, once however many taps share it, and number of head_dim, 4 forward and 10 backward; and
per tap the trilinear sums and the exponential (`scalar_flops`). The former are done at the best
rate that a matrix product of torch reaches here in the row's dtype, the latter at that of fp32.

Offsets are what the model's bound allows at most: independent for every token, raw values from the
normal distribution, bounded at `RANGE` voxels. Real ones are smoother and cost less.

Shapes: q, k, v [1, T, H, W, heads, d]; offsets [1, T, H, W, 1, 3 | 12 | K, 3].
"""

import argparse
import ctypes
import gc
import itertools
import json
import math
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
PEER_KIND: Any = "affine"
MOST_PEER_TOKENS = 16384  # beyond, they take minutes and many gigabytes
DEFAULT_TOKENS = (2048, 4096, 16384, 65536)
BUDGET_S = 3.0  # of each contender, for its runs after the first
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


def sample_positions(
    size: tuple[int, ...], offsets: Tensor | None, *, window: Any, kind: str
) -> Tensor:
    """Where the taps of all queries sample, in voxels: [N, K, 3], not yet clamped to the volume."""
    sizes = torch.tensor(size)
    grid = torch.cartesian_prod(*(torch.arange(n) for n in size)).reshape(*size, 3)
    last = (sizes - torch.tensor(window)).float()
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
    return (start.unsqueeze(-2) + tap + delta).flatten(0, 2)


def grid_sample_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, *, window: Any, kind: str = "none"
) -> Tensor:
    """The operator from its definition: K keys and values sampled per query and head."""
    size = torch.tensor(q.shape[1:4])
    position = sample_positions(tuple(q.shape[1:4]), offsets, window=window, kind=kind)
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


class Contender:
    """One side of the comparison; `seconds` holds its runs, (forward, forward+backward) each."""

    def __init__(self, run: Run, inputs: list[Tensor], least: int = 1) -> None:
        self.run, self.inputs, self.least = run, inputs, least
        self.seconds: list[tuple[float, float]] = []

    def gradients(self) -> tuple[Tensor, ...]:
        out = self.run()
        return torch.autograd.grad(out, self.inputs, torch.ones_like(out))

    def measure(self) -> None:
        start = time.perf_counter()
        out = self.run()
        forward = time.perf_counter() - start
        seed = torch.ones_like(out)
        start = time.perf_counter() - forward
        torch.autograd.grad(out, self.inputs, seed)
        self.seconds.append((forward, time.perf_counter() - start))

    def wants_more(self, rounds: int) -> bool:
        spent = sum(both for _, both in self.seconds)
        return len(self.seconds) < (rounds if spent < BUDGET_S else self.least)

    def median_ms(self, backward: bool) -> float:
        return 1e3 * statistics.median(taken[backward] for taken in self.seconds)


def take_turns(contenders: list[Contender], rounds: int) -> None:
    """Everyone once per round, so that a disturbance meets all alike; fewer where it takes long."""
    while waiting := [c for c in contenders if c.wants_more(rounds)]:
        for contender in waiting:
            contender.measure()


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def usual_extra_bytes(run: Callable[[], Any]) -> int:
    """The median of three: threads and the allocator take memory of their own now and then."""
    return statistics.median(extra_bytes(run) for _ in range(3))


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


def voxels_sampled(case: dict[str, Any], most_queries: int = 2048) -> float:
    """Distinct voxels with a weight in any tap of a query; mean over queries evenly apart."""
    size = tuple(case["q"].shape[1:4])
    with torch.no_grad():
        position = sample_positions(
            size, case["offsets"], window=WINDOW, kind=case.get("kind", "none")
        )
        position = position[:: -(-len(position) // most_queries)]
        position = torch.minimum(position.clamp_min(0), torch.tensor(size) - 1.0)  # [N,K,3]
    ends = torch.stack((position.floor(), position.ceil()))  # [2,N,K,3]; one where it is whole
    t, h, w = ends.long().unbind(-1)
    corners = [
        (t[i] * size[1] + h[j]) * size[2] + w[k] for i, j, k in itertools.product((0, 1), repeat=3)
    ]
    numbers = torch.cat(corners, 1).sort(1).values  # [N,8K]
    return float(1 + (numbers.diff() != 0).sum(1).double().mean())


def scalar_flops(kind: str, backward: bool) -> int:
    """Per query and head, least: trilinear sums as steps between two numbers, 2 each, and e^x.

    A sum over 8 corners takes 7 steps, 3 where all taps share their fractions. Forward there is
    one of the scores and one, transposed, of the weights. Backward there are two each, and the
    derivative along each axis. The exponential is a polynomial of 8 terms, 2 each.
    """
    steps = {"none": 0, "shift": 3}.get(kind, 7)
    slopes = {"none": 0, "shift": 3}.get(kind, 9)
    sums = (2 + 4) * steps + slopes if backward else 2 * steps
    return math.prod(WINDOW) * (2 * sums + 16 * (2 if backward else 1))


# ---- the run ---------------------------------------------------------------------------------


def our_contender(case: dict[str, Any]) -> Contender:
    inputs = [x for x in case.values() if isinstance(x, Tensor)]
    return Contender(lambda: deformable_attention(**case, backend="native"), inputs, least=3)


def dense_contender(case: dict[str, Any]) -> Contender:
    qkv = [case[n] for n in "qkv"]
    return Contender(lambda: dense_attention(*qkv), qkv)


def grid_sample_contender(tokens: int) -> Contender:
    case = make_case(SIZES[tokens], PEER_KIND, torch.float32)
    inputs = [x for x in case.values() if isinstance(x, Tensor)]
    return Contender(lambda: grid_sample_attention(**case), inputs)


def measure_size(
    tokens: int, dtype_name: str, kinds: list[Any], rounds: int, grid_sample: Contender | None,
    peaks: dict[str, float],
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of all kinds and both directions, with the threads that torch has."""
    cases = {kind: make_case(SIZES[tokens], kind, DTYPES[dtype_name]) for kind in kinds}
    ours = {kind: our_contender(case) for kind, case in cases.items()}
    dense = dense_contender(next(iter(cases.values()))) if tokens <= MOST_PEER_TOKENS else None
    extra = {}
    for kind, contender in ours.items():  # also warms up
        extra[kind] = (
            usual_extra_bytes(torch.no_grad()(contender.run)),
            usual_extra_bytes(contender.gradients),
        )
    take_turns([*ours.values(), *(c for c in (dense, grid_sample) if c)], rounds)
    voxels = {kind: voxels_sampled(case) for kind, case in cases.items()}
    rows = []
    for kind, backward in itertools.product(kinds, (False, True)):
        flops = (14 if backward else 4) * voxels[kind] * HEAD_DIM
        least_s = flops / peaks[dtype_name] + scalar_flops(kind, backward) / peaks["float32"]
        ours_ms = ours[kind].median_ms(backward)
        rows.append({
            "tokens": tokens,
            "dtype": dtype_name,
            "kind": kind,
            "threads": torch.get_num_threads(),
            "direction": "forward+backward" if backward else "forward",
            "ours_ms": ours_ms,
            "grid_sample_ms": grid_sample.median_ms(backward) if grid_sample else None,
            "sdpa_ms": dense.median_ms(backward) if dense else None,
            "extra_bytes": extra[kind][backward],
            "qkvo_bytes": 4 * cases[kind]["q"].nbytes,
            "limit_fraction": least_s * tokens * HEADS / (1e-3 * ours_ms),
            "runs": len(ours[kind].seconds),
        })  # fmt: skip
    return rows


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from attention_table import ratios, table  # beside this script; others import its peers alone

    for kind, dtype in itertools.product(arguments.kinds, DTYPES.values()):
        check(kind, dtype)
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        peaks = {name: matmul_flops(dtype) for name, dtype in DTYPES.items()}
        for tokens in arguments.tokens:
            grid_sample = grid_sample_contender(tokens) if tokens <= MOST_PEER_TOKENS else None
            for name in DTYPES:  # grid_sample has had its turns when the second comes
                rows += measure_size(
                    tokens, name, arguments.kinds, arguments.rounds, grid_sample, peaks
                )
                if arguments.progress:
                    print(table(rows[-2 * len(arguments.kinds) :]), flush=True)
    name = library.load().megaslide_instruction_set
    name.restype = ctypes.c_char_p
    machine = probe()
    return {
        "rows": rows,
        "ratios": ratios(rows),
        "table": table(rows),
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "window": WINDOW,
        "offset_range": RANGE,
        "rounds": arguments.rounds,
        "grid_sample_kind": PEER_KIND,
        "isa": name().decode(),
        "packages": {p: package_version(p) for p in ("torch", "megaslide")},
        "commit": machine.commit,
        "machine": machine.provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", choices=SIZES, default=list(DEFAULT_TOKENS)
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--progress", action="store_true", help="print rows as they are measured")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    result = measure(arguments)
    print(result.pop("table"))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    for name, (least, most) in result["ratios"].items():
        print(f"{name}: {least:.2f} to {most:.2f}")


if __name__ == "__main__":
    main()
