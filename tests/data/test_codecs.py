"""The codecs against scipy's DCT, and what they keep of real footage."""

import hashlib
import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.fft import dctn

from megaslide.config import CodecConfig, Triple
from megaslide.data.codecs import (
    LAW,
    WHITENING,
    BlockCodec,
    build_codec,
    channel_order,
    dct_codec,
    pixel_codec,
)
from megaslide.data.footage import footage_path
from megaslide.data.sprites import sprite_clip
from megaslide.data.video import read_clip
from megaslide.errors import InputError

BLOCKS = [(1, 8, 8), (4, 8, 8), (1, 4, 4), (4, 4, 4), (2, 8, 4), (3, 5, 2)]


def random_bytes(size: Triple, *, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, 3, *size), generator=generator, dtype=torch.uint8)


def to_pixels(frames: torch.Tensor) -> torch.Tensor:
    return frames.float() / 127.5 - 1


def to_bytes(pixels: torch.Tensor) -> torch.Tensor:
    return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(10 * torch.log10(4 / (a - b).square().mean()))


@lru_cache
def film(name: str, height: int, start: int) -> torch.Tensor:
    """Real footage, `[1, 3, T, H, W]` in [-1, 1]."""
    frames = read_clip(footage_path(name), start=start, frames=17)
    width = round(frames.shape[2] * height / frames.shape[1] / 8) * 8
    method = Image.Resampling.BICUBIC
    small = [np.asarray(Image.fromarray(frame).resize((width, height), method)) for frame in frames]
    return to_pixels(torch.from_numpy(np.stack(small)).permute(3, 0, 1, 2)[None])


@pytest.mark.parametrize("block", BLOCKS)
def test_full_band_is_exact_to_the_last_grey_level(block: Triple) -> None:
    bt, bh, bw = block
    frames = random_bytes((2 * bt + 1, 3 * bh, 2 * bw), batch=2)
    for codec in (dct_codec(block, 3 * math.prod(block)), pixel_codec(block)):
        latents = codec.encode(to_pixels(frames))
        assert latents.shape == (2, codec.channels, *codec.latent_shape(frames.shape[2:]))
        assert latents.dtype == torch.float32
        assert torch.equal(to_bytes(codec.decode(latents)), frames)


@pytest.mark.parametrize("block", BLOCKS)
def test_coefficients_are_scipys(block: Triple) -> None:
    codec = dct_codec(block, 3 * math.prod(block))
    pixels = to_pixels(random_bytes((1, block[1], block[2])))
    repeated = pixels[0].numpy().astype(np.float64).repeat(block[0], axis=1)  # frame 0, bt times
    root = np.sqrt
    colours = [
        repeated.sum(0) / root(3),
        (repeated[0] - repeated[2]) / root(2),
        (2 * repeated[1] - repeated[0] - repeated[2]) / root(6),
    ]
    expected = np.stack([dctn(plane, norm="ortho") for plane in colours]).ravel()
    std = LAW.std(block).flatten()
    order = channel_order(LAW.std(block))
    mean = torch.zeros(3, *block, dtype=torch.float64)
    mean[:, 0, 0, 0] = torch.tensor(LAW.mean) * math.sqrt(math.prod(block))
    top = np.sort(std.numpy())[::-1][:48]
    scale = std**0.4 * math.sqrt((top**1.2).mean())
    expected = (torch.from_numpy(expected) - mean.flatten()) / scale
    latents = codec.encode(pixels)[0, :, 0, 0, 0].double()
    torch.testing.assert_close(latents, expected[order], atol=1e-4, rtol=1e-4)


def test_dropped_channels_lose_exactly_their_own_energy() -> None:
    frames = random_bytes((1, 16, 16))
    full, part = dct_codec((1, 8, 8), 192), dct_codec((1, 8, 8), 48)
    latents = full.encode(to_pixels(frames))
    torch.testing.assert_close(part.encode(to_pixels(frames)), latents[:, :48])
    error = part.decode(latents[:, :48]) - to_pixels(frames)
    scale = full._std[48:]
    lost = (latents[:, 48:] * scale[:, None, None, None]).square().sum()
    torch.testing.assert_close(error.square().sum(), lost, rtol=1e-4, atol=0)


def test_order_starts_with_luma_and_is_fixed() -> None:
    std = LAW.std((1, 8, 8))
    order = channel_order(std)
    assert sorted(order.tolist()) == list(range(192))
    assert order[0] == 0
    assert bool((std.flatten()[order].diff() <= 1e-5).all())
    where = [tuple(int(i) for i in np.unravel_index(int(n), (3, 1, 8, 8))) for n in order[:6]]
    assert set(where) == {
        (0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1),
    }  # fmt: skip


def test_changed_normalisation_needs_a_new_version() -> None:
    """Caches hold latents of one version: on failure raise BlockCodec.version, then this digest."""
    digest = hashlib.sha256(repr((LAW, WHITENING)).encode()).hexdigest()[:12]
    assert (BlockCodec.version, digest) == (2, "7aea7b9f3717")


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_causal_frames(frames: int) -> None:
    codec = dct_codec((4, 8, 8), 768)
    pixels = to_pixels(random_bytes((frames, 16, 8)))
    latents = codec.encode(pixels)
    assert latents.shape[2] == (frames - 1) // 4 + 1
    assert codec.latent_shape((frames, 16, 8)) == (latents.shape[2], 2, 1)
    torch.testing.assert_close(codec.decode(latents, frames), pixels, atol=1e-5, rtol=0)
    order = channel_order(LAW.std((4, 8, 8)))
    moving = torch.from_numpy(np.unravel_index(order.numpy(), (3, 4, 8, 8))[1].copy()) > 0
    assert latents[0, moving, 0].abs().max() < 1e-4  # the first latent frame is a still image
    later = to_pixels(random_bytes((frames, 16, 8)))
    later[:, :, 0] = -1.0
    if frames > 1:  # frame 0 alone decides the first latent frame
        torch.testing.assert_close(codec.encode(later)[:, :, 1:], latents[:, :, 1:])


