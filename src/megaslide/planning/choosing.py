"""Which of the choices that a config leaves open is taken, and what one other choice would do.

What fits comes first. Among that, the results come before the time: a state that rounds its moments
is taken only where no other fits. Bytes decide without a simulation, so only the number of slots
asks for time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megaslide.errors import InputError
from megaslide.models.network import OwnNetwork
from megaslide.pages.quantities import format_bytes
from megaslide.planning.costs import ModelCosts
from megaslide.planning.plan import Choice, Machine, Plan, make_plan
from megaslide.planning.subject import Subject
from megaslide.streaming.records import FORMATS

WORTH = 0.01
"""Share of a step by which a larger device arena has to shorten it."""
SHOWN = 3
"""Changes that a refusal names."""


def choose(
    choices: Sequence[Choice], costs: ModelCosts, machine: Machine, *, clips: int = 1
) -> Plan:  # fmt: skip
    """The preferred choice that fits, with the slots that are worth their bytes.

    Where none fits, the one that lacks least.

    Args:
        choices: at least one, the preferred first.
        costs: of one micro-batch.
        clips: in one micro-batch.
    """
    plans = [make_plan(costs, machine, choice, clips=clips) for choice in choices]
    fitting = [plan for plan in plans if not plan.shortfall]
    if not fitting:
        return min(plans, key=lambda plan: sum(plan.shortfall.values()))
    first = fitting[0].choice
    by_slots = {
        plan.choice.slots: plan
        for plan in reversed(fitting)
        if replace(plan.choice, slots=first.slots, activations=first.activations) == first
    }
    candidates = [by_slots[slots] for slots in sorted(by_slots)]
    if len(candidates) == 1:
        return candidates[0]
    best = min(plan.simulated.step_s for plan in candidates)
    return next(p for p in candidates if p.simulated.step_s <= (1 + WORTH) * best)


def alternatives(subject: Subject, plan: Plan) -> list[tuple[str, Plan]]:
    """Plans one change away, each with the change in words.

    What fits comes first, what lacks least next; in each the same work done otherwise before other
    work, and the faster before the slower. Speed is per clip, since more clips are more work done.
    """
    found = []
    for words, choice in _choices(plan):
        other_work = choice.micro_batches != plan.choice.micro_batches
        other = make_plan(plan.costs, plan.machine, choice, clips=plan.clips)
        found.append((words, other, other_work))
    for words, smaller in _smaller(subject):
        micro_batches = plan.choice.micro_batches * subject.clips // smaller.clips
        choice = replace(plan.choice, micro_batches=micro_batches)
        other = make_plan(smaller.costs(), plan.machine, choice, clips=smaller.clips)
        same_work = smaller.clips != subject.clips or smaller.offload != subject.offload
        found.append((words, other, not same_work))
    found.sort(key=lambda item: (sum(item[1].shortfall.values()), item[2], item[1].pace_s))
    return [(words, other) for words, other, _ in found]


def require_fit(subject: Subject, plan: Plan) -> None:
    """Refuse what cannot fit.

    Raises:
        InputError: names every place, what it lacks, what needs it, and the changes that would fit.
    """
    if not plan.shortfall:
        return
    places = "; ".join(_lack(plan, name, nbytes) for name, nbytes in plan.shortfall.items())
    others = alternatives(subject, plan)
    fitting = [f"{words} ({other.pace_s / plan.pace_s:.2g} x the time per clip)"
               for words, other in others if not other.shortfall]  # fmt: skip
    if fitting:
        fix = f"one of these changes fits: {'; '.join(fitting[:SHOWN])}"
    else:
        words, other = others[0]
        lacks = ", ".join(f"{format_bytes(n)} of {name}" for name, n in other.shortfall.items())
        fix = f"no single change is enough; the nearest is {words}, which still lacks {lacks}"
    raise InputError(f"the run does not fit: {places}", fix)


def _lack(plan: Plan, name: str, nbytes: int) -> str:
    needs, room = plan.places[name]
    assert room is not None
    kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in needs.items())
    needed = format_bytes(sum(needs.values()))
    return (
        f"{name} lacks {nbytes} bytes ({format_bytes(nbytes)}): {needed} needed ({kinds}), "
        f"{format_bytes(room)} there"
    )


def _choices(plan: Plan) -> Iterator[tuple[str, Choice]]:
    """What is the same work, done otherwise; and more of it per step."""
    choice = plan.choice
    changes: list[tuple[str, Choice]] = [
        (f"offload.state_format={name}", replace(choice, state_format=name)) for name in FORMATS
    ]
    changes += [(f"offload.activations={place}", replace(choice, activations=place))
                for place in ("device", "host", "disk")]  # fmt: skip
    changes += [(f"offload.slots={slots}", replace(choice, slots=slots))
                for slots in (2, choice.slots + 1)]  # fmt: skip
    for factor in (2, 4):
        more = factor * choice.micro_batches
        changes.append((f"{more} micro-batches per step", replace(choice, micro_batches=more)))
    along = " offload.gradient_tier=ram" if choice.gradient_tier == "disk" else ""
    in_ram = replace(choice, tier="ram", gradient_tier="ram")
    changes.append((f"offload.tier=ram{along}", in_ram))
    changes.append(("offload.tier=disk", replace(choice, tier="disk")))
    spilled = replace(choice, tier="disk", gradient_tier="disk")
    changes.append(("offload.tier=disk offload.gradient_tier=disk", spilled))
    measured = plan.machine.disk_bytes_s is not None
    for words, other in changes:
        if other != choice and (measured or "disk" not in (other.tier, other.activations)):
            yield words, other


def _smaller(subject: Subject) -> Iterable[tuple[str, Subject]]:
    """Fewer clips at a time, fewer frames at a time, and less work per clip."""
    divisors = [n for n in range(1, subject.clips) if subject.clips % n == 0]
    for clips in dict.fromkeys(divisors[:1] + divisors[-1:]):
        yield f"offload.micro_batch_size={clips}", replace(subject, clips=clips)
    yield from _fewer_frames_at_a_time(subject)
    patch = subject.network.patch_size
    t, h, w = (n // (2 * p) * p for n, p in zip(subject.latents, patch, strict=True))
    _, height, width = subject.latents
    if h and w:
        yield "half the height and width", replace(subject, latents=(subject.latents[0], h, w))
    if t:
        yield "half the frames", replace(subject, latents=(t, height, width))
    network = subject.network
    if isinstance(network, OwnNetwork) and network.config.attention_kind != "dense":
        t, h, w = (max(n - 2, min(n, 3)) for n in network.config.window)
        window = (t, h, w)
        if window != tuple(network.config.window):
            other = replace(network, config=replace(network.config, window=window))
            words = f"attention.window=[{','.join(map(str, window))}]"
            yield words, replace(subject, network=other)


def _fewer_frames_at_a_time(subject: Subject) -> Iterable[tuple[str, Subject]]:
    """An eighth, where blocks can be computed in chunks."""
    network, offload = subject.network, subject.offload
    if not isinstance(network, OwnNetwork):
        return
    if network.config.attention_kind not in ("deformable", "neighborhood"):
        return
    frames = offload.frames_per_chunk or subject.latents[0] // network.patch_size[0]
    if frames > 1:
        fewer = max(1, frames // 8)
        other = offload.model_copy(update={"frames_per_chunk": fewer})
        yield f"offload.frames_per_chunk={fewer}", replace(subject, offload=other)
