"""How fast this machine is at what a training step does, measured in a few seconds.

The planner multiplies a model's costs by these rates, so each is measured by what the engine itself
runs: torch's matrix products, the AdamW kernel on the state format `split`, the copy of the H2D and
D2H lanes, the file of the disk tier. The best of several runs counts: everything that disturbs a
measurement makes it slower.
"""

import ctypes
import functools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from megaslide.errors import InputError
from megaslide.ops import library
from megaslide.ops.adamw import AdamWSettings, AdamWState, adamw_
from megaslide.planning.hardware import probe
from megaslide.streaming.disk import RecordFile
from megaslide.streaming.lanes import copy_bytes
from megaslide.streaming.memory import host_memory

__all__ = ["DiskRates", "Rates", "brief_rates", "disk_rates", "measure_rates", "triad_"]

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what is being measured."""

Transfer = Callable[[torch.Tensor, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much work one measurement is."""

    gemm_size: int
    elements: int
    """Of the triad and of AdamW, 12 bytes each and more: far beyond caches."""
    copy_bytes: int
    seconds: float
    """For each measurement of computation or memory."""
    runs: int
    """Of each of them, at least; the first one warms up, if it is not the only one."""
    disk_bytes: int
    disk_seconds: float


DISK_BYTES = 1 << 30
CHUNK = 16 << 20
"""Bytes of one disk transfer, as AdamW's fp32 moments are read and written."""
FULL = Effort(
    gemm_size=2048, elements=1 << 24, copy_bytes=128 << 20, seconds=0.4, runs=1,
    disk_bytes=DISK_BYTES, disk_seconds=1.0,
)  # fmt: skip
BRIEF = Effort(
    gemm_size=768, elements=1 << 22, copy_bytes=32 << 20, seconds=0.03, runs=3,
    disk_bytes=8 * CHUNK, disk_seconds=0.1,
)  # fmt: skip
TRIAD_BYTES = 12
"""Per element: two floats read, one written."""
ADAMW_BYTES = 14 + 12
"""Per parameter in `split`: weight, residual, moments and gradient read, all but it written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """Bytes per second of a folder's disk, in transfers of CHUNK by one thread each way."""

    read_bytes_s: float
    write_bytes_s: float
    both_bytes_s: float
    """Reading and writing at once, together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What this machine does per second."""

    threads: int
    """Of torch, where not one is said."""
    gemm_fp32_flop_s: float
    gemm_bf16_flop_s: float
    triad_bytes_s: float
    """STREAM's triad: what memory gives to a loop that does little else."""
    adamw_parameters_s: float
    adamw_bytes_s: float
    adamw_lane_parameters_s: float
    """On one thread, as the engine's optimizer runs beside the computation."""
    adamw_lane_bytes_s: float
    copy_bytes_s: float
    """Host to host on one thread: the link, where the device is the CPU."""
    disk: DiskRates | None = None
    """None: not measured."""
    machine: dict[str, Any] = field(default_factory=dict)
    """`Machine.to_dict()` of where this was measured."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_json(cls, path: Path) -> "Rates":
        """Read what `to_json` wrote.

        Raises:
            InputError: no such file, or one that is not such a record; names what is wrong in it.
        """
        fix = f"write one with: megaslide info --probe --json {path}"
        try:
            values = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"{path}: {error}", fix) from error
        try:
            disk = values.pop("disk", None)
            rates = cls(disk=None if disk is None else DiskRates(**disk), **values)
        except (AttributeError, TypeError) as error:
            raise InputError(f"{path}: not a record of rates: {error}", fix) from error
        _require_numbers(path, rates, fix)
        return rates


def measure_rates(
    folder: Path | None = Path(), progress: Progress | None = None, effort: Effort = FULL
) -> Rates:
    """Measure everything; in full about five seconds, and 600 MB of memory at the most.

    Args:
        folder: on the disk to be measured, with 2 GB free; None leaves the disk out.
        progress: called before each step, and when all are done.
        effort: how long and how large each measurement is.

    Raises:
        InputError: the folder cannot be used or its disk is too full.
    """
    threads = torch.get_num_threads()
    values: dict[str, Any] = {}
    steps: dict[str, Callable[[], Any]] = {}
    if folder is not None:  # first, so that a folder that cannot be used is refused at once
        steps["disk"] = lambda: disk_rates(folder, effort.disk_bytes, effort.disk_seconds)
    steps |= {
        "gemm_fp32_flop_s": lambda: _gemm_flop_s(torch.float32, effort),
        "gemm_bf16_flop_s": lambda: _gemm_flop_s(torch.bfloat16, effort),
        "triad_bytes_s": lambda: _triad_bytes_s(threads, effort),
        "adamw_parameters_s": lambda: _adamw_parameters_s(threads, effort),
        "adamw_lane_parameters_s": lambda: _adamw_parameters_s(1, effort),
        "copy_bytes_s": lambda: _copy_bytes_s(effort),
        "machine": lambda: probe(folder or Path()).to_dict(),
    }
    report = progress or (lambda done, total, name: None)
    for done, (name, step) in enumerate(steps.items()):
        report(done, len(steps), name.removesuffix("_s").replace("_", " "))
        values[name] = step()
    report(len(steps), len(steps), "")
    return Rates(
        threads=threads,
        adamw_bytes_s=ADAMW_BYTES * values["adamw_parameters_s"],
        adamw_lane_bytes_s=ADAMW_BYTES * values["adamw_lane_parameters_s"],
        **values,
    )


@functools.cache
def brief_rates(folder: Path | None = None) -> Rates:
    """The same in about half a second and once per process, for a first estimate.

    Raises:
        InputError: as `measure_rates`.
    """
    return measure_rates(folder, effort=BRIEF)


def disk_rates(folder: Path, nbytes: int = DISK_BYTES, seconds: float = 1.0) -> DiskRates:
    """Measure a folder's disk as the disk tier uses it; its file goes at once.

    Args:
        folder: an existing one, with twice `nbytes` free.
        nbytes: moved in each measurement, at most; a multiple of CHUNK.
        seconds: after which a measurement ends, though fewer bytes were moved.

    Raises:
        InputError: the folder cannot be used or its disk is too full.
        DiskError: reading or writing failed.
    """
    file = RecordFile(folder, 2 * nbytes)
    try:
        memory = _noise()
        # A training step overwrites what is there. The first write, to blocks that are only
        # reserved, is slower; and what was never written would be read from no disk.
        filled, _ = _moved(file.write, memory, 0, 2 * nbytes, 2 * seconds)
        half = max(filled // (2 * CHUNK), 1) * CHUNK
        _, write = _moved(file.write, memory, 0, half, seconds)
        _, read = _moved(file.read, memory, 0, half, seconds)
        return DiskRates(
            read_bytes_s=read, write_bytes_s=write, both_bytes_s=_both_ways(file, half, seconds),
        )  # fmt: skip
    finally:
        file.close()


def triad_(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, threads: int) -> None:
    """a = b + 3 c on fp32 `[n]`, by the native kernel, whose stores skip the caches.

    Raises:
        RuntimeError: without the native library.
    """
    status = library.load().megaslide_triad(
        *(ctypes.c_void_p(x.data_ptr()) for x in (a, b, c)),
        ctypes.c_float(3.0), ctypes.c_int64(a.numel()), ctypes.c_int32(threads),
    )  # fmt: skip
    library.check_status(status)


def _gemm_flop_s(dtype: torch.dtype, effort: Effort) -> float:
    size = effort.gemm_size
    a, b, out = (torch.ones(size, size, dtype=dtype) for _ in range(3))
    return 2 * size**3 / _best_seconds(lambda: torch.mm(a, b, out=out), effort)


def _triad_bytes_s(threads: int, effort: Effort) -> float:
    a, b, c = (torch.ones(effort.elements) for _ in range(3))
    nbytes = TRIAD_BYTES * effort.elements
    if library.why_absent() is None:
        return nbytes / _best_seconds(lambda: triad_(a, b, c, threads), effort)
    return nbytes / _best_seconds(lambda: torch.add(b, c, alpha=3, out=a), effort)


def _adamw_parameters_s(threads: int, effort: Effort) -> float:
    count = effort.elements
    state = AdamWState(
        weight=torch.ones(count, dtype=torch.bfloat16),
        residual=torch.zeros(count, dtype=torch.int16),
        exp_avg=torch.zeros(count), exp_avg_sq=torch.zeros(count),
    )  # fmt: skip
    grad, settings = torch.full((count,), 1e-3, dtype=torch.bfloat16), AdamWSettings(lr=1e-5)
    return count / _best_seconds(
        lambda: adamw_(state, grad, settings, step=1, threads=threads), effort
    )


def _copy_bytes_s(effort: Effort) -> float:
    source, target = host_memory(effort.copy_bytes), host_memory(effort.copy_bytes)
    source.fill_(1)  # untouched memory is one page of zeros, which a cache holds
    return effort.copy_bytes / _best_seconds(lambda: copy_bytes(target, source), effort)


def _best_seconds(work: Callable[[], object], effort: Effort) -> float:
    """Of one run, after one that warms up; a run that takes all the time counts as it is."""
    taken: list[float] = []
    while len(taken) < effort.runs or sum(taken) < effort.seconds:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken[1:], default=taken[0])


def _noise() -> torch.Tensor:
    """One transfer's memory, with what no disk can compress."""
    memory = host_memory(CHUNK)
    return memory.random_(0, 256)


