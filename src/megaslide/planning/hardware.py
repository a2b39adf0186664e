"""What machine this is, in one record that every result carries.

A measured number without its machine, versions and commit cannot be compared with anything, so the
run log, the benchmark files and `megaslide info` all write the same `Machine`. Nothing is probed at
import: `probe()` asks when it is called, and a fact that cannot be had is None, never a guess.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instruction sets that change which kernel runs, spelled as Linux spells them."""
PACKAGES = ("torch", "diffusers", "av", "numpy")
SOURCE_TREE = Path(__file__).resolve().parents[3]
PROC_CPUINFO = Path("/proc/cpuinfo")
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator that torch can use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about the machine and the software on it, at the time of `probe()`."""

    cpu: str
    cores_physical: int | None
    cores_usable: int
    """Logical cores this process may run on (affinity counted, container quotas not)."""
    isa: tuple[str, ...]
    """The members of ISA_FLAGS that the CPU has; empty where the system does not tell."""
    ram_bytes: int
    """Installed memory, or the container's limit where that is lower."""
    disk_path: str
    disk_free_bytes: int
    gpus: tuple[Gpu, ...]
    gpu_reason: str | None
    """Why `gpus` is empty; None where it is not."""
    system: str
    python: str
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Version of each of PACKAGES; None where it is not installed."""
    megaslide: str
    commit: str | None
    """Git commit of the source tree, with `-dirty` if files differ; None outside a checkout."""
    native_reason: str | None
    """Why the native library cannot be used; None where it can."""

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready types."""
        return asdict(self)

    def provenance(self) -> dict[str, Any]:
        """What a published result depends on: the record without folders and what is free there."""
        return {k: v for k, v in asdict(self).items() if not k.startswith("disk_")}


def probe(folder: Path = Path()) -> Machine:
    """Ask the system everything; about two seconds where torch is not imported yet.

    Args:
        folder: any path on the disk whose free space matters; it need not exist yet.
    """
    folder = _existing(folder)
    gpus, gpu_reason = _gpus()
    return Machine(
        cpu=_cpu_model(),
        cores_physical=psutil.cpu_count(logical=False),
        cores_usable=usable_cores(),
        isa=_isa(),
        ram_bytes=_ram_bytes(),
        disk_path=str(folder),
        disk_free_bytes=disk_free(folder),
        gpus=gpus,
        gpu_reason=gpu_reason,
        system=platform.platform(),
        python=platform.python_version(),
        packages={name: package_version(name) for name in PACKAGES},
        megaslide=package_version("megaslide") or "not installed",
        commit=source_commit(SOURCE_TREE),
        native_reason=_native_reason(),
    )


def package_version(name: str) -> str | None:
    """Installed version of a distribution, without importing it; None where absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Logical cores this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def disk_free(folder: Path) -> int:
    """Bytes an ordinary user can still write below `folder`, which need not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def source_commit(tree: Path) -> str | None:
    """Commit that `tree` is checked out at; None unless it is itself the root of a checkout.

    A package installed below somebody else's repository must not report that repository's commit,
    hence the look for `.git` right here instead of git's own upward search.
    """
    if not (tree / ".git").exists():
        return None
    commit = _git(tree, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return f"{commit}-dirty" if _git(tree, "status", "--porcelain") else commit


def _git(tree: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _existing(folder: Path) -> Path:
    """The nearest ancestor that exists, since free space is asked before a folder is made."""
    folder = folder.resolve()
    return next(p for p in (folder, *folder.parents) if p.exists())


def _cpuinfo(key: str) -> str:
    """First value of a key in Linux's cpuinfo, or an empty string."""
    try:
        lines = PROC_CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _isa() -> tuple[str, ...]:
    flags = set(_cpuinfo("flags").split())
    return tuple(flag for flag in ISA_FLAGS if flag in flags)


def _ram_bytes() -> int:
    installed = psutil.virtual_memory().total
    try:
        return min(installed, int(CGROUP_MEMORY.read_text()))
    except (OSError, ValueError):  # no cgroup v2 here, or its limit is "max"
        return installed


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") and torch.version.cuda is None:
            return (), f"torch {torch.__version__} is a CPU build; install one with CUDA"
        return (), "no CUDA device"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Gpu(name=d.name, memory_bytes=d.total_memory) for d in devices), None


def _native_reason() -> str | None:
    from megaslide.ops.library import why_absent

    return why_absent()
