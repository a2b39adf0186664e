"""Sampling by a family's own diffusers pipeline, with a streamed transformer in it.

What a fine-tuned model gives should be what its users will see, so its samples are made by the
class that they will load it into: the published scheduler, its sigmas, its guidance. The pipeline
gets no autoencoder and no text encoder; it starts from noise and embeddings that are given and
stops at latents, which the codec decodes.

Shapes: B prompts, C t h w latents, L text tokens of D channels.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megaslide.config import Triple
from megaslide.models.pretrained.family import Family, padded

Progress = Callable[[int, int], None]
TEXT, MASK = "encoder_hidden_states", "encoder_attention_mask"
IMAGE = ("image_latents", "encoder_hidden_states_image")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What differs between the pipelines."""

    class_name: str
    scales: tuple[str, str]
    """Its attributes for frames and for pixels per latent voxel."""
    text_length: Callable[[Mapping[str, Any]], int] | None = None
    """Tokens to which text is padded, from the transformer's config.json."""
    mask: str | None = None
    """Its argument for the mask of the text, if it takes one; `negative_` stands before it."""
    layout: str = "volume"
    """Of its latents: `volume` [B, C, t, h, w], `frames` [B, t, C, h, w] or `tokens` [B, N, C]."""
    takes_fps: bool = False
    pools: bool = False
    """Whether it takes pooled text."""
    guides: bool = False
    """Whether a guider, a part of it, holds the guidance scale and sees each step."""
    asks_sizes: bool = False
    """Whether it asks its autoencoder for sizes, even where it does not call it."""


KINDS: dict[str, Kind] = {
    "WanTransformer3DModel": Kind(
        class_name="WanPipeline", text_length=lambda config: 512,
        scales=("vae_scale_factor_temporal", "vae_scale_factor_spatial"),
    ),
    "LTXVideoTransformer3DModel": Kind(
        class_name="LTXPipeline", mask="prompt_attention_mask", layout="tokens",
        takes_fps=True, scales=("vae_temporal_compression_ratio", "vae_spatial_compression_ratio"),
    ),
    "CogVideoXTransformer3DModel": Kind(
        class_name="CogVideoXPipeline", layout="frames",
        text_length=lambda config: int(config["max_text_seq_length"]),
        scales=("vae_scale_factor_temporal", "vae_scale_factor_spatial"),
    ),
    "MochiTransformer3DModel": Kind(
        class_name="MochiPipeline", mask="prompt_attention_mask",
        text_length=lambda config: int(config["max_sequence_length"]),
        scales=("vae_temporal_scale_factor", "vae_spatial_scale_factor"),
    ),
    "HunyuanVideoTransformer3DModel": Kind(
        class_name="HunyuanVideoPipeline", mask="prompt_attention_mask", pools=True,
        scales=("vae_scale_factor_temporal", "vae_scale_factor_spatial"),
    ),
    "HunyuanVideo15Transformer3DModel": Kind(
        class_name="HunyuanVideo15Pipeline", mask="prompt_embeds_mask", guides=True,
        asks_sizes=True,
        scales=("vae_scale_factor_temporal", "vae_scale_factor_spatial"),
    ),
}  # fmt: skip
"""By the transformer's class. Cosmos' pipelines insist on a safety model of their own."""