def _moved(
    call: Transfer, memory: torch.Tensor, first: int, nbytes: int, seconds: float
) -> tuple[int, float]:
    """(bytes moved, bytes per second) of transfers one after another from `first`."""
    start, done = time.perf_counter(), 0
    while done < nbytes and (done == 0 or time.perf_counter() - start < seconds):
        call(memory, first + done)
        done += memory.nbytes
    return done, done / (time.perf_counter() - start)


def _both_ways(file: RecordFile, half: int, seconds: float) -> float:
    """Bytes per second together: one thread reads the first half, one overwrites the second."""
    moved: list[int] = []
    errors: list[BaseException] = []

    def work(call: Transfer, memory: torch.Tensor, first: int, most: int) -> None:
        try:
            moved.append(_moved(call, memory, first, most, seconds)[0])
        except BaseException as error:
            errors.append(error)

    ways = ((file.read, _noise(), 0, half), (file.write, _noise(), half, half))
    threads = [threading.Thread(target=work, args=way) for way in ways]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(moved) / (time.perf_counter() - start)


def _require_numbers(path: Path, rates: Rates, fix: str) -> None:
    if not isinstance(rates.machine, dict):
        raise InputError(f"{path}: machine={rates.machine!r} is no record of a machine", fix)
    records = [r for r in (rates, rates.disk) if r is not None]
    for record in records:
        for each in fields(record):
            value = getattr(record, each.name)
            if each.name in ("disk", "machine"):
                continue
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise InputError(f"{path}: {each.name}={value!r} is no positive number", fix)
