"""One convention for all families of pretrained transformers, and what a family says of itself.

The rest of the package trains and samples a velocity: `model(x_sigma, 1000·sigma, text, mask)`
returns an estimate of e − x0 at x_sigma = (1 − sigma)·x0 + sigma·e, or for CogVideoX its own v, all
in [B, C, T, H, W]. A family turns that call into its transformer's: the layout of the latents, what
it takes for time, the length of its text, and its other arguments.

Shapes: B batch, C T H W latents, L text tokens of D channels, N video tokens after patching.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from megaslide.config import Triple
from megaslide.errors import InputError

Arguments = dict[str, Any]
NUM_TRAIN_TIMESTEPS = 1000


class Family:
    """The convention of most: latents as they are, time as 1000·sigma, no extra arguments.

    Args:
        config: the transformer's config.json.
        fps: frame rate of the clips, for families whose positions are in seconds; None takes what
            the family's pipeline assumes.
        guidance: the guidance scale told to families that take one as an input.

    Raises:
        InputError: a variant of the family that needs inputs nobody gives it here.
    """

    def __init__(
        self, config: Mapping[str, Any], *, fps: float | None = None, guidance: float = 1.0
    ) -> None:
        self.config, self.fps, self.guidance = config, fps, guidance
        self._check()

    @property
    def takes_first_frame(self) -> bool:
        """Whether timesteps may differ from frame to frame, so that the first can stay clean."""
        return False

    @property
    def channels(self) -> int:
        """Latent channels C."""
        return int(self.config["in_channels"])

    @property
    def text_dim(self) -> int:
        """Channels D of the text embeddings."""
        return int(self.config["text_embed_dim"])

    @property
    def pooled_dim(self) -> int | None:
        """Channels P of `pooled_projections` [B, P] among the conditioning; None: there are none"""
        return None

    @property
    def image(self) -> str:
        """What it is given of the first frame, as `data.image.name` has it: `none`, `latents` or
        `encoder`."""
        return "none"

    @property
    def image_dim(self) -> int | None:
        """Channels of the embedding of an image; None where it takes none."""
        return None

    def conditions(self, latents: Triple) -> dict[str, tuple[int, ...]]:
        """Shapes, without the batch axis, of what it takes besides text, by keyword.

        Args:
            latents: (T, H, W) of the clip.
        """
        return {}

    def with_image(self, latents: Tensor, image_latents: Tensor) -> Tensor:
        """Its input: [B, C, T, H, W] with those of the first frame and grey ones after it."""
        raise NotImplementedError

    @property
    def patch_size(self) -> Triple:
        """Latent voxels per token (t, h, w)."""
        size = self.config.get("patch_size", 1)
        if isinstance(size, int):
            return self.config.get("patch_size_t") or 1, size, size
        t, h, w = size
        return t, h, w

    def arguments(self, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Arguments:
        """Keyword arguments of the transformer.

        Args:
            latents: [B, C, T, H, W], in the model's dtype.
            timestep: 1000·sigma, fp32 [B], or [B, T] where the family takes it per frame.
            text: [B, L, D], in the model's dtype, zero where masked.
            mask: bool [B, L].
        """
        raise NotImplementedError

    def prediction(self, output: Tensor, latents: Tensor) -> Tensor:
        """The transformer's output in the common convention, [B, C, T, H, W]."""
        return output

    def _per_token(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """[B, T] to [B, N]: tokens lie frame by frame, and a token takes its first frame's time.

        One time per sample, [B], stays as it is.
        """
        if timestep.ndim == 1:
            return timestep
        t, h, w = self.patch_size
        in_frame = (latents.shape[3] // h) * (latents.shape[4] // w)
        return timestep[:, ::t].repeat_interleave(in_frame, dim=1)

    def _check(self) -> None:
        given = int(self.config["in_channels"])
        predicted = int(self.config.get("out_channels") or given)
        if given != predicted:
            raise InputError(
                f"{type(self).__name__} with in_channels={given}, out_channels={predicted}: its "
                f"other {given - predicted} channels are a condition on images",
                "give the text-to-video model of the family",
            )


def padded(text: Tensor, length: int) -> Tensor:
    """[B, L, D] with zeros up to `length` tokens.

    Raises:
        ValueError: the text is longer than that.
    """
    if text.shape[1] > length:
        raise ValueError(f"text has {text.shape[1]} tokens; the model takes up to {length}")
    return functional.pad(text, (0, 0, 0, length - text.shape[1]))
