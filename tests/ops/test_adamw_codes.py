"""8-bit moments: what a code keeps, that it neither stalls nor drifts, and that training agrees."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaslide.ops import library
from megaslide.ops.adamw import BLOCK8, AdamWSettings, AdamWState, adamw_, codes
from megaslide.ops.adamw.reference import join_master, split_master_

absent = library.why_absent()
needs_library = pytest.mark.skipif(absent is not None, reason=absent or "present")
BACKENDS = ["reference", pytest.param("native", marks=needs_library)]
KINDS = ("whole", "split", "master")
SETTINGS = AdamWSettings(lr=3e-3, beta1=0.9, beta2=0.99, eps=1e-7, weight_decay=0.1)


def coded_state(master: Tensor, kind: str = "whole", *, ema: bool = False) -> AdamWState:
    n = len(master)
    fields: dict[str, Any] = {
        "exp_avg": torch.zeros(n, dtype=torch.uint8),
        "exp_avg_sq": torch.zeros(n, dtype=torch.uint8),
        "exp_avg_scale": torch.zeros(codes.num_blocks(n)),
        "exp_avg_sq_scale": torch.zeros(codes.num_blocks(n)),
        "ema": master.clone() if ema else None,
        "weight": master.clone(),
    }
    if kind != "whole":
        fields["weight"] = torch.zeros(n, dtype=torch.bfloat16)
        fields["residual"] = torch.zeros(n, dtype=torch.int16) if kind == "split" else None
        fields["master"] = master.clone() if kind == "master" else None
        split_master_(master, fields["weight"], fields["residual"])
    return AdamWState(**fields)


def moments(state: AdamWState) -> tuple[Tensor, Tensor]:
    """exp_avg and exp_avg_sq, fp32 `[n]`."""
    assert state.exp_avg_scale is not None
    assert state.exp_avg_sq_scale is not None
    exp_avg = codes.decode(state.exp_avg, state.exp_avg_scale, codes.EXP_AVG)
    return exp_avg, codes.decode(state.exp_avg_sq, state.exp_avg_sq_scale, codes.ROOT).square()


def assert_same(found: AdamWState, expected: AdamWState, *, skip: tuple[str, ...] = ()) -> None:
    for name in AdamWState.__slots__:
        x, y = getattr(found, name), getattr(expected, name)
        if x is not None and name not in skip:
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=name)


# ---- the code ------------------------------------------------------------------------------------


def round_trip(x: Tensor, code: codes.Code, step: int) -> Tensor:
    stored = torch.zeros(len(x), dtype=torch.uint8)
    scale = torch.zeros(codes.num_blocks(len(x)))
    noise = codes.noise(0, len(x), step)[code is codes.ROOT]
    codes.encode_(x, stored, scale, code, noise)
    return codes.decode(stored, scale, code)


@pytest.mark.parametrize("code", [codes.EXP_AVG, codes.ROOT], ids=["exp_avg", "root"])
def test_a_code_is_a_neighbour_of_its_number(code: codes.Code) -> None:
    """Within 1/16 of the number plus the offset; the largest of a block is exact."""
    x = torch.randn(1000) * torch.randn(1000).mul(4).exp()
    x = x if code.has_sign else x.abs()
    found = round_trip(x, code, 1)
    for part, kept in zip(x.split(BLOCK8), found.split(BLOCK8), strict=True):
        most = part.abs().max()
        assert ((kept - part).abs() <= (part.abs() + code.offset * most) / 16 * 1.001).all()
        top = part.abs().argmax()
        torch.testing.assert_close(kept[top], part[top], rtol=3e-7, atol=0)


@pytest.mark.parametrize("code", [codes.EXP_AVG, codes.ROOT], ids=["exp_avg", "root"])
def test_rounding_is_right_on_average(code: codes.Code) -> None:
    x = torch.linspace(0.01, 1, BLOCK8, dtype=torch.float64).float()
    steps = 4000
    mean = sum(round_trip(x, code, step).double() for step in range(steps)) / steps
    standard_error = (x / 16 / 2) / steps**0.5
    assert ((mean - x).abs() <= 5 * standard_error + 1e-6).all()
    assert ((mean - x) / standard_error).mean().abs() < 0.5


def test_zero_is_kept_and_a_root_never_becomes_it() -> None:
    x = torch.zeros(BLOCK8)
    assert not round_trip(x, codes.ROOT, 1).any()
    x[0], x[1], x[2] = 1.0, 1e-12, 1e-30
    for step in range(50):
        kept = round_trip(x, codes.ROOT, step)
        assert (kept[:3] > 0).all()
        assert not kept[3:].any()


def test_noise_is_uniform_and_its_two_parts_independent() -> None:
    a, b = (x.double() / 2**19 for x in codes.noise(0, 1 << 16, 5))
    for x in (a, b):
        assert x.mean() == pytest.approx(0.5, abs=0.005)
        assert x.var() == pytest.approx(1 / 12, abs=0.002)
    later = codes.noise(0, 1 << 16, 6)[0].double() / 2**19
    for pair in ((a, b), (a, later), (a[1:], a[:-1])):
        assert abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 0.02


# ---- in the update -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_do_not_stall(backend: Any) -> None:
    """At beta2 = 0.999 no step moves exp_avg_sq by as much as a code; its mean still follows.

    The largest gradient of a block is constant, so that the scale does not move for the others.
    """
    rows, s = 24, AdamWSettings(lr=0.0)
    sizes = torch.logspace(-2, 0, BLOCK8).repeat(rows)
    n = len(sizes)
    state, held = coded_state(torch.zeros(n)), torch.zeros(n, dtype=torch.float64)
    for step in range(1, 801):
        grad = sizes * (3 if step <= 400 else 1)
        grad[::BLOCK8] = sizes[::BLOCK8] = 5
        adamw_(state, grad, s, step=step, backend=backend)
        held = s.beta2 * held + (1 - s.beta2) * grad.double().square()
    exp_avg, exp_avg_sq = moments(state)
    for ratio in (exp_avg_sq / held, exp_avg / sizes):
        per_size = ratio.view(rows, BLOCK8).mean(0)
        assert ((per_size - 1).abs() < 0.3).all()
        assert per_size.mean().item() == pytest.approx(1, abs=0.03)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_native_has_the_bits_of_the_reference(kind: str) -> None:
    for n in (0, 1, 63, 127, 128, 129, 1000, 40_001):
        master = torch.randn(n)
        expected = coded_state(master, kind, ema=True)
        states = {threads: coded_state(master, kind, ema=True) for threads in (1, 2)}
        for step in range(1, 6):
            grad = torch.randn(n) * torch.randn(n).mul(4).exp()
            grad[::7] = 0
            grad = grad.bfloat16() if step % 2 else grad
            call: dict[str, Any] = {"step": step, "grad_scale": 0.3, "ema_decay": 0.9}
            adamw_(expected, grad, SETTINGS, backend="reference", **call)
            for threads, state in states.items():
                adamw_(state, grad, SETTINGS, backend="native", threads=threads, **call)
                assert_same(state, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masters_are_the_same_in_every_format(backend: Any) -> None:
    master = torch.randn(1000)
    states = {kind: coded_state(master, kind) for kind in KINDS}
    for step in range(1, 10):
        grad = torch.randn(1000)
        for state in states.values():
            adamw_(state, grad, SETTINGS, step=step, backend=backend)
    assert states["split"].residual is not None
    split = join_master(states["split"].weight, states["split"].residual)
    assert torch.equal(split, states["whole"].weight)
    assert torch.equal(states["master"].master, states["whole"].weight)


@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e18])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tiny_and_huge_gradients_stay_finite(backend: Any, scale: float) -> None:
    state = coded_state(torch.randn(300))
    for step in range(1, 6):
        adamw_(state, torch.randn(300) * scale, SETTINGS, step=step, backend=backend)
    assert all(x.isfinite().all() for x in (state.weight, *moments(state)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_its_block(backend: Any) -> None:
    n = 3 * BLOCK8
    master, grad = torch.randn(n), torch.randn(n)
    clean, state = coded_state(master), coded_state(master)
    spoilt = grad.clone()
    spoilt[BLOCK8 + 5] = torch.nan
    for step in (1, 2):
        adamw_(clean, grad, SETTINGS, step=step, backend=backend)
        adamw_(state, spoilt, SETTINGS, step=step, backend=backend)
    hit = torch.arange(n) // BLOCK8 == 1
    assert state.weight[hit].isnan().all()
    for found, expected in zip(moments(state), moments(clean), strict=True):
        assert torch.equal(found[~hit], expected[~hit])
        assert found[hit].isnan().all()
    assert torch.equal(state.weight[~hit], clean.weight[~hit])


def final_loss(coded: bool, seed: int) -> float:
    """Mean loss of the last 50 of 300 steps: a network fits another, inputs of 1e-2 … 1e1."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
    scales, states, losses = torch.logspace(-2, 1, 16), [], []
    for p in net.parameters():
        state = coded_state(p.data.flatten())
        if not coded:
            moment = {"exp_avg": torch.zeros(p.numel()), "exp_avg_sq": torch.zeros(p.numel())}
            state = AdamWState(weight=state.weight, **moment)
        p.data = state.weight.view_as(p)
        states.append(state)
    for step in range(1, 301):
        x = torch.randn(64, 16) * scales
        loss = (net(x) - teacher(x)).square().mean()
        net.zero_grad()
        loss.backward()
        losses.append(loss.item())
        s = AdamWSettings(lr=5e-3 * (1 - step / 301))
        for p, state in zip(net.parameters(), states, strict=True):
            assert p.grad is not None
            adamw_(state, p.grad.flatten(), s, step=step)
    assert losses[0] > 10 * losses[-1]
    return sum(losses[-50:]) / 50


@pytest.mark.parametrize("seed", [0, 1])
def test_training_reaches_the_loss_of_fp32_moments(seed: int) -> None:
    assert final_loss(True, seed) == pytest.approx(final_loss(False, seed), rel=0.03)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"exp_avg_scale": None}, "exp_avg_scale=False, exp_avg_sq_scale=True; give both"),
        ({"exp_avg_scale": torch.zeros(2)}, r"exp_avg_scale is .*\[2\].*must be float32 \[3\]"),
        ({"exp_avg": torch.zeros(300)}, r"exp_avg is torch.float32.*must be uint8 \[300\]"),
    ],
)
def test_refuses_codes_that_do_not_belong_together(change: dict[str, Any], said: str) -> None:
    state = coded_state(torch.randn(300))
    fields = {name: getattr(state, name) for name in AdamWState.__slots__}
    with pytest.raises(ValueError, match=said):
        adamw_(AdamWState(**fields | change), torch.zeros(300), SETTINGS, step=1)
