"""Measured rates: that what is timed is what is counted, by a clock that the tests turn."""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaslide.errors import InputError
from megaslide.ops.library import why_absent
from megaslide.planning import rates
from megaslide.planning.rates import CHUNK, DiskRates, Rates, disk_rates, measure_rates
from megaslide.streaming.disk import DiskError, RecordFile

VALUES = {
    "threads": 2,
    "gemm_fp32_flop_s": 1e11,
    "gemm_bf16_flop_s": 2e11,
    "triad_bytes_s": 3e10,
    "adamw_parameters_s": 1e9,
    "adamw_bytes_s": 2.6e10,
    "adamw_lane_parameters_s": 5e8,
    "adamw_lane_bytes_s": 1.3e10,
    "copy_bytes_s": 8e9,
}
DISK = {"read_bytes_s": 2e9, "write_bytes_s": 1e9, "both_bytes_s": 2.5e9}


SMALL = rates.Effort(
    gemm_size=64, elements=4096, copy_bytes=1 << 16, seconds=0.001, runs=1, disk_bytes=2 * CHUNK,
    disk_seconds=1.0,
)  # fmt: skip


class Clock:
    """Stands for `time` in the module: moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_best_of_the_runs_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = Clock(), [0.1, 0.15, 0.12, 0.2, 9.0]
    monkeypatch.setattr(rates, "time", clock)

    def work() -> None:
        clock.now += left.pop(0)

    assert rates._best_seconds(work, replace(SMALL, seconds=0.5)) == pytest.approx(0.12)
    assert left == [9.0]  # 0.57 s have passed, more than 0.5
    assert rates._best_seconds(work, replace(SMALL, seconds=0.5)) == pytest.approx(9.0)  # it counts
    left += [3.0, 0.1, 0.2]
    assert rates._best_seconds(work, replace(SMALL, runs=3)) == pytest.approx(0.1)


def test_counts_are_those_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every run taking 2 s, rates are half of the work of one."""
    ran: list[str] = []

    def two_seconds(work: Callable[[], object], effort: rates.Effort) -> float:
        ran.append("run")
        work()
        return 2.0

    monkeypatch.setattr(rates, "_best_seconds", two_seconds)
    measured = measure_rates(None, effort=SMALL)
    assert len(ran) == 6
    assert measured.gemm_fp32_flop_s == measured.gemm_bf16_flop_s == 64**3
    assert measured.triad_bytes_s == 4096 * 3 * 4 / 2
    assert measured.adamw_parameters_s == measured.adamw_lane_parameters_s == 2048
    # bf16 weight, int16 residual, two fp32 moments, read and written; a bf16 gradient, read.
    assert measured.adamw_bytes_s == 2048 * (2 * (2 + 2 + 4 + 4) + 2)
    assert measured.copy_bytes_s == (1 << 16) / 2
    assert measured.disk is None
    assert measured.threads == torch.get_num_threads()


@pytest.mark.skipif(why_absent() is not None, reason="needs the native library")
def test_triad_computes_its_sum() -> None:
    b, c = torch.randn(100_003), torch.randn(100_003)
    rates.triad_(a := torch.zeros(100_003), b, c, 2)
    assert torch.allclose(a, b + 3 * c, rtol=1e-6)


def test_machine_without_kernels_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaslide.ops.library._open", lambda: (None, "no compiler"))
    measured = measure_rates(None, effort=SMALL)
    assert min(measured.triad_bytes_s, measured.adamw_parameters_s) > 0
    assert measured.machine["native_reason"] == "no compiler"


def test_real_run_tells_its_progress_and_leaves_no_file(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    measured = measure_rates(
        tmp_path, effort=SMALL, progress=lambda done, total, name: seen.append((done, total))
    )
    total = seen[0][1]
    assert seen == [(done, total) for done in range(total + 1)]
    assert measured.disk is not None
    assert min(measured.disk.read_bytes_s, measured.disk.write_bytes_s) > 1e6
    assert measured.machine["disk_path"] == str(tmp_path)
    assert os.listdir(tmp_path) == []


# -- the disk -------------------------------------------------------------------------------------


class FakeDisk:
    """Transfers take the clock's time: 0.25 s to write a chunk, `read_s` to read one."""

    def __init__(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch, read_s: float = 0.5
    ) -> None:  # fmt: skip
        self.clock, self.lock, self.read_s = clock, threading.Lock(), read_s
        self.written: set[int] = set()
        self.read_before_written: list[int] = []
        monkeypatch.setattr(rates, "time", clock)
        monkeypatch.setattr(RecordFile, "write", lambda _, memory, at: self.write(at))
        monkeypatch.setattr(RecordFile, "read", lambda _, memory, at: self.read(at))

    def write(self, at: int) -> None:
        with self.lock:
            self.written.add(at)
            self.clock.now += 0.25

    def read(self, at: int) -> None:
        with self.lock:
            if at not in self.written:
                self.read_before_written.append(at)
            self.clock.now += self.read_s


def test_disk_rates_are_bytes_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk(Clock(), monkeypatch)
    found = disk_rates(tmp_path, 4 * CHUNK, seconds=float("inf"))
    assert found.write_bytes_s == CHUNK / 0.25
    assert found.read_bytes_s == CHUNK / 0.5
    assert found.both_bytes_s == pytest.approx(8 * CHUNK / (4 * 0.25 + 4 * 0.5))
    assert disk.written == {n * CHUNK for n in range(8)}
    assert disk.read_before_written == []


def test_slow_disk_ends_the_measurement_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FakeDisk(Clock(), monkeypatch, read_s=0.0625)
    found = disk_rates(tmp_path, 64 * CHUNK, seconds=0.6)
    assert disk.clock.now < 104
    assert found.read_bytes_s == CHUNK / 0.0625
    assert found.write_bytes_s == CHUNK / 0.25
    assert disk.read_before_written == []


def test_failing_disk_is_told_from_whichever_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RecordFile.write

    def failing(self: RecordFile, memory: torch.Tensor, at: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise DiskError(f"{tmp_path}: gone")
        original(self, memory, at)

    monkeypatch.setattr(RecordFile, "write", failing)
    with pytest.raises(DiskError, match="gone"):
        disk_rates(tmp_path, CHUNK)


def test_folder_that_is_not_there_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        measure_rates(tmp_path / "nowhere")


# -- the record -----------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [None, DiskRates(**DISK)])
def test_record_survives_a_file(tmp_path: Path, disk: DiskRates | None) -> None:
    record = Rates(**VALUES, disk=disk, machine={"cpu": "x"})  # type: ignore[arg-type]
    record.to_json(path := tmp_path / "rates.json")
    assert Rates.from_json(path) == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"copy_bytes_s": None}, "copy_bytes_s=None"),
        ({"copy_bytes_s": 0}, "copy_bytes_s=0"),
        ({"triad_bytes_s": "fast"}, "triad_bytes_s='fast'"),
        ({"disk": {**DISK, "read_bytes_s": -1}}, "read_bytes_s=-1"),
        ({"disk": {"read_bytes_s": 1}}, "both_bytes_s"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"machine": "x"}, "machine='x'"),
    ],
)
def test_damaged_record_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (path := tmp_path / "rates.json").write_text(json.dumps(VALUES | change))
    with pytest.raises(InputError, match=message) as refused:
        Rates.from_json(path)
    assert f"megaslide info --probe --json {path}" in str(refused.value)


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"threads": 1}'])
def test_other_files_are_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"rates\.json"):
        Rates.from_json(path)
