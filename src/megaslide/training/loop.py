"""`train`: from a configuration to a run folder, whatever interrupts it on the way.

The loop owns the calendar (when to log, validate, sample, save) and nothing else; a step is
`Trainer.train_step`.
"""

import logging
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megaslide import runs
from megaslide.config import Config, save_config
from megaslide.evaluation.validation import ValidationLoss
from megaslide.planning.run import RunPlan, plan_run
from megaslide.tracing import Span
from megaslide.training.logs import RunLog
from megaslide.training.trainer import Trainer

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Called after each step with (steps done, steps in all, logged values)."""

OBSERVED_STEPS = 2  # activation memory repeats from step to step; following it costs time


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a run ended."""

    step: int
    checkpoint: Path
    interrupted: bool
    validation: ValidationLoss | None
    """The last evaluation, if there are held-out clips."""
    parameters: int
    state_bytes: int
    device_bytes: Mapping[str, int]
    """Peak bytes on the device by kind."""
    step_time_s: float
    """Median over the steps of this process."""
    last_step_spans: Sequence[Span]
    """What the lanes did during the last step."""
    h2d_bytes: int
    d2h_bytes: int
    """Bytes over the link in the last step."""


def train(config: Config, on_progress: Progress | None = None) -> TrainResult:
    """Plan a run and carry it out.

    Raises:
        InputError: unusable configuration, data, checkpoint or disk, or what does not fit.
        NonFiniteLossError: the loss or the gradient norm is not finite.
    """
    return train_planned(plan_run(config), on_progress)


def train_planned(planned: RunPlan, on_progress: Progress | None = None) -> TrainResult:
    """Train as planned; resumes, logs, validates, samples and saves on the way.

    Ctrl-C (SIGINT) saves a checkpoint after the current step and returns `interrupted=True`.

    Raises: as `train`.
    """
    config = planned.config
    run = Path(config.output_dir)
    with ExitStack() as stack:
        stack.enter_context(runs.occupied(run))
        source = runs.resume_source(run, config.train.resume_from_checkpoint)
        trainer = Trainer(planned)
        stack.callback(trainer.close)
        runs.require_space(run, trainer.checkpoint_bytes, "one checkpoint")
        if source is not None:
            trainer.resume(source)
            logger.info("resumed from %s at step %d", source, trainer.step)
        save_config(config, run / runs.CONFIG)
        log = RunLog(run, config.log.report_to, config, start_step=trainer.step)
        stack.callback(log.close)
        stopped = stack.enter_context(_stop_on_sigint())
        return run_loop(trainer, log, stopped, on_progress)


def run_loop(
    trainer: Trainer, log: RunLog, stopped: threading.Event, on_progress: Progress | None
) -> TrainResult:
    """Step until the configured end or `stopped`; the last state is always saved."""
    config, result = trainer.config, None
    held = runs.checkpoints(trainer.run)
    checkpoint = held[-1] if held else None  # the state now: see runs.resume_source
    seconds, first = [0.0], trainer.step
    if first == 0 and (result := trainer.validate()) is not None:
        log.log(0, {"eval/loss": result.loss})
    while trainer.step < trainer.max_steps and not stopped.is_set():
        with ExitStack() as stack:
            if trainer.step - first < OBSERVED_STEPS:
                stack.enter_context(trainer.model.observing_memory())
            values = trainer.train_step()
        seconds.append(values["perf/step_time_s"])
        step, last = trainer.step, trainer.step == trainer.max_steps
        if _due(step, config.train.validation_steps) or last:
            result = trainer.validate()
            values |= {} if result is None else {"eval/loss": result.loss}
        if _due(step, config.log.log_every) or "eval/loss" in values or step == first + 1:
            log.log(step, values)
        if config.sample.prompts and _due(step, config.sample.every_steps):
            log.sample(step, trainer.sample(trainer.run / "samples" / f"step-{step:06d}"))
        checkpoint = trainer.save() if _due(step, config.train.checkpointing_steps) else None
        if on_progress is not None:
            on_progress(step, trainer.max_steps, values)
    return TrainResult(
        step=trainer.step,
        checkpoint=checkpoint or trainer.save(),
        interrupted=trainer.step < trainer.max_steps,
        validation=result,
        parameters=trainer.model.num_parameters,
        state_bytes=trainer.model.state_bytes,
        device_bytes=trainer.model.device_bytes,
        step_time_s=statistics.median(seconds[1:] or seconds),
        **trainer.last_step(),
    )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


@contextmanager
def _stop_on_sigint() -> Iterator[threading.Event]:
    """An event set by the first Ctrl-C; the second one interrupts as usual."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
