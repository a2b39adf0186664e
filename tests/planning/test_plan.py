"""Plans: bytes are what the engine allocates, time is what its lanes add up to."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megaslide.config import AttentionConfig, ModelConfig
from megaslide.errors import InputError
from megaslide.models.dit import VideoDiT, build_model
from megaslide.planning.costs import ModelCosts, model_costs
from megaslide.planning.devices import device_named
from megaslide.planning.plan import Choice, Machine, accelerator, make_plan
from megaslide.planning.subject import subject_of
from megaslide.streaming import stream

GIB = 1 << 30
LAYERS = 6
MACHINE = Machine(
    name="toy", flop_s=1e9, peak_flop_s=2e9, memory_bytes_s=1e12, link_bytes_s=1e9,
    adamw_bytes_s=1e9, disk_bytes_s=1e9, device_bytes=GIB, ram_bytes=GIB, disk_bytes=GIB, basis={},
)  # fmt: skip


def model() -> VideoDiT:
    sizes = ModelConfig(hidden_size=32, num_layers=LAYERS, num_attention_heads=2)
    return build_model(sizes, AttentionConfig(), in_channels=4, text_dim=8)


def inputs(clips: int = 1) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(clips, 4, 3, 8, 8),
        "timestep": torch.full((clips,), 500.0),
        "encoder_hidden_states": torch.randn(clips, 5, 8),
    }


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    return model_costs(model(), inputs(), dtype=torch.bfloat16)


@pytest.mark.parametrize("state_format", ["master", "split", "split8"])
@pytest.mark.parametrize(("tier", "gradient_tier"), [("ram", "ram"), ("disk", "ram"),
                                                     ("disk", "disk")])  # fmt: skip
def test_bytes_are_those_that_the_engine_allocates(
    costs: ModelCosts, state_format: Any, tier: Any, gradient_tier: Any, tmp_path: Any
) -> None:
    choice = Choice(state_format=state_format, tier=tier, gradient_tier=gradient_tier, slots=3)
    plan = make_plan(costs, MACHINE, choice)
    streamed = stream(
        model(), dtype=torch.bfloat16, state_format=state_format, tier=tier, slots=3,
        gradient_tier=gradient_tier, disk_path=tmp_path,
    )  # fmt: skip
    held = sum(buffer.nbytes for buffer in streamed.store.buffers)
    on_disk = sum(streamed.store.nbytes.values()) - sum(
        arena.nbytes for arena in streamed.store.arenas.values()
    )
    device = {k: n for k, n in streamed.device_bytes.items() if k != "activations"}
    assert plan.ram == {"state": held}
    assert sum(plan.disk.values()) == on_disk
    assert plan.to_dict()["state_bytes"] == streamed.state_bytes
    assert {k: plan.device[k] for k in device} == device
    streamed.close()


def test_traffic_is_that_of_a_real_step(costs: ModelCosts) -> None:
    streamed = stream(model(), dtype=torch.bfloat16, micro_batch_size=1)
    moved = []
    for _ in range(3):
        before = dict(streamed.trace.counters)
        sample = {k: v.bfloat16() for k, v in inputs(2).items()}
        streamed(**sample).float().square().mean().backward()
        streamed.step()
        streamed.finish()
        moved.append({k: streamed.trace.counters[k] - before.get(k, 0) for k in before})
    streamed.close()
    figures = make_plan(costs, MACHINE, Choice(micro_batches=2)).to_dict()
    assert figures["d2h_bytes_per_step"] == moved[-1]["d2h_bytes"]
    total = streamed.trace.counters["h2d_bytes"]
    first = 2 * costs.units[1].weight_bytes + costs.units[0].weight_bytes  # a fourth step's
    assert figures["h2d_bytes_per_step"] * 3 + first == total


def test_compute_bound_time_is_flop_over_rate(costs: ModelCosts) -> None:
    fast = replace(MACHINE, link_bytes_s=1e15, adamw_bytes_s=1e15, memory_bytes_s=1e18)
    plan = make_plan(costs, fast, Choice(micro_batches=3))
    assert plan.simulated.step_s == pytest.approx(3 * costs.flop / fast.flop_s, rel=1e-6)
    assert plan.flop == 3 * costs.flop
    useful = costs.forward_flop + costs.backward_flop
    assert plan.mfu == pytest.approx(useful / costs.flop * fast.flop_s / fast.peak_flop_s, rel=1e-6)


def test_link_bound_time_is_bytes_over_bandwidth(costs: ModelCosts) -> None:
    slow = replace(MACHINE, flop_s=1e15, adamw_bytes_s=1e15, link_bytes_s=1e6)
    plan = make_plan(costs, slow, Choice())
    figures = plan.to_dict()
    assert figures["bound"] == "h2d"
    floor = figures["h2d_bytes_per_step"] / 1e6
    block = costs.units[1].weight_bytes / 1e6
    assert floor < figures["step_s"] < floor + 5 * block


def test_the_optimizer_and_the_disk_take_what_their_bytes_take(costs: ModelCosts) -> None:
    """`split`: 14 bytes read and 12 written per parameter, besides what page padding adds."""
    figures = make_plan(costs, MACHINE, Choice(tier="disk", gradient_tier="disk")).to_dict()
    state, weights = figures["state_bytes"], sum(u.weight_bytes for u in costs.units)
    gradients = sum(figures["disk_bytes"].values()) - state
    busy = figures["busy_s"]
    assert busy["adamw"] * 1e9 >= 2 * state + gradients  # its waits for the disk are in it
    in_ram = make_plan(costs, MACHINE, Choice()).to_dict()["busy_s"]
    assert in_ram["adamw"] * 1e9 == pytest.approx(2 * state + gradients)
    assert 26 * costs.parameters < 2 * state + gradients < 40 * costs.parameters
    assert busy["disk_write"] * 1e9 >= state + gradients
    assert figures["step_s"] * 1e9 > 2 * state + 2 * gradients + weights


def test_shortfall_says_what_is_missing_where(costs: ModelCosts) -> None:
    plan = make_plan(costs, MACHINE, Choice())
    assert not plan.shortfall
    needed = sum(plan.device.values())
    small = replace(MACHINE, device_bytes=needed - 7, ram_bytes=1000)
    short = make_plan(costs, small, Choice()).shortfall
    assert short == {"device": 7, "RAM": sum(plan.ram.values()) - 1000}
    unknown = replace(small, device_bytes=None, ram_bytes=None)
    assert not make_plan(costs, unknown, Choice()).shortfall


def test_inputs_count_where_they_wait(costs: ModelCosts) -> None:
    own = sum(unit.boundary_bytes for unit in costs.units)
    stay, leave = (
        make_plan(costs, MACHINE, Choice(activations=place, micro_batches=2))
        for place in ("device", "host")
    )
    assert stay.device["inputs"] == 2 * (own + costs.shared_bytes)
    assert leave.ram["inputs"] == 2 * own * (LAYERS - 1) // LAYERS
    assert leave.device["inputs"] < stay.device["inputs"]


# ---- subjects ------------------------------------------------------------------------------------


def test_a_preset_is_what_its_name_says() -> None:
    subject = subject_of("1b", clip=(33, 256, 256))
    assert subject.latents == (9, 32, 32)
    assert subject.tokens == 9 * 16 * 16
    assert subject.costs().parameters == pytest.approx(1e9, rel=0.1)


def test_a_run_is_planned_as_its_config_says(tmp_path: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {buckets: [9x32x32], codec: {name: dct, block: 4x8x8, channels: 32}}\n"
        "train: {train_batch_size: 6, gradient_accumulation_steps: 2}\n"
    )
    overrides = ["offload.micro_batch_size=3", "offload.state_format=split8"]
    subject = subject_of(str(path), overrides)
    assert (subject.channels, subject.clips) == (32, 3)
    assert {choice.micro_batches for choice in subject.choices} == {4}
    assert {choice.state_format for choice in subject.choices} == {"split8"}
    assert subject.latents == (3, 4, 4)


def test_a_preset_is_planned_as_the_command_says() -> None:
    assert subject_of("tiny").dtype == torch.bfloat16
    told = ("train.mixed_precision=no", "train.train_batch_size=3",
            "train.gradient_accumulation_steps=2")  # fmt: skip
    subject = subject_of("tiny", told, clip=(9, 64, 64))
    assert (subject.dtype, subject.clips) == (torch.float32, 3)
    assert {choice.micro_batches for choice in subject.choices} == {2}


def test_new_weights_take_ram_beside_the_state() -> None:
    subject = subject_of("tiny", clip=(9, 64, 64))
    costs = subject.costs()
    besides = subject.besides(costs)
    assert sum(besides.values()) == 4 * costs.parameters
    plan = make_plan(costs, replace(MACHINE, ram_besides=besides), subject.choices[0])
    assert plan.to_dict()["ram_bytes"] == {"state": plan.store.ram_bytes, **besides}
    room = plan.store.ram_bytes
    short = make_plan(
        costs, replace(MACHINE, ram_besides=besides, ram_bytes=room), subject.choices[0]
    ).shortfall
    assert short == {"RAM": 4 * costs.parameters}


@pytest.mark.parametrize(
    ("what", "clip", "told"),
    [("15b", None, "no preset"), ("1b", (1, 8, 8), "no whole token")],
)
def test_what_cannot_be_planned_is_refused(what: str, clip: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        subject_of(what, clip=clip)


def test_an_accelerator_reaches_a_stated_share_of_its_peak() -> None:
    machine = accelerator(device_named("h200"), efficiency=0.5)
    assert machine.flop_s == machine.peak_flop_s / 2
    assert "0.5 of the peak (assumed)" in machine.basis["compute"]
    other = accelerator(device_named("h200"), bf16=False)
    assert "the peak of bf16, which this run's fp32 does not reach" in other.basis["compute"]


def test_places_that_nobody_spoke_of_are_named(costs: ModelCosts) -> None:
    unknown = replace(MACHINE, ram_bytes=None, disk_bytes=None)
    assert make_plan(costs, unknown, Choice()).untold == ["RAM"]
    assert make_plan(costs, unknown, Choice(tier="disk")).untold == ["RAM", "disk"]
    assert make_plan(costs, MACHINE, Choice(tier="disk")).untold == []
