"""The simulated step against arithmetic by hand, and against what the real engine does.

Units in the tests take whole seconds, so that expected times are sums anybody can do.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megaslide.planning.profile import profile
from megaslide.planning.simulate import Load, Schedule, Shared, Simulated, UnitLoad, simulate
from megaslide.streaming import TransferHooks, stream

NOTHING = Load(seconds=0.0)
RESIDENT = UnitLoad(forward_s=0.0, backward_s=0.0, h2d=NOTHING, d2h=NOTHING, adamw=NOTHING)
DEPTH = 12


def block(compute: float = 1.0, link: float = 0.0, adamw: float = 0.0) -> UnitLoad:
    return UnitLoad(
        forward_s=compute, recompute_s=compute, backward_s=2 * compute,
        h2d=Load(seconds=link, nbytes=10), d2h=Load(seconds=link, nbytes=7),
        adamw=Load(seconds=adamw),
    )  # fmt: skip


def run(load: UnitLoad, resident: UnitLoad = RESIDENT, **options: Any) -> Simulated:
    return simulate([resident, *[load] * DEPTH], Schedule(**options))


def test_compute_alone_is_the_sum_of_its_passes() -> None:
    assert run(block()).step_s == pytest.approx(4 * DEPTH)
    assert run(block(), micro_batches=3).step_s == pytest.approx(3 * 4 * DEPTH)
    resident = replace(RESIDENT, forward_s=5.0, backward_s=8.0)
    assert run(block(), resident, micro_batches=2).step_s == pytest.approx(2 * (4 * DEPTH + 13))
    gradients = replace(block(), clear_s=0.25, round_s=0.5)
    assert run(gradients, micro_batches=2).step_s == pytest.approx((2 * 4 + 0.75) * DEPTH)


@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_bytes_are_the_engine_s_identity(slots: int, micro_batches: int) -> None:
    moved = run(block(link=0.1), slots=slots, micro_batches=micro_batches).lanes.nbytes
    assert moved["h2d"] == 2 * (2 * DEPTH - slots) * 10  # of two steps
    assert moved["d2h"] == 2 * DEPTH * 7


def test_without_overlap_everything_adds_up() -> None:
    """Two copies down less the slots, one up; AdamW hides, but for the block that is first."""
    found = run(block(link=1.0, adamw=0.5), synchronous=True).step_s
    assert found == pytest.approx(4 * DEPTH + (2 * DEPTH - 2) + DEPTH + 0.5)


def test_copies_that_fit_beside_compute_cost_their_ends_only() -> None:
    """Exposed: the last gradient, which the norm waits for, the first update, the first load."""
    assert run(block(link=0.3, adamw=0.2)).step_s == pytest.approx(4 * DEPTH + 0.3 + 0.2 + 0.3)


def test_a_slow_link_is_what_a_step_takes() -> None:
    """All loads, and between steps the time in which none may start: the last two blocks' backward
    with one gradient that leaves, the norm, one update."""
    found = run(block(compute=0.1, link=3.0, adamw=0.2))
    loads = 3.0 * (2 * DEPTH - 2)
    assert loads < found.step_s < loads + 3 * 3.0
    assert found.bound == "h2d"
    assert found.lanes.overlap == pytest.approx(loads / found.step_s)


def test_updates_need_not_wait_for_the_norm_without_clipping() -> None:
    slow = block(compute=1.0, adamw=3.0)
    clipped, early = run(slow), run(slow, clip=False)
    # AdamW has the forward pass to hide in, or as early updates the backward pass too.
    assert clipped.step_s == pytest.approx(3 * DEPTH + 3 * DEPTH + 1)
    assert early.step_s < clipped.step_s - DEPTH
    assert early.lanes.busy_s["adamw"] == clipped.lanes.busy_s["adamw"]


def test_activations_share_the_link() -> None:
    away = replace(block(link=0.1), activation=Load(seconds=0.5, nbytes=100))
    stay, leave = run(away), run(away, activations="host")
    assert leave.lanes.nbytes["d2h"] - stay.lanes.nbytes["d2h"] == 2 * (DEPTH - 1) * 100
    assert leave.lanes.busy_s["h2d"] - stay.lanes.busy_s["h2d"] == pytest.approx(
        2 * (DEPTH - 2) * 0.5
    )  # the last one stays, and the one before has not yet left when it is wanted


def test_all_that_the_disk_does_takes_its_turn() -> None:
    second = Load(seconds=1.0, nbytes=5)
    slow = replace(block(0.01), disk_weights=second, disk_read=second, disk_write=second)
    found = run(slow, tier="disk")
    per_step = {lane: s / 2 for lane, s in found.lanes.busy_s.items() if lane.startswith("disk")}
    assert per_step["disk_weights"] >= 2 * DEPTH - 2  # waiting for the disk counts as busy
    disk_s = (2 * DEPTH - 2) + DEPTH + DEPTH
    assert disk_s <= found.step_s <= disk_s + 4
    spilled = run(replace(slow, disk_gradients=second), tier="disk", gradient_tier="disk")
    assert spilled.step_s == pytest.approx(found.step_s + DEPTH, abs=4)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=12))
def test_what_is_shared_serves_one_at_a_time_and_never_idles_for_nothing(asked: Any) -> None:
    """Against seconds in a row, each taken by the first who asks for it."""
    shared, taken = Shared(), set()
    for at, seconds in asked:
        free = [t for t in range(at, 400) if t not in taken][:seconds]
        taken |= set(free)
        assert shared.take(at, seconds) == free[-1] + 1


def test_no_lane_does_two_things_at_once() -> None:
    found = run(block(link=0.7, adamw=0.4), micro_batches=2, slots=3)
    for lane in ("compute", "h2d", "d2h", "adamw"):
        spans = sorted((s.start, s.end) for s in found.spans if s.lane == lane)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))


# ---- against the engine --------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, depth: int, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.blocks:
            x = torch.tanh(layer(x))
        return x


def step_of(model: Any, batch: int) -> Any:
    x = torch.randn(batch, 8)

    def step() -> None:
        loss = model(x).square().mean()
        with model.final_backward():
            loss.backward()
        model.step()

    return step


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("activations", ["device", "host"])
@pytest.mark.parametrize("slots", [2, 4])
def test_lanes_do_what_the_engine_s_lanes_do_in_its_order(
    slots: int, activations: str, clip: bool
) -> None:
    depth, batch = 5, 2
    model = stream(
        Net(depth), slots=slots, activations=activations, micro_batch_size=1,
        max_grad_norm=1.0 if clip else None, hooks=TransferHooks(max_delay_s=0.0005),
    )  # fmt: skip
    step = step_of(model, batch)
    for _ in range(4):
        step()
    model.close()
    schedule = Schedule(slots=slots, micro_batches=batch, clip=clip, activations=activations)
    simulated = simulate([RESIDENT, *[block(link=0.1, adamw=0.1)] * depth], schedule)
    for lane in ("compute", "h2d", "d2h", "adamw"):
        found = [s.name for s in simulated.spans if s.lane == lane]
        real = [s.name for s in model.trace.spans if s.lane == lane]
        assert found
        assert any(real[i : i + len(found)] == found for i in range(len(real))), lane


def test_profile_reads_every_kind_of_work() -> None:
    model = stream(Net(3, dim=128), micro_batch_size=1, hooks=TransferHooks(synchronous=True))
    x = torch.randn(1, 128)

    def step() -> None:
        model(x).sum().backward()
        model.step()

    resident, *blocks = profile(model, step)
    model.close()
    assert resident.forward_s > 0
    for load, layout in zip(blocks, model.store.units[1:], strict=True):
        assert min(load.forward_s, load.recompute_s, load.backward_s, load.clear_s) > 0
        assert min(load.h2d.seconds, load.d2h.seconds, load.adamw.seconds) > 0
        assert load.h2d.nbytes == layout.weight_nbytes
