"""A run's plan: what it decides is what the engine gets, and what cannot fit never starts."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megaslide.config import Config, load_config
from megaslide.errors import InputError
from megaslide.planning import here
from megaslide.planning.costs import UnknownCostsError
from megaslide.planning.devices import device_named
from megaslide.planning.here import machine_here
from megaslide.planning.plan import Choice
from megaslide.planning.rates import DiskRates, Rates
from megaslide.planning.run import plan_run
from megaslide.planning.subject import Subject, subject_of_run
from megaslide.streaming import stream

RATES = Rates(
    threads=1, gemm_fp32_flop_s=1e11, gemm_bf16_flop_s=2e11, triad_bytes_s=3e10,
    adamw_parameters_s=1e9, adamw_bytes_s=2.6e10, adamw_lane_parameters_s=5e8,
    adamw_lane_bytes_s=1.3e10, copy_bytes_s=8e9,
    disk=DiskRates(read_bytes_s=2e9, write_bytes_s=1e9, both_bytes_s=2.5e9),
    machine={"cpu": "a test's"},
)  # fmt: skip


def configure(tmp_path: Path, **changes: Any) -> Config:
    RATES.to_json(tmp_path / "rates.json")
    values = {
        "output_dir": tmp_path / "run", "data.buckets": "[5x32x32,9x64x64]",
        "data.codec.channels": 6, "data.text.dim": 16, "train.train_batch_size": 3,
        "offload.rates": tmp_path / "rates.json",
    } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    return load_config(None, [f"{key}={value}" for key, value in values.items()])


def ram(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(here, "available_ram", lambda: nbytes)


# ---- the machine ---------------------------------------------------------------------------------


def machine(config: Config, tmp_path: Path, **options: Any) -> Any:
    return machine_here(subject_of_run(config), state_folder=tmp_path, **options)


def test_rates_are_those_of_the_file_the_link_and_the_budget(tmp_path: Path) -> None:
    plain = machine(configure(tmp_path), tmp_path)
    assert (plain.flop_s, plain.link_bytes_s, plain.device_bytes) == (1e11, 8e9, None)
    assert (plain.adamw_bytes_s, plain.disk_bytes_s) == (1.3e10, 2.5e9)
    assert plain.basis["compute"] == f"measured on a test's ({tmp_path / 'rates.json'})"
    told = {"offload__link_gb_s": 2, "offload__device_budget_gb": 0.5}
    other = machine(configure(tmp_path, train__mixed_precision="bf16", **told), tmp_path)
    assert (other.flop_s, other.link_bytes_s, other.device_bytes) == (2e11, 2e9, 500_000_000)
    assert "emulated" in other.basis["link"]
    slow = machine(configure(tmp_path, offload__disk_gb_s=1), tmp_path)
    assert slow.disk_bytes_s == 1e9
    assert "emulated" in slow.basis["disk"]
    fast = machine(configure(tmp_path, offload__link_gb_s=100), tmp_path)
    assert fast.link_bytes_s == 8e9, "no link is faster than the memory it is emulated in"


@pytest.mark.parametrize("tier", ["ram", "auto"])
def test_without_a_file_it_measures_the_disk_only_where_one_may_be_used(
    tmp_path: Path, tier: str
) -> None:
    folders: list[Path | None] = []

    def measure(folder: Path | None) -> Rates:
        folders.append(folder)
        return RATES

    config = configure(tmp_path, offload__rates="null", offload__tier=tier)
    found = machine_here(
        subject_of_run(config), state_folder=tmp_path / "not" / "there", measure=measure
    )
    assert folders == [tmp_path if tier == "auto" else None]
    assert not (tmp_path / "not").exists()
    assert found.basis["compute"] == "measured here just now"


def test_on_a_gpu_its_own_rates_stand_beside_those_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, h200 = machine(configure(tmp_path), tmp_path), device_named("h200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (140 * 10**9, 150 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    found = machine(configure(tmp_path), tmp_path)
    assert (found.peak_flop_s, found.device_bytes) == (h200.bf16_flop_s, 140 * 10**9)
    assert (found.link_bytes_s, found.memory_bytes_s) == (h200.link_bytes_s, h200.memory_bytes_s)
    assert (found.adamw_bytes_s, found.disk_bytes_s) == (plain.adamw_bytes_s, plain.disk_bytes_s)
    assert not found.device_is_host
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    found = machine(configure(tmp_path), tmp_path)
    assert found.flop_s == plain.flop_s
    assert "no rates are known of Tesla T4" in found.basis["compute"]


def test_a_brief_measurement_is_near_enough_and_made_once(tmp_path: Path) -> None:
    from megaslide.planning.rates import brief_rates

    rates = brief_rates()
    assert brief_rates() is rates
    assert rates.disk is None
    moved = torch.ones(1 << 22)
    assert rates.copy_bytes_s > moved.nbytes  # a second for 16 MB would be page faults, no copy


def test_a_file_that_holds_no_rates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match=r"other\.json"):
        plan_run(configure(tmp_path, offload__rates=tmp_path / "other.json"))


# ---- what is decided -----------------------------------------------------------------------------


def test_the_largest_bucket_is_what_must_fit(tmp_path: Path) -> None:
    config = configure(tmp_path)
    large = configure(tmp_path, data__buckets="[9x64x64]")
    assert subject_of_run(config).latents == subject_of_run(large).latents
    small = configure(tmp_path, data__buckets="[5x32x32]")
    assert math.prod(subject_of_run(small).latents) < math.prod(subject_of_run(large).latents)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "told",
    [
        {},
        {"tier": "auto", "state_format": "auto", "gradient_tier": "auto"},
        {"slots": 3, "activations": "host", "state_format": "split8"},
        {"tier": "disk", "gradient_tier": "disk", "slots": 4},
    ],
)
def test_the_engine_allocates_what_the_plan_says(
    tmp_path: Path, precision: str, told: dict[str, Any]
) -> None:
    offload = {f"offload__{key}": value for key, value in told.items()}
    ema = {"train__use_ema": "true", "train__mixed_precision": precision}
    planned = plan_run(configure(tmp_path, **offload, **ema))
    plan = planned.plan
    assert plan is not None
    network, dtype = planned.network, torch.bfloat16 if precision == "bf16" else torch.float32
    streamed = stream(
        network.build(dtype), dtype=network.stream_dtype(dtype), **planned.engine_options,
        ema_decay=0.9, disk_path=tmp_path,
    )  # fmt: skip
    arenas = {k: n for k, n in streamed.device_bytes.items() if k != "activations"}
    assert arenas == {k: plan.device[k] for k in arenas}
    assert sum(buffer.nbytes for buffer in streamed.store.buffers) == plan.ram["state"]
    in_ram = sum(arena.nbytes for arena in streamed.store.arenas.values())
    assert sum(streamed.store.nbytes.values()) - in_ram == plan.disk.get("state", 0)
    assert streamed.state_bytes == plan.to_dict()["state_bytes"]
    streamed.close()


def test_nothing_is_left_open_in_the_config(tmp_path: Path) -> None:
    told = {f"offload__{key}": "auto" for key in ("tier", "state_format", "gradient_tier")}
    planned = plan_run(configure(tmp_path, offload__device_budget_gb=1, **told))
    offload = planned.config.offload
    assert planned.engine_options == {
        "slots": 2, "activations": "device", "tier": "ram", "state_format": "split",
        "gradient_tier": "ram",
    }  # fmt: skip
    assert {n: getattr(offload, n) for n in planned.engine_options} == planned.engine_options
    assert offload.device_budget_gb == 1
    assert "auto" not in [v for n, v in offload.model_dump().items() if n != "device"]
    assert plan_run(planned.config).config == planned.config


def test_the_budget_counts_activations(tmp_path: Path) -> None:
    roomy = plan_run(configure(tmp_path)).plan
    assert roomy is not None
    needed = sum(roomy.device.values())
    exact = configure(tmp_path, offload__device_budget_gb=needed / 1e9)
    assert plan_run(exact).choice.activations == "device"
    away = plan_run(configure(tmp_path, offload__device_budget_gb=(needed - 10) / 1e9))
    assert away.choice.activations == "host"
    arenas = sum(n for kind, n in roomy.device.items() if kind not in ("inputs", "working"))
    with pytest.raises(InputError, match="device lacks"):
        plan_run(configure(tmp_path, offload__device_budget_gb=arenas / 1e9))


def test_a_new_model_is_initialised_beside_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path)
    plan = plan_run(config).plan
    assert plan is not None
    needed = sum(plan.ram.values()) + sum(plan.device.values())
    assert plan.ram["new weights in fp32"] == 4 * plan.costs.parameters
    ram(monkeypatch, needed)
    plan_run(config)
    ram(monkeypatch, needed - 1)
    with pytest.raises(InputError, match="RAM lacks"):
        plan_run(configure(tmp_path, offload__activations="device", offload__slots=2))


def test_what_cannot_fit_is_refused_before_anything_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megaslide.training.loop import train

    ram(monkeypatch, 10_000_000)
    config = configure(tmp_path, data__cache_dir=tmp_path / "no-cache")
    with pytest.raises(InputError, match="RAM lacks") as error:
        train(config)
    assert error.value.fix is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rates.json"]


def test_one_line_says_what_it_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        planned = plan_run(configure(tmp_path))
    (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("plan: "))
    assert line == f"plan: {planned}"
    assert "\n" not in line
    for words in ("s per step", "2 slots", "on the device at the peak", "of state", "a test's"):
        assert words in line


def test_a_model_that_shapes_do_not_tell_trains_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(self: Subject) -> None:
        raise UnknownCostsError("Odd: its forward asks for values")

    monkeypatch.setattr(Subject, "costs", unknown)
    with caplog.at_level(logging.WARNING):
        planned = plan_run(configure(tmp_path, offload__tier="auto"))
    assert planned.plan is None
    assert planned.choice == Choice()
    assert planned.config.offload.slots == 2
    assert "training without a plan: Odd: its forward asks for values" in caplog.text
    assert "slots" in str(planned)
