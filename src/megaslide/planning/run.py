"""The plan of a run, made before its data are loaded and before anything is allocated.

What the config leaves open (`auto`) is decided here once; the engine, the log and the run's saved
config all take it from the result. What cannot fit is refused here, while nothing is lost yet.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaslide.config import Config
from megaslide.models.network import Network
from megaslide.pages.quantities import format_bytes, format_seconds
from megaslide.planning.choosing import choose, require_fit
from megaslide.planning.costs import ModelCosts, UnknownCostsError
from megaslide.planning.here import machine_here
from megaslide.planning.plan import Choice, Machine, Plan
from megaslide.planning.subject import OPEN, Subject, subject_of_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A run with nothing left open."""

    config: Config
    """Without any `auto` among the engine's options."""
    choice: Choice
    network: Network
    plan: Plan | None
    """None where the model's costs cannot be known from shapes."""

    @property
    def engine_options(self) -> dict[str, Any]:
        """Keywords of `megaslide.stream` that the plan decides."""
        return {name: getattr(self.choice, name) for name in OPEN}

    def __str__(self) -> str:
        """One line: the choice and what it costs."""
        chosen = f"{self.choice}, {self.choice.slots} slots"
        if self.plan is None:
            return chosen
        figures, basis = self.plan.to_dict(), self.plan.machine.basis["compute"]
        step, state = format_seconds(figures["step_s"]), figures["state_bytes"]
        return (
            f"{chosen}: {step} per step or more, at the rate of matrix products ({basis}), "
            f"{format_bytes(figures['device_peak_bytes'])} on the device at the peak, "
            f"{format_bytes(state)} of state ({state / figures['params']:.0f} bytes per parameter)"
        )


def plan_run(config: Config) -> RunPlan:
    """Decide what the config leaves open, and refuse what does not fit this machine.

    A model whose forward looks at the values of its inputs has no plan; the engine then refuses
    by itself what does not fit, when it allocates.

    Raises:
        InputError: it does not fit, with the shortfall and the changes that would fit; or the
            config, its model or its file of rates cannot be used.
    """
    subject = subject_of_run(config)
    try:
        costs = subject.costs()
    except UnknownCostsError as error:
        logger.warning("training without a plan: %s", error.problem)
        return _settled(config, subject, subject.choices[0], None)
    plan = choose(subject.choices, costs, _machine(config, subject, costs), clips=subject.clips)
    require_fit(subject, plan)
    planned = _settled(config, subject, plan.choice, plan)
    logger.info("plan: %s", planned)
    return planned


def _settled(config: Config, subject: Subject, choice: Choice, plan: Plan | None) -> RunPlan:
    decided = {name: getattr(choice, name) for name in OPEN}
    offload = config.offload.model_copy(update=decided)
    settled = config.model_copy(update={"offload": offload})
    return RunPlan(config=settled, choice=choice, network=subject.network, plan=plan)


def _machine(config: Config, subject: Subject, costs: ModelCosts) -> Machine:
    state = Path(config.offload.disk_path or Path(config.output_dir) / "state")
    machine = machine_here(subject, state_folder=state)
    return replace(machine, ram_besides=subject.besides(costs))
