"""The main promise on the real model: streamed VideoDiT training is plain PyTorch training.

Twenty steps with torch.optim.AdamW and clip_grad_norm_ as the oracle, for every attention kind,
with flow matching on moving inputs, random copy delays and poisoned memory.
"""

import pytest
import torch
from plain_adamw import PlainAdamW

from megaslide.config import AttentionConfig, ModelConfig
from megaslide.diffusion.objectives import FlowMatching
from megaslide.models.dit import VideoDiT, build_model
from megaslide.streaming import StreamedModel, TransferHooks, stream

KINDS = ("deformable", "neighborhood", "swin", "dense")
STEPS, BATCH = 20, 4


def build(kind: str) -> VideoDiT:
    torch.manual_seed(0)
    model = build_model(
        ModelConfig(hidden_size=32, num_layers=3, num_attention_heads=2, patch_size=(1, 1, 1)),
        AttentionConfig(kind=kind, num_register_tokens=2),
        in_channels=4,
        text_dim=8,
    )
    with torch.no_grad():  # leave the zero-initialised point, where much has no gradient yet
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def run(model: VideoDiT | StreamedModel, step: object) -> list[float]:
    """Losses of STEPS steps on data that depends on the seed only."""
    objective, g, losses = FlowMatching(), torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        latents = torch.randn(BATCH, 4, 3, 4, 5, generator=g)
        noise = torch.randn(latents.shape, generator=g)
        sigmas = objective.sample_sigmas(BATCH, g)
        text = torch.randn(BATCH, 6, 8, generator=g)
        mask = torch.rand(BATCH, 6, generator=g) > 0.3
        mask[:, 0] = True
        loss, _ = objective.loss(
            model, latents, noise, sigmas, encoder_hidden_states=text, encoder_attention_mask=mask
        )
        loss.backward()
        step()  # type: ignore[operator]
        losses.append(loss.item())
    return losses


def train_plain(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(kind)
    optimizer = PlainAdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run(model, step), {k: v.detach() for k, v in model.named_parameters()}


def train_streamed(kind: str, **options: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    hooks = TransferHooks(max_delay_s=0.001, seed=5, poison=True)
    streamed = stream(build(kind), lr=1e-3, hooks=hooks, **options)  # type: ignore[arg-type]
    losses = run(streamed, streamed.step)
    weights = streamed.state_dict()
    streamed.close()
    return losses, weights


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_equal_plain_pytorch(kind: str) -> None:
    losses, weights = train_plain(kind)
    streamed_losses, streamed_weights = train_streamed(kind)
    assert streamed_losses == losses
    for name, expected in weights.items():
        error = (streamed_weights[name] - expected).abs().max() / expected.abs().max()
        assert error <= 1e-6, f"{name}: {error:.1e}"


@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal_across_slots_and_close_across_micro_batches(kind: str) -> None:
    losses, weights = train_streamed(kind, micro_batch_size=2)
    for slots in (3, 4):
        again, same = train_streamed(kind, micro_batch_size=2, slots=slots)
        assert again == losses
        assert all(torch.equal(same[name], weights[name]) for name in weights)
    whole, _ = train_streamed(kind)
    assert whole == pytest.approx(losses, rel=2e-5)


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 3}])
def test_chunks_of_frames_differ_only_by_summation_order(options: dict[str, int]) -> None:
    losses, _ = train_plain("deformable")
    found, weights = train_streamed("deformable", frames_per_chunk=2, **options)
    assert found[:6] == pytest.approx(losses[:6], rel=1e-6)
    assert found == pytest.approx(losses, rel=2e-5)
    again, same = train_streamed("deformable", frames_per_chunk=2, slots=3, **options)
    assert again == found
    assert all(torch.equal(same[name], weights[name]) for name in weights)
