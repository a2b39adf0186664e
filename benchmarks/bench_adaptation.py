"""What it costs a pretrained dense model to get a local attention: loss at conversion and after.

    python benchmarks/bench_adaptation.py [--data digits|real] [--json FILE] [--plot FILE.png] [...]

A small dense `VideoDiT` is pretrained on moving digits, or on small clips of real films, in the
latents of the demo's codec. Its weights are then given to the same model with another
self-attention, which trains on; the dense model trained on by as much is the control. All arms of a
seed see the same clips, noise and noise levels in the same order, and are measured as `eval/loss`
is. The correctness gate comes first: with a window that covers the whole grid and offsets that are
zero, as they begin, every kind must compute what the dense model does.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from real_clips import CROPS, HEIGHT, STRIDES, RealClip, described, real_clips

from megaslide.config import CodecConfig, TextConfig
from megaslide.data.codecs import build_codec
from megaslide.data.latents import Batch
from megaslide.data.sprites import SpriteClip, sprite_clip
from megaslide.data.text import build_text_encoder
from megaslide.demo.run import SPEED
from megaslide.diffusion.objectives import FlowMatching
from megaslide.evaluation.validation import validation_loss
from megaslide.models.dit import VideoDiT, VideoDiTConfig
from megaslide.planning.hardware import probe

FRAMES, SIDE = 17, 64
"""Pixels; 5 x 8 x 8 latent voxels, each a token."""
CODEC = CodecConfig(name="dct", block="4x8x8", channels=32)
TEXT = TextConfig(name="hashed_ngram", dim=64, max_length=12)
WINDOW = (3, 3, 3)
ARMS: dict[str, dict[str, Any]] = {
    "dense": {"attention_kind": "dense"},
    "deformable": {"attention_kind": "deformable", "offset_kind": "affine"},
    "neighborhood": {"attention_kind": "neighborhood"},
    "swin": {"attention_kind": "swin"},
}
"""What the pretrained model becomes; `dense` is left as it is and trained on."""
GATE = 1e-5
HELD_OUT = 10**6
"""Number of the first clip held out."""
Clip = SpriteClip | RealClip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The budget: all of it is the same for every arm."""

    clips: int = 320
    held_out: int = 48
    pretraining_steps: int = 500
    pretraining_rate: float = 2e-3
    steps: int = 200
    rate: float = 5e-4
    warmup: int = 20
    batch: int = 8
    points: int = 4
    """Measurements on the way of an adaptation, evenly spread."""


SETTINGS = {"digits": Settings(), "real": Settings(pretraining_steps=2000)}
"""After 500 steps on real clips the loss still falls fast: there would be little to take away."""


def dense_config() -> VideoDiTConfig:
    return VideoDiTConfig(
        in_channels=CODEC.channels, text_dim=TEXT.dim, hidden_size=64, num_layers=4,
        num_attention_heads=4, patch_size=(1, 1, 1), freq_dim=64, window=WINDOW,
        attention_kind="dense",
    )  # fmt: skip


def converted(dense: VideoDiT, **attention: Any) -> VideoDiT:
    """The same weights under another self-attention; only offset networks are new."""
    model = VideoDiT(dataclasses.replace(dense.config, **attention))
    left = model.load_state_dict(dense.state_dict(), strict=False)
    missing = [key for key in left.missing_keys if ".offset_net." not in key]
    if missing or left.unexpected_keys:
        raise RuntimeError(f"weights that do not fit: {missing + left.unexpected_keys}")
    return model


def require_equal() -> dict[str, float]:
    """Largest difference of each kind from the dense model, under a window that covers all."""
    torch.manual_seed(0)
    dense = VideoDiT(dense_config())
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    grid = build_codec(CODEC).latent_shape((FRAMES, SIDE, SIDE))
    latents, text = torch.randn(2, CODEC.channels, *grid), torch.randn(2, 3, TEXT.dim)
    sigma = torch.tensor(500.0)
    found = {}
    with torch.no_grad():
        expected = dense(latents, sigma, text)
        for name, attention in ARMS.items():
            out = converted(dense, **attention, window=grid)(latents, sigma, text)
            found[name] = ((out - expected).abs().max() / expected.abs().max()).item()
    if max(found.values()) > GATE:
        raise RuntimeError(f"a converted model differs from the dense one by {found}")
    return found


