"""Machine facts: each against what the system itself says, or against a forged source."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaslide.ops import library
from megaslide.planning import hardware
from megaslide.planning.hardware import (
    Gpu,
    Machine,
    disk_free,
    package_version,
    probe,
    source_commit,
)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_record_survives_json() -> None:
    record = json.loads(json.dumps(probe().to_dict()))
    assert set(record) == set(Machine.__dataclass_fields__)
    assert record["python"].count(".") == 2
    assert record["packages"]["torch"] == package_version("torch")


def test_probe_agrees_with_the_system(tmp_path: Path) -> None:
    machine = probe(tmp_path / "not" / "there" / "yet")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.ram_bytes <= pages
    assert 1 <= machine.cores_usable <= (os.cpu_count() or 1)
    assert machine.disk_path == str(tmp_path.resolve())
    block = os.statvfs(tmp_path)
    assert machine.disk_free_bytes == pytest.approx(block.f_bavail * block.f_frsize, rel=0.01)


def test_either_devices_or_a_reason_for_none() -> None:
    machine = probe()
    assert bool(machine.gpus) != bool(machine.gpu_reason)


def test_devices_are_listed_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="Imaginary GPU", total_memory=80_000_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    machine = probe()
    assert machine.gpus == (Gpu(name="Imaginary GPU", memory_bytes=80_000_000_000),) * 2
    assert machine.gpu_reason is None


def test_gpu_that_torch_was_not_built_for_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a CPU build" in (probe().gpu_reason or "")


@pytest.mark.parametrize("reason", [None, "no C++ compiler"])
def test_native_library_is_reported_as_the_loader_finds_it(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "why_absent", lambda: reason)
    assert probe().native_reason == reason


def test_cpu_is_read_from_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel\t\t: 7\nmodel name\t: Imaginary: 9000\n"
        "flags\t\t: fpu avx2 avx512f_not amx_bf16\n"
        "processor\t: 1\nmodel name\t: Other\nflags\t\t: avx512f\n"
    )
    monkeypatch.setattr(hardware, "PROC_CPUINFO", cpuinfo)
    machine = probe()
    assert (machine.cpu, machine.isa) == ("Imaginary: 9000", ("avx2", "amx_bf16"))


def test_system_without_cpuinfo_still_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "PROC_CPUINFO", tmp_path / "absent")
    machine = probe()
    assert machine.isa == ()
    assert machine.cpu


@pytest.mark.parametrize(("limit", "expected"), [("1048576", 1048576), ("max", None)])
def test_container_limit_counts_as_ram(
    limit: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    monkeypatch.setattr(hardware, "CGROUP_MEMORY", tmp_path / "memory.max")
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert probe().ram_bytes == pytest.approx(expected or installed, rel=0.01)


def test_commit_of_a_clean_and_of_a_changed_checkout(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert source_commit(checkout) == head[:12]
    (checkout / "file").write_text("two")
    assert source_commit(checkout) == f"{head[:12]}-dirty"


def test_folder_inside_another_checkout_has_no_commit(checkout: Path) -> None:
    inside = checkout / "site-packages"
    inside.mkdir()
    assert source_commit(inside) is None


def test_checkout_without_commits_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert source_commit(tmp_path) is None


def test_machine_without_git_has_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert source_commit(checkout) is None


def test_absent_package_has_no_version() -> None:
    assert package_version("surely-not-a-package") is None


def test_free_space_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert disk_free(tmp_path / "a" / "b") > 0
