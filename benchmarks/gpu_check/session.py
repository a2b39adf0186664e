"""What every part is given: the device and its clock, a deadline, and a place for its rows.

A part that is killed loses nothing: the file is written anew after each row.
"""

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megaslide.planning.devices import DEVICES

Row = dict[str, Any]
COLD_BYTES = 256 * 2**20
"""More than any L2: written between calls that are timed, so that none finds its inputs there."""


class Chip:
    """The device under test: its clock, memory and ceilings. The CPU answers the same questions."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type != "cpu"
        self._module = torch.get_device_module(self.device) if self.is_gpu else None
        nbytes = COLD_BYTES if self.is_gpu else 0
        self._cold = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def name(self) -> str:
        return self._module.get_device_name(self.device) if self._module else "cpu"

    @property
    def peak_flop_s(self) -> float | None:
        """The datasheet's dense bf16 rate; None for a device that `planning.devices` lacks."""
        name = "".join(filter(str.isalnum, self.name.lower()))
        known = [d for key, d in DEVICES.items() if key.replace("-", "") in name]
        return known[0].bf16_flop_s if known else None

    def synchronize(self) -> None:
        if self._module:
            self._module.synchronize(self.device)

    def median_s(self, run: Callable[[], Any], *, budget_s: float = 1.0, most: int = 30) -> float:
        """Median seconds of a call whose inputs are in no cache, by the device's own clock."""
        once = max(self._once(run), 1e-6)  # warms up too: compilation, tuning, allocation
        once = max(min(once, self._once(run)), 1e-6)
        count = max(1, min(most, int(budget_s / once)))
        return statistics.median(self._once(run) for _ in range(count))

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """By how much a call raises the peak of device memory; None where nobody counts."""
        if self._module is None:
            return None
        self.synchronize()
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self.device)
        before = self._module.memory_allocated(self.device)
        run()
        self.synchronize()
        return int(self._module.max_memory_allocated(self.device) - before)

    def release(self) -> None:
        """Give memory that torch keeps but does not use back to the device."""
        if self._module:
            self._module.empty_cache()

    def _once(self, run: Callable[[], Any]) -> float:
        if self._module is None:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        self._cold.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def copy_bytes_s(chip: Chip, nbytes: int) -> float:
    """Bytes per second, read and written, of a copy within the device."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=chip.device)
    target = torch.empty_like(source)
    return 2 * nbytes / chip.median_s(lambda: target.copy_(source))


def gemm_flop_s(chip: Chip, size: int) -> float:
    """FLOP per second of a square bf16 matrix product of random numbers."""
    a, b = (torch.randn(size, size, device=chip.device).bfloat16() for _ in range(2))
    return 2 * size**3 / chip.median_s(lambda: a @ b)


@dataclass(kw_only=True)
class Session:
    """One part's run."""

    chip: Chip
    smoke: bool
    """Toy sizes: everything runs, nothing is measured that means anything."""
    out: Path
    """Where rows go, and other files of the part."""
    part: str
    budget_s: float
    shard: int | None = None
    """Which of several processes, for a part that is split among some."""
    rows: list[Row] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started)

    @property
    def file(self) -> Path:
        shard = "" if self.shard is None else f"-shard{self.shard}"
        return self.out / f"part-{self.part}{shard}.json"

    def row(self, name: str, work: Callable[[], Row]) -> Row:
        """Add what `work` returns; or why it returned nothing, after which others still run."""
        start = time.monotonic()
        if self.left_s <= 0:
            return self.add(name, {"skipped": f"the part's {self.budget_s:.0f} s are over"})
        try:
            found = work()
        except Exception as error:
            # The engine explains why memory is short: its own error then has torch's as its cause.
            if any(isinstance(e, torch.OutOfMemoryError) for e in (error, error.__cause__)):
                found = {"skipped": f"out of device memory: {str(error)[:200]}"}
            else:
                tail = traceback.format_exc()[-1500:]
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}", "traceback": tail}
        self.chip.release()
        return self.add(name, {**found, "took_s": time.monotonic() - start})

    def passes(self, name: str, work: Callable[[], Row]) -> bool:
        """Whether a check, which has a row too, was made and found nothing."""
        return not {"error", "skipped"} & self.row(name, work).keys()

    def add(self, name: str, found: Row) -> Row:
        row = {"name": name, **found}
        self.rows.append(row)
        scratch = self.file.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.rows, indent=1))
        scratch.replace(self.file)
        return row

    def ceilings(self) -> Row:
        """What the device reaches at the two things every kernel is made of, measured here."""
        size, nbytes = (256, 2**20) if self.smoke else (8192, 2**32)
        found = {
            "copy_bytes_s": copy_bytes_s(self.chip, nbytes),
            "gemm_flop_s": gemm_flop_s(self.chip, size),
        }
        self.chip.release()
        return self.add("ceilings", found)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is handed out within is NaN, so that what a kernel leaves unwritten shows.

    torch does that for whoever asks for deterministic algorithms; their warnings are not of
    interest here.
    """
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
