"""The study's synthetic videos move as they say, and its offsets are read as they lie."""

import pytest
import torch
from torch import Tensor

from benchmarks.quality.arms import BASE
from benchmarks.quality.offsets import measure_offsets
from benchmarks.quality.worlds import SIDE, WORLDS, Clips, World, draw
from megaslide.models.dit import VideoDiT, VideoDiTConfig

WIDE = World(name="wide", height=30, width=30)


def clips_of(world: World, batch: int = 16) -> Clips:
    return draw(world, batch, torch.Generator().manual_seed(3))


def test_sprite_lies_where_its_corner_says() -> None:
    clips = clips_of(WORLDS["base"])
    rows, columns = torch.arange(10.0)[:, None], torch.arange(10.0)[None]
    weight = clips.mask / clips.mask.sum((2, 3), keepdim=True)
    centroid = torch.stack([(weight * rows).sum((2, 3)), (weight * columns).sum((2, 3))], -1)
    torch.testing.assert_close(centroid, clips.corner + (SIDE - 1) / 2, atol=1e-4, rtol=0)


def test_speed_is_the_worlds_and_walls_hold() -> None:
    clips = clips_of(WORLDS["base"], 64)
    speed = clips.velocity.norm(dim=-1)[clips.steady]
    assert speed.min() > 1.0 - 1e-4
    assert speed.max() < 2.25 + 1e-4
    assert clips.corner.min() >= 0
    assert clips.corner.max() <= 10 - SIDE + 1e-5


def test_texture_travels_with_the_sprite_and_background_stays() -> None:
    clips = clips_of(World(name="still", speed=(0.0, 0.0)))
    assert torch.equal(clips.latents[:, :, 0], clips.latents[:, :, -1])
    moving = clips_of(WORLDS["textured"])
    assert moving.latents[:, :, 0, 0, 0].std() > 0.2
    bare = (moving.mask == 0).all(1, keepdim=True)[:, None].expand_as(moving.latents)
    over_time = moving.latents - moving.latents[:, :, :1]
    assert over_time[bare].abs().max() == 0
    assert over_time[~bare].abs().max() > 1


def test_cut_replaces_everything_in_the_middle() -> None:
    clips = clips_of(World(name="cut", cut=True, background=1.0))
    change = clips.latents.diff(dim=2).abs().mean((0, 1, 3, 4))  # [T-1]
    assert change.argmax() == 2
    assert change[2] > 3 * change[1]
    assert not clips.steady[:, 1:3].any()


def test_crossing_sprites_meet_in_the_middle() -> None:
    # Large, so that no wall sends a sprite back over cells it has covered.
    world = World(name="crossing", speed=(3, 3), frames=7, height=300, width=300, crossing=True)
    clips = clips_of(world, 2)
    background = clips.latents.median(dim=2, keepdim=True).values
    drawn = (clips.latents - background).abs().amax(1) > 1e-6  # [B, T, H, W]
    beside = (drawn & (clips.mask == 0)).sum((0, 2, 3))
    assert beside[3] == 0
    assert beside[0] > 0


@pytest.mark.parametrize("kind", ["shift", "affine", "tap"])
def test_windows_that_follow_are_seen_to_follow(kind: str) -> None:
    model = VideoDiT(VideoDiTConfig(**BASE | {"offset_kind": kind, "num_layers": 1}))
    clips = clips_of(WIDE, 24)
    net = model.blocks[0].attn1.offset_net
    net.forward = lambda _: following_offsets(kind, clips)  # type: ignore[method-assign]
    measured = measure_offsets(model, clips, lambda: net(None))
    assert measured is not None
    (block,) = measured["blocks"]
    follows, other = ("slide", "shear") if kind == "shift" else ("shear", "slide")
    assert block[follows]["sprite"] > 0.95
    assert abs(block[follows]["other_clip"]) < 0.5
    assert block[other]["sprite"] is None or abs(block[other]["sprite"]) < 0.2


def following_offsets(kind: str, clips: Clips) -> Tensor:
    """Offsets in voxels that move every window with the sprite of its clip and frame."""
    frames, height, width = clips.mask.shape[1:]
    step = torch.cat([clips.velocity[:, :1], clips.velocity, clips.velocity[:, -1:]], 1)
    motion = torch.nn.functional.pad(step, (1, 0))  # [B, T, 3], no motion along time
    motion = motion[:, :, None, None, None].expand(-1, frames, height, width, 1, 3)
    if kind == "shift":
        return motion
    if kind == "affine":
        zero = torch.zeros_like(motion)
        return torch.cat([zero, motion, zero, zero], -1)  # slide, rows t, h, w of M
    tau = torch.arange(27) // 9 - 1
    return tau[:, None] * motion[..., None, :]


def test_recorded_windows_are_those_at_the_sprite() -> None:
    model = VideoDiT(VideoDiTConfig(**BASE | {"num_layers": 1}))
    clips = clips_of(WIDE, 4)
    net = model.blocks[0].attn1.offset_net
    measured = measure_offsets(model, clips, lambda: net(torch.zeros(4, 6, 30, 30, 64)))
    assert measured is not None
    windows = measured["windows"]
    taps = torch.tensor(windows["taps"])[0, 0]  # fresh: the undeformed window [T, K, 3]
    inner = taps[1:-1].mean(1)
    middle = clips.corner[windows["clip"], 1:-1] + (SIDE - 1) / 2
    assert torch.equal(inner[:, 0], torch.arange(1.0, 5.0))
    assert (inner[:, 1:] - middle).abs().max() <= 1.01  # half a cell, one more at the border
