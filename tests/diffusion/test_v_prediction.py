"""v-prediction against diffusers' CogVideoX scheduler, and the published form of the loss."""

from typing import Any

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler

from megaslide.diffusion.v_prediction import VPrediction

MODELS = {
    "2b": {"snr_shift_scale": 3.0, "rescale_betas_zero_snr": True},
    "5b": {"snr_shift_scale": 1.0, "rescale_betas_zero_snr": True},
    "plain": {"snr_shift_scale": 1.0, "rescale_betas_zero_snr": False, "beta_end": 0.02},
}


def scheduler(name: str) -> Any:
    return CogVideoXDDIMScheduler(prediction_type="v_prediction", **MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_the_schedule_is_that_of_diffusers(name: str) -> None:
    ours = VPrediction.from_scheduler(scheduler(name).config)
    torch.testing.assert_close(ours.alphas, scheduler(name).alphas_cumprod, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("t", [0, 1, 499, 998, 999])
def test_the_loss_is_the_published_one(name: str, t: int) -> None:
    """1/(1−a)·|x0-hat − x0|², from the scheduler's own noising and velocity, in fp64."""
    reference, objective = scheduler(name), VPrediction.from_scheduler(scheduler(name).config)
    generator = torch.Generator().manual_seed(t)
    latents, noise, guess = (
        torch.randn(2, 3, 2, 4, 5, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    steps = torch.full((2,), t)
    noisy = reference.add_noise(latents, noise, steps)
    x0 = reference.get_velocity(guess, noisy, steps)
    expected = (x0 - latents).square().mean() / (1 - reference.alphas_cumprod[t])
    seen: dict[str, torch.Tensor] = {}

    def model(hidden: torch.Tensor, timestep: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.update(hidden=hidden, timestep=timestep)
        return guess

    loss, per_sample = objective.loss(model, latents, noise, steps / 1000)
    # x0-hat at t = 0 subtracts nearly equal numbers, so the published form is the less exact one.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss == per_sample.mean()
    torch.testing.assert_close(seen["hidden"].double(), noisy, rtol=1e-5, atol=1e-6)
    assert seen["timestep"].tolist() == [t, t]


def test_a_perfect_model_has_no_loss_and_a_silent_one_that_of_zero() -> None:
    reference, objective = scheduler("5b"), VPrediction.from_scheduler(scheduler("5b").config)
    latents, noise = torch.randn(3, 2, 2, 4, 4), torch.randn(3, 2, 2, 4, 4)
    steps = torch.tensor([0, 500, 999])
    v = reference.get_velocity(latents.double(), noise.double(), steps).float()
    assert objective.loss(lambda *_: v, latents, noise, steps / 1000)[0] < 1e-12
    silent, _ = objective.loss(lambda x, _: torch.zeros_like(x), latents, noise, steps / 1000)
    assert silent == pytest.approx(objective.zero_loss(latents, noise, steps / 1000))


def test_timesteps_are_uniform_and_whole() -> None:
    objective = VPrediction.from_scheduler(scheduler("5b").config)
    drawn = objective.sample_sigmas(20_000, torch.Generator().manual_seed(0)) * 1000
    assert (drawn - drawn.round()).abs().max() < 1e-4
    counts = torch.bincount(drawn.round().long() // 100, minlength=10)
    assert (counts - 2000).abs().max() < 4 * (20_000 * 0.1 * 0.9) ** 0.5
    fixed = torch.cat([objective.fixed_sigmas(250, i, 4) for i in range(4)])
    assert sorted((fixed * 1000).round().long().tolist()) == list(range(1000))


def test_another_schedule_of_betas_is_refused() -> None:
    with pytest.raises(ValueError, match="beta_schedule='linear'"):
        VPrediction.from_scheduler({"beta_schedule": "linear"})
