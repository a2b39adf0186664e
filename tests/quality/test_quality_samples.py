"""The numbers about samples tell true clips from clips that break one law each."""

import torch

from benchmarks.quality.samples import Lawfulness, brightest_squares, lawfulness
from benchmarks.quality.worlds import WORLDS, draw

CLIPS = draw(WORLDS["base"], 24, torch.Generator().manual_seed(1))
ENERGY = CLIPS.latents.square().mean().item()
TRUE = lawfulness(CLIPS.latents, ENERGY)


def measured(latents: torch.Tensor) -> Lawfulness:
    return lawfulness(latents, ENERGY)


def test_squares_lie_on_the_sprites() -> None:
    position, _ = brightest_squares(CLIPS.latents)
    assert (position - CLIPS.corner).abs().mean() < 0.3  # textures are not equally bright
    assert TRUE.gathered > 0.85
    assert TRUE.identity > 0.9
    assert TRUE.path < 0.3


def test_noise_keeps_no_law() -> None:
    noise = torch.randn(CLIPS.latents.shape, generator=torch.Generator().manual_seed(2))
    assert measured(noise).gathered < 0.3
    assert abs(measured(noise).identity) < 0.1


def test_frames_in_another_order_leave_the_path_alone() -> None:
    shuffled = measured(CLIPS.latents[:, :, [0, 3, 1, 4, 2, 5]])
    assert shuffled.path > 3 * TRUE.path
    assert shuffled.gathered == TRUE.gathered or abs(shuffled.gathered - TRUE.gathered) < 1e-5


def test_another_sprite_in_every_frame_is_not_the_same() -> None:
    stranger = CLIPS.latents.roll(1, 0)
    mixed = CLIPS.latents.clone()
    mixed[:, :, 1::2] = stranger[:, :, 1::2]
    assert measured(mixed).identity < 0.3


def test_a_faint_clip_has_little_energy() -> None:
    faint = measured(0.5 * CLIPS.latents)
    assert abs(faint.energy - 0.25) < 1e-5
    assert abs(faint.identity - TRUE.identity) < 1e-5
