"""Each family is called as its diffusers pipeline calls it.

The oracle is the real class, called here the way the pipeline's denoising loop does: latents and
times laid out by explicit loops, and diffusers' own schedulers where time runs differently.
"""

import json
from typing import Any

import pytest
import tiny_diffusers as tiny
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from megaslide.config import TrainConfig
from megaslide.diffusion.objectives import predicted_latents
from megaslide.diffusion.recipes import Recipe
from megaslide.diffusion.samplers import sample_latents, sigma_schedule
from megaslide.errors import InputError
from megaslide.models.network import FamilyDenoiser
from megaslide.models.pretrained import family_of
from megaslide.models.pretrained.families import CogVideoX, Cosmos, centred
from megaslide.models.pretrained.family import padded

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
B, C, T, H, W, L = tiny.B, tiny.C, tiny.T, tiny.H, tiny.W, tiny.L
TEXT = {"encoder_hidden_states": tiny.text(), "encoder_attention_mask": tiny.text_mask()}
SIGMAS = torch.tensor([0.8, 0.15])


@pytest.fixture(autouse=True)
def _resize() -> None:
    tiny.install_resize()


def pair(name: str, **options: float) -> tuple[nn.Module, FamilyDenoiser]:
    """A tiny model, and the same behind the common convention."""
    model = tiny.build(name).eval()
    family = family_of(type(model).__name__)(model.config, **options)
    return model, FamilyDenoiser(family=family, model=model, dtype=torch.float32)


def zeroed(text: Tensor) -> Tensor:
    """The text as a cache holds it: zero where masked."""
    return text * tiny.text_mask()[..., None]


@torch.no_grad()
def call(model: Any, *args: Tensor, **kwargs: Any) -> Tensor:
    out = model(*args, **kwargs)
    return out if isinstance(out, Tensor) else out[0]


def test_wan_pads_text_and_takes_the_timestep_as_it_is() -> None:
    model, denoiser = pair("wan")
    latents = tiny.video()
    text = torch.zeros(B, 512, tiny.TEXT)
    text[:, :L] = zeroed(tiny.text())
    expected = call(model, latents, 1000 * SIGMAS, text, return_dict=False)
    assert torch.equal(call(denoiser, latents, 1000 * SIGMAS, **TEXT), expected)


