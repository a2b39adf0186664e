"""The dimensions of VBench that need weights: the official package, run in its own interpreter.

Nothing is computed here and nothing is downloaded. A dimension whose weight files are not all
there, or whose run fails, is not measured, with the reason. The official code looks for weights
under VBENCH_CACHE_DIR (default ~/.cache/vbench), and for DINO's under TORCH_HOME as well.
"""

import json
import logging
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaslide.errors import InputError
from megaslide.evaluation.results import Figure, Missing

logger = logging.getLogger(__name__)

PYTHON, CACHE = "VBENCH_PYTHON", "VBENCH_CACHE_DIR"
WEIGHTS: dict[str, tuple[str, ...]] = {
    "subject_consistency": (
        "dino_model/facebookresearch_dino_main",
        "dino_model/dino_vitbase16_pretrain.pth",
        "$TORCH_HOME/hub/checkpoints/dino_vitbase16_pretrain.pth",
    ),
    "background_consistency": ("clip_model/ViT-B-32.pt",),
    "motion_smoothness": ("amt_model/amt-s.pth",),
    "dynamic_degree": ("raft_model/models/raft-things.pth",),
    "aesthetic_quality": (
        "clip_model/ViT-L-14.pt",
        "aesthetic_model/emb_reader/sa_0_4_vit_l_14_linear.pth",
    ),
    "imaging_quality": ("pyiqa_model/musiq_spaq_ckpt-358bb6af.pth",),
    "overall_consistency": (
        "ViCLIP/ViClip-InternVid-10M-FLT.pth",
        "ViCLIP/bpe_simple_vocab_16e6.txt.gz",
    ),
}
"""Files of each dimension, below VBENCH_CACHE_DIR unless they say otherwise."""
PROMPT_SUITE_ONLY = (
    "object_class",
    "multiple_objects",
    "color",
    "spatial_relationship",
    "scene",
    "appearance_style",
    "temporal_style",
    "human_action",
)
"""Defined on VBench's own prompts and what they are annotated with, not on other clips."""
NEEDS_PROMPT = ("overall_consistency",)
_PER_CLIP_SCALE = {"imaging_quality": 0.01}
"""The official score is per cent of what the results file has per clip."""
_WORKER = Path(__file__).with_name("vbench_worker.py")
_NAME = "megaslide"


@dataclass(frozen=True, slots=True)
class Scores:
    """What the official package gave for one dimension."""

    overall: float
    by_clip: dict[Path, float]


def why_not(
    dimension: str,
    clips: Sequence[Path],
    prompts: Mapping[Path, str],
    environment: Mapping[str, str],
) -> str | None:
    """The reason why a dimension cannot be measured, or None.

    Raises:
        InputError: VBENCH_PYTHON names no program.
    """
    python = environment.get(PYTHON, "")
    if not python:
        return f"{PYTHON} is not set (the Python of an environment with the package vbench)"
    if not os.access(python, os.X_OK) or not Path(python).is_file():
        raise InputError(f"{PYTHON}={python}: not a program", "set it to that environment's python")
    for file in weight_files(dimension, environment):
        if not file.exists():
            return f"weights missing at {file}"
    others = [clip.name for clip in clips if clip.suffix.lower() != ".mp4"]
    if others:
        return f"the official package reads .mp4 only, not {others[0]}"
    without = [clip.name for clip in clips if clip not in prompts]
    if dimension in NEEDS_PROMPT and without:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        return f"no prompt for {without[0]}{more}; give --prompts"
    return None


def weight_files(dimension: str, environment: Mapping[str, str]) -> list[Path]:
    """Where the official code looks for the files of a dimension."""
    home = Path(environment.get("HOME") or Path.home())
    cache = Path(environment.get(CACHE) or home / ".cache" / "vbench")
    xdg = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    torch_home = environment.get("TORCH_HOME") or str(xdg / "torch")
    files = (file.replace("$TORCH_HOME", torch_home) for file in WEIGHTS[dimension])
    return [cache / file for file in files]


def measure(
    clips: Sequence[Path],
    prompts: Mapping[Path, str],
    *,
    environment: Mapping[str, str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Scores | Missing]:
    """Run every dimension that can run, each in a process of its own.

    Args:
        clips: readable clips.
        prompts: by clip.
        environment: variables; those of this process by default.
        progress: called with (dimensions done, in all, the next one's name).

    Raises:
        InputError: VBENCH_PYTHON names no program.
    """
    environment = os.environ if environment is None else environment
    suite = Missing("defined on VBench's own prompt suite only")
    results: dict[str, Scores | Missing] = {f"vbench.{d}": suite for d in PROMPT_SUITE_ONLY}
    for number, dimension in enumerate(WEIGHTS):
        reason = why_not(dimension, clips, prompts, environment)
        if reason is None and progress is not None:
            progress(number, len(WEIGHTS), f"vbench.{dimension}")
        results[f"vbench.{dimension}"] = (
            _run(dimension, clips, prompts, environment) if reason is None else Missing(reason)
        )
    return results


def _run(
    dimension: str,
    clips: Sequence[Path],
    prompts: Mapping[Path, str],
    environment: Mapping[str, str],
) -> Scores | Missing:
    with tempfile.TemporaryDirectory(prefix="megaslide-vbench-") as name:
        folder = Path(name)
        videos, out = folder / "videos", folder / "out"
        videos.mkdir()
        links = {videos / f"{number:05d}.mp4": clip for number, clip in enumerate(clips)}
        for link, clip in links.items():
            link.symlink_to(clip.resolve())
        listed = folder / "prompts.json"
        listed.write_text(
            json.dumps({str(link): prompts.get(clip, "") for link, clip in links.items()})
        )
        options = {
            "--dimension": dimension, "--videos": videos, "--prompts": listed, "--out": out,
            "--name": _NAME,
        }  # fmt: skip
        command = [
            environment[PYTHON],
            str(_WORKER),
            *(str(o) for pair in options.items() for o in pair),
        ]
        done = subprocess.run(
            command, env={**environment, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            logger.info("vbench %s failed:\n%s", dimension, done.stderr)
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return Missing(f"the official package failed (exit {done.returncode}): {last}")
        by_name = {link.name: clip for link, clip in links.items()}
        return read_scores(out / f"{_NAME}_eval_results.json", dimension, by_name)


def read_scores(file: Path, dimension: str, clips: Mapping[str, Path]) -> Scores | Missing:
    """Scores from `{dimension: [score, [{"video_path", "video_results"}, ...]]}`.

    Args:
        file: the results file.
        dimension: its key.
        clips: by the file name under which the package saw them.
    """
    try:
        score, rows = json.loads(file.read_text(encoding="utf-8"))[dimension]
        scale = _PER_CLIP_SCALE.get(dimension, 1.0)
        by_clip = {
            clips[Path(row["video_path"]).name]: scale * float(row["video_results"]) for row in rows
        }
        overall = float(score)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Missing(f"the official package's results cannot be read: {error!r}")
    if missing := [clip.name for clip in clips.values() if clip not in by_clip]:
        return Missing(f"the official package gave no result for {missing[0]}")
    if not all(map(math.isfinite, (overall, *by_clip.values()))):
        return Missing("the official package gave a value that is not finite")
    return Scores(overall, by_clip)


def figures_of(clip: Path, scores: Mapping[str, Scores | Missing]) -> dict[str, Figure]:
    """The dimensions of one clip."""
    return {
        name: result if isinstance(result, Missing) else result.by_clip[clip]
        for name, result in scores.items()
    }
