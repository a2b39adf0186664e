"""Prompts to files, with a stand-in codec and text encoder whose results can be written down."""

import itertools
import json
import math
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from torch import Tensor

from megaslide.config import CodecConfig, SampleConfig, TextConfig
from megaslide.data.codecs import build_codec
from megaslide.data.samples import save_samples, slug, to_frames
from megaslide.data.text import build_text_encoder
from megaslide.diffusion.samplers import sigma_schedule
from megaslide.sampling import generate, prompt_generator

BUCKET = (4, 16, 24)


class PixelShuffleCodec:
    """4x4 pixels of one channel per latent voxel, repeated over RGB."""

    channels = 16

    def latent_shape(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        return size[0], size[1] // 4, size[2] // 4

    def decode(self, latents: Tensor, frames: int | None = None) -> Tensor:
        b, _, t, h, w = latents.shape
        grid = latents.view(b, 4, 4, t, h, w).permute(0, 3, 4, 1, 5, 2)
        return grid.reshape(b, 1, t, 4 * h, 4 * w).expand(-1, 3, -1, -1, -1)[:, :, :frames]

    def close(self) -> None:
        pass


class LengthEncoder:
    """An embedding that is the caption's length, one token per word and padding."""

    dim = 8

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        self.calls.append(captions)
        lengths = torch.tensor([max(1, len(c.split())) for c in captions])
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        values = torch.tensor([float(len(c)) for c in captions])
        return values.view(-1, 1, 1) * mask[..., None] * torch.ones(self.dim), mask

    def pooled(self, captions: list[str]) -> None:
        return None

    def close(self) -> None:
        pass


class Model:
    """Moves latents by the mean of the valid tokens plus their number."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
    ) -> Tensor:
        self.rows.append(len(hidden_states))
        valid = encoder_attention_mask[..., None]
        text = (encoder_hidden_states * valid).sum((1, 2)) / valid.sum((1, 2)) / 8
        text = text + valid.sum((1, 2))
        return 0.5 * hidden_states - text.view(-1, 1, 1, 1, 1) / 50


def sample(prompts: list[str], **changes: object) -> list[np.ndarray]:
    settings = SampleConfig(num_inference_steps=3, guidance_scale=2.0, seed=11)
    arguments = {"bucket": BUCKET, "settings": settings, "device": "cpu"}
    arguments |= {"sigmas": sigma_schedule(3, 2.0), **changes}
    return generate(Model(), PixelShuffleCodec(), LengthEncoder(), prompts, **arguments)


def test_clips_have_the_bucket_and_the_value_of_the_euler_integral() -> None:
    frames = sample(["a red car", "two"])
    assert [clip.shape for clip in frames] == [(*BUCKET, 3)] * 2
    assert {clip.dtype for clip in frames} == {np.dtype(np.uint8)}
    for index, positive, empty in [(0, 9 + 3, 0 + 1), (1, 3 + 1, 0 + 1)]:
        latents = torch.randn((1, 16, 4, 4, 6), generator=prompt_generator(11, index)).double()
        for now, after in itertools.pairwise(2 * u / (1 + u) for u in (1, 2 / 3, 1 / 3, 0)):
            text = empty + 2 * (positive - empty)
            latents = latents + (after - now) * (0.5 * latents - text / 50)
        pixels = PixelShuffleCodec().decode(latents)[0].permute(1, 2, 3, 0).numpy()
        expected = np.clip(np.floor((pixels + 1) * 127.5 + 0.5), 0, 255)
        difference = np.abs(frames[index].astype(int) - expected)
        assert difference.max() <= 1
        assert (difference == 0).mean() > 0.999


def test_a_perfect_velocity_brings_back_the_clip_through_the_real_codec() -> None:
    """v = (x − x0)/sigma points at x0 from everywhere, so any schedule must end in the clip."""
    codec = build_codec(CodecConfig(name="dct", block="1x8x8", channels=192))
    clip = moving_square(200)
    pixels = torch.from_numpy(clip).permute(3, 0, 1, 2)[None] / 127.5 - 1
    x0 = codec.encode(pixels)

    def perfect(hidden_states: Tensor, timestep: Tensor, **text: Tensor) -> Tensor:
        assert text["encoder_hidden_states"].shape[0] == len(hidden_states)
        return (hidden_states - x0) / (timestep / 1000).view(-1, 1, 1, 1, 1)

    [frames] = generate(
        perfect, codec, build_text_encoder(TextConfig()), ["a square"], bucket=(5, 32, 48),
        settings=SampleConfig(num_inference_steps=4, guidance_scale=3), device="cpu",
        sigmas=sigma_schedule(4, 3.0),
    )  # fmt: skip
    assert np.abs(frames.astype(int) - clip).max() <= 1


def test_a_sample_depends_on_its_seed_and_position_only() -> None:
    prompts = ["one", "a much longer caption", "three", "four", "five"]
    together = sample(prompts, batch_size=5)
    for size in (1, 2):
        for a, b in zip(together, sample(prompts, batch_size=size), strict=True):
            assert np.abs(a.astype(int) - b).max() <= 1
    changed = sample([prompts[0], prompts[1], "another caption here", *prompts[3:]])
    assert np.abs(changed[1].astype(int) - together[1]).max() <= 1
    assert np.abs(changed[2].astype(int) - together[2]).max() > 1
    torch.manual_seed(5)
    for a, b in zip(together, sample(prompts, batch_size=5), strict=True):
        assert np.array_equal(a, b)
    twice = sample(["same", "same"])
    assert not np.array_equal(*twice)


def test_seeds_do_not_collide_and_may_be_negative() -> None:
    draws = {
        torch.rand(1, generator=prompt_generator(seed, index)).item()
        for seed in (-1, 0, 1, 2)
        for index in range(4)
    }
    assert len(draws) == 16


def test_the_prompts_of_a_batch_share_each_pass_over_the_weights() -> None:
    model, encoder, seen = Model(), LengthEncoder(), []
    settings = SampleConfig(num_inference_steps=3, guidance_scale=2.0)
    generate(
        model, PixelShuffleCodec(), encoder, ["a", "b c", "d"], bucket=BUCKET, settings=settings,
        sigmas=sigma_schedule(3, 1.0), device="cpu", batch_size=2, negative_prompt="blurry",
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert model.rows == [4, 4, 4, 2, 2, 2]
    assert encoder.calls == [["a", "b c", "d", "blurry"]]
    assert seen == [(step, 6) for step in range(1, 7)]


def test_frames_are_rounded_to_nearest_and_clamped() -> None:
    levels = torch.tensor([0, 1, 100, 254, 255]).float()
    pixels = (levels / 127.5 - 1 + torch.tensor([-3, 0.003, -0.003, 0.003, 3])).view(1, 1, 1, 5)
    frames = to_frames(pixels.expand(3, -1, -1, -1))
    assert frames.shape == (1, 1, 5, 3)
    assert frames[0, 0, :, 0].tolist() == [0, 1, 100, 254, 255]


def test_a_clip_that_is_not_finite_is_refused() -> None:
    class Broken(PixelShuffleCodec):
        def decode(self, latents: Tensor, frames: int | None = None) -> Tensor:
            return super().decode(latents, frames) * math.inf

    with pytest.raises(RuntimeError, match="'a cat' has values that are not finite"):
        generate(
            Model(), Broken(), LengthEncoder(), ["a cat"], bucket=BUCKET,
            settings=SampleConfig(num_inference_steps=1), sigmas=sigma_schedule(1, 1.0),
            device="cpu",
        )  # fmt: skip


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        sample([])
    with pytest.raises(ValueError, match="batch_size=0"):
        sample(["a"], batch_size=0)
    with pytest.raises(ValueError, match="1 clips for 2 prompts"):
        save_samples([np.zeros((1, 16, 16, 3), np.uint8)], ["a", "b"], Path("unused"), 8.0)


# --- files ------------------------------------------------------------------------------------


def moving_square(level: int) -> np.ndarray:
    clip = np.full((5, 32, 48, 3), 30, np.uint8)
    for t in range(5):
        clip[t, 8:24, 4 + 6 * t : 20 + 6 * t] = level
    return clip


def read_back(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def test_samples_become_videos_a_sheet_and_a_record(tmp_path: Path) -> None:
    prompts = ["A red/blue  car, 50% faster!", "", "café 数字 7"]
    clips = [moving_square(level) for level in (120, 200, 250)]
    settings = SampleConfig(seed=3, guidance_scale=2.5)
    paths = save_samples(clips, prompts, tmp_path / "new" / "samples", 8.0, settings)
    folder = tmp_path / "new" / "samples"
    assert [path.name for path in paths] == [
        "00_a-red-blue-car-50-faster.mp4", "01_empty.mp4", "02_café-数字-7.mp4",
    ]  # fmt: skip
    expected = {*(path.name for path in paths), "contact_sheet.png", "prompts.json"}
    assert {path.name for path in folder.iterdir()} == expected
    for path, clip in zip(paths, clips, strict=True):
        assert np.abs(read_back(path).astype(int) - clip).mean() < 4
    record = json.loads((folder / "prompts.json").read_text())
    assert [entry["prompt"] for entry in record["samples"]] == prompts
    assert [entry["file"] for entry in record["samples"]] == [path.name for path in paths]
    assert record["samples"][0]["size"] == [5, 32, 48]
    assert record["settings"]["seed"] == 3
    assert record["fps"] == 8.0


def test_a_failed_write_leaves_the_old_file_and_no_fragment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [old] = save_samples([moving_square(90)], ["x"], tmp_path, 8.0)
    before = old.read_bytes()

    def fails_halfway(path: Path, frames: np.ndarray, fps: float) -> Path:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("megaslide.data.samples.write_video", fails_halfway)
    with pytest.raises(OSError, match="disk full"):
        save_samples([moving_square(200)], ["x"], tmp_path, 8.0)
    assert old.read_bytes() == before
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("prompt", ["x" * 400, "../../etc/passwd", "a\nb\0c", "数" * 300])
def test_slugs_are_safe_and_short(prompt: str) -> None:
    name = f"00_{slug(prompt)}.mp4"
    assert len(f".partial-{name}".encode()) <= 255
    assert not set(name) & set("/\\\0\n")
    assert ".." not in name
