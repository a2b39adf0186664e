"""v-prediction on a DDPM schedule: the training objective of CogVideoX.

Its noise levels are the 1000 whole timesteps t of that schedule; they travel as sigma = t/1000, so
that whoever draws them need not know which objective they are for.

Shapes: B batch, latents and noise [B, C, T, H, W], timesteps [B].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaslide.diffusion.objectives import Denoiser, midpoints, prediction_of


def cumulative_alphas(
    *,
    beta_start: float = 0.00085,
    beta_end: float = 0.012,
    timesteps: int = 1000,
    snr_shift_scale: float = 3.0,
    zero_terminal_snr: bool = False,
) -> Tensor:
    """alpha-bar_t of CogVideoX's schedule, fp64 [timesteps], decreasing.

    beta_t = ((1 − t/(n−1))·sqrt(beta_start) + t/(n−1)·sqrt(beta_end))², a_t = prod (1 − beta), then
    the signal-to-noise ratio is divided by k: a/(k + (1 − k)·a), and with `zero_terminal_snr`
    sqrt(a) is moved and stretched so that the last is 0 and the first as before.

    Source: Yang et al. 2024 (arXiv:2408.06072), section 2.3, as
    diffusers/schedulers/scheduling_ddim_cogvideox.py has it; Lin et al. 2023 (arXiv:2305.08891),
    algorithm 1, for the zero signal at the end.
    """
    roots = torch.linspace(beta_start**0.5, beta_end**0.5, timesteps, dtype=torch.float64)
    alphas = torch.cumprod(1 - roots**2, dim=0)
    alphas = alphas / (snr_shift_scale + (1 - snr_shift_scale) * alphas)
    if zero_terminal_snr:
        root = alphas.sqrt()
        alphas = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    return alphas


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VPrediction:
    """Uniform timesteps, and the squared error of v.

    x_t = sqrt(a)·x0 + sqrt(1−a)·e and v = sqrt(a)·e − sqrt(1−a)·x0, with a = alpha-bar_t. The
    published loss weighs the error of x0-hat = sqrt(a)·x_t − sqrt(1−a)·v-hat by 1/(1−a); since
    x0-hat − x0 = −sqrt(1−a)·(v-hat − v), that is the error of v itself, which has no division by
    the small 1−a of the first timesteps.

    Source: Salimans & Ho 2022 (arXiv:2202.00512), section 4, for v; diffusers'
    examples/cogvideo/train_cogvideox_lora.py for the weight.
    """

    alphas: Tensor
    """alpha-bar per timestep, fp64, of `cumulative_alphas`."""

    @classmethod
    def from_scheduler(cls, scheduler: Mapping[str, Any]) -> "VPrediction":
        """The objective behind a scheduler_config.json of CogVideoX.

        Raises:
            ValueError: a schedule of betas other than `scaled_linear`.
        """
        schedule = scheduler.get("beta_schedule", "scaled_linear")
        if schedule != "scaled_linear":
            raise ValueError(f"beta_schedule={schedule!r}; only 'scaled_linear' is known")
        alphas = cumulative_alphas(
            beta_start=scheduler.get("beta_start", 0.00085),
            beta_end=scheduler.get("beta_end", 0.012),
            timesteps=scheduler.get("num_train_timesteps", 1000),
            snr_shift_scale=scheduler.get("snr_shift_scale", 3.0),
            zero_terminal_snr=scheduler.get("rescale_betas_zero_snr", False),
        )
        return cls(alphas=alphas)

    def sample_sigmas(self, batch: int, generator: torch.Generator) -> Tensor:
        """Random timesteps over the number of them, fp32 [B] in [0, 1)."""
        uniform = torch.rand(
            batch, generator=generator, device=generator.device, dtype=torch.float64
        )
        return self._quantiles(uniform)

    def fixed_sigmas(self, batch: int, index: int, total: int) -> Tensor:
        """Timesteps of validation batch `index` of `total`, as `FlowMatching.fixed_sigmas`."""
        return self._quantiles(midpoints(batch, index, total))

    def loss(
        self, model: Denoiser, latents: Tensor, noise: Tensor, sigmas: Tensor, **conditioning: Any
    ) -> tuple[Tensor, Tensor]:
        """Mean over the batch of mean((v_model − v)²).

        Args:
            model: called as `model(x_t, t, **conditioning)`, both fp32.
            latents: clean latents x0.
            noise: e ~ N(0, 1).
            sigmas: [B], as `sample_sigmas` gives them.

        Returns:
            The scalar loss, and the losses [B] it is the mean of, detached; fp32.
        """
        timesteps = self._timesteps(sigmas).to(latents.device)
        signal, spread = self._scales(timesteps, latents)
        noisy = signal * latents.float() + spread * noise.float()
        output = model(noisy, timesteps.float(), **conditioning)
        target = signal * noise.float() - spread * latents.float()
        squared = (prediction_of(output, noisy).float() - target).square()
        per_sample = squared.flatten(1).mean(1)
        return per_sample.mean(), per_sample.detach()

    def zero_loss(self, latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
        """Loss of a model that always predicts zero, a scalar."""
        signal, spread = self._scales(self._timesteps(sigmas).to(latents.device), latents)
        return (signal * noise.float() - spread * latents.float()).square().mean()

    def _quantiles(self, probabilities: Tensor) -> Tensor:
        count = len(self.alphas)
        return ((probabilities * count).floor().clamp(max=count - 1) / count).float()

    def _timesteps(self, sigmas: Tensor) -> Tensor:
        return (sigmas.double() * len(self.alphas)).round().long()

    def _scales(self, timesteps: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(a_t) and sqrt(1 − a_t), fp32 [B, 1, ...] to broadcast over `like`."""
        alphas = self.alphas.to(timesteps.device)[timesteps].view(-1, *[1] * (like.ndim - 1))
        return alphas.sqrt().float(), (1 - alphas).sqrt().float()