def digits(count: int, seed: int, held_out: bool) -> list[SpriteClip]:
    first = HELD_OUT * held_out
    return [
        sprite_clip(frames=FRAMES, size=(SIDE, SIDE), seed=seed, index=first + i, speed=SPEED)
        for i in range(count)
    ]


def real(count: int, seed: int, held_out: bool) -> list[RealClip]:
    return list(real_clips(count, frames=FRAMES, side=SIDE, seed=seed, held_out=held_out))


DATA: dict[str, Callable[[int, int, bool], Sequence[Clip]]] = {"digits": digits, "real": real}
"""Each gives clips for a count and a seed; those held out are others than those trained on."""


def batches(clips: Sequence[Clip], first: int, size: int) -> list[Batch]:
    """The clips, numbered from `first` on, encoded, in batches."""
    return [encoded(clips[i : i + size], first + i) for i in range(0, len(clips), size)]


def encoded(clips: Sequence[Clip], first: int) -> Batch:
    pixels = torch.stack([torch.from_numpy(clip.frames) for clip in clips])
    pixels = pixels.permute(0, 4, 1, 2, 3).float() / 127.5 - 1  # [B, 3, T, H, W]
    text, mask = build_text_encoder(TEXT).encode([clip.caption for clip in clips])
    return Batch(
        latents=build_codec(CODEC).encode(pixels), text=text, mask=mask, pooled=None,
        clip_ids=tuple(str(first + i) for i in range(len(clips))),
    )  # fmt: skip


def measured(model: VideoDiT, held_out: Sequence[Batch]) -> float:
    objective = FlowMatching()
    return validation_loss(model, lambda _: objective, held_out, torch.device("cpu")).loss


