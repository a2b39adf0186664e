"""What the offsets of a trained model do: do windows move the way the sprite does?

Offsets of different kinds are compared by where the taps land. The displacement of every tap from
its place in the undeformed window gives two vectors per query, in cells:

- *shear*: how much further the taps one frame later lie displaced than those one frame earlier,
  per frame. A window that follows a sprite has the sprite's velocity as its shear.
- *slide*: the mean over all taps. A `shift` window has no shear; it can follow a sprite into one
  neighbouring frame only, with a slide of plus or minus the velocity.

Each is correlated with the true velocity over the tokens that the sprite covers. Two controls
stand beside it: the velocity of another clip, and tokens of the background.

Shapes: B clips · T H W grid · G offset groups · N = T·H·W · K taps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.worlds import Clips
from megaslide.models.attention import DeformableSlideAttention
from megaslide.models.dit import VideoDiT
from megaslide.ops.deformable_attention import cut_window
from megaslide.ops.deformable_attention.reference import sample_positions

COVERED = 0.5
"""Share of a cell from which on it counts as the sprite's."""


def measure_offsets(
    model: VideoDiT, clips: Clips, forward: Callable[[], object]
) -> dict[str, Any] | None:
    """Correlations of each block and group with the true motion, and the windows of one clip.

    Args:
        model: whose offsets are meant.
        clips: what `forward` evaluates the model on, in this order.
        forward: evaluates it on all clips.

    Returns:
        None for a model without offsets, else `blocks`, a list with, per block and group, `shear`
        and `slide` (each with `sprite`, `other_clip`, `background`; None where nothing varies)
        and `displacement` in cells; and `windows` of the first clip that moves steadily:
        its index, and tap positions [block][group][frame][tap] (t, h, w) at the sprite's centre.
    """
    modules = [m for m in model.modules() if isinstance(m, DeformableSlideAttention)]
    if not modules:
        return None
    recorded = _record(modules, forward)
    blocks, windows = [], []
    shown = _first_steady(clips)
    for module, offsets in zip(modules, recorded, strict=True):
        kind = module.offset_net.kind
        window = cut_window(module.offset_net.window, offsets.shape[1:4])
        position = tap_positions(offsets, window, kind)
        moved = position - tap_positions(torch.zeros_like(offsets[:1]), window, kind)
        blocks += [_correlations(moved[:, g], window, clips) for g in range(moved.shape[1])]
        windows.append(_windows(position[shown], clips, shown))
    return {"blocks": blocks, "windows": {"clip": shown, "taps": windows}}


def tap_positions(offsets: Tensor, window: tuple[int, int, int], kind: str) -> Tensor:
    """Where taps sample: offsets [B, T, H, W, G, ...] to [B, G, N, K, 3] in voxels."""
    size = tuple(offsets.shape[1:4])
    by_group = offsets.flatten(1, 3).transpose(1, 2)  # [B, G, N, ...]
    queries = torch.arange(by_group.shape[2])
    position, _ = sample_positions(by_group, queries, size, window, kind)
    return position


def _record(modules: list[DeformableSlideAttention], forward: Callable[[], object]) -> list[Tensor]:
    """Offsets [B, T, H, W, G, ...] of each module over all clips."""
    parts: list[list[Tensor]] = [[] for _ in modules]
    hooks = [
        module.offset_net.register_forward_hook(lambda _m, _in, out, to=part: to.append(out))
        for module, part in zip(modules, parts, strict=True)
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(part).detach().float() for part in parts]


def _correlations(moved: Tensor, window: tuple[int, int, int], clips: Clips) -> dict[str, Any]:
    """`moved` [B, N, K, 3]: displacements of one block and group."""
    grid = clips.mask.shape[1:]
    moved = moved[..., 1:].unflatten(2, window)  # [B, N, kt, kh, kw, (h, w)]
    plane = moved.mean(dim=(3, 4))  # [B, N, kt, 2]
    shear = (plane[:, :, -1] - plane[:, :, 0]) / max(window[0] - 1, 1)
    slide = plane.mean(dim=2)
    return {
        "shear": _against_motion(shear.unflatten(1, grid), clips),
        "slide": _against_motion(slide.unflatten(1, grid), clips),
        "displacement": moved.norm(dim=-1).mean().item(),
    }


def _against_motion(vector: Tensor, clips: Clips) -> dict[str, float | None]:
    """`vector` [B, T, H, W, 2] against the velocity, at inner frames without a bounce."""
    vector = vector[:, 1:-1]  # at the ends the window is pushed inwards in time
    velocity = clips.velocity[:, :, None, None].expand_as(vector)
    steady = clips.steady[:, :, None, None]
    sprite = steady & (clips.mask[:, 1:-1] > COVERED)
    background = steady & (clips.mask[:, 1:-1] == 0)
    other = velocity.roll(1, dims=0)
    return {
        "sprite": _pearson(vector[sprite], velocity[sprite]),
        "other_clip": _pearson(vector[sprite], other[sprite]),
        "background": _pearson(vector[background], velocity[background]),
    }


def _pearson(a: Tensor, b: Tensor) -> float | None:
    """Correlation over all entries; None where one of the two does not vary."""
    a, b = a.flatten().double(), b.flatten().double()
    if len(a) < 2 or a.std() < 1e-6 or b.std() < 1e-6:
        return None
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


def _first_steady(clips: Clips) -> int:
    """The first clip without a bounce, or the one with the fewest."""
    return int(clips.steady.sum(dim=1).argmax())


def _windows(position: Tensor, clips: Clips, clip: int) -> list[Any]:
    """Of one clip's positions [G, N, K, 3], those at the sprite's centre: [group][frame][tap]."""
    frames, _, width = clips.mask.shape[1:]
    row, column = clips.centre[clip].T
    at = position.unflatten(1, (frames, -1))[:, torch.arange(frames), row * width + column]
    return [[[[round(x, 2) for x in tap] for tap in frame] for frame in g] for g in at.tolist()]
