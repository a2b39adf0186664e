"""Flow matching: the training objective of Wan, LTX, HunyuanVideo, Cosmos, Mochi and our VideoDiT.

It stands apart from the trainer so that the formulas can be read, cited and tested on their own,
and so that validation uses the same density and the same weights as training does. Whatever dtype
a model computes in, interpolation, target and loss are fp32 here: in bf16, the 1000 timesteps
collapse to 294 distinct values.

Shapes: B batch, latents and noise [B, C, T, H, W] (any [B, ...] works), sigma [B].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

WeightingScheme = Literal["none", "logit_normal", "sigma_sqrt", "cosmap"]

Denoiser = Callable[..., Any]
"""`(hidden_states, timestep, **conditioning)` -> Tensor, tuple, or object with `.sample`."""

NUM_TRAIN_TIMESTEPS = 1000

SMALLEST_U = 1 / NUM_TRAIN_TIMESTEPS
"""Lower end of u before the shift: the last timestep of the grid pretrained models were trained
on. It also keeps sigma^-2 of `sigma_sqrt` finite."""


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """s·sigma / (1 + (s−1)·sigma): moves noise levels towards 1 for s > 1, keeping 0 and 1.

    Source: Esser et al. 2024 (arXiv:2403.03206), section 5.3.2, eq. 23, with s = sqrt(m/n).
    """
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def interpolate(latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    """The noisy latents x_sigma = (1−sigma)·x0 + sigma·e, fp32; sigma [B], or [B, T] per frame.

    Source: Liu et al. 2022 (arXiv:2209.03003), with sigma = 0 at the data as diffusers has it.
    """
    sigma = _per_frame(sigmas, latents) if sigmas.ndim == 2 else _per_sample(sigmas, latents)
    return (1 - sigma) * latents.float() + sigma * noise.float()


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """The target v = d x_sigma / d sigma = e − x0, fp32."""
    return noise.float() - latents.float()


def predicted_latents(noisy: Tensor, prediction: Tensor, sigmas: Tensor) -> Tensor:
    """The x0 that a velocity at x_sigma points to: x_sigma − sigma·v, fp32."""
    return noisy.float() - _per_sample(sigmas, noisy) * prediction.float()


def call_model(
    model: Denoiser, hidden_states: Tensor, sigmas: Tensor, **conditioning: Any
) -> Tensor:
    """Evaluate the model at timestep 1000·sigma (float, as `sigmas`) and unwrap its prediction.

    Raises:
        ValueError: the prediction's shape is not that of `hidden_states`.
    """
    return prediction_of(
        model(hidden_states, sigmas * NUM_TRAIN_TIMESTEPS, **conditioning), hidden_states
    )


def prediction_of(output: Any, hidden_states: Tensor) -> Tensor:
    """What a model returned as a tensor of the shape of `hidden_states`.

    Raises:
        ValueError: it has another shape.
    """
    prediction = output
    if not isinstance(output, Tensor):
        prediction = output[0] if isinstance(output, tuple) else output.sample
    if prediction.shape != hidden_states.shape:
        raise ValueError(
            f"the model returned shape {tuple(prediction.shape)} for latents of shape "
            f"{tuple(hidden_states.shape)}; a velocity has the shape of the latents"
        )
    return prediction


class Objective(Protocol):
    """What a model is trained on; noise levels go by the name sigma, fp32 [B] in [0, 1]."""

    def sample_sigmas(self, batch: int, generator: torch.Generator) -> Tensor:
        """Random noise levels from the training density."""
        ...

    def fixed_sigmas(self, batch: int, index: int, total: int) -> Tensor:
        """Noise levels of validation batch `index` of `total`: the same every time."""
        ...

    def loss(
        self, model: Denoiser, latents: Tensor, noise: Tensor, sigmas: Tensor, **conditioning: Any
    ) -> tuple[Tensor, Tensor]:
        """The scalar loss, and the losses [B] it is the mean of, detached."""
        ...

    def zero_loss(self, latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
        """Loss of a model that always predicts zero."""
        ...


def midpoints(batch: int, index: int, total: int) -> Tensor:
    """Midpoint quantiles that batch `index` of `total` holds, fp64 [B], increasing.

    All batches together hold every quantile once; each by itself spans the whole range.

    Raises:
        ValueError: `index` outside 0..total−1.
    """
    if not 0 <= index < total:
        raise ValueError(f"index={index} is not a batch of total={total}; accepted: 0 to total-1")
    position = torch.arange(batch, dtype=torch.float64) * total + index
    return (position + 0.5) / (batch * total)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowMatching:
    """Density of timesteps, weights and loss of rectified-flow training.

    Densities of u, before the shift: `logit_normal` draws u = sigmoid(logit_mean + logit_std·n)
    with n ~ N(0, 1); the other schemes draw u uniformly. Then sigma = shift_sigmas(u, shift).

    Weights of the squared error at the shifted sigma, as diffusers' training examples define them:

    - `none` and `logit_normal`: 1
    - `sigma_sqrt`: sigma^-2 (diffusers' formula, despite the name)
    - `cosmap`: 2 / (pi·(1 − 2·sigma + 2·sigma²))

    Source: Esser et al. 2024 (arXiv:2403.03206), section 3.1 (logit-normal density, CosMap).

    `sigma_range` conditions that density on a range of sigma, for a model that is one of several
    experts (Wan 2.2 A14B). With `first_frame`, the first latent frame is given: it stays clean, its
    timestep is 0 while the others' is 1000·sigma (so the model gets timesteps [B, T]), and the loss
    is of the other frames only (Wan 2.2 TI2V-5B, Cosmos-Predict2 Video2World).

    Raises:
        ValueError: a shift or logit_std that is not positive, an unknown weighting scheme, or a
            range that is empty or not within [0, 1].
    """

    shift: float = 1.0
    weighting_scheme: WeightingScheme = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    sigma_range: tuple[float, float] = (0.0, 1.0)
    first_frame: bool = False

    def __post_init__(self) -> None:
        if self.weighting_scheme not in get_args(WeightingScheme):
            known = ", ".join(get_args(WeightingScheme))
            raise ValueError(f"weighting_scheme={self.weighting_scheme!r} is not one of {known}")
        for name in ("shift", "logit_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")
        low, high = self.sigma_range
        if not 0 <= low < high <= 1:
            raise ValueError(f"sigma_range={self.sigma_range} is no range within 0 and 1")

    def sample_sigmas(self, batch: int, generator: torch.Generator) -> Tensor:
        """Random noise levels from the training density.

        Args:
            batch: number of samples B.
            generator: the only source of randomness; its device is the result's.

        Returns:
            fp32 [B] in (0, 1].
        """
        uniform = torch.rand(
            batch, generator=generator, device=generator.device, dtype=torch.float64
        )
        return self._quantiles(uniform)

    def fixed_sigmas(self, batch: int, index: int, total: int) -> Tensor:
        """Noise levels of validation batch `index` of `total`: the same every time.

        Together the batches hold the midpoint quantiles of the training density, so that their
        mean loss estimates the training objective without the variance of random timesteps; each
        batch by itself spans the whole range.

        Returns:
            fp32 [B] on the CPU, increasing.

        Raises:
            ValueError: `index` outside 0..total−1.
        """
        return self._quantiles(midpoints(batch, index, total))

    def weights(self, sigmas: Tensor) -> Tensor:
        """w(sigma), fp32 [B]."""
        sigmas = sigmas.float()
        if self.weighting_scheme == "sigma_sqrt":
            return sigmas**-2
        if self.weighting_scheme == "cosmap":
            return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
        return torch.ones_like(sigmas)

    def loss(
        self, model: Denoiser, latents: Tensor, noise: Tensor, sigmas: Tensor, **conditioning: Any
    ) -> tuple[Tensor, Tensor]:
        """Mean over the batch of w(sigma)·mean((v_model − v)²).

        Args:
            model: called as `model(x_sigma, 1000·sigma, **conditioning)` with fp32 x_sigma.
            latents: clean latents x0 [B, C, T, H, W].
            noise: e ~ N(0, 1), shape of `latents`.
            sigmas: [B].

        Returns:
            The scalar loss, and the weighted losses [B] it is the mean of, detached, by which a
            trainer names the sample whose loss is not finite. Both fp32.
        """
        sigmas = sigmas.to(latents.device, torch.float32)
        times = self._times(sigmas, latents)
        noisy = interpolate(latents, noise, times)
        prediction = call_model(model, noisy, times, **conditioning)
        per_sample = self._weighted(prediction, velocity(latents, noise), sigmas)
        return per_sample.mean(), per_sample.detach()

    def zero_loss(self, latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
        """Loss of a model that always predicts zero, a scalar: what a trained model must beat."""
        sigmas = sigmas.to(latents.device, torch.float32)
        target = velocity(latents, noise)
        return self._weighted(torch.zeros_like(target), target, sigmas).mean()

    def _times(self, sigmas: Tensor, latents: Tensor) -> Tensor:
        """Sigma of every sample [B]; with a given first frame, of every frame [B, T]."""
        if not self.first_frame:
            return sigmas
        frames = latents.shape[2]
        if frames < 2:
            raise ValueError(f"{frames} latent frame and the first is given; need 2 or more")
        times = sigmas[:, None].repeat(1, frames)
        times[:, 0] = 0
        return times

    def _weighted(self, prediction: Tensor, target: Tensor, sigmas: Tensor) -> Tensor:
        squared = (prediction.float() - target).square()
        if self.first_frame:
            squared = squared[:, :, 1:]
        return self.weights(sigmas) * squared.flatten(1).mean(1)

    def _quantiles(self, probabilities: Tensor) -> Tensor:
        """Quantile function of sigma. fp64 in: fp32 has too few values near 0 for the tails."""
        low, high = (self._share_below(sigma) for sigma in self.sigma_range)
        u = low + (high - low) * probabilities
        if self.weighting_scheme == "logit_normal":
            u = torch.sigmoid(self.logit_mean + self.logit_std * torch.special.ndtri(u))
        sigmas = shift_sigmas(u.clamp(min=SMALLEST_U), self.shift)
        return sigmas.float().clamp(*self.sigma_range)

    def _share_below(self, sigma: float) -> float:
        """Probability that the whole density gives to noise levels up to `sigma`."""
        u = sigma / (self.shift - (self.shift - 1) * sigma)  # before the shift
        if self.weighting_scheme != "logit_normal" or u in (0, 1):
            return u
        logit = math.log(u / (1 - u))
        return 0.5 * math.erfc((self.logit_mean - logit) / (self.logit_std * math.sqrt(2)))


def _per_sample(sigmas: Tensor, like: Tensor) -> Tensor:
    """[B] as fp32 [B, 1, ...] on the device of `like`, to broadcast over it."""
    return sigmas.to(like.device, torch.float32).view(-1, *[1] * (like.ndim - 1))


def _per_frame(sigmas: Tensor, like: Tensor) -> Tensor:
    """[B, T] as fp32 [B, 1, T, 1, 1] on the device of `like`, to broadcast over it."""
    return sigmas.to(like.device, torch.float32)[:, None, :, None, None]
