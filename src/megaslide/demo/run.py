"""`megaslide demo`: everything once, small, on whatever machine this is.

The same functions that the other verbs call, in their order: draw and copy clips, prepare them,
train a VideoDiT whose state exceeds the device's peak, sample it from its checkpoint, and write
down what was measured. Nothing is faked for the demo; only the sizes are small.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from megaslide.config import Config, load_config
from megaslide.data.footage import SCENES, footage_path
from megaslide.data.prepare import prepare
from megaslide.data.sprites import write_sprites
from megaslide.demo.report import write_report
from megaslide.errors import InputError
from megaslide.planning.hardware import probe
from megaslide.sampling import sample_run
from megaslide.streaming.placement import chosen_device
from megaslide.training.logs import read_log
from megaslide.training.loop import TrainResult, train

Phase = Callable[[str], AbstractContextManager[Callable[..., None]]]
"""Opens a named phase; yields what is called with (done, total, ...) as it goes on."""

SPRITES = 900
SPEED = (0.75, 2.0)
"""Pixels per frame: what the codec's four-frame blocks still show as a digit."""
FILM = "bigbuckbunny.mp4"
EXAMPLES_SHOWN = 4


def demo_config(out: Path) -> Config:
    """The demo's configuration with its folders under `out`."""
    folders = {
        "output_dir": out / "run",
        "data.path": out / "clips",
        "data.cache_dir": out / "cache",
    }
    overrides = [f"{key}={json.dumps(str(path))}" for key, path in folders.items()]
    source = resources.files("megaslide.demo").joinpath("demo.yaml")
    with resources.as_file(source) as path:
        return load_config(path, overrides)


@contextmanager
def _unseen(name: str) -> Iterator[Callable[..., None]]:
    yield lambda *progress: None


def run_demo(out: Path, phase: Phase = _unseen) -> dict[str, Any]:
    """Run the demo into `out` and return what `out/summary.json` holds.

    Writes `clips/`, `cache/`, `run/`, `samples/`, `summary.json` and `report.html`.

    Raises:
        InputError: `out` holds something that is not an earlier demo.
        ImportError: a package of the `demo` extra is missing.
    """
    start = time.perf_counter()
    _claim(out)
    config = demo_config(out)
    write_clips(out / "clips", config)
    with phase("prepare") as progress:
        prepare(config.data, patch_size=config.model.patch_size or (1, 1, 1), progress=progress)
    trained_from = time.perf_counter()
    with phase("train") as progress:
        result = train(config, on_progress=progress)
    if result.interrupted:
        raise KeyboardInterrupt
    train_s = time.perf_counter() - trained_from
    with phase("sample") as progress:
        paths = sample_run(result.checkpoint, out=out / "samples", progress=progress)
    summary = _summary(config, result, paths)
    summary |= {"train_s": train_s, "wall_s": time.perf_counter() - start}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _write_report(out, config, result, summary, paths)
    return summary


def write_clips(folder: Path, config: Config) -> None:
    """Moving digits drawn for the demo, and a real film as it comes."""
    frames, height, width = (int(n) for n in config.data.buckets[0].split("x"))
    write_sprites(
        folder / "sprites",
        count=SPRITES, frames=frames, size=(height, width), seed=0, speed=SPEED,
    )  # fmt: skip
    caption = next(scene.caption for scene in SCENES if scene.source == FILM)
    shutil.copyfile(footage_path(FILM), folder / FILM)
    (folder / FILM).with_suffix(".txt").write_text(caption + "\n")


def _claim(out: Path) -> None:
    """Make `out` an empty folder of ours; never delete what is not a demo's."""
    marker = out / "DEMO"
    if out.exists() and any(out.iterdir()) and not marker.exists():
        raise InputError(f"{out}: is not empty and not an earlier demo", "give another --out")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():  # not `out` itself: it may be `.`, a link or a mount
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        elif old != marker:  # kept until the end: a kill on the way leaves a demo's folder
            old.unlink()
    marker.write_text("Written by `megaslide demo`; the next demo here replaces this folder.\n")


def _summary(config: Config, result: TrainResult, paths: list[Path]) -> dict[str, Any]:
    assert result.validation is not None  # the demo's data always has a validation split
    first, *_, last = [r["eval/loss"] for r in read_log(_run(config)) if "eval/loss" in r]
    return {
        "params": result.parameters,
        "state_bytes": result.state_bytes,
        "device_peak_bytes": sum(result.device_bytes.values()),
        "steps": result.step,
        "val_loss_first": first,
        "val_loss": last,
        "val_loss_zero": result.validation.zero_loss,
        "step_s": result.step_time_s,
        "h2d_bytes": result.h2d_bytes,
        "d2h_bytes": result.d2h_bytes,
        "threads": torch.get_num_threads(),
        "device": chosen_device(config.offload),
        "samples": [str(path.relative_to(path.parent.parent)) for path in paths],
    }


def _write_report(
    out: Path,
    config: Config,
    result: TrainResult,
    summary: Mapping[str, Any],
    paths: list[Path],
) -> None:
    records = read_log(_run(config))
    memory = {**result.device_bytes, "state": result.state_bytes}
    memory["gradient_buffers"] = memory.pop("gradients")
    examples = sorted((out / "clips" / "sprites").glob("*.mp4"))[:EXAMPLES_SHOWN]
    write_report(
        out / "report.html",
        {key: value for key, value in summary.items() if key != "samples"},
        {name: _points(records, f"{name}/loss") for name in ("train", "eval")},
        [(prompt, path) for prompt, path in zip(config.sample.prompts, paths, strict=True)],
        [(path.with_suffix(".txt").read_text().strip(), path) for path in examples],
        memory,
        result.last_step_spans,
        config=config,
        machine=probe(out).to_dict(),
    )


def _points(records: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(r["step"], r[key]) for r in records if r.get(key) is not None]


def _run(config: Config) -> Path:
    return Path(config.output_dir)
