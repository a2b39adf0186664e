"""What a published scheduler says about training, against that scheduler itself."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from megaslide.config import TrainConfig
from megaslide.diffusion.objectives import FlowMatching, shift_sigmas
from megaslide.diffusion.recipes import Recipe, expert_range, scheduler_shift
from megaslide.diffusion.samplers import sigma_schedule
from megaslide.diffusion.v_prediction import VPrediction
from megaslide.errors import InputError

LINEAR = np.linspace(1.0, 0.1, 10)
FLOW = "FlowMatchEulerDiscreteScheduler"
LTX = {
    "use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05,
    "base_image_seq_len": 1024, "max_image_seq_len": 4096,
}  # fmt: skip


def test_a_static_shift_is_the_schedulers() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    scheduler.set_timesteps(sigmas=LINEAR)
    ours = shift_sigmas(torch.tensor(LINEAR), scheduler_shift(scheduler.config, 999))
    torch.testing.assert_close(scheduler.sigmas[:-1], ours.float())


def test_wans_flow_shift_is_the_schedulers() -> None:
    scheduler = UniPCMultistepScheduler(
        use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction"
    )
    scheduler.set_timesteps(10)
    linear = np.linspace(1, 1 / 1000, 11)[:-1]
    ours = shift_sigmas(torch.tensor(linear), scheduler_shift(scheduler.config, 999))
    torch.testing.assert_close(scheduler.sigmas[:-1], ours.float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize(("tokens", "mu"), [(1024, 0.95), (4096, 2.05), (2560, 1.5), (6000, None)])
def test_a_dynamic_shift_grows_with_the_clip(kind: Any, tokens: int, mu: float | None) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**LTX, time_shift_type=kind)
    slope = (2.05 - 0.95) / (4096 - 1024)
    expected = mu if mu is not None else slope * tokens + 0.95 - slope * 1024
    scheduler.set_timesteps(sigmas=LINEAR, mu=expected)
    ours = shift_sigmas(torch.tensor(LINEAR), scheduler_shift(scheduler.config, tokens))
    torch.testing.assert_close(scheduler.sigmas[:-1], ours.float())


def test_sampling_takes_the_noise_levels_of_the_published_scheduler() -> None:
    """LTX's end at shift_terminal and Mochi's run backwards, which no shift could say."""
    ltx = FlowMatchEulerDiscreteScheduler(**LTX, shift_terminal=0.1)
    ltx.set_timesteps(sigmas=LINEAR, mu=1.5)
    got = recipe_of(ltx).sampling_sigmas(10, 2560)
    torch.testing.assert_close(got, ltx.sigmas)
    assert got[-2].item() == pytest.approx(0.1)
    mochi = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    torch.testing.assert_close(
        recipe_of(mochi).sampling_sigmas(10, 9), torch.tensor([*LINEAR, 0.0], dtype=torch.float32)
    )
    plain = recipe_of(FlowMatchEulerDiscreteScheduler(**LTX), shift=3.0).sampling_sigmas(10, 2560)
    torch.testing.assert_close(plain, sigma_schedule(10, 3.0))
    wan = UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0)
    torch.testing.assert_close(recipe_of(wan).sampling_sigmas(10, 9), sigma_schedule(10, 5.0))
    with pytest.raises(ValueError, match="steps=0"):
        recipe_of(ltx).sampling_sigmas(0, 9)


def test_cosmos_noise_levels_are_karras_and_end_above_zero() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    got = recipe_of(scheduler).sampling_sigmas(5, 9).double()
    s = [(80 ** (1 / 7) + i / 4 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(5)]
    expected = torch.tensor([x / (1 + x) for x in [*s, s[-1]]], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9)


def recipe_of(scheduler: Any, **changes: Any) -> Recipe:
    """Of a scheduler as its scheduler_config.json has it."""
    values = json.loads(scheduler.to_json_string())
    return Recipe(train=TrainConfig(**changes), scheduler=values)


def test_the_configs_shift_comes_first_and_a_new_model_has_none() -> None:
    scheduler = {"_class_name": FLOW, "shift": 7.0}
    assert Recipe(train=TrainConfig(), scheduler=scheduler).shift(9) == 7
    assert Recipe(train=TrainConfig(shift=2.0), scheduler=scheduler).shift(9) == 2
    assert Recipe(train=TrainConfig()).shift(9) == 1


def test_the_objective_follows_the_scheduler() -> None:
    flow = Recipe(
        train=TrainConfig(first_frame="given"),
        scheduler={**LTX, "_class_name": FLOW},
    )
    objective = flow.objective(4096)
    assert isinstance(objective, FlowMatching)
    assert objective.first_frame
    assert objective.shift == pytest.approx(math.exp(2.05))
    v = Recipe(train=TrainConfig(), scheduler={"prediction_type": "v_prediction"})
    assert isinstance(v.objective(1), VPrediction)
    with pytest.raises(InputError, match="first_frame=given"):
        Recipe(
            train=TrainConfig(first_frame="given"), scheduler={"prediction_type": "v_prediction"}
        )
    with pytest.raises(InputError, match=r"EDMEulerScheduler .* neither"):
        Recipe(train=TrainConfig(), scheduler={"_class_name": "EDMEulerScheduler"})


def test_each_expert_has_its_side_of_the_boundary() -> None:
    pipeline = {"boundary_ratio": 0.875}
    assert expert_range(pipeline, "transformer") == (0.875, 1)
    assert expert_range(pipeline, "transformer_2") == (0, 0.875)
    assert expert_range({"boundary_ratio": None}, "transformer") == (0, 1)
    assert expert_range(None, "transformer") == (0, 1)


@pytest.mark.parametrize("scheme", ["none", "logit_normal"])
@pytest.mark.parametrize("shift", [1.0, 5.0])
@pytest.mark.parametrize("levels", [(0.875, 1.0), (0.0, 0.875), (0.3, 0.6)])
def test_an_experts_density_is_the_whole_one_within_its_range(
    scheme: Any, shift: float, levels: tuple[float, float]
) -> None:
    """Against rejection: draws of the whole density that fall into the range."""
    options: Any = {"weighting_scheme": scheme, "shift": shift, "logit_mean": 0.3, "logit_std": 0.8}
    whole = FlowMatching(**options).sample_sigmas(200_000, torch.Generator().manual_seed(0))
    expected = whole[(whole >= levels[0]) & (whole <= levels[1])].sort().values
    expert = FlowMatching(**options, sigma_range=levels)
    drawn = expert.sample_sigmas(len(expected), torch.Generator().manual_seed(1)).sort().values
    assert drawn.min() >= levels[0]
    assert drawn.max() <= levels[1]
    inside = torch.linspace(0.05, 0.95, 19)
    width = levels[1] - levels[0]
    error = (drawn.quantile(inside) - expected.quantile(inside)).abs().max()
    assert error < 4 * width / len(expected) ** 0.5


def test_a_given_first_frame_is_clean_untimed_and_out_of_the_loss() -> None:
    latents, noise = torch.randn(2, 3, 4, 5, 6), torch.randn(2, 3, 4, 5, 6)
    sigmas = torch.tensor([0.25, 0.75])
    seen: dict[str, torch.Tensor] = {}

    def model(hidden: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        seen.update(hidden=hidden, timestep=timestep)
        return torch.full_like(hidden, 2.0)

    objective = FlowMatching(first_frame=True)
    loss, _ = objective.loss(model, latents, noise, sigmas)
    assert torch.equal(seen["hidden"][:, :, 0], latents[:, :, 0])
    mixed = 0.25 * latents[1, :, 1] + 0.75 * noise[1, :, 1]
    torch.testing.assert_close(seen["hidden"][1, :, 1], mixed)
    assert seen["timestep"].tolist() == [[0, 250, 250, 250], [0, 750, 750, 750]]
    error = (2 - (noise - latents))[:, :, 1:].square()
    assert loss.item() == pytest.approx(error.mean().item(), rel=1e-6)
    assert objective.zero_loss(latents, noise, sigmas).item() == pytest.approx(
        (noise - latents)[:, :, 1:].square().mean().item(), rel=1e-6
    )
    with pytest.raises(ValueError, match="1 latent frame"):
        objective.loss(model, latents[:, :, :1], noise[:, :, :1], sigmas)


@pytest.mark.parametrize("levels", [(0.5, 0.5), (-0.1, 1), (0.2, 1.1)])
def test_an_impossible_range_is_refused(levels: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no range within 0 and 1"):
        FlowMatching(sigma_range=levels)