def train(
    model: VideoDiT, data: Sequence[Batch], settings: Settings, *, steps: int, rate: float,
    seed: int, measure: Any = None,
) -> float:  # fmt: skip
    """Train in place on batches in an order that `seed` alone decides; CPU seconds of training.

    `measure` is called with the number of steps done, `settings.points` times.
    """
    generator, cpu_s = torch.Generator().manual_seed(seed), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    every = max(1, steps // settings.points)
    for step in range(1, steps + 1):
        batch = data[int(torch.randint(len(data), (1,), generator=generator))]
        noise = torch.randn(batch.latents.shape, generator=generator)
        sigmas = FlowMatching().sample_sigmas(len(noise), generator)
        optimizer.param_groups[0]["lr"] = rate * min(1, step / settings.warmup)
        start = time.process_time()
        given = batch.conditioning()
        loss, _ = FlowMatching().loss(model, batch.latents, noise, sigmas, **given)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        cpu_s += time.process_time() - start
        if measure is not None and (step % every == 0 or step == steps):
            measure(step)
    return cpu_s


def run(seed: int, settings: Settings, name: str) -> list[dict[str, Any]]:
    """One row per arm: the pretrained model's loss, and the arm's at conversion and after.

    `name` is one of `DATA`.
    """
    data = batches(DATA[name](settings.clips, seed, False), 0, settings.batch)
    held_out = batches(DATA[name](settings.held_out, seed, True), HELD_OUT, settings.batch)
    torch.manual_seed(seed)
    dense = VideoDiT(dense_config())
    train(
        dense, data, settings, steps=settings.pretraining_steps, rate=settings.pretraining_rate,
        seed=seed,
    )  # fmt: skip
    pretrained, rows = measured(dense, held_out), []
    for arm, attention in ARMS.items():
        torch.manual_seed(seed)  # the offset network's first values
        model = converted(dense, **attention)
        losses = {0: measured(model, held_out)}

        def measure(step: int, model: VideoDiT = model, losses: dict[int, float] = losses) -> None:
            losses[step] = measured(model, held_out)

        cpu_s = train(
            model, data, settings, steps=settings.steps, rate=settings.rate, seed=10**6 + seed,
            measure=measure,
        )  # fmt: skip
        rows.append({
            "arm": arm, "seed": seed, "pretrained_loss": pretrained, "losses": losses,
            "parameters": sum(p.numel() for p in model.parameters()),
            "step_cpu_s": cpu_s / settings.steps, "config": model.config.to_dict(),
        })  # fmt: skip
        shown = " ".join(f"{step}: {loss:.4f}" for step, loss in losses.items())
        print(f"seed {seed} {arm:12} {shown}", flush=True)
    return rows


def what_was_cut(seeds: int, settings: Settings) -> dict[str, Any]:
    """Of which films, scenes and frames the clips of all seeds are."""
    every = [
        clip
        for seed in range(seeds)
        for held_out, count in ((False, settings.clips), (True, settings.held_out))
        for clip in real(count, seed, held_out)
    ]
    return {
        "size": [FRAMES, SIDE, SIDE],
        "strides": list(STRIDES),
        "films_reduced_to_height": HEIGHT,
        "crop_sides": list(CROPS),
        "parts": described(every),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per arm: losses of all seeds when converted and at the end, and the gap to dense at the end.

    `verdict` says where an arm ends against the dense control only if all seeds agree.
    """
    controls = {row["seed"]: last(row) for row in rows if row["arm"] == "dense"}
    found = {}
    for arm in ARMS:
        own = [row for row in rows if row["arm"] == arm]
        gaps = [last(row) - controls[row["seed"]] for row in own]
        found[arm] = {
            "at_conversion": [row["losses"][0] for row in own],
            "at_the_end": [last(row) for row in own],
            "gap_to_dense": gaps,
            "verdict": verdict(gaps) if arm != "dense" else "the control",
            "step_cpu_s": statistics.fmean(row["step_cpu_s"] for row in own),
        }
    return found


def last(row: dict[str, Any]) -> float:
    return row["losses"][max(row["losses"])]


def verdict(gaps: Sequence[float]) -> str:
    if len(gaps) < 2:
        return "fewer than two seeds: no conclusion"
    if max(gaps) < 0:
        return f"below dense in all {len(gaps)} seeds"
    return f"above dense in all {len(gaps)} seeds" if min(gaps) > 0 else "seeds disagree"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for row in rows:
        steps, losses = zip(*row["losses"].items(), strict=True)
        colour = f"C{list(ARMS).index(row['arm'])}"
        first = row["seed"] == min(r["seed"] for r in rows)
        label = row["arm"] if first else None
        axes.plot(steps, losses, "o-", ms=4, lw=1, alpha=0.8, color=colour, label=label)
    axes.set(xlabel="steps after conversion", ylabel="eval/loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="one line per seed")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", choices=sorted(DATA), default="digits", help="clips to train and measure on")
    add("--json", type=Path, help="also write the result to this file")
    add("--plot", type=Path, help="draw losses over steps, PNG")
    add("--seeds", type=int, default=2)
    counts = ("clips", "held_out", "pretraining_steps", "steps")
    for name in counts:
        defaults = ", ".join(f"{getattr(own, name)} ({data})" for data, own in SETTINGS.items())
        add(f"--{name.replace('_', '-')}", type=int, dest=name, help=f"default: {defaults}")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in counts if getattr(options, name) is not None}
    settings = dataclasses.replace(SETTINGS[options.data], **given)
    torch.set_num_threads(1)
    differences = require_equal()
    rows = [row for seed in range(options.seeds) for row in run(seed, settings, options.data)]
    result = {
        "summary": summary(rows),
        "gate_relative_difference": differences,
        "settings": dataclasses.asdict(settings),
        "rows": rows,
        "threads": torch.get_num_threads(),
        "machine": probe().provenance(),
    }
    if options.data == "real":
        result["clips"] = what_was_cut(options.seeds, settings)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.plot:
        plot(rows, options.plot)
    print(json.dumps(result["summary"], indent=2))


if __name__ == "__main__":
    main()
