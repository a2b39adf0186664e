"""3D-DSA on the device: its kernels against the definition, then their time beside the peers'.

Shapes: q, k, v [1, T, H, W, heads, d]; offsets [1, T, H, W, G, ...] as the operator has them; N =
T·H·W tokens, K taps, E extra keys.
"""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_attention import dense_attention, grid_sample_attention
from benchmarks.gpu_check.session import Row, Session, poisoned
from megaslide.models.offsets import bound_offsets
from megaslide.ops.deformable_attention import deformable_attention, offset_channels
from megaslide.ops.deformable_attention.flops import backward_flop, forward_flop

SHARDS = 12
RANGE = (1.0, 3.0, 3.0)
TENSORS = ("q", "k", "v", "offsets", "extra_k", "extra_v")
KINDS: tuple[Any, ...] = ("none", "shift", "affine", "tap")
HALVES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
SINGLE = 2e-5
OFFSETS = 5e-3
"""Errors that pass, by dtype: norm of the difference over the norm. The derivative by an offset
jumps where a tap crosses a voxel, and rounding decides on which side a few of millions lie."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Random inputs of one shape."""

    size: tuple[int, int, int]
    kind: str
    dtype: torch.dtype = torch.bfloat16
    window: tuple[int, int, int] = (3, 7, 7)
    heads: int = 8
    d: int = 128
    groups: int = 1
    extra: int = 0

    @property
    def tokens(self) -> int:
        return math.prod(self.size)

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.size, self.heads, self.d)

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} {dtype} d={self.d} {self.tokens} tokens"

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Those of TENSORS that it has, each a leaf; as large as the model lets offsets be."""
        found = {n: torch.randn(self.shape, device=device).to(self.dtype) for n in "qkv"}
        if self.kind != "none":
            channels = offset_channels(self.kind, self.window)  # type: ignore[arg-type]
            raw = torch.randn(1, *self.size, self.groups, channels, device=device)
            found["offsets"] = bound_offsets(raw, self.kind, self.window, RANGE)  # type: ignore[arg-type]
        for name in ("extra_k", "extra_v") if self.extra else ():
            shape = (1, self.extra, self.heads, self.d)
            found[name] = torch.randn(shape, device=device).to(self.dtype)
        return {name: x.detach().requires_grad_() for name, x in found.items()}

    def attend(self, tensors: dict[str, Tensor], backend: str | None = None) -> Tensor:
        kind: Any = "affine" if self.kind == "none" else self.kind
        return deformable_attention(**tensors, window=self.window, kind=kind, backend=backend)


# ---- parity --------------------------------------------------------------------------------------


def parity(session: Session) -> None:
    """Every kind, dtype and head dim at sizes that no tile divides; then one size of thousands.

    On a GPU in several processes at once: nearly all of the time goes into compiling, on one core
    each, and what is compiled here is there for those that measure.
    """
    if session.chip.is_gpu and session.shard is None:
        _in_shards(session)
        return
    for index, (case, oracle) in enumerate(cases(session)):
        if session.shard in (None, index % SHARDS):
            session.row(case.name, lambda c=case, o=oracle: compare(session, c, o))


def cases(session: Session) -> list[tuple[Case, torch.dtype]]:
    """Cases, and the dtype in which the definition can afford to answer."""
    dtypes = [torch.float32, *HALVES] if session.chip.is_gpu else [torch.float32]
    dims = (64,) if session.smoke else (64, 128)
    odd: dict[str, Any] = {
        "size": (3, 5, 9),
        "window": (3, 3, 3),
        "heads": 2,
        "groups": 2,
        "extra": 5,
    }
    small = [
        Case(kind=kind, dtype=dtype, d=d, **odd)
        for kind, dtype, d in itertools.product(KINDS, dtypes, dims)
        if dtype != torch.float16 or d == 64
    ]
    size = (4, 8, 9) if session.smoke else (4, 24, 40)
    pairs = itertools.product(KINDS, (torch.float32, torch.bfloat16))
    large = [Case(size=size, kind=kind, dtype=dtype, heads=2, d=64) for kind, dtype in pairs]
    measured = [] if session.smoke else [gate_case(kind, 128) for kind in KINDS]
    double = [(case, torch.float64) for case in (*measured, *small)]
    return [*double, *((case, torch.float32) for case in large)]


def gate_case(kind: str, d: int) -> Case:
    """The kernels that are measured, on a volume that the definition can afford."""
    return Case(size=(4, 9, 11), kind=kind, heads=2, d=d)


def _in_shards(session: Session) -> None:
    """The same command again, once per shard; each writes rows of its own."""
    command = [
        sys.executable, "-m", "benchmarks.gpu_check", "--part", session.part,
        "--out", str(session.out), "--device", str(session.chip.device),
        "--budget-s", str(max(1.0, session.left_s)), *(["--smoke"] if session.smoke else []),
    ]  # fmt: skip
    children = [subprocess.Popen([*command, "--shard", str(n)]) for n in range(SHARDS)]
    codes = [child.wait() for child in children]
    if any(codes):
        session.add("shards", {"error": f"exit codes {codes}"})


def compare(session: Session, case: Case, oracle: torch.dtype = torch.float64) -> Row:
    """Errors of the output and of all gradients; the definition is computed in `oracle`.

    Raises:
        RuntimeError: one is beyond its bound, or not finite.
    """
    given = case.tensors(session.chip.device)
    seed = torch.randn(case.shape, device=session.chip.device).to(case.dtype)
    with poisoned():
        out = case.attend(given)
        found = [out, *torch.autograd.grad(out, list(given.values()), seed)]
    plain = {n: x.detach().to(oracle).requires_grad_() for n, x in given.items()}
    out = case.attend(plain, "reference")
    expected = [out, *torch.autograd.grad(out, list(plain.values()), seed.to(oracle))]
    errors = {
        name: ((x.double() - y.double()).norm() / y.double().norm()).item()
        for name, x, y in zip(["out", *given], found, expected, strict=True)
    }
    bound = HALVES.get(case.dtype, SINGLE)
    bad = [
        n for n, e in errors.items() if not e <= (max(bound, OFFSETS) if n == "offsets" else bound)
    ]
    if bad:
        raise RuntimeError(f"{case}: {', '.join(bad)} differ from the definition: {errors}")
    return {"worst": max(errors.values()), "bound": bound, "errors": errors}


# ---- time ----------------------------------------------------------------------------------------

SIZES = ((8, 32, 32), (32, 32, 32), (21, 45, 80))
LARGEST = (256, 68, 120)
"""256 frames of 1088 x 1920 in patches of 16; dense attention would take minutes."""
SMOKE_SIZES = ((2, 8, 8),)


def attention(session: Session) -> None:
    """Forward, and forward with backward, of everything that answers the same question."""
    ceilings = session.ceilings()
    sizes = SMOKE_SIZES if session.smoke else SIZES
    heads, d = (2, 16) if session.smoke else (8, 128)
    gate = gates(session)
    for size, name in itertools.product(sizes, ("none", "shift", "affine", "tap")):
        measure(session, Case(size=size, kind=name, heads=heads, d=d), "ours", ceilings, gate)
    for size, peer in itertools.product(sizes, ("dense", "grid_sample")):
        measure(session, Case(size=size, kind="affine", heads=heads, d=d), peer, ceilings, gate)
    largest = (3, 8, 8) if session.smoke else LARGEST
    for name in ("shift", "affine", "none", "tap"):
        measure(session, Case(size=largest, kind=name, heads=1, d=d), "ours", ceilings, gate)


def gates(session: Session) -> dict[str, str | None]:
    """By kind, why it may not be measured; None where it may."""
    why: dict[str, str | None] = {}
    d = 16 if session.smoke else 128
    for kind in KINDS:
        row = session.row(f"gate {kind}", lambda k=kind: compare(session, gate_case(k, d)))
        why[kind] = row.get("error") or row.get("skipped")
    return why


def measure(
    session: Session, case: Case, who: str, ceilings: Row, gate: dict[str, str | None]
) -> None:
    for backward in (False, True):
        direction = "fwd+bwd" if backward else "fwd"
        label = case.kind if who == "ours" else who
        name = f"{label} {case.tokens} x {case.heads} {direction}"
        if who == "ours" and gate[case.kind]:
            session.add(name, {"skipped": f"its gate failed: {gate[case.kind]}"[:200]})
            continue
        session.row(name, lambda b=backward: timed(session, case, who, ceilings, b))


def timed(session: Session, case: Case, who: str, ceilings: Row, backward: bool) -> Row:
    """Seconds, rate, share of the counted limit, and bytes above what stands before the call."""
    chip = session.chip
    run = directed(session, case, who, backward)
    peak = chip.peak_bytes(run)  # the first call also compiles and tunes
    seconds = chip.median_s(run, budget_s=0.02 if session.smoke else 0.6)
    flop, nbytes = counted(case, who, backward)
    limit_s = max(flop / ceilings["gemm_flop_s"], nbytes / ceilings["copy_bytes_s"])
    return {
        "ms": 1e3 * seconds, "tflop_s": flop / seconds / 1e12, "limit_fraction": limit_s / seconds,
        "peak_bytes": peak, "flop": flop, "bytes": nbytes, "tokens": case.tokens,
        "heads": case.heads, "d": case.d, "window": case.window, "who": who, "kind": case.kind,
        "backward": backward,
    }  # fmt: skip


def directed(session: Session, case: Case, who: str, backward: bool) -> Callable[[], Any]:
    """One call of the peer: without grad, or with the gradients of all its inputs."""
    given = case.tensors(session.chip.device)
    if who == "dense":
        given.pop("offsets", None)
    seed = torch.randn(case.shape, device=session.chip.device).to(case.dtype)

    def forward() -> Tensor:
        if who == "ours":
            return case.attend(given)
        if who == "dense":
            return dense_attention(**given)
        with session.chip.device:
            plain = {name: x.float() for name, x in given.items()}
            return grid_sample_attention(**plain, window=case.window, kind=case.kind)

    def both() -> Any:
        out = forward()
        return torch.autograd.grad(out, list(given.values()), seed.view_as(out).to(out.dtype))

    return both if backward else torch.no_grad()(forward)


def counted(case: Case, who: str, backward: bool) -> tuple[int, int]:
    """FLOP of the definition, and bytes that must move at least: every input and output once."""
    tensor = math.prod(case.shape) * case.dtype.itemsize
    offsets = 0
    if who == "dense":
        flop = 4 * case.tokens**2 * case.d * case.heads
        flop += flop * 5 // 2 if backward else 0
    else:
        has = case.kind != "none"
        flop = forward_flop(case.shape, case.window, offsets=has)
        flop += backward_flop(case.shape, case.window, offsets=has) if backward else 0
        offsets = 4 * case.tokens * offset_channels(case.kind, case.window) if has else 0  # type: ignore[arg-type]
    # forward: q, k, v, out; backward: those and grad_out in, three gradients out
    return flop, (12 * tensor + 3 * offsets) if backward else (4 * tensor + offsets)
