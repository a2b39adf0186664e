"""AdamW, both backends, against torch.optim.AdamW bit for bit, float64 and 80-bit arithmetic.

Shapes: n elements of one region.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from plain_adamw import PlainAdamW
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.adamw import BACKENDS as FUNCTIONS
from megaslide.ops.adamw import AdamWSettings, AdamWState, adamw_
from megaslide.ops.adamw.reference import join_master, split_master_
from megaslide.ops.adamw.state import Coefficients

absent = library.why_absent()
needs_library = pytest.mark.skipif(absent is not None, reason=absent or "present")
BACKENDS = ["reference", pytest.param("native", marks=needs_library)]
INSTRUCTION_SETS = ("x86-64-v4", "x86-64-v3", "baseline")
FORMATS = ("whole", "split", "master")
UNSUPPORTED = 3
SETTINGS = AdamWSettings(lr=3e-3, beta1=0.9, beta2=0.99, eps=1e-7, weight_decay=0.1)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    use = library.load().megaslide_use_instruction_set
    current = library.load().megaslide_instruction_set
    current.restype = ctypes.c_char_p
    best = current()
    if use(request.param.encode()) == UNSUPPORTED:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    use(best)


def new_state(
    master: Tensor,
    kind: str,
    *,
    ema: bool = False,
    shift: int = 0,
    shared: dict[str, Any] | None = None,
) -> AdamWState:
    """State of a region with this fp32 master; arrays begin `shift` elements off alignment."""

    def array(dtype: torch.dtype) -> Tensor:
        return torch.zeros(master.numel() + shift, dtype=dtype)[shift:]

    def filled(dtype: torch.dtype = torch.float32) -> Tensor:
        return array(dtype).copy_(master)

    fields: dict[str, Any] = {"exp_avg": array(torch.float32), "exp_avg_sq": array(torch.float32)}
    if kind == "whole":
        fields["weight"] = filled()
    else:
        fields["weight"] = array(torch.bfloat16)
        key = "residual" if kind == "split" else "master"
        fields[key] = array(torch.int16) if kind == "split" else filled()
        split_master_(master, fields["weight"], fields.get("residual"))
    if ema:
        fields["ema"] = filled()
    return AdamWState(**fields | (shared or {}))


def master_of(state: AdamWState) -> Tensor:
    if state.residual is not None:
        return join_master(state.weight, state.residual)
    return state.weight if state.master is None else state.master


def tensors(state: AdamWState) -> dict[str, Tensor]:
    named = {name: getattr(state, name) for name in AdamWState.__slots__}
    return {name: x for name, x in named.items() if x is not None}


def assert_same(found: AdamWState, expected: AdamWState) -> None:
    """Bit for bit, but for the payload of a NaN."""
    for name, x in tensors(expected).items():
        torch.testing.assert_close(
            tensors(found)[name], x, rtol=0, atol=0, equal_nan=True, msg=name
        )


class Plain:
    """torch.optim.AdamW on one parameter, with a moving average of it."""

    def __init__(self, master: Tensor, s: AdamWSettings, ema_decay: float) -> None:
        self.parameter = torch.nn.Parameter(master.clone())
        self.ema, self.ema_decay = master.clone(), ema_decay
        self.optimizer = PlainAdamW(
            [self.parameter], lr=s.lr, betas=(s.beta1, s.beta2), eps=s.eps,
            weight_decay=s.weight_decay,
        )  # fmt: skip

    def step(self, grad: Tensor) -> None:
        self.parameter.grad = grad.clone()
        self.optimizer.step()
        self.ema.lerp_(self.parameter.detach(), 1 - self.ema_decay)

    def assert_same(self, state: AdamWState) -> None:
        held = self.optimizer.state[self.parameter]
        expected = {
            "master": self.parameter.detach(),
            "exp_avg": held["exp_avg"],
            "exp_avg_sq": held["exp_avg_sq"],
            "ema": self.ema,
        }
        for name, found in (tensors(state) | {"master": master_of(state)}).items():
            if name in expected:
                assert torch.equal(found, expected[name]), name


# ---- torch's bits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "s",
    [
        SETTINGS,
        AdamWSettings(lr=1e-5),
        AdamWSettings(lr=1e-2, beta1=0.3, beta2=0.5, eps=1e-3, weight_decay=0.0),
        AdamWSettings(lr=1e-3, beta1=0.0, beta2=0.999),
    ],
    ids=["steep", "default", "low betas", "no momentum"],
)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hundred_steps_have_the_bits_of_torch(backend: Any, kind: str, s: AdamWSettings) -> None:
    n = 5003
    master = torch.randn(n)
    plain, state = Plain(master, s, 0.99), new_state(master, kind, ema=True, shift=3)
    for step in range(1, 101):
        grad = torch.randn(n) * 10.0 ** -(step % 7)
        grad[::5] = 0
        plain.step(grad)
        adamw_(state, grad, s, step=step, ema_decay=0.99, backend=backend)
    plain.assert_same(state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_length_of_the_tail_has_the_bits_of_torch(backend: Any) -> None:
    for n in [*range(64), 127, 128, 129, 255, 300, 32767, 32769, 65537]:
        for kind in FORMATS:
            master = torch.randn(n)
            plain, state = Plain(master, SETTINGS, 0.7), new_state(master, kind, ema=True)
            for step in (1, 2):
                grad = torch.randn(n)
                plain.step(grad)
                adamw_(state, grad, SETTINGS, step=step, ema_decay=0.7, backend=backend)
            plain.assert_same(state)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-19, 1e18])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tiny_and_huge_numbers_have_the_bits_of_torch(backend: Any, scale: float) -> None:
    """Squares of these gradients are zero, denormal, barely normal, and nearly infinite."""
    master = torch.randn(4096) * 1e-38
    plain, state = Plain(master, SETTINGS, 0.5), new_state(master, "whole", ema=True)
    for step in range(1, 4):
        grad = torch.randn(4096) * scale
        plain.step(grad)
        adamw_(state, grad, SETTINGS, step=step, ema_decay=0.5, backend=backend)
    plain.assert_same(state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hundred_steps_of_torch_as_it_is(backend: Any) -> None:
    """With the square root that torch has here, whichever that is."""
    n, s = 5003, AdamWSettings(lr=1e-3)
    parameter = torch.nn.Parameter(torch.randn(n))
    optimizer = torch.optim.AdamW([parameter], lr=s.lr, foreach=False)
    state = new_state(parameter.detach(), "split")
    for step in range(1, 101):
        parameter.grad = torch.randn(n)
        adamw_(state, parameter.grad, s, step=step, backend=backend)
        optimizer.step()
    error = (master_of(state) - parameter.detach()).norm() / parameter.detach().norm()
    assert error <= 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_roots_are_the_nearest_floats(backend: Any) -> None:
    """Every float of two binades, against NumPy's sqrt, which is the processor's instruction.

    With beta2 = 1 and no gradient exp_avg_sq stays; exp_avg 1 and weight 0 leave 1 / root.
    """
    exp_avg_sq = torch.arange(127 << 23, 129 << 23, dtype=torch.int32).view(torch.float32)
    n = exp_avg_sq.numel()
    held = {"exp_avg": torch.ones(n), "exp_avg_sq": exp_avg_sq.clone()}
    state = new_state(torch.zeros(n), "whole", shared=held)
    by = Coefficients(
        grad_scale=1.0, decay=1.0, exp_avg_weight=0.0, beta2=1.0, exp_avg_sq_weight=0.0,
        root_correction=1.0, eps=0.0, step_size=1.0, ema_weight=0.0, step=1,
    )  # fmt: skip
    FUNCTIONS[backend](state, torch.zeros(n), by, threads=2)
    expected = np.float32(1) / np.sqrt(exp_avg_sq.numpy())
    assert torch.equal(state.weight, torch.from_numpy(expected))


# ---- independent arithmetic ----------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_is_within_two_ulp_of_float64(
    backend: Any, kind: str, grad_dtype: torch.dtype
) -> None:
    n, clip, step = 10_000, 0.37, 7
    master, grad = torch.randn(n) + 3, torch.randn(n).to(grad_dtype)
    moments = {"exp_avg": torch.randn(n), "exp_avg_sq": torch.rand(n) + 0.1}
    state = new_state(master, kind, shared={k: v.clone() for k, v in moments.items()})
    adamw_(state, grad, SETTINGS, step=step, grad_scale=clip, backend=backend)
    s, g = SETTINGS, grad.double() * clip
    m = s.beta1 * moments["exp_avg"].double() + (1 - s.beta1) * g
    v = s.beta2 * moments["exp_avg_sq"].double() + (1 - s.beta2) * g * g
    hat_m, hat_v = m / (1 - s.beta1**step), v / (1 - s.beta2**step)
    w = master.double()
    w = w - s.lr * s.weight_decay * w - s.lr * hat_m / (hat_v.sqrt() + s.eps)
    ulp = 2.0**-23
    assert ((master_of(state) - w).abs() <= 2 * ulp * w.abs()).all()
    scale = torch.maximum(moments["exp_avg"].abs(), g.abs())
    assert ((state.exp_avg - m).abs() <= 2 * ulp * scale).all()
    assert ((state.exp_avg_sq - v).abs() <= 2 * ulp * v).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hundred_steps_stay_near_float64(backend: Any, kind: str) -> None:
    """torch.optim.AdamW in float64 on the same gradients, each of which bf16 holds exactly.

    Not nearer than 1e-5, because 1 - lr * weight_decay is rounded to fp32 and applied each step;
    torch's own fp32 steps are the same bits (above) and as far off.
    """
    n, s = 2000, AdamWSettings(lr=1e-3)
    master = torch.randn(n) + 2
    plain, state = Plain(master.double(), s, 0.9), new_state(master, kind)
    for step in range(1, 101):
        grad = torch.randn(n).bfloat16()
        plain.step(grad.double())
        adamw_(state, grad, s, step=step, backend=backend)
    expected = plain.parameter.detach()
    error = (master_of(state) - expected).norm() / expected.norm()
    assert error <= 1e-5


def fused80(a: Any, b: Any, c: Any) -> np.ndarray:
    """a * b + c in 64 bits of mantissa, then rounded to float32."""
    return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(np.float32)


def lerp80(start: np.ndarray, end: np.ndarray, weight: float) -> np.ndarray:
    w = np.float32(weight)
    near = w < 0.5
    return fused80(w if near else w - np.float32(1), end - start, start if near else end)


@needs_library
@pytest.mark.parametrize("kind", FORMATS)
def test_each_rounding_is_where_the_formula_has_it(instruction_set: str, kind: str) -> None:
    f, s, n, step = np.float32, SETTINGS, 20_011, 3
    master, grad = torch.randn(n), torch.randn(n)
    m, v = torch.randn(n), torch.rand(n)
    state = new_state(
        master, kind, ema=True, shared={"exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    )
    adamw_(state, grad, s, step=step, grad_scale=0.3, ema_decay=0.2, backend="native")
    g = grad.numpy() * f(0.3)
    w = master.numpy() * f(1 - s.lr * s.weight_decay)
    m80 = lerp80(m.numpy(), g, 1 - s.beta1)
    v80 = fused80(f(1 - s.beta2) * g, g, v.numpy() * f(s.beta2))
    below = np.sqrt(v80) / f((1 - s.beta2**step) ** 0.5) + f(s.eps)
    w = w + m80 * f(-s.lr / (1 - s.beta1**step)) / below
    for found, expected in [
        (state.exp_avg, m80),
        (state.exp_avg_sq, v80),
        (master_of(state), w),
        (state.ema, lerp80(master.numpy(), w, 1 - 0.2)),
    ]:
        assert torch.equal(found, torch.from_numpy(expected))


# ---- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiny_updates_move_every_format_and_not_plain_bf16(backend: Any) -> None:
    s = AdamWSettings(lr=1e-6, weight_decay=0.0)
    master = torch.rand(1000) + 1
    states = {kind: new_state(master, kind) for kind in FORMATS}
    plain = torch.nn.Parameter(master.bfloat16())
    optimizer = PlainAdamW([plain], lr=s.lr, weight_decay=0.0)
    for step in range(1, 21):
        grad = torch.randn(1000).abs()
        for state in states.values():
            adamw_(state, grad, s, step=step, backend=backend)
        plain.grad = grad.bfloat16()
        optimizer.step()
    assert torch.equal(plain.detach(), master.bfloat16())
    moved = master - master_of(states["whole"])
    assert (moved > 1e-5).all()
    for kind in ("split", "master"):
        assert torch.equal(master_of(states[kind]), master_of(states["whole"]))
    assert torch.equal(states["split"].weight, states["master"].weight)


@examples(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_split_restores_every_master(bits: list[int]) -> None:
    edges = [0, 1 << 31, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFFFFFFFF, 0x7FFFFFFF, 0x00018000]
    master = torch.from_numpy(np.array(bits + edges, np.uint32).view(np.float32))
    hi, lo = torch.zeros(len(master)).bfloat16(), torch.zeros(len(master), dtype=torch.int16)
    split_master_(master, hi, lo)
    restored = join_master(hi, lo)
    number = ~master.isnan()
    assert torch.equal(restored[number].view(torch.int32), master[number].view(torch.int32))
    assert restored[~number].isnan().all()
    assert hi[~number].isnan().all()
    near = number & (master.abs() < 3e38)
    half = torch.nextafter(hi[near].abs(), torch.tensor(torch.inf).bfloat16()) - hi[near].abs()
    assert ((hi[near].double() - master[near].double()).abs() <= half.double() / 2).all()


# ---- native is reference -------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_native_has_the_bits_of_the_reference_for_any_threads(
    kind: str, ema: bool, grad_dtype: torch.dtype
) -> None:
    n = 170_007
    master = torch.randn(n)
    expected = new_state(master, kind, ema=ema)
    states = {threads: new_state(master, kind, ema=ema, shift=threads) for threads in (1, 2, 5)}
    for step in (1, 2, 3):
        grad = torch.randn(n).to(grad_dtype)
        call = {"step": step, "grad_scale": 0.7, "ema_decay": 0.999}
        adamw_(expected, grad, SETTINGS, backend="reference", **call)
        for threads, state in states.items():
            adamw_(state, grad, SETTINGS, backend="native", threads=threads, **call)
    for state in states.values():
        assert_same(state, expected)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_its_element(backend: Any, kind: str) -> None:
    n = 200
    master = torch.randn(n)
    clean, state = new_state(master, kind), new_state(master, kind)
    grad = torch.randn(n)
    spoilt = grad.clone()
    spoilt[[3, 77, 199]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    spoilt.view(torch.int32)[50] = 0x7FFFFFFF  # a NaN whose bits would round up to -0
    for step in (1, 2):
        adamw_(clean, grad, SETTINGS, step=step, backend=backend)
        adamw_(state, spoilt, SETTINGS, step=step, backend=backend)
    hit = torch.zeros(n, dtype=torch.bool)
    hit[[3, 50, 77, 199]] = True
    for name, x in tensors(state).items():
        assert torch.equal(x[~hit], tensors(clean)[name][~hit]), name
    assert master_of(state)[hit].isnan().all()
    assert state.weight[hit].isnan().all()


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.zeros(8, dtype=torch.float16)}, "float16; must be float32 or bfloat16"),
        ({"weight": torch.zeros(8)}, "float32 takes neither"),
        ({"residual": None}, "bfloat16 exactly one"),
        ({"master": torch.zeros(8)}, "bfloat16 exactly one"),
        ({"residual": torch.zeros(8)}, r"residual is torch.float32 \[8\].*must be int16 \[8\]"),
        ({"exp_avg": torch.zeros(7)}, r"exp_avg is torch.float32 \[7\].*must be float32 \[8\]"),
        ({"exp_avg_sq": torch.zeros(16)[::2]}, r"exp_avg_sq .*strides \[2\].*contiguous"),
        ({"exp_avg": torch.zeros(2, 4)}, r"exp_avg is torch.float32 \[2, 4\]"),
        ({"ema": torch.zeros(8, device="meta")}, "ema .* on meta.*on the cpu"),
        ({"grad": torch.zeros(8, dtype=torch.int32)}, "grad is torch.int32.*float32 or bfloat16"),
        ({"grad": torch.zeros(9)}, r"grad is torch.float32 \[9\]"),
        ({"step": 0}, "step 0 is below 1"),
        ({"threads": 0}, "threads 0 is below 1"),
        ({"backend": "cuda"}, "'cuda' is none of"),
    ],
)
def test_refuses_what_does_not_belong_together(change: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = tensors(new_state(torch.ones(8), "split"))
    grad = change.pop("grad", torch.zeros(8))
    call = {"step": 1} | {k: change.pop(k) for k in ("step", "threads", "backend") if k in change}
    state = AdamWState(**fields | change)
    with pytest.raises(ValueError, match=said):
        adamw_(state, grad, SETTINGS, **call)
    assert not state.exp_avg.any() or state.exp_avg.is_meta


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_open", lambda: (None, "no native kernels: none"))
    state, expected = (new_state(torch.ones(8), "split") for _ in range(2))
    adamw_(state, torch.ones(8), SETTINGS, step=1)
    with pytest.raises(RuntimeError, match="no native kernels"):
        adamw_(expected, torch.ones(8), SETTINGS, step=1, backend="native")
    adamw_(expected, torch.ones(8), SETTINGS, step=1, backend="reference")
    assert_same(state, expected)
