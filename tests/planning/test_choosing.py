"""What a plan decides by itself, against a search of every choice; and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest

from megaslide.errors import InputError
from megaslide.planning.choosing import alternatives, choose, require_fit
from megaslide.planning.costs import ModelCosts
from megaslide.planning.plan import Choice, Machine, make_plan
from megaslide.planning.subject import Subject, subject_of

TIB = 1 << 40
MACHINE = Machine(
    name="toy", flop_s=1e12, peak_flop_s=2e12, memory_bytes_s=1e12, link_bytes_s=1e9,
    adamw_bytes_s=1e10, disk_bytes_s=1e9, device_bytes=TIB, ram_bytes=TIB, disk_bytes=TIB,
    basis={},
)  # fmt: skip
OPEN = [f"offload.{key}=auto" for key in ("state_format", "tier", "gradient_tier")]


def subject(*overrides: str) -> Subject:
    return subject_of("tiny", overrides, clip=(9, 64, 64))


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    return subject().costs()


def needs(costs: ModelCosts, place: str, **choice: Any) -> int:
    """Bytes in a place, of a choice that is spelt out."""
    wanted, _ = make_plan(costs, MACHINE, Choice(**choice)).places[place]
    return sum(wanted.values())


def test_a_config_that_says_everything_is_taken_by_its_word(costs: ModelCosts) -> None:
    told = ["offload.slots=3", "offload.activations=disk", "offload.state_format=master"]
    asked = subject(*told, "offload.tier=disk", "optim.max_grad_norm=null")
    plan = choose(asked.choices, costs, MACHINE)
    assert plan.choice == Choice(
        slots=3, activations="disk", state_format="master", tier="disk", clip=False
    )
    assert "simulated" not in vars(plan), "bytes must not wait for a simulation"


AWAY = ("offload.activations=host", "train.gradient_accumulation_steps=40")
"""Inputs return on the lane of the weights, which gradients do not use: there slots save time."""


@pytest.mark.parametrize(("link", "expected"), [(1e7, 4), (1e8, 3), (1e9, 2)])
def test_slots_are_the_fewest_that_are_within_a_percent_of_the_best(
    costs: ModelCosts, link: float, expected: int
) -> None:
    machine = replace(MACHINE, link_bytes_s=link)
    choices = {n: Choice(slots=n, activations="host", micro_batches=40) for n in (2, 3, 4)}
    steps = {n: make_plan(costs, machine, c).simulated.step_s for n, c in choices.items()}
    enough = [n for n, step in steps.items() if step <= 1.01 * min(steps.values())]
    assert enough[0] == expected
    assert choose(subject(*AWAY).choices, costs, machine).choice == choices[expected]


def test_slots_that_do_not_fit_are_not_taken(costs: ModelCosts) -> None:
    room = needs(costs, "device", slots=3, activations="host", micro_batches=40)
    tight = replace(MACHINE, link_bytes_s=1e7, device_bytes=room)
    assert choose(subject(*AWAY).choices, costs, tight).choice.slots == 3


def test_inputs_leave_the_device_when_they_do_not_fit_there(costs: ModelCosts) -> None:
    room = needs(costs, "device")
    asked = subject("offload.slots=2")
    fits, short = (replace(MACHINE, device_bytes=n) for n in (room, room - 1))
    assert choose(asked.choices, costs, fits).choice.activations == "device"
    assert choose(asked.choices, costs, short).choice.activations == "host"


def test_state_goes_to_the_disk_before_its_moments_are_rounded() -> None:
    """One byte less RAM, and at last no disk, at every turn. Staging outweighs smaller models."""
    asked = subject_of("base", (*OPEN, "offload.slots=2"), clip=(9, 64, 64))
    costs = asked.costs()
    turns = [
        (needs(costs, "RAM"), TIB, Choice()),
        (needs(costs, "RAM") - 1, TIB, Choice(tier="disk")),
        (needs(costs, "RAM", tier="disk") - 1, TIB, Choice(tier="disk", gradient_tier="disk")),
        (needs(costs, "RAM") - 1, 0, Choice(state_format="split8")),
    ]
    for ram, on_disk, expected in turns:
        machine = replace(MACHINE, ram_bytes=ram, disk_bytes=on_disk)
        assert choose(asked.choices, costs, machine).choice == expected


def test_what_the_device_holds_takes_ram_where_it_is_the_processor(costs: ModelCosts) -> None:
    both = needs(costs, "RAM") + needs(costs, "device")
    here = replace(MACHINE, device_is_host=True, device_bytes=None)
    asked = subject("offload.slots=2", "offload.activations=device")
    assert not choose(asked.choices, costs, replace(here, ram_bytes=both)).shortfall
    assert choose(asked.choices, costs, replace(here, ram_bytes=both - 1)).shortfall == {"RAM": 1}


def test_a_refusal_names_the_bytes_and_what_would_fit(costs: ModelCosts) -> None:
    asked = subject("offload.slots=2")
    ram = needs(costs, "RAM")
    plan = choose(asked.choices, costs, replace(MACHINE, ram_bytes=ram - 12345))
    with pytest.raises(InputError, match="RAM lacks 12345 bytes") as error:
        require_fit(asked, plan)
    named = [words for words, other in alternatives(asked, plan) if not other.shortfall][:3]
    assert named[0] == "offload.state_format=split8"
    assert error.value.fix is not None
    assert all(f"{words} (" in error.value.fix for words in named)
    require_fit(asked, choose(asked.choices, costs, replace(MACHINE, ram_bytes=ram)))


def test_a_refusal_without_a_way_out_names_the_nearest(costs: ModelCosts) -> None:
    asked = subject("offload.slots=2")
    machine = replace(MACHINE, ram_bytes=5, device_bytes=3, disk_bytes=1)
    with pytest.raises(InputError, match="no single change is enough") as error:
        require_fit(asked, choose(asked.choices, costs, machine))
    for place in ("device", "RAM"):
        assert f"{place} lacks" in error.value.problem


def test_the_same_work_comes_before_less_work_and_both_by_pace(costs: ModelCosts) -> None:
    asked = subject("train.train_batch_size=2")
    tight = replace(MACHINE, ram_bytes=needs(costs, "RAM") - 1)
    found = alternatives(asked, choose(asked.choices, costs, tight))
    lacks = [sum(plan.shortfall.values()) for _, plan in found]
    assert lacks == sorted(lacks)
    assert lacks[0] == 0 < lacks[-1]
    names = [words for words, plan in found if not plan.shortfall]
    paces = {words: plan.pace_s for words, plan in found}
    other = {n for n in names if "half" in n or "window" in n or "micro-batches" in n}
    for group in (other, set(names) - other):
        ordered = [paces[n] for n in names if n in group]
        assert ordered == sorted(ordered)
    assert all(n in other for n in names[len(names) - len(other) :])
    assert "offload.micro_batch_size=1" in paces


def test_changes_of_the_work_are_what_their_words_say(costs: ModelCosts) -> None:
    found = dict(alternatives(subject(), choose(subject().choices, costs, MACHINE)))
    small = subject_of("tiny", clip=(9, 32, 32))
    assert found["half the height and width"].flop == small.costs().flop
    window = subject("attention.window=[3,5,5]")
    assert found["attention.window=[3,5,5]"].flop == window.costs().flop
    assert found["2 micro-batches per step"].flop == 2 * costs.flop


def test_back_to_ram_takes_the_gradients_along(costs: ModelCosts) -> None:
    told = ("offload.tier=disk", "offload.gradient_tier=disk")
    asked = subject_of("tiny", told, clip=(9, 64, 64))
    found = [words for words, _ in alternatives(asked, choose(asked.choices, costs, MACHINE))]
    back = "offload.tier=ram offload.gradient_tier=ram"
    assert back in found
    subject_of("tiny", (*told, *back.split()))  # a proposal can be taken


def test_no_disk_is_proposed_where_none_was_measured(costs: ModelCosts) -> None:
    diskless = replace(MACHINE, disk_bytes_s=None)
    found = alternatives(subject(), choose(subject().choices, costs, diskless))
    assert not any("disk" in words for words, _ in found)