class FamilyPipeline:
    """A pipeline around a streamed transformer.

    Args:
        class_name: of the transformer; one of `KINDS`.
        family: of the transformer.
        model: streamed; called as the transformer is, its `module` answers for the rest.
        dtype: what latents and text are given in.
        scheduler: scheduler_config.json.
        block: pixels per latent voxel (t, h, w), h and w the same.
        experts: where `model` is for high noise only, the one for low noise, streamed, and the
            sigma below which it takes over.
    """

    def __init__(
        self,
        class_name: str,
        *,
        family: Family,
        model: Any,
        dtype: torch.dtype,
        scheduler: Mapping[str, Any],
        block: Triple,
        experts: tuple[Any, float] | None = None,
    ) -> None:
        import diffusers

        self._kind, self._family, self._dtype, self._block = KINDS[class_name], family, dtype, block
        known = getattr(diffusers, str(scheduler["_class_name"]))
        cls = getattr(diffusers, self._kind.class_name)
        self._experts = [_Streamed(model, dtype, family)]
        parts: dict[str, Any] = {
            "transformer": self._experts[0],
            "scheduler": known.from_config(dict(scheduler)),
        }
        if experts is not None:
            second, boundary = experts
            self._experts.append(_Streamed(second, dtype, family))
            parts |= {"transformer_2": self._experts[1], "boundary_ratio": boundary}
        if self._kind.asks_sizes:
            parts["vae"] = _Sizes(family.channels, block)
        self._pipeline: Any = cls(**dict.fromkeys(_required_parts(cls)) | parts)
        for attribute, scale in zip(self._kind.scales, block[:2], strict=True):
            setattr(self._pipeline, attribute, scale)
        self._pipeline.set_progress_bar_config(disable=True)

    @torch.no_grad()
    def latents(
        self,
        noise: Tensor,
        conditioning: Mapping[str, Tensor],
        negative: Mapping[str, Tensor],
        *,
        steps: int,
        guidance_scale: float,
        progress: Progress | None = None,
    ) -> Tensor:
        """From noise [B, C, t, h, w] fp32 to normalised latents of the same shape, fp32.

        Args:
            noise: N(0, 1).
            conditioning: `encoder_hidden_states` [B, L, D], `encoder_attention_mask` [B, L], and
                `pooled_projections` [B, P] and conditions on images where the family takes them.
            negative: the same for the negative prompt.
            steps: model evaluations (twice as many with guidance).
            guidance_scale: 1 or less turns guidance off.
            progress: called after each step with (steps done, in all).
        """
        t, h, w = noise.shape[2:]
        bt, bh, bw = self._block
        for expert in self._experts:
            expert.image = {key: conditioning[key] for key in IMAGE if key in conditioning}
        report: dict[str, Any] = {"callback_on_step_end": _reporting(progress, steps)}
        if self._kind.guides:
            report = {}
            self._pipeline.register_modules(guider=_guider(guidance_scale, progress))
        speed = {"frame_rate": self._family.fps or 25.0} if self._kind.takes_fps else {}
        latents = self._pipeline(
            latents=self._packed(noise), num_frames=(t - 1) * bt + 1, height=h * bh, width=w * bw,
            num_inference_steps=steps, output_type="latent", return_dict=False,
            **self._text(conditioning, ""), **self._guidance(guidance_scale, negative), **speed,
            **report,
        )[0]  # fmt: skip
        return self._unpacked(latents, noise).float()

    def _guidance(self, scale: float, negative: Mapping[str, Tensor]) -> dict[str, Any]:
        """HunyuanVideo's pipeline calls `guidance_scale` what its transformer is told.

        One that was distilled to follow it is sampled without a negative prompt, as published.
        """
        if self._kind.guides:
            return self._text(negative, "negative_")
        if not self._kind.pools:
            return {"guidance_scale": scale, **self._text(negative, "negative_")}
        told = {"guidance_scale": self._family.guidance}
        if self._family.config.get("guidance_embeds"):
            return told
        return told | {"true_cfg_scale": scale, **self._text(negative, "negative_")}

    def _text(self, given: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        text, mask = given[TEXT].to(self._dtype), given[MASK].bool()
        if self._kind.text_length is not None:
            length = self._kind.text_length(self._family.config)
            text, mask = padded(text, length), padded(mask[..., None], length)[..., 0]
        arguments = {f"{prefix}prompt_embeds": text}
        if self._kind.mask is not None:
            arguments[f"{prefix}{self._kind.mask}"] = mask
        if self._kind.pools:
            pooled = given["pooled_projections"].to(self._dtype)
            arguments[f"{prefix}pooled_prompt_embeds"] = pooled
        if self._kind.guides:  # what ByT5 makes of text in quotation marks; there is none
            size = len(text), 1, int(self._family.config["text_embed_2_dim"])
            arguments[f"{prefix}prompt_embeds_2"] = text.new_zeros(size)
            arguments[f"{prefix}prompt_embeds_mask_2"] = text.new_zeros(size[:2])
        return arguments

    def _packed(self, noise: Tensor) -> Tensor:
        if self._kind.layout == "tokens":
            return noise.flatten(2).transpose(1, 2)
        if self._kind.layout == "frames":  # CogVideoX feeds it to the transformer as it is
            return noise.transpose(1, 2).to(self._dtype)
        return noise

    def _unpacked(self, latents: Tensor, noise: Tensor) -> Tensor:
        if self._kind.layout == "tokens":
            return latents.transpose(1, 2).unflatten(2, noise.shape[2:])
        return latents.transpose(1, 2) if self._kind.layout == "frames" else latents


class _Streamed:
    """A streamed model where a pipeline expects its module, with what that does not know of."""

    def __init__(self, model: Any, dtype: torch.dtype, family: Family) -> None:
        self._model, self.dtype, self._family = model, dtype, family
        self.image: dict[str, Tensor] = {}
        """Conditions on first frames, by keyword; Wan's text-to-video pipeline has none."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {key: value.to(self.dtype) for key, value in self.image.items()}
        if (image_latents := given.pop("image_latents", None)) is not None:
            kwargs["hidden_states"] = self._family.with_image(
                kwargs["hidden_states"], image_latents
            )
        return self._model(*args, **kwargs, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.module, name)


def _required_parts(cls: Any) -> list[str]:
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.default is p.empty]


class _Sizes:
    """What a pipeline asks of an autoencoder that it does not call."""

    def __init__(self, channels: int, block: Triple) -> None:
        self.temporal_compression_ratio, self.spatial_compression_ratio = block[:2]
        self.config = SimpleNamespace(latent_channels=channels)


def _guider(scale: float, progress: Progress | None) -> Any:
    """Classifier-free guidance as diffusers' pipelines with guiders have it; reports each step."""
    from diffusers import ClassifierFreeGuidance

    base: Any = ClassifierFreeGuidance

    class Reporting(base):
        def set_state(self, step: int, num_inference_steps: int, timestep: Any) -> None:
            super().set_state(step, num_inference_steps, timestep)
            if progress is not None:
                progress(step + 1, num_inference_steps)

    return Reporting(guidance_scale=max(scale, 1.0))


def _reporting(progress: Progress | None, steps: int) -> Callable[..., dict[str, Any]] | None:
    if progress is None:
        return None

    def report(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        progress(step + 1, steps)
        return tensors

    return report
