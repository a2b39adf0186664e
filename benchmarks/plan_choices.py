"""How far what the planner chooses is from the best that there is: every open choice, measured.

Each configuration leaves some options of the engine open, as `auto` does in a config. The planner
chooses from what the model costs and what this machine does per second; then every choice that fits
is built and timed, in rounds, so that a machine that drifts treats all alike. The shortest of many
noisy times is short by luck too, so the two are measured once more, in turns, and compared by that.
"""

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench_streaming import Net

from megaslide.planning.choosing import choose
from megaslide.planning.costs import ModelCosts, model_costs
from megaslide.planning.here import machine_of
from megaslide.planning.plan import Choice, Machine, make_plan
from megaslide.planning.rates import measure_rates
from megaslide.planning.subject import OPEN
from megaslide.streaming import StreamedModel, stream

ROUNDS, STEPS, PAIRS = 3, 2, 7


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One model on one machine, and what is left open."""

    name: str
    dim: int
    tokens: int
    link_gb_s: float
    micro_batches: int
    left_open: tuple[str, ...]
    tier: str = "ram"
    device_mb: float | None = None
    depth: int = 8

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The preferred first, as of a config."""
        told = Choice(micro_batches=self.micro_batches, tier=self.tier)  # type: ignore[arg-type]
        values = itertools.product(*(OPEN[name] for name in OPEN if name in self.left_open))
        names = [name for name in OPEN if name in self.left_open]
        return tuple(replace(told, **dict(zip(names, v, strict=True))) for v in values)

    def costs(self) -> ModelCosts:
        with torch.device("meta"):
            model, x = Net(self.dim, self.depth), torch.empty(1, self.tokens, 8)
        return model_costs(model, [x])

    def build(self, choice: Choice) -> StreamedModel:
        torch.manual_seed(0)
        chosen = {name: getattr(choice, name) for name in OPEN}
        return stream(
            Net(self.dim, self.depth), micro_batch_size=1, lr=1e-5, link_gb_s=self.link_gb_s,
            disk_path=tempfile.gettempdir(), **chosen,
        )  # fmt: skip


ANYTHING = ("state_format", "activations", "slots")
CONFIGURATIONS = [
    Configuration(
        name="slow link, one micro-batch", dim=512, tokens=64, link_gb_s=0.5, micro_batches=1,
        left_open=ANYTHING,
    ),
    Configuration(
        name="long clips, little room on the device", dim=256, tokens=512, link_gb_s=0.5,
        micro_batches=2, left_open=ANYTHING, device_mb=15,
    ),
    Configuration(
        name="state on disk", dim=384, tokens=128, link_gb_s=0.6, micro_batches=2, tier="disk",
        left_open=("gradient_tier", "activations", "slots"),
    ),
]  # fmt: skip
"""Steps of a tenth of a second and more, so that all choices together take a minute or two."""


def sweep() -> list[dict[str, Any]]:
    """Per configuration: the planner's choice, its time over the best one's, and all rows."""
    rates = measure_rates(Path(tempfile.gettempdir()))
    here = machine_of(rates, bf16=False)
    found = []
    for configuration in CONFIGURATIONS:
        machine = replace(
            here, link_bytes_s=min(here.link_bytes_s, configuration.link_gb_s * 1e9),
            device_bytes=configuration.device_mb and int(configuration.device_mb * 1e6),
        )  # fmt: skip
        one = _swept(configuration, machine)
        print(f"{one['name']}: {one['choice']}\n  {one['choice_over_best']:.3f} times the best, "
              f"{one['best']}", flush=True)  # fmt: skip
        found.append(one)
    return found


def _swept(configuration: Configuration, machine: Machine) -> dict[str, Any]:
    costs = configuration.costs()
    chosen = choose(configuration.choices, costs, machine).choice
    plans = [make_plan(costs, machine, choice) for choice in configuration.choices]
    fitting = [plan for plan in plans if not plan.shortfall]
    seconds: dict[Choice, list[float]] = {plan.choice: [] for plan in fitting}
    for _ in range(ROUNDS):
        for choice, times in seconds.items():
            times.append(_step_s(configuration, choice))
    best = min(seconds, key=lambda choice: min(seconds[choice]))
    pairs = [[_step_s(configuration, choice) for choice in (chosen, best)] for _ in range(PAIRS)]
    rows = [
        {**_fields(plan.choice), "measured_s": seconds[plan.choice],
         "planned_s": plan.simulated.step_s}
        for plan in fitting
    ]  # fmt: skip
    return {
        "name": configuration.name, "choice": _fields(chosen), "best": _fields(best),
        "choice_over_best": statistics.median(mine / other for mine, other in pairs),
        "pairs_s": pairs,
        "choices": len(plans), "rows": rows,
        **{k: v for k, v in vars(configuration).items() if k != "name"},
    }  # fmt: skip


def _fields(choice: Choice) -> dict[str, Any]:
    return {name: getattr(choice, name) for name in OPEN}


def _step_s(configuration: Configuration, choice: Choice) -> float:
    """The shortest of some steps, after one that fills the slots."""
    model, seconds = configuration.build(choice), []
    x = torch.randn(configuration.micro_batches, configuration.tokens, 8)
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        model(x).square().mean().backward()
        model.step()
        seconds.append(time.perf_counter() - start)
    model.close()
    return min(seconds[1:])
