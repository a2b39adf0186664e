"""How a model was trained, read from the scheduler it was published with.

Fine-tuning must go on as training did: the same kind of prediction, and noise levels where
generation will need them. A diffusers pipeline says both in its scheduler_config.json, and in
model_index.json which noise levels each of two experts is for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaslide.config import TrainConfig
from megaslide.diffusion.objectives import FlowMatching, Objective
from megaslide.diffusion.samplers import sigma_schedule
from megaslide.diffusion.v_prediction import VPrediction
from megaslide.errors import InputError

FULL_RANGE = (0.0, 1.0)
EDM_RANGE = {"sigma_max": 80.0, "sigma_min": 0.002}
"""Noise levels that Cosmos-Predict2's pipelines begin and end with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The objective of a run, which for some models depends on the size of a clip.

    Raises:
        InputError: the scheduler is of a kind that is not known here.
    """

    train: TrainConfig
    scheduler: Mapping[str, Any] | None = None
    """scheduler_config.json of a pretrained model; None for one that is trained from scratch."""
    sigma_range: tuple[float, float] = FULL_RANGE
    """Noise levels that the model is for."""

    def __post_init__(self) -> None:
        if self.scheduler is not None:
            _require_known(self.scheduler)
        if self.is_v_prediction and self.train.first_frame == "given":
            raise InputError(
                "train.first_frame=given: this model has one timestep for all frames",
                "set train.first_frame=noisy",
            )

    @property
    def is_v_prediction(self) -> bool:
        return (self.scheduler or {}).get("prediction_type") == "v_prediction"

    def objective(self, tokens: int) -> Objective:
        """The objective for clips of `tokens` video tokens."""
        train = self.train
        if self.scheduler is not None and self.is_v_prediction:
            return VPrediction.from_scheduler(self.scheduler)
        return FlowMatching(
            shift=self.shift(tokens), weighting_scheme=train.weighting_scheme,
            logit_mean=train.logit_mean, logit_std=train.logit_std,
            sigma_range=self.sigma_range, first_frame=train.first_frame == "given",
        )  # fmt: skip

    def shift(self, tokens: int) -> float:
        """Timestep shift: the config's, else that of the model's scheduler, else none."""
        if self.train.shift is not None:
            return self.train.shift
        return 1.0 if self.scheduler is None else scheduler_shift(self.scheduler, tokens)

    def sampling_sigmas(self, steps: int, tokens: int) -> Tensor:
        """Noise levels of our own sampler for clips of `tokens` video tokens, fp32 [steps + 1].

        Raises:
            ImportError: diffusers is not installed and the model has a scheduler of it.
        """
        if str((self.scheduler or {}).get("_class_name")).startswith("FlowMatch"):
            return published_sigmas(self.sampling_scheduler, steps, tokens)
        return sigma_schedule(steps, self.shift(tokens))

    @property
    def sampling_scheduler(self) -> dict[str, Any]:
        """scheduler_config.json for sampling, with the config's shift where that has one."""
        values = dict(self.scheduler or {})
        if self.train.shift is None:
            return values
        key = "flow_shift" if values.get("use_flow_sigmas") else "shift"
        return values | {key: self.train.shift, "use_dynamic_shifting": False}


def scheduler_shift(scheduler: Mapping[str, Any], tokens: int) -> float:
    """The shift s of sigma' = s·sigma/(1 + (s − 1)·sigma) that a flow-matching scheduler applies.

    Static: `shift` (FlowMatchEuler: HunyuanVideo) or `flow_shift` (UniPC: Wan). Dynamic (LTX):
    mu = base_shift + (max_shift − base_shift)·(tokens − base_len)/(max_len − base_len), and
    s = e^mu, or mu itself where the scheduler's `time_shift_type` is linear.

    Source: diffusers/schedulers/scheduling_flow_match_euler_discrete.py, `time_shift`, and
    pipelines/ltx/pipeline_ltx.py, `calculate_shift`.
    """
    if not scheduler.get("use_dynamic_shifting"):
        key = "flow_shift" if scheduler.get("use_flow_sigmas") else "shift"
        return float(scheduler.get(key, 1.0))
    mu = _mu(scheduler, tokens)
    return mu if scheduler.get("time_shift_type") == "linear" else math.exp(mu)


def published_sigmas(scheduler: Mapping[str, Any], steps: int, tokens: int) -> Tensor:
    """The noise levels of a flow-matching scheduler of diffusers, fp32 [steps + 1], decreasing.

    Cosmos-Predict2's are EDM's, s from 80 to 0.002 as Karras spaces them (`use_karras_sigmas`), and
    here s/(1 + s), see `models/pretrained/families.py`; its pipeline does not step to zero.

    Source: diffusers/schedulers/scheduling_flow_match_euler_discrete.py, with the arguments of
    pipelines/ltx/pipeline_ltx.py, hunyuan_video/pipeline_hunyuan_video.py and
    cosmos/pipeline_cosmos2_video2world.py.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    if steps < 1:
        raise ValueError(f"steps={steps}; sampling needs 1 or more")
    edm = bool(scheduler.get("use_karras_sigmas"))
    known: Any = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler))
    if edm:
        known.register_to_config(**EDM_RANGE)
    dynamic = scheduler.get("use_dynamic_shifting")
    linear = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
    known.set_timesteps(sigmas=linear.tolist(), mu=_mu(scheduler, tokens) if dynamic else None)
    sigmas: Tensor = 1 - known.sigmas if scheduler.get("invert_sigmas") else known.sigmas
    if edm:
        sigmas[-1] = sigmas[-2]
        sigmas = sigmas / (1 + sigmas)
    return sigmas


def _mu(scheduler: Mapping[str, Any], tokens: int) -> float:
    length, longest = (
        scheduler.get("base_image_seq_len", 256),
        scheduler.get("max_image_seq_len", 4096),
    )
    base, largest = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
    return float(base + (largest - base) * (tokens - length) / (longest - length))


def expert_range(pipeline: Mapping[str, Any] | None, subfolder: str) -> tuple[float, float]:
    """Noise levels that the transformer in `subfolder` of a pipeline is for.

    With a `boundary_ratio` b (Wan 2.2 A14B: 0.875 for text, 0.9 for images), `transformer` is for
    sigma ≥ b and `transformer_2` for sigma < b; without one, both are for all of them.

    Source: diffusers/pipelines/wan/pipeline_wan.py, the choice of `current_model`.
    """
    boundary = (pipeline or {}).get("boundary_ratio")
    if boundary is None:
        return FULL_RANGE
    return (0.0, float(boundary)) if subfolder == "transformer_2" else (float(boundary), 1.0)


def _require_known(scheduler: Mapping[str, Any]) -> None:
    name, prediction = scheduler.get("_class_name"), scheduler.get("prediction_type")
    is_flow = str(name).startswith("FlowMatch") or bool(scheduler.get("use_flow_sigmas"))
    if not is_flow and prediction != "v_prediction":
        raise InputError(
            f"scheduler {name} with prediction_type={prediction!r} is neither flow matching nor "
            "v-prediction",
            "train this model from Python, with an objective of your own and megaslide.stream",
        )
