"""The sampler against a schedule written out by hand, an independent Euler loop and exact flows."""

import builtins
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from megaslide.diffusion.samplers import sample_latents, sigma_schedule

SHAPE = (3, 2, 2, 4, 4)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text_of(rows: int, value: float = 1.0) -> dict[str, Tensor | None]:
    return {
        "encoder_hidden_states": torch.full((rows, 5, 8), value),
        "encoder_attention_mask": torch.ones(rows, 5, dtype=torch.bool),
    }


class Recorder:
    """A velocity that depends on everything it is given, and keeps what it was given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []
        self.dtype = dtype

    def __call__(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
    ) -> Tensor:
        self.calls.append((hidden_states, timestep))
        t = (timestep / 1000).view(-1, 1, 1, 1, 1)
        text = encoder_hidden_states.mean((1, 2)).view(-1, 1, 1, 1, 1)
        return (torch.sin(hidden_states) + t * text).to(self.dtype)


def euler_by_hand(
    noise: np.ndarray, steps: int, shift: float, scale: float, positive: float, negative: float
) -> np.ndarray:
    """The same integration in numpy fp64: one sigma at a time, guidance by two evaluations."""
    levels = [k / steps for k in range(steps, -1, -1)]
    levels = [shift * u / (1 + (shift - 1) * u) for u in levels]
    x = noise.astype(np.float64)
    for now, after in itertools.pairwise(levels):
        conditional = np.sin(x) + now * positive
        unconditional = np.sin(x) + now * negative
        x = x + (after - now) * (scale * conditional + (1 - scale) * unconditional)
    return x


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_schedule_is_the_shifted_grid_and_ends_in_zero(shift: float) -> None:
    sigmas = sigma_schedule(10, shift)
    expected = [shift * k / (10 + (shift - 1) * k) for k in range(10, -1, -1)]
    np.testing.assert_allclose(sigmas.numpy(), expected, rtol=1e-6)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0


def test_the_model_is_called_at_exactly_these_timesteps() -> None:
    """diffusers alone, at shift 5 and 10 steps, would end at 24.4 where the grid has 357.1."""
    model = Recorder()
    sample_latents(
        model, SHAPE, sigmas=sigma_schedule(10, 5.0), guidance_scale=1, generator=generator(),
        conditioning=text_of(3),
    )  # fmt: skip
    seen = torch.stack([timestep for _, timestep in model.calls])
    expected = torch.tensor([5000 * k / (10 + 4 * k) for k in range(10, 0, -1)])
    assert seen.shape == (10, 3)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen, expected[:, None].expand(10, 3))
    assert seen[-1, 0].item() == pytest.approx(357.14, abs=0.01)


@pytest.mark.parametrize(("scale", "steps", "shift"), [(1.0, 7, 1.0), (4.0, 6, 3.0), (0.0, 5, 2.0)])
def test_equals_an_euler_loop_written_by_hand(scale: float, steps: int, shift: float) -> None:
    model = Recorder()
    latents = sample_latents(
        model, SHAPE, sigmas=sigma_schedule(steps, shift), guidance_scale=scale,
        generator=generator(5), conditioning=text_of(3, 1.0), negative=text_of(3, -0.5),
    )  # fmt: skip
    noise = torch.randn(SHAPE, generator=generator(5)).numpy()
    expected = euler_by_hand(noise, steps, shift, scale, 1.0, -0.5)
    np.testing.assert_allclose(latents.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert latents.dtype == torch.float32
    assert not latents.requires_grad
    assert len(model.calls) == steps
    rows = 3 if scale == 1 else 6
    assert {len(hidden) for hidden, _ in model.calls} == {rows}


def test_exact_velocity_of_a_gaussian_gives_its_moments() -> None:
    """x0 ~ N(m, c²): x_sigma has std S = sqrt((1−sigma)²c² + sigma²), and the flow maps noise to
    m + c·noise exactly; Euler must come there at first order."""
    m, c = 1.5, 0.3

    def exact(hidden_states: Tensor, timestep: Tensor) -> Tensor:
        s = (timestep / 1000).view(-1, 1, 1, 1, 1)
        variance = (1 - s) ** 2 * c**2 + s**2
        return (s - (1 - s) * c**2) / variance * (hidden_states - (1 - s) * m) - m

    def error(steps: int) -> float:
        latents = sample_latents(
            exact, (2, 4, 4, 8, 8), sigmas=sigma_schedule(steps, 3.0), guidance_scale=1,
            generator=generator(2), conditioning={},
        )  # fmt: skip
        target = m + c * torch.randn(2, 4, 4, 8, 8, generator=generator(2))
        return (latents - target).square().mean().sqrt().item()

    errors = [error(steps) for steps in (50, 100, 200)]
    assert errors[-1] < 1e-2
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.15)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.15)


def test_bf16_predictions_do_not_round_the_latents() -> None:
    kept = []
    model = Recorder(torch.bfloat16)
    latents = sample_latents(
        model, SHAPE, sigmas=sigma_schedule(8, 1), guidance_scale=2, generator=generator(),
        conditioning=text_of(3), negative=text_of(3, 0.0),
        progress=lambda done, total: kept.append((done, total)),
    )  # fmt: skip
    assert kept == [(step, 8) for step in range(1, 9)]
    assert {hidden.dtype for hidden, _ in model.calls} == {torch.float32}
    assert not torch.equal(latents, latents.bfloat16().float())
    expected = euler_by_hand(torch.randn(SHAPE, generator=generator()).numpy(), 8, 1, 2, 1.0, 0.0)
    np.testing.assert_allclose(latents.numpy(), expected, atol=0.03)


def test_no_negative_or_scale_one_is_one_pass() -> None:
    for options in ({"negative": None}, {"negative": {}}):
        model = Recorder()
        sample_latents(
            model, SHAPE, sigmas=sigma_schedule(2, 1), guidance_scale=5, generator=generator(),
            conditioning=text_of(3), **options,
        )  # fmt: skip
        assert {len(hidden) for hidden, _ in model.calls} == {3}


def test_one_generator_per_sample_makes_samples_independent_of_the_batch() -> None:
    def sample(seeds: list[int]) -> Tensor:
        return sample_latents(
            Recorder(), (len(seeds), *SHAPE[1:]), sigmas=sigma_schedule(3, 1), guidance_scale=1,
            generator=[generator(seed) for seed in seeds], conditioning=text_of(len(seeds)),
        )  # fmt: skip

    together, alone = sample([4, 5, 6]), sample([5])
    torch.testing.assert_close(together[1:2], alone)
    assert not torch.allclose(together[0], together[1])


def test_global_randomness_is_neither_used_nor_changed() -> None:
    before = torch.random.get_rng_state()
    first = sample_latents(
        Recorder(), SHAPE, sigmas=sigma_schedule(2, 1), guidance_scale=1, generator=generator(),
        conditioning=text_of(3),
    )  # fmt: skip
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    again = sample_latents(
        Recorder(), SHAPE, sigmas=sigma_schedule(2, 1), guidance_scale=1, generator=generator(),
        conditioning=text_of(3),
    )  # fmt: skip
    assert torch.equal(first, again)


def test_conditioning_that_is_no_tensor_is_passed_through() -> None:
    seen = []

    def model(hidden_states: Tensor, timestep: Tensor, *, mask: None, num_frames: int) -> Tensor:
        seen.append((mask, num_frames, len(hidden_states)))
        return hidden_states

    both = {"mask": None, "num_frames": 8}
    sample_latents(
        model, SHAPE, sigmas=sigma_schedule(1, 1), guidance_scale=2, generator=generator(),
        conditioning=both, negative=dict(both),
    )  # fmt: skip
    assert seen == [(None, 8, 6)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generator": [generator()]}, "1 generators for a batch of 3"),
        ({"negative": {"encoder_hidden_states": torch.ones(3, 5, 8)}}, "same keys"),
        ({"negative": {**text_of(3), "encoder_attention_mask": None}}, "None in negative"),
        ({"negative": {**text_of(3), "encoder_hidden_states": torch.ones(3, 6, 8)}}, "one length"),
    ],
)
def test_bad_arguments_say_what_is_accepted(change: dict, message: str) -> None:
    arguments = {
        "sigmas": sigma_schedule(2, 1.0), "guidance_scale": 2.0, "generator": generator(),
        "conditioning": text_of(3), "negative": text_of(3),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        sample_latents(Recorder(), SHAPE, **{**arguments, **change})


@pytest.mark.parametrize(("change", "message"), [((0, 1.0), "steps=0"), ((2, 0.0), "shift=0.0")])
def test_schedules_that_are_none_are_refused(change: tuple[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sigma_schedule(*change)


def test_a_given_frame_stays_and_has_time_zero() -> None:
    """By hand: the other frames move by what the model says of them, and it sees the given one."""
    calls: list[tuple[Tensor, Tensor]] = []

    def model(hidden_states: Tensor, timestep: Tensor) -> Tensor:
        calls.append((hidden_states.clone(), timestep.clone()))
        return 0.5 * hidden_states + hidden_states[:, :, :1]

    first = torch.full((SHAPE[0], SHAPE[1], 1, *SHAPE[3:]), 2.0)
    sigmas = torch.tensor([0.9, 0.4, 0.1])
    latents = sample_latents(
        model, SHAPE, sigmas=sigmas, guidance_scale=1, generator=generator(7), conditioning={},
        first_frame=first,
    )  # fmt: skip
    expected = 0.9 * torch.randn(SHAPE, generator=generator(7))
    for number, (now, after) in enumerate([(0.9, 0.4), (0.4, 0.1)]):
        seen, times = calls[number]
        assert torch.equal(seen[:, :, :1], first)
        assert not times[:, 0].any()
        torch.testing.assert_close(times[:, 1:], torch.full_like(times[:, 1:], 1000 * now))
        expected = expected + (after - now) * (0.5 * expected + 2)
    assert torch.equal(latents[:, :, :1], first)
    torch.testing.assert_close(latents[:, :, 1:], expected[:, :, 1:] / 0.9)


def test_missing_diffusers_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_diffusers(name: str, *args, **kwargs):
        if name.split(".")[0] == "diffusers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_diffusers)
    with pytest.raises(ImportError, match=r"pip install 'megaslide\[train\]'"):
        sample_latents(
            Recorder(), SHAPE, sigmas=sigma_schedule(1, 1), guidance_scale=1, generator=generator(),
            conditioning=text_of(3),
        )  # fmt: skip
