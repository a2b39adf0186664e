"""Synthetic videos drawn directly in latent space, whose motion is known exactly.

A sprite is a random texture: nothing about it can be guessed, only collected from the frames in
which it is seen through noise. Denoising it well therefore needs attention that finds the same
texture in other frames, which is what windows that follow motion are meant for. Backgrounds do not
move, so that a fixed window is at its best there.

Shapes: B clips · C channels · T frames · H W cells · S side of a sprite in cells.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

CHANNELS = 8
SIDE = 4
"""Of a sprite, in cells."""
GRAIN = 2
"""Independent values along a side of a sprite, per channel; cells between are interpolated. With a
value of its own in every cell, a model of this size needs thousands of steps to learn textures."""
CONTRAST = 2.0
"""Standard deviation of a sprite's texture, before it is interpolated."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A distribution of clips."""

    name: str
    speed: tuple[float, float] = (1.0, 2.25)
    """Cells per frame, uniform between the two; the direction is uniform too."""
    background: float = 0.0
    """Standard deviation of a smooth background that does not move."""
    frames: int = 6
    height: int = 10
    width: int = 10
    crossing: bool = False
    """Two sprites that meet in the middle of the clip, each at its own velocity."""
    cut: bool = False
    """Another sprite, path and background from the middle frame on."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(C, T, H, W)."""
        return CHANNELS, self.frames, self.height, self.width


@dataclass(frozen=True)
class Clips:
    """Latents with what is known of them."""

    latents: Tensor
    """[B, C, T, H, W], fp32."""
    mask: Tensor
    """[B, T, H, W]: share of each cell that the front sprite covers."""
    corner: Tensor
    """[B, T, 2]: first cell (h, w) of the front sprite, fractional."""

    @property
    def velocity(self) -> Tensor:
        """[B, T-2, 2]: central differences of `corner` at the inner frames, cells per frame."""
        return (self.corner[:, 2:] - self.corner[:, :-2]) / 2

    @property
    def steady(self) -> Tensor:
        """Bool [B, T-2]: inner frames at which the velocity does not change (no bounce or cut)."""
        step = self.corner.diff(dim=1)
        return (step[:, 1:] - step[:, :-1]).abs().amax(-1) < 1e-3

    @property
    def centre(self) -> Tensor:
        """Integers [B, T, 2]: the cell (h, w) nearest to the middle of the front sprite."""
        return (self.corner + (SIDE - 1) / 2).round().long()

    def first(self, count: int) -> "Clips":
        """The first clips."""
        return Clips(self.latents[:count], self.mask[:count], self.corner[:count])


WORLDS = {
    world.name: world
    for world in (
        World(name="base"),
        World(name="still", speed=(0.0, 0.0)),
        World(name="slow", speed=(0.25, 0.75)),
        World(name="fast", speed=(2.5, 3.5)),
        World(name="faster", speed=(4.0, 5.0)),
        World(name="crossing", crossing=True),
        World(name="cut", cut=True),
        World(name="textured", background=0.5),
        World(name="long", frames=12),
        World(name="longer", frames=24),
    )
}


def definition(world: World) -> dict[str, Any]:
    """All numbers that say what is drawn."""
    return asdict(world) | {
        "channels": CHANNELS,
        "side": SIDE,
        "grain": GRAIN,
        "contrast": CONTRAST,
    }


def draw(world: World, batch: int, generator: torch.Generator) -> Clips:
    """`batch` clips of a world, reproducible from the generator."""
    if not world.cut:
        return _scene(world, batch, generator)
    before, after = _scene(world, batch, generator), _scene(world, batch, generator)
    half = world.frames // 2
    return Clips(
        *(
            torch.cat([a.narrow(axis, 0, half), b.narrow(axis, half, world.frames - half)], axis)
            for a, b, axis in (
                (before.latents, after.latents, 2),
                (before.mask, after.mask, 1),
                (before.corner, after.corner, 1),
            )
        )
    )


def _scene(world: World, batch: int, generator: torch.Generator) -> Clips:
    latents = _background(world, batch, generator)
    for corner in _paths(world, batch, generator):
        texture = CONTRAST * _smooth(batch, GRAIN, (SIDE, SIDE), generator)
        rows, columns = (
            _hat(corner[..., axis], length)
            for axis, length in enumerate((world.height, world.width))
        )  # each [B, T, length, S]
        mask = torch.einsum("bthi,btwj->bthw", rows, columns)
        sprite = torch.einsum("bthi,btwj,bcij->bcthw", rows, columns, texture)
        latents = latents * (1 - mask[:, None]) + sprite
    return Clips(latents, mask, corner)


def _background(world: World, batch: int, generator: torch.Generator) -> Tensor:
    """Smooth, and the same in every frame: [B, C, T, H, W]."""
    smooth = _smooth(batch, 3, (world.height, world.width), generator)
    smooth = world.background * smooth / smooth.std()
    return smooth[:, :, None].expand(-1, -1, world.frames, -1, -1)


def _smooth(batch: int, grain: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """[B, C, *size]: normal values on a grid of `grain` by `grain`, interpolated."""
    coarse = torch.randn(batch, CHANNELS, grain, grain, generator=generator)
    return torch.nn.functional.interpolate(coarse, size, mode="bilinear", align_corners=True)


def _paths(world: World, batch: int, generator: torch.Generator) -> list[Tensor]:
    """Corners [B, T, 2] of each sprite, back to front: constant velocity, reflected at walls."""
    room = torch.tensor([world.height - SIDE, world.width - SIDE], dtype=torch.float32)
    time = torch.arange(world.frames, dtype=torch.float32)[None, :, None]
    origin = torch.rand(batch, 1, 2, generator=generator) * room
    if world.crossing:
        time = time - (world.frames - 1) / 2  # both are at `origin` in the middle of the clip
    count = 2 if world.crossing else 1
    return [
        _reflect(origin + time * _velocities(world, batch, generator), room) for _ in range(count)
    ]


def _velocities(world: World, batch: int, generator: torch.Generator) -> Tensor:
    """[B, 1, 2] (h, w) in cells per frame."""
    angle, share = torch.rand(2, batch, generator=generator)
    low, high = world.speed
    speed = low + (high - low) * share
    angle = 2 * torch.pi * angle
    return (speed * torch.stack([angle.sin(), angle.cos()])).T[:, None]


def _reflect(position: Tensor, room: Tensor) -> Tensor:
    wrapped = position.remainder(2 * room)
    return torch.minimum(wrapped, 2 * room - wrapped)


def _hat(start: Tensor, length: int) -> Tensor:
    """Bilinear weights [..., length, S] of a texture's rows on the cells of one axis."""
    cell = torch.arange(length, dtype=torch.float32)[:, None]
    row = start[..., None, None] + torch.arange(SIDE, dtype=torch.float32)
    return (1 - (cell - row).abs()).clamp_min(0)
