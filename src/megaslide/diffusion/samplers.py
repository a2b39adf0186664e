"""Generation: Euler steps from noise to latents, with classifier-free guidance.

The integrator is diffusers' own scheduler, so that what a run shows during training is what its
checkpoint gives in a diffusers pipeline. Three of its habits are stepped around. It derives its
last sigma from an already shifted one and shifts it again, so the sigmas are computed here and
passed in; it searches the timestep grid for its first index, so that is set; and it casts latents
to the dtype of the prediction, so the prediction is fp32 before it arrives.

Shapes: B batch, latents [B, C, T, H, W], T frames, S steps, L text tokens, D text channels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megaslide.diffusion.objectives import Denoiser, call_model, shift_sigmas

Progress = Callable[[int, int], None]
"""Called after each step with (steps done, steps in all)."""

Generators = torch.Generator | Sequence[torch.Generator]


def sigma_schedule(steps: int, shift: float) -> Tensor:
    """shift_sigmas(1, 1−1/S, …, 1/S), then 0: fp32 [S + 1], from noise to data.

    Raises:
        ValueError: fewer than one step, or a shift that is not positive.
    """
    if shift <= 0:
        raise ValueError(f"shift={shift} must be positive; 1 is no shift")
    if steps < 1:
        raise ValueError(f"steps={steps}; sampling needs 1 or more")
    linear = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift_sigmas(linear, shift).float()


@torch.no_grad()
def sample_latents(
    model: Denoiser,
    shape: Sequence[int],
    *,
    sigmas: Tensor,
    guidance_scale: float,
    generator: Generators,
    conditioning: Mapping[str, Any],
    negative: Mapping[str, Any] | None = None,
    first_frame: Tensor | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Integrate dx/dsigma = v from noise to data with S Euler steps.

    A schedule that ends at sigma > 0 ends at x0 + sigma/(1 − sigma)·e: latents are divided by
    1 − sigma.

    With guidance, v = v_negative + guidance_scale·(v_conditional − v_negative) (Ho & Salimans
    2022, arXiv:2207.12598, in the form diffusers uses: 1 is no guidance). Both predictions are one
    call of twice the batch, so that streamed weights cross the link once per step.

    Args:
        model: called as `model(x_sigma fp32, 1000·sigma float [B], **conditioning)`.
        shape: of the latents, [B, C, T, H, W].
        sigmas: noise levels, decreasing, fp32 [S + 1]; the model is evaluated at all but the last.
        guidance_scale: 1 (or no `negative`) evaluates the conditional prediction alone.
        generator: draws the noise, on its own device, fp32: one for the batch, or one per sample,
            which makes a sample's noise independent of the batch it is in.
        conditioning: keyword arguments of the model. Tensors have B rows; they decide the device.
        negative: the same keys and shapes, for the empty or negative prompt.
        first_frame: latents [B, C, 1, H, W] that stay what they are, with a timestep of 0; the
            model then gets timesteps [B, T].
        progress: called after each step.

    Returns:
        fp32 latents of `shape`.

    Raises:
        ValueError: a number of generators that is not B, or `negative` with
            other keys or shapes than `conditioning`.
        ImportError: diffusers is not installed.
    """
    scheduler, steps = _scheduler(sigmas), len(sigmas) - 1
    guided = bool(negative) and guidance_scale != 1
    if guided:
        conditioning = _concatenate(conditioning, negative or {})
    latents = draw_noise(shape, generator, _device(conditioning, generator)) * sigmas[0]
    for step, (sigma, timestep) in enumerate(zip(sigmas[:-1], scheduler.timesteps, strict=True)):
        latents, times = _given(latents, sigma, first_frame)
        inputs, times = (torch.cat([t, t]) if guided else t for t in (latents, times))
        prediction = call_model(model, inputs, times, **conditioning).float()
        if guided:
            conditional, unconditional = prediction.chunk(2)
            prediction = unconditional + guidance_scale * (conditional - unconditional)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
        if progress is not None:
            progress(step + 1, steps)
    return _given(latents / (1 - sigmas[-1]), sigmas[-1], first_frame)[0]


def _given(latents: Tensor, sigma: Tensor, first_frame: Tensor | None) -> tuple[Tensor, Tensor]:
    """Latents with the frame that is given, and their noise levels [B], or [B, T] with one."""
    times = sigma.to(latents.device).expand(len(latents))
    if first_frame is None:
        return latents, times
    latents = torch.cat([first_frame.to(latents), latents[:, :, 1:]], dim=2)
    times = times[:, None].repeat(1, latents.shape[2])
    times[:, 0] = 0
    return latents, times


def _scheduler(sigmas: Tensor) -> Any:
    """A FlowMatchEulerDiscreteScheduler that walks exactly `sigmas`."""
    try:
        from diffusers import FlowMatchEulerDiscreteScheduler
    except ImportError as error:
        raise ImportError("sampling needs diffusers: pip install 'megaslide[train]'") from error
    # shift=1: the sigmas passed in are already shifted, and the scheduler would shift them again.
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=sigmas[:-1].tolist())
    scheduler.sigmas[:] = sigmas
    scheduler.set_begin_index(0)
    return scheduler


def draw_noise(shape: Sequence[int], generator: Generators, device: torch.device) -> Tensor:
    """N(0, 1) of `shape`, fp32 whatever the model's dtype, drawn where each generator lives."""
    if isinstance(generator, torch.Generator):
        noise = torch.randn(
            tuple(shape), generator=generator, device=generator.device, dtype=torch.float32
        )
        return noise.to(device)
    if len(generator) != shape[0]:
        raise ValueError(
            f"{len(generator)} generators for a batch of {shape[0]}; pass one, or one per sample"
        )
    return torch.cat([draw_noise((1, *shape[1:]), each, device) for each in generator])


def _device(conditioning: Mapping[str, Any], generator: Generators) -> torch.device:
    for value in conditioning.values():
        if isinstance(value, Tensor):
            return value.device
    first = generator if isinstance(generator, torch.Generator) else generator[0]
    return first.device


def _concatenate(conditioning: Mapping[str, Any], negative: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of `conditioning`, then rows of `negative`, for one call of twice the batch."""
    if conditioning.keys() != negative.keys():
        raise ValueError(
            f"negative has the keys {sorted(negative)}, conditioning {sorted(conditioning)}; "
            "guidance needs the same keys in both"
        )
    return {key: _pair(key, conditioning[key], negative[key]) for key in conditioning}


def _pair(key: str, positive: Any, negative: Any) -> Any:
    if not isinstance(positive, Tensor) and not isinstance(negative, Tensor):
        if positive == negative:
            return positive
    elif getattr(positive, "shape", None) == getattr(negative, "shape", None):
        return torch.cat([positive, negative])
    raise ValueError(
        f"{key} is {_describe(positive)} in conditioning and {_describe(negative)} in negative; "
        "encode both prompts to one length, and give what is not a tensor the same value in both"
    )


def _describe(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