def test_wrong_sizes_are_refused_with_the_rule() -> None:
    codec = dct_codec((4, 8, 8), 48)
    for size in [(8, 64, 64), (5, 60, 64), (5, 64, 12)]:
        with pytest.raises(ValueError, match="4n\\+1 frames, height a multiple of 8"):
            codec.latent_shape(size)
        with pytest.raises(ValueError, match="does not divide"):
            codec.encode(torch.zeros(1, 3, *size))
    latents = torch.zeros(1, 48, 2, 8, 8)
    with pytest.raises(ValueError, match="2 latent frames are 5 frames, not 8"):
        codec.decode(latents, 8)
    with pytest.raises(ValueError, match=r"need \[B, 48, t, h, w\]"):
        codec.decode(latents[:, :16])


def test_wrong_pixels_are_refused() -> None:
    codec = dct_codec((1, 8, 8), 48)
    frames = random_bytes((1, 8, 8))
    with pytest.raises(ValueError, match="uint8"):
        codec.encode(frames)
    with pytest.raises(ValueError, match=r"reach from .* to 2[0-9][0-9]; need \[-1, 1\]"):
        codec.encode(frames.float())
    with pytest.raises(ValueError, match="need float"):
        codec.encode(torch.zeros(3, 1, 8, 8))


@pytest.mark.parametrize(
    ("block", "patch", "size", "fitted"),
    [
        ((1, 8, 8), (1, 2, 2), (8, 65, 64), (8, 64, 64)),
        ((1, 8, 8), (1, 2, 2), (8, 72, 90), (8, 64, 80)),
        ((1, 8, 8), (2, 1, 1), (9, 64, 64), (8, 64, 64)),
        ((4, 8, 8), (1, 2, 2), (8, 64, 64), (5, 64, 64)),
        ((4, 8, 8), (1, 2, 2), (9, 64, 64), (9, 64, 64)),
        ((4, 8, 8), (2, 1, 1), (13, 64, 64), (13, 64, 64)),
        ((4, 8, 8), (2, 1, 1), (12, 64, 64), (5, 64, 64)),
    ],
)
def test_fit_size(block: Triple, patch: Triple, size: Triple, fitted: Triple) -> None:
    codec = dct_codec(block, 16)
    assert codec.fit_size(size, patch) == fitted
    latent = codec.latent_shape(fitted)
    assert all(n % p == 0 for n, p in zip(latent, patch, strict=True))
    with pytest.raises(InputError, match="smaller than one patch"):
        codec.fit_size((1, 8 * patch[1], 8 * patch[2] - 1), patch)


@pytest.mark.parametrize(
    ("block", "channels", "floor"),
    [((1, 8, 8), 48, 30.0), ((4, 8, 8), 48, 25.0), ((1, 4, 4), 24, 33.0)],
)
@pytest.mark.parametrize("name", ["bikes.mp4", "bigbuckbunny.mp4"])
def test_real_footage_survives(name: str, block: Triple, channels: int, floor: float) -> None:
    pixels = film(name, 128, 80)
    codec = dct_codec(block, channels)
    measured = psnr(codec.decode(codec.encode(pixels), 17).clamp(-1, 1), pixels)
    assert measured > floor, f"{name}: {measured:.1f} dB"
    more = dct_codec(block, channels + 24)
    assert psnr(more.decode(more.encode(pixels)), pixels) > measured


@pytest.mark.parametrize("block", [(1, 8, 8), (4, 8, 8)])
def test_latents_have_about_unit_variance(block: Triple) -> None:
    codec = dct_codec(block, 48)
    sprites = [sprite_clip(frames=17, size=(64, 64), seed=5, index=i).frames for i in range(8)]
    drawn = to_pixels(torch.from_numpy(np.stack(sprites)).permute(0, 4, 1, 2, 3))
    groups = [film("bikes.mp4", 128, 80), film("bigbuckbunny.mp4", 128, 80), drawn]
    squares = torch.stack([codec.encode(g).square().mean((0, 2, 3, 4)) for g in groups])  # [3, C]
    per_channel = squares.mean(0).sqrt()
    assert 0.7 < float(per_channel.square().mean().sqrt()) < 1.4
    assert float(per_channel.min()) > 0.1
    assert float(per_channel.max()) < 4


def test_pixel_codec_only_rearranges() -> None:
    codec = pixel_codec((1, 2, 2))
    pixels = to_pixels(random_bytes((2, 4, 6)))
    latents = codec.encode(pixels)
    assert latents.shape == (1, 12, 2, 2, 3)
    plain = codec._mean[0] + codec._std[0] * latents
    torch.testing.assert_close(plain[0, 0, 1, 1, 2], pixels[0, 0, 1, 2, 4])
    torch.testing.assert_close(plain[0, 7, 1, 1, 2], pixels[0, 1, 1, 3, 5])


def test_build_codec() -> None:
    assert build_codec(CodecConfig()).settings()["channels"] == 48
    assert build_codec(CodecConfig(name="pixel", block="1x4x4")).channels == 48
    with pytest.raises(InputError, match=r"channels=193: a .1, 8, 8. block has 1 to 192"):
        build_codec(CodecConfig(channels=193))