def test_wans_tokens_take_the_time_of_their_frame() -> None:
    model, denoiser = pair("wan")
    latents, per_frame = tiny.video(), torch.rand(B, T) * 1000
    per_frame[:, 0] = 0
    per_token = torch.empty(B, T * (H // 2) * (W // 2))
    token = 0
    for frame in range(T):
        for _ in range((H // 2) * (W // 2)):
            per_token[:, token] = per_frame[:, frame]
            token += 1
    text = padded(zeroed(tiny.text()), 512)
    expected = call(model, latents, per_token, text, return_dict=False)
    assert torch.equal(call(denoiser, latents, per_frame, **TEXT), expected)
    same = call(denoiser, latents, 1000 * SIGMAS[:, None].expand(B, T), **TEXT)
    torch.testing.assert_close(same, call(denoiser, latents, 1000 * SIGMAS, **TEXT))


def test_ltx_takes_tokens_frame_by_frame_and_positions_in_seconds() -> None:
    model, denoiser = pair("ltx", fps=12.0)
    latents = tiny.video()
    tokens = torch.empty(B, T * H * W, C)
    for t in range(T):
        for h in range(H):
            for w in range(W):
                tokens[:, (t * H + h) * W + w] = latents[:, :, t, h, w]
    output = call(
        model, tokens, zeroed(tiny.text()), 1000 * SIGMAS, tiny.text_mask(), T, H, W,
        (8 / 12, 32, 32), return_dict=False,
    )  # fmt: skip
    got = call(denoiser, latents, 1000 * SIGMAS, **TEXT)
    assert got.shape == latents.shape
    for t, h, w in [(0, 0, 0), (1, 2, 3), (2, 7, 9), (0, 7, 1)]:
        assert torch.equal(got[:, :, t, h, w], output[:, (t * H + h) * W + w])
    other = pair("ltx")[1]
    assert not torch.equal(call(other, latents, 1000 * SIGMAS, **TEXT), got)


def test_ltxs_given_frame_has_time_zero_as_in_image_to_video() -> None:
    """The mask of the pipeline's `prepare_latents` in its denoising loop."""
    from diffusers import LTXImageToVideoPipeline

    model, denoiser = pair("ltx")
    latents, pack = tiny.video(), LTXImageToVideoPipeline._pack_latents
    mask = torch.zeros(B, 1, T, H, W)
    mask[:, :, 0] = 1
    timestep = (1000 * SIGMAS).unsqueeze(-1) * (1 - pack(mask, 1, 1).squeeze(-1))
    expected = call(
        model, pack(latents, 1, 1), zeroed(tiny.text()), timestep, tiny.text_mask(), T, H, W,
        (8 / 25, 32, 32), return_dict=False,
    )  # fmt: skip
    times = 1000 * SIGMAS[:, None].repeat(1, T)
    times[:, 0] = 0
    got = call(denoiser, latents, times, **TEXT)
    assert torch.equal(pack(got, 1, 1), expected)
    assert not torch.allclose(got, call(denoiser, latents, 1000 * SIGMAS, **TEXT))


@pytest.mark.parametrize("edm_sigma", [0.02, 0.7, 5.0, 80.0])
def test_cosmos_predicts_the_x0_of_its_pipeline(edm_sigma: float) -> None:
    model, denoiser = pair("cosmos2")
    x = tiny.video() + edm_sigma * tiny.random(B, C, T, H, W, seed=9)
    t = torch.tensor(edm_sigma / (edm_sigma + 1))
    raw = call(
        model, x * (1 - t), t.expand(B), padded(zeroed(tiny.text()), 512), fps=16,
        padding_mask=torch.zeros(1, 1, 8 * H, 8 * W), return_dict=False,
    )  # fmt: skip
    expected = (1 - t) * x - t * raw
    velocity = call(denoiser, x * (1 - t), 1000 * t.expand(B), **TEXT)
    got = predicted_latents(x * (1 - t), velocity, t.expand(B))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["cosmos2", "cosmos2-v2w"])
def test_cosmos_samples_as_its_pipelines_do(name: str) -> None:
    """Their loops in EDM's terms, with diffusers' scheduler, against our sampler.

    Their guidance adds to the conditional prediction: their 3 is our 4.
    """
    model, denoiser = pair(name, fps=16)
    given = name == "cosmos2-v2w"
    first = tiny.random(B, C, 1, H, W, seed=8)
    scheduler = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    scheduler.register_to_config(sigma_max=80.0, sigma_min=0.002)
    scheduler.set_timesteps(sigmas=torch.linspace(0, 1, 4).tolist())
    scheduler.sigmas[-1] = scheduler.sigmas[-2]
    indicator = torch.zeros(1, 1, T, 1, 1)
    indicator[:, :, 0] = float(given)
    conditioned = first * indicator
    x = 80 * torch.randn((B, C, T, H, W), generator=torch.Generator().manual_seed(5))
    for i, step in enumerate(scheduler.timesteps):
        s = scheduler.sigmas[i]
        t = s / (s + 1)
        options: dict[str, Any] = {"fps": 16, "padding_mask": torch.zeros(1, 1, 1, 1)}
        z, time = x * (1 - t), t.expand(B)
        if given:
            z = indicator * conditioned + (1 - indicator) * z
            time = indicator * (1e-4 / 1.0001) + (1 - indicator) * t
            time = time.expand(B, -1, -1, -1, -1)
            options["condition_mask"] = indicator.expand(B, 1, T, H, W)
        x0 = []
        for text in (zeroed(tiny.text()), zeroed(tiny.text(seed=6))):
            raw = call(model, z, time, padded(text, 512), return_dict=False, **options)
            clean = (1 - t) * x - t * raw
            x0.append(indicator * conditioned + (1 - indicator) * clean)
        guided = x0[0] + 3 * (x0[0] - x0[1])
        x = scheduler.step((x - guided) / s, step, x, return_dict=False)[0]
    values = json.loads(FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True).to_json_string())
    got = sample_latents(
        denoiser, (B, C, T, H, W), guidance_scale=4.0, conditioning=TEXT,
        sigmas=Recipe(train=TrainConfig(), scheduler=values).sampling_sigmas(4, 99),
        negative={**TEXT, "encoder_hidden_states": tiny.text(seed=6)},
        first_frame=first if given else None, generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    frames = slice(1, None) if given else slice(None)
    scale = x.abs().max().item()
    torch.testing.assert_close(got[:, :, frames], x[:, :, frames], rtol=1e-4, atol=1e-4 * scale)
    if given:
        assert torch.equal(got[:, :, :1], first)


def test_cosmos_is_told_which_frames_are_given() -> None:
    model, denoiser = pair("cosmos2-v2w", fps=10.0)
    latents = tiny.video()
    times = SIGMAS[:, None].repeat(1, T)
    times[:, 0] = 0
    condition, per_frame = torch.zeros(B, 1, T, H, W), torch.empty(B, 1, T, 1, 1)
    condition[:, :, 0] = 1
    for b in range(B):
        for t in range(T):
            per_frame[b, 0, t] = 1e-4 / 1.0001 if t == 0 else SIGMAS[b]
    options = {"fps": 10, "padding_mask": torch.zeros(1, 1, 1, 1), "return_dict": False}
    text = padded(zeroed(tiny.text()), 512)
    expected = call(model, latents, per_frame, text, condition_mask=condition, **options)
    got = call(denoiser, latents, 1000 * times, **TEXT)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    expected = call(
        model, latents, SIGMAS, text, condition_mask=torch.zeros_like(condition), **options
    )
    torch.testing.assert_close(call(denoiser, latents, 1000 * SIGMAS, **TEXT), expected)


def test_hunyuan15_gets_absent_conditions_as_its_pipeline_gives_them() -> None:
    model, denoiser = pair("hunyuan1.5")
    latents, config = tiny.video(), model.config
    condition, where = torch.zeros(B, C, T, H, W), torch.zeros(B, 1, T, H, W)
    expected = call(
        model, torch.cat([latents, condition, where], dim=1), 1000 * SIGMAS, zeroed(tiny.text()),
        tiny.text_mask(), encoder_hidden_states_2=torch.zeros(B, 256, config.text_embed_2_dim),
        encoder_attention_mask_2=torch.zeros(B, 256),
        image_embeds=torch.zeros(B, 729, config.image_embed_dim), return_dict=False,
    )  # fmt: skip
    got = call(denoiser, latents, 1000 * SIGMAS, **TEXT)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert got.std() > 1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [({"task_type": "i2v"}, "embeddings of an image"), ({"use_meanflow": True}, "pairs of times"),
     ({"in_channels": C}, "in_channels=4, out_channels=4; 9 are known")],
)  # fmt: skip
def test_other_kinds_of_hunyuan15_are_refused(change: dict[str, Any], words: str) -> None:
    config = {**tiny.MODELS["hunyuan1.5"].config, **change}
    with pytest.raises(InputError, match=words):
        family_of("HunyuanVideo15Transformer3DModel")(config)


def test_hunyuan_gets_its_guidance_times_1000_and_the_pooled_text() -> None:
    model, denoiser = pair("hunyuan", guidance=4.5)
    latents, pooled = tiny.video(), tiny.random(B, tiny.POOLED, seed=2)
    expected = call(
        model, latents, 1000 * SIGMAS, zeroed(tiny.text()), tiny.text_mask(), pooled,
        torch.full((B,), 4500.0), return_dict=False,
    )  # fmt: skip
    got = call(denoiser, latents, 1000 * SIGMAS, pooled_projections=pooled, **TEXT)
    assert torch.equal(got, expected)
    assert denoiser.family.pooled_dim == tiny.POOLED
    assert pair("wan")[1].family.pooled_dim is None


@pytest.mark.parametrize(
    ("name", "frames", "patches"), [("cogvideox-rope", T, 1), ("cogvideox1.5", 4, 2)]
)
def test_cogvideox_puts_frames_first_and_makes_the_rotary_table(
    name: str, frames: int, patches: int
) -> None:
    model, denoiser = pair(name)
    latents = tiny.random(B, C, frames, H, W)
    slices: dict[str, Any] = {"grid_type": "slice", "max_size": (H // 2, W // 2)}
    rope = tiny.rotary(16, frames // patches, **(slices if patches > 1 else {}))
    frames_first = torch.stack([latents[:, :, t] for t in range(frames)], dim=1)
    text, mask = tiny.text(6, 8), torch.ones(B, 6)
    expected = call(
        model, frames_first, padded(text, 8), torch.tensor([800, 150]), image_rotary_emb=rope,
        return_dict=False,
    )  # fmt: skip
    got = call(
        denoiser, latents, 1000 * SIGMAS, encoder_hidden_states=text, encoder_attention_mask=mask
    )
    for t in range(frames):
        assert torch.equal(got[:, :, t], expected[:, t])
    assert denoiser.family.patch_size == (patches, 2, 2)


def test_cogvideox_centres_another_aspect_in_its_training_grid() -> None:
    assert centred((16, 16), (30, 45)) == ((0, 8), (30, 38))
    assert centred((10, 45), (30, 45)) == ((10, 0), (20, 45))
    assert centred((30, 45), (30, 45)) == ((0, 0), (30, 45))


def test_mochi_is_integrated_as_its_own_scheduler_does() -> None:
    """The pipeline's loop, with the raw model and inverted sigmas, against our sampler."""
    model, denoiser = pair("mochi")
    text, mask = padded(zeroed(tiny.text()), 16), torch.zeros(B, 16, dtype=torch.bool)
    mask[:, :L] = tiny.text_mask().bool()
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    scheduler.set_begin_index(0)
    shape = (B, C, T, H, W)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    for t in scheduler.timesteps:
        out = call(model, latents, text, t.expand(B), mask, return_dict=False)
        latents = scheduler.step(out, t, latents, return_dict=False)[0]
    got = sample_latents(
        denoiser, shape, sigmas=sigma_schedule(4, 1.0), guidance_scale=1.0, conditioning=TEXT,
        generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    torch.testing.assert_close(got, latents, rtol=1e-5, atol=1e-5)


def test_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens; the model takes up to 8"):
        padded(torch.zeros(1, 9, 2), 8)


def test_variants_that_need_other_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="16 channels are a condition on images"):
        CogVideoX({"in_channels": 32, "out_channels": 16})
    with pytest.raises(InputError, match="Cosmos 1"):
        Cosmos({"in_channels": 16, "out_channels": 16, "extra_pos_embed_type": "learnable"})
    with pytest.raises(InputError, match="'token_replace' is image-to-video"):
        family_of("HunyuanVideoTransformer3DModel")(tiny.MODELS["hunyuan-token-replace"].config)
    with pytest.raises(InputError, match="LatteTransformer3DModel: how this family is trained"):
        family_of("LatteTransformer3DModel")


def test_cosmos_without_torchvision_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from diffusers.models.transformers import transformer_cosmos

    monkeypatch.delattr(transformer_cosmos, "transforms")
    with pytest.raises(ImportError, match="pip install torchvision"):
        pair("cosmos2")
