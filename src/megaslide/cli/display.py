"""How results and progress look: tables that fit 80 columns, bars only where a person watches.

Results go to standard output and progress to standard error, so that piping a verb's output keeps
it clean. Where standard error is no terminal, a bar would be thousands of control characters in a
log file; there a plain line appears now and then.
"""

import json
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from megaslide.planning.hardware import Machine
    from megaslide.planning.rates import Rates

PLAIN_LINE_SECONDS = 10.0
WATCHED = {
    "train/loss": "loss",
    "eval/loss": "eval",
    "train/lr": "lr",
    "perf/step_time_s": "s/step",
}
"""Log keys that progress shows, by the word for each; the log has the others."""


class Meter:
    """Progress of one verb: a bar on a terminal, now and then a plain line anywhere else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = console(stderr=True)
        self._bar = _bar(self._console, name) if self._console.is_interactive else None
        self._last = -math.inf

    def __enter__(self) -> "Meter":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, total: int, detail: str | Mapping[str, float] = "") -> None:
        """Show that `done` of `total` are done; `detail` is a file's name, or values to show."""
        text = detail if isinstance(detail, str) else _scalars(detail)
        if self._bar:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=total, detail=text)
        elif done == total or time.monotonic() - self._last >= PLAIN_LINE_SECONDS:
            self._last = time.monotonic()
            typer.echo(f"{self._name} {done}/{total} {text}".rstrip(), err=True)


def _bar(screen: "Console", name: str) -> "Progress":
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    detail = TextColumn(
        "{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, ratio=1)
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        detail,
    )
    progress = Progress(*columns, console=screen, expand=True)
    progress.add_task(name, total=None, detail="")
    return progress


def _scalars(values: Mapping[str, float]) -> str:
    """What to watch, in a few words: `loss 0.8123  eval 0.9  lr 0.0001  s/step 0.52`."""
    return "  ".join(f"{WATCHED[key]} {values[key]:.4g}" for key in WATCHED if key in values)


def console(*, stderr: bool = False) -> "Console":
    """Made at each use, since rich looks at the terminal only once, when a console is made."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def status(text: str) -> AbstractContextManager[object]:
    """A spinner while something without steps goes on; nothing where nobody watches."""
    screen = console(stderr=True)
    return screen.status(text) if screen.is_interactive else nullcontext()


def print_json(value: object) -> None:
    """On standard output, unwrapped, whatever the terminal's width."""
    typer.echo(json.dumps(value, indent=2))


def grid(rows: Mapping[str, str]) -> "Table":
    """Facts by name, in two columns without lines."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def machine_grid(machine: "Machine") -> "Table":
    versions = ", ".join(f"{name} {v or 'missing'}" for name, v in machine.packages.items())
    gpus = ", ".join(f"{gpu.name} ({size(gpu.memory_bytes)})" for gpu in machine.gpus)
    return grid(
        {
            "megaslide": f"{machine.megaslide}, commit {machine.commit or 'unknown'}",
            "system": f"{machine.system}, Python {machine.python}",
            "packages": versions,
            "cpu": f"{machine.cpu}, {machine.cores_usable} usable cores",
            "vectors": " ".join(machine.isa) or "unknown",
            "memory": size(machine.ram_bytes),
            "disk": f"{size(machine.disk_free_bytes)} free at {machine.disk_path}",
            "gpu": gpus or f"none: {machine.gpu_reason}",
            "native": machine.native_reason or "ready",
        }
    )


def rates_grid(rates: "Rates") -> "Table":
    fp32, bf16 = rates.gemm_fp32_flop_s, rates.gemm_bf16_flop_s
    rows = {
        "threads": str(rates.threads),
        "matrix products": f"{rate(fp32, 'FLOP')} in fp32, {rate(bf16, 'FLOP')} in bf16",
        "memory": f"{rate(rates.triad_bytes_s, 'B')} (triad)",
        "adamw": f"{rate(rates.adamw_parameters_s, ' parameters')}, "
        f"{rate(rates.adamw_bytes_s, 'B')}",
        "adamw, 1 thread": f"{rate(rates.adamw_lane_parameters_s, ' parameters')}, "
        f"{rate(rates.adamw_lane_bytes_s, 'B')}",
        "copy, 1 thread": rate(rates.copy_bytes_s, "B"),
    }
    if rates.disk is not None:
        disk = rates.disk
        rows["disk"] = (
            f"read {rate(disk.read_bytes_s, 'B')}, write {rate(disk.write_bytes_s, 'B')}, "
            f"both {rate(disk.both_bytes_s, 'B')}"
        )
    return grid(rows)


def preset_table(rows: list[dict[str, Any]]) -> "Table":
    """One line a preset; the state is what training keeps in host memory."""
    from rich.table import Table

    head = ("preset", "parameters", "state", "blocks", "hidden size", "heads")
    table = Table(*head, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        scaled = (row["preset"], count(row["parameters"]), size(row["state_bytes"]))
        sizes = (row["num_layers"], row["hidden_size"], row["num_attention_heads"])
        table.add_row(*scaled, *map(str, sizes))
    return table


def count(number: float) -> str:
    """A number of parameters, such as 1.3 B."""
    return _scaled(number, ("", "k", "M", "B", "T"))


def size(number: float) -> str:
    """A number of bytes in decimal units, such as 1.3 GB."""
    return _scaled(number, ("B", "kB", "MB", "GB", "TB"))


def rate(number: float, unit: str) -> str:
    """So many of a unit per second, such as 1.3 GB/s."""
    return _scaled(number, tuple(power + unit for power in ("", "k", "M", "G", "T", "P"))) + "/s"


def _scaled(number: float, units: tuple[str, ...]) -> str:
    """Three significant digits and the unit that keeps them below 1000."""
    number = float(f"{number:.3g}")  # first, or 999,600 would become 1e+03 k
    power = 0
    while number >= 1000 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {units[power]}".rstrip()
