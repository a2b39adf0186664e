"""The run log: one clean history per run, whatever stopped and resumed it.

`log.jsonl` is always written, one flushed line per report, because it needs no reader but `cat`;
TensorBoard and W&B are views of the same values. The keys are fixed: a misspelt key would split a
curve in two and nobody would notice before the run is over.
"""

import json
import logging
import math
import os
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megaslide.config import Config
from megaslide.errors import InputError
from megaslide.planning.hardware import probe

logger = logging.getLogger(__name__)

KEYS = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "eval/loss",
    "perf/step_time_s",
    "perf/tokens_per_s",
    "mem/device_peak_gb",
    "mem/host_rss_gb",
    "offload/h2d_gb",
    "offload/d2h_gb",
    "offload/wait_s",
    "offload/compute_s",
    "offload/h2d_s",
    "offload/d2h_s",
    "offload/adamw_s",
    "offload/overlap",
)
LOG_NAME = "log.jsonl"


class Destination(Protocol):
    """A view of the log beside the JSONL file."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def media(self, step: int, paths: Sequence[Path]) -> None: ...
    def close(self) -> None: ...


class RunLog:
    """Writes one run's history; usable as a context manager.

    Args:
        folder: the run's output folder, made if absent.
        report_to: "tensorboard", "wandb" or "none"; the JSONL file is written in any case.
        config: recorded with the run where the destination can hold it.
        start_step: step of the checkpoint this run continues from, 0 for a new run. Lines of a
            later step are dropped: what they report is about to happen again.

    Raises:
        ImportError: the destination's package is missing; the message has the install command.
    """

    def __init__(
        self, folder: Path, report_to: str, config: Config, *, start_step: int = 0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_NAME
        self._destination = _destination(report_to, folder, config, start_step)
        # A new run drops step 0 too: it evaluates there, as an attempt without a checkpoint did.
        _drop_after(self.path, start_step or -1)
        self._file = self.path.open("a", encoding="utf-8")
        # One line per start: a run continued on another machine has two, and speeds change there.
        self._write(start_step, {"machine": probe(folder).to_dict()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record scalars of one step; a value that is not finite becomes null in the JSONL.

        Raises:
            ValueError: a key that is not one of KEYS.
        """
        unknown = sorted(set(values) - set(KEYS))
        if unknown:
            raise ValueError(f"unknown log keys {unknown}; accepted: {', '.join(KEYS)}")
        numbers = {key: float(value) for key, value in values.items()}
        for key in (key for key, value in numbers.items() if not math.isfinite(value)):
            logger.warning("%s is %s at step %d", key, numbers[key], step)
        finite = {key: v if math.isfinite(v) else None for key, v in numbers.items()}
        self._write(step, finite)
        if self._destination:
            self._destination.scalars(step, numbers)

    def sample(self, step: int, paths: Sequence[Path]) -> None:
        """Record files generated at a step, relative to the run's folder where they are in it."""
        self._write(step, {"samples": [self._relative(path) for path in paths]})
        if self._destination:
            self._destination.media(step, paths)

    def close(self) -> None:
        self._file.close()
        if self._destination:
            self._destination.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def _relative(self, path: Path) -> str:
        folder = self.path.parent
        return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's log, oldest first; a last line torn by a crash is left out.

    Raises:
        InputError: no log there, or a line in the middle that is not JSON, named by its number.
    """
    path = folder / LOG_NAME
    if not path.exists():
        raise InputError(f"{path}: no such file", "give the output folder of a run")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise InputError(
                f"{path}, line {number}: not JSON: {error}", "mend or delete the line"
            ) from None
    return records


def _drop_after(path: Path, step: int) -> None:
    """Rewrite the log without lines beyond `step`, in one rename so that a crash loses nothing."""
    if not path.exists():
        return
    kept = [record for record in read_log(path.parent) if record["step"] <= step]
    text = "".join(json.dumps(record) + "\n" for record in kept)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _destination(report_to: str, folder: Path, config: Config, start: int) -> Destination | None:
    if report_to == "tensorboard":
        return _TensorBoard(folder / "tensorboard", config, start)
    if report_to == "wandb":
        return _Wandb(folder, config, start)
    if report_to == "none":
        return None
    raise ValueError(f"report_to={report_to!r}; accepted: tensorboard, wandb, none")


class _TensorBoard:
    """Event files that `tensorboard --logdir` reads."""

    def __init__(self, folder: Path, config: Config, start_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "log.report_to=tensorboard needs tensorboard: pip install tensorboard "
                "(or set log.report_to=none)"
            ) from error
        # purge_step hides what an earlier, longer attempt wrote beyond the checkpoint.
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else 0)
        self._writer.add_text("config", f"```json\n{config.model_dump_json(indent=2)}\n```")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def media(self, step: int, paths: Sequence[Path]) -> None:
        for path in (path for path in paths if path.suffix == ".png"):
            self._add_png(f"samples/{path.stem}", path, step)
        self._writer.flush()

    def _add_png(self, tag: str, path: Path, step: int) -> None:
        """Pass the file on as it is: decoding and encoding again would only cost time."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])  # in the header of every PNG
        image = Summary.Image(height=height, width=width, encoded_image_string=data)
        value = Summary.Value(tag=tag, image=image)
        self._writer._get_file_writer().add_summary(Summary(value=[value]), step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A W&B run whose id is kept in the output folder, so that a resumed run continues it."""

    def __init__(self, folder: Path, config: Config, start_step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                "log.report_to=wandb needs wandb: pip install wandb (or set log.report_to=none)"
            ) from error
        self._wandb = wandb
        identity = folder / "wandb-run-id"
        continued = start_step > 0 and identity.exists()
        self._run = wandb.init(
            project="megaslide",
            name=folder.name,
            dir=str(folder),
            id=identity.read_text().strip() if continued else None,
            resume="allow",
            config=config.model_dump(mode="json"),
        )
        identity.write_text(self._run.id)
        # W&B refuses to go back in its own step counter; an explicit axis can.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def media(self, step: int, paths: Sequence[Path]) -> None:
        kinds = {".png": self._wandb.Image, ".mp4": self._wandb.Video}
        media = {f"samples/{p.stem}": kinds[p.suffix](str(p)) for p in paths if p.suffix in kinds}
        self._run.log({"step": step, **media})

    def close(self) -> None:
        self._run.finish()
