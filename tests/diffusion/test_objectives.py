"""Objectives against closed forms, numpy's own draws, and the exact optimum of a Gaussian toy."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from megaslide.diffusion.objectives import (
    FlowMatching,
    interpolate,
    predicted_latents,
    shift_sigmas,
    velocity,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latents_and_noise(batch: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    shape = (batch, 4, 2, 3, 5)
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g)


def zero_model(hidden_states: Tensor, timestep: Tensor) -> Tensor:
    return torch.zeros_like(hidden_states)


# --- formulas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 7.0])
def test_shift_is_a_scaling_of_the_odds(shift: float) -> None:
    sigma = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    shifted = shift_sigmas(sigma, shift)
    torch.testing.assert_close(shifted / (1 - shifted), shift * sigma / (1 - sigma))
    assert shift_sigmas(torch.tensor([0.0, 1.0]), shift).tolist() == [0.0, 1.0]


def test_velocity_points_from_noise_to_latents() -> None:
    x0, e = latents_and_noise(6)
    sigma = torch.tensor([1e-3, 0.1, 0.4, 0.6, 0.9, 1.0])
    noisy = interpolate(x0, e, sigma)
    torch.testing.assert_close(noisy[5], e[5])
    torch.testing.assert_close(predicted_latents(noisy, velocity(x0, e), sigma), x0)
    step = 1e-3
    slope = (interpolate(x0, e, sigma + step) - noisy) / step
    torch.testing.assert_close(slope, velocity(x0, e), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("scheme", "weight"),
    [
        ("none", lambda s: 1.0),
        ("logit_normal", lambda s: 1.0),
        ("sigma_sqrt", lambda s: 1 / (s * s)),
        ("cosmap", lambda s: 2 / (math.pi * (1 - 2 * s + 2 * s * s))),
    ],
)
def test_loss_is_the_weighted_mean_written_out(scheme: str, weight) -> None:
    x0, e = latents_and_noise(3)
    sigma = [0.2, 0.5, 1.0]

    def model(hidden_states: Tensor, timestep: Tensor, *, bias: float) -> Tensor:
        return 0.3 * hidden_states + timestep.view(-1, 1, 1, 1, 1) / 1000 + bias

    objective = FlowMatching(weighting_scheme=scheme, shift=5.0)
    loss, per_sample = objective.loss(model, x0, e, torch.tensor(sigma), bias=0.1)
    expected = []
    for i, s in enumerate(sigma):
        a, b = x0[i].double().numpy(), e[i].double().numpy()
        prediction = 0.3 * ((1 - s) * a + s * b) + s + 0.1
        expected.append(weight(s) * ((prediction - (b - a)) ** 2).mean())
    np.testing.assert_allclose(per_sample.numpy(), expected, rtol=1e-5)
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-5)
    zero_loss = objective.zero_loss(x0, e, torch.tensor(sigma))
    assert zero_loss == objective.loss(zero_model, x0, e, torch.tensor(sigma))[0]


# --- densities --------------------------------------------------------------------------------


def numpy_sigmas(n: int, shift: float, mean: float | None, std: float) -> np.ndarray:
    rng = np.random.default_rng(7)
    u = rng.random(n) if mean is None else 1 / (1 + np.exp(-(mean + std * rng.standard_normal(n))))
    return shift * u / (1 + (shift - 1) * u)


@pytest.mark.parametrize(
    ("scheme", "shift", "mean", "std"),
    [("none", 1.0, None, 1.0), ("cosmap", 3.0, None, 1.0), ("sigma_sqrt", 0.5, None, 1.0),
     ("logit_normal", 1.0, 0.0, 1.0), ("logit_normal", 5.0, -0.5, 1.3)],
)  # fmt: skip
def test_density_matches_numpy(scheme: str, shift: float, mean: float | None, std: float) -> None:
    objective = FlowMatching(
        weighting_scheme=scheme, shift=shift, logit_mean=mean or 0.0, logit_std=std
    )
    n = 200_000
    drawn = objective.sample_sigmas(n, generator()).numpy()
    expected = numpy_sigmas(n, shift, mean, std)
    at = np.linspace(0.05, 0.95, 19)
    np.testing.assert_allclose(np.quantile(drawn, at), np.quantile(expected, at), atol=5e-3)
    assert drawn.mean() == pytest.approx(expected.mean(), abs=3e-3)
    assert drawn.std() == pytest.approx(expected.std(), abs=3e-3)


def test_sigmas_stay_above_zero_and_reach_one_at_most() -> None:
    wide = FlowMatching(weighting_scheme="logit_normal", logit_std=40.0, shift=2.0)
    sigma = wide.sample_sigmas(10_000, generator())
    assert sigma.min().item() == pytest.approx(2e-3 / (1 + 1e-3))
    assert sigma.max() <= 1
    assert FlowMatching(weighting_scheme="sigma_sqrt").weights(sigma).isfinite().all()


def test_only_the_generator_decides() -> None:
    objective = FlowMatching()
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = objective.sample_sigmas(16, generator(3))
    torch.testing.assert_close(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first, objective.sample_sigmas(16, generator(3)))
    assert not torch.equal(first, objective.sample_sigmas(16, generator(4)))
    assert first.dtype == torch.float32


def test_fixed_sigmas_are_the_midpoint_quantiles() -> None:
    objective = FlowMatching(shift=3.0, logit_mean=0.4, logit_std=0.8)
    batches = [objective.fixed_sigmas(6, i, 4) for i in range(4)]
    together = torch.cat(batches).sort().values.numpy()
    quantiles = np.quantile(numpy_sigmas(400_000, 3.0, 0.4, 0.8), (np.arange(24) + 0.5) / 24)
    np.testing.assert_allclose(together, quantiles, atol=5e-3)
    assert torch.equal(batches[2], objective.fixed_sigmas(6, 2, 4))
    for batch in batches:
        assert batch[0] < np.quantile(together, 0.2) < np.quantile(together, 0.8) < batch[-1]
    with pytest.raises(ValueError, match="index=4"):
        objective.fixed_sigmas(6, 4, 4)


def test_fixed_sigmas_estimate_the_training_objective() -> None:
    """E[w·sigma²] over the density, from 64 fixed points, against a long random average."""
    for scheme in ("none", "logit_normal", "cosmap"):
        objective = FlowMatching(weighting_scheme=scheme, shift=2.0)
        random = objective.sample_sigmas(400_000, generator())
        fixed = torch.cat([objective.fixed_sigmas(8, i, 8) for i in range(8)])
        long, short = ((objective.weights(s) * s**2).mean().item() for s in (random, fixed))
        assert short == pytest.approx(long, rel=5e-3), scheme


# --- the optimum ------------------------------------------------------------------------------


def test_optimal_predictor_on_a_gaussian_reaches_the_exact_minimum() -> None:
    """x0 ~ N(0, c²): E[v|x] = (sigma − (1−sigma)c²)/V·x with V = (1−sigma)²c² + sigma².

    The smallest possible loss at sigma is Var(v|x) = c²/V.
    """
    c, batch = 0.6, 4000
    g = generator()
    x0 = c * torch.randn(batch, 64, generator=g)
    e = torch.randn(batch, 64, generator=g)

    def optimum(hidden_states: Tensor, timestep: Tensor) -> Tensor:
        s = (timestep / 1000)[:, None]
        return (s - (1 - s) * c**2) / ((1 - s) ** 2 * c**2 + s**2) * hidden_states

    def nearby(hidden_states: Tensor, timestep: Tensor) -> Tensor:
        return 1.1 * optimum(hidden_states, timestep)

    objective = FlowMatching(weighting_scheme="cosmap", shift=2.0)
    sigma = objective.sample_sigmas(batch, g)
    expected = objective.weights(sigma) * c**2 / ((1 - sigma) ** 2 * c**2 + sigma**2)
    loss, per_sample = objective.loss(optimum, x0, e, sigma)
    assert loss.item() == pytest.approx(expected.mean().item(), rel=5e-3)
    assert loss < objective.loss(nearby, x0, e, sigma)[0] < objective.zero_loss(x0, e, sigma)
    assert torch.corrcoef(torch.stack([per_sample, expected]))[0, 1] > 0.8


# --- models as they are -----------------------------------------------------------------------


def test_bf16_predictions_are_compared_in_fp32() -> None:
    x0, e = latents_and_noise(2)
    sigma = torch.tensor([0.3, 0.7])

    def half(hidden_states: Tensor, timestep: Tensor) -> Tensor:
        return (e - x0).bfloat16()

    loss, per_sample = FlowMatching().loss(half, x0, e, sigma)
    rounding = ((e - x0).bfloat16().float() - (e - x0)).square().mean()
    assert loss.dtype == per_sample.dtype == torch.float32
    assert loss.item() == pytest.approx(rounding.item(), rel=1e-5)
    assert loss > 0


def test_bf16_latents_and_sigmas_are_interpolated_in_fp32() -> None:
    x0, e = latents_and_noise(2)
    sigma = torch.tensor([0.3, 0.7])
    noisy = interpolate(x0.bfloat16(), e.bfloat16(), sigma)
    expected = interpolate(x0.bfloat16().float(), e.bfloat16().float(), sigma)
    assert noisy.dtype == torch.float32
    assert torch.equal(noisy, expected)


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: (t, 1), lambda t: SimpleNamespace(sample=t)]
)
def test_outputs_of_diffusers_models_are_unwrapped(wrap) -> None:
    x0, e = latents_and_noise(2)
    seen = {}

    def model(hidden_states: Tensor, timestep: Tensor, **conditioning: Tensor):
        seen.update(conditioning, timestep=timestep)
        return wrap(e - x0)

    text = torch.ones(2, 3, 4)
    loss, _ = FlowMatching().loss(
        model, x0, e, torch.tensor([0.25, 1.0]), encoder_hidden_states=text
    )
    assert loss == 0
    assert seen["encoder_hidden_states"] is text
    assert seen["timestep"].tolist() == [250.0, 1000.0]
    assert seen["timestep"].dtype == torch.float32


def test_gradients_flow_and_the_bad_sample_is_named() -> None:
    x0, e = latents_and_noise(3)
    x0[1] = math.nan
    scale = torch.tensor(0.5, requires_grad=True)
    loss, per_sample = FlowMatching().loss(
        lambda hidden_states, timestep: scale * hidden_states, x0, e, torch.full((3,), 0.5)
    )
    assert loss.requires_grad
    assert not per_sample.requires_grad
    assert per_sample.isfinite().tolist() == [True, False, True]


def test_bad_arguments_name_the_value_and_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"'mode' is not one of none, logit_normal"):
        FlowMatching(weighting_scheme="mode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shift=0 must be positive"):
        FlowMatching(shift=0)
    with pytest.raises(ValueError, match=r"logit_std=-1"):
        FlowMatching(logit_std=-1)
    x0, e = latents_and_noise(2)
    with pytest.raises(ValueError, match="shape"):
        FlowMatching().loss(lambda h, t: h[:, :1], x0, e, torch.tensor([0.5, 0.5]))
