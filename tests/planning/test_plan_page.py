"""The page of a plan: its bars are the plan's bytes, its timeline is one simulated step."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megaslide.planning.choosing import alternatives, choose
from megaslide.planning.devices import device_named
from megaslide.planning.page import one_step, write_html
from megaslide.planning.plan import Machine, Plan, accelerator
from megaslide.planning.subject import Subject, subject_of

TIB = 1 << 40
MACHINE: Machine = replace(
    accelerator(device_named("h200")), flop_s=1e12, ram_bytes=TIB, disk_bytes=TIB, disk_bytes_s=5e9
)


@pytest.fixture(scope="module")
def planned() -> tuple[Subject, Plan]:
    told = ("offload.tier=disk", "offload.activations=host", "train.gradient_accumulation_steps=3")
    subject = subject_of("tiny", told, clip=(9, 64, 64))
    return subject, choose(subject.choices, subject.costs(), MACHINE)


def page(tmp_path: Path, subject: Subject, plan: Plan) -> str:
    path = write_html(tmp_path / "plan.html", subject, plan, alternatives(subject, plan))
    return path.read_text()


def bars(text: str) -> list[tuple[str, dict[str, float]]]:
    """(SVG of a bar, width in percent by kind)."""
    found = re.findall(r"<svg class='parts'.*?</svg>", text)
    rect = r"<rect x='[\d.]+%' width='([\d.]+)%' height='100%' class='(\w+)'>"
    return [(svg, {name: float(w) for w, name in re.findall(rect, svg)}) for svg in found]


def test_nothing_is_loaded(tmp_path: Path, planned: tuple[Subject, Plan]) -> None:
    text = page(tmp_path, *planned)
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import", text)


def test_bars_are_bytes_on_the_scale_of_the_room(
    tmp_path: Path, planned: tuple[Subject, Plan]
) -> None:
    subject, plan = planned
    room = 4 * sum(plan.device.values())
    text = page(tmp_path, subject, replace(plan, machine=replace(MACHINE, device_bytes=room)))
    device, ram, disk = bars(text)
    assert device[1] == pytest.approx(
        {kind: 100 * n / room for kind, n in plan.device.items()}, abs=0.001
    )
    assert "<line x1='100%'" in device[0]
    store = plan.store
    assert ram[1].keys() == {"inputs", "gradients", "staging"}
    assert ram[1]["staging"] == pytest.approx(100 * sum(store.staging.values()) / TIB, abs=0.001)
    assert disk[1].keys() == {"weights", "residual", "exp_avg", "exp_avg_sq"}


def test_what_is_missing_lies_right_of_the_mark(
    tmp_path: Path, planned: tuple[Subject, Plan]
) -> None:
    subject, plan = planned
    needed = sum(plan.device.values())
    short = replace(plan, machine=replace(MACHINE, device_bytes=needed // 4))
    text = page(tmp_path, subject, short)
    device = bars(text)[0]
    assert sum(device[1].values()) == pytest.approx(100, abs=0.01)
    mark = re.search(r"<line x1='([\d.]+)%'", device[0])
    assert mark is not None
    assert float(mark[1]) == pytest.approx(25, abs=0.01)
    assert "This run does not fit" in text


def test_room_that_nobody_told_has_no_mark(tmp_path: Path, planned: tuple[Subject, Plan]) -> None:
    subject, plan = planned
    text = page(tmp_path, subject, replace(plan, machine=replace(MACHINE, ram_bytes=None)))
    assert "<line" not in bars(text)[1][0]
    assert "Nobody said how much RAM there is" in text


def test_the_timeline_is_one_step_with_the_model_s_own_names(
    tmp_path: Path, planned: tuple[Subject, Plan]
) -> None:
    subject, plan = planned
    spans = one_step(plan)
    step = plan.simulated.step_s
    assert min(s.start for s in spans) >= 0
    assert max(s.end for s in spans) <= step
    for lane in ("compute", "d2h"):
        busy = sum(s.end - s.start for s in spans if s.lane == lane)
        assert busy == pytest.approx(plan.to_dict()["busy_s"][lane], rel=1e-6)
    forward = [s.name for s in spans if s.lane == "compute" and s.name.startswith("forward ")]
    assert set(forward) == {f"forward {unit.name}" for unit in plan.costs.units[1:]}
    text = page(tmp_path, subject, plan)
    for lane in ("h2d", "compute", "d2h", "adamw", "disk_read", "disk_write", "disk_weights"):
        assert f"class='spans {lane}'" in text
    assert f"<title>recompute {plan.costs.units[1].name}: " in text


def test_every_change_is_there_with_what_it_lacks(
    tmp_path: Path, planned: tuple[Subject, Plan]
) -> None:
    subject, plan = planned
    text = page(tmp_path, subject, plan)
    for words, other in alternatives(subject, plan):
        assert f"<td>{words}</td><td>{other.pace_s / plan.pace_s:.2f}×</td>" in text
