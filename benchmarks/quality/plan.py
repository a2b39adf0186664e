"""Which runs the study has, in parts that each ask one question; the first answers first."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.quality.study import Run, Settings
from megaslide.errors import InputError

FIRST_LOOK = ("fixed", "affine", "tap", "shift", "dense")
MAIN = ("fixed", "affine", "dense")
LARGER_WINDOWS = ("fixed-355", "fixed-533")
SMOKE_SETTINGS = Settings(
    steps=4, batch=2, curve_every=2, curve_clips=2, held_out=2, warmup=2, samples=2
)


@dataclass(frozen=True)
class Part:
    """Arms times worlds, each with every seed."""

    name: str
    question: str
    arms: tuple[str, ...]
    worlds: tuple[str, ...] = ("base",)

    def runs(self, seeds: Iterable[int]) -> list[Run]:
        """Seed by seed, so that a study stopped early has whole seeds."""
        return [
            Run(arm, world, seed, also=("long", "longer") if world == "base" else ())
            for seed in seeds
            for world in self.worlds
            for arm in self.arms
        ]


PARTS = (
    Part("first-look", "Do learned offsets lower the loss, and which kind?", FIRST_LOOK),
    Part(
        "controls",
        "Is it parameters, reach, time or the offset network itself, rather than moving windows?",
        ("affine-held", "fixed-as-affine", "fixed-as-tap", *LARGER_WINDOWS, "fixed-longer", "swin"),
    ),
    Part(
        "displacement",
        "How does the gain depend on how far the sprite moves per frame?",
        (*MAIN, *LARGER_WINDOWS, "fixed-longer"),
        ("still", "slow", "fast", "faster"),
    ),
    Part("registers", "Do global registers help?", tuple(f"{a}+r" for a in (*FIRST_LOOK, "swin"))),
    Part(
        "textured",
        "And where most of a clip stands still?",
        (*MAIN, "fixed-533", "fixed-longer", "fixed-533-longer"),
        ("textured",),
    ),
    Part("cut", "What does a scene cut in the middle do?", MAIN, ("cut",)),
    Part("crossing", "What do two crossing sprites do?", MAIN, ("crossing",)),
    Part(
        "groups",
        "Is a set of offsets per head better than one for all heads?",
        ("shift-heads", "affine-heads", "tap-heads"),
    ),
    Part("window", "Is a larger window better, with and without offsets?", ("affine-355",)),
    Part("reach", "Is a fixed window as large as the offsets' reach as good?", ("fixed-reach",)),
    Part(
        "larger",
        "Is it the same in a larger model?",
        ("fixed-large", "affine-large", "fixed-longer-large"),
    ),
)
SMOKE = (Part("first-look", "Does the study run?", ("fixed", "affine")),)


def runs_of(parts: Iterable[Part], seeds: Iterable[int]) -> list[Run]:
    """All runs in order."""
    seeds = list(seeds)
    return [run for part in parts for run in part.runs(seeds)]


def keep_arms(part: Part, names: Iterable[str]) -> Part:
    """The part with the arms of these names only; with all where there are none."""
    wanted = set(names)
    return replace(part, arms=tuple(a for a in part.arms if a in wanted)) if wanted else part


def chosen_parts(names: Iterable[str]) -> tuple[Part, ...]:
    """The parts of these names; all where there are none.

    Raises:
        InputError: a name that is unknown.
    """
    known = {part.name: part for part in PARTS}
    wanted = list(names) or list(known)
    if unknown := sorted(set(wanted) - set(known)):
        raise InputError(f"parts {unknown} are unknown", f"choose from {', '.join(known)}")
    return tuple(known[name] for name in wanted)
