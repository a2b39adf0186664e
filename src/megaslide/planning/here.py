"""This machine as a plan sees it: what it does per second, and what is free on it now.

Rates come from the file that `offload.rates` names. Without one they are measured in well under a
second before a run begins, which is enough to tell which lane is the slow one; on a busy machine
they are what it has left.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megaslide.planning.devices import device_called
from megaslide.planning.hardware import disk_free
from megaslide.planning.plan import Machine, accelerator
from megaslide.planning.rates import Rates, brief_rates
from megaslide.planning.subject import Subject
from megaslide.streaming.budget import available_ram
from megaslide.streaming.placement import chosen_device, device_budget

Measure = Callable[[Path | None], Rates]
"""Given the folder whose disk is measured, or None."""


def machine_here(
    subject: Subject, *, state_folder: Path, measure: Measure = brief_rates
) -> Machine:
    """The processor as the device, with the link and the budget that the config gives it.

    Args:
        subject: what is to run.
        state_folder: where the disk tier would be.
        measure: what measures, where the config names no file.

    Raises:
        InputError: the file of rates is none, or the disk to be measured cannot be used.
    """
    offload = subject.offload
    on_disk = any("disk" in (c.tier, c.activations) for c in subject.choices)
    if offload.rates is not None:
        rates = Rates.from_json(Path(offload.rates))
        told = f"measured on {rates.machine.get('cpu', 'a machine not named')} ({offload.rates})"
    else:
        rates = measure(_existing(state_folder) if on_disk else None)
        told = "measured here just now"
    machine = machine_of(rates, bf16=subject.dtype == torch.bfloat16, told=told)
    link, basis = machine.link_bytes_s, dict(machine.basis)
    if offload.link_gb_s is not None and offload.link_gb_s * 1e9 < link:
        link, basis["link"] = offload.link_gb_s * 1e9, "emulated (offload.link_gb_s)"
    disk = machine.disk_bytes_s
    if offload.disk_gb_s is not None and disk and offload.disk_gb_s * 1e9 < disk:
        disk, basis["disk"] = offload.disk_gb_s * 1e9, "emulated (offload.disk_gb_s)"
    device = chosen_device(offload)
    machine = replace(machine, link_bytes_s=link, disk_bytes_s=disk, basis=basis)
    if device == "cuda":
        name, bf16 = torch.cuda.get_device_name(), subject.dtype == torch.bfloat16
        machine = with_gpu(machine, name, bf16=bf16)
    return replace(
        machine, ram_bytes=available_ram(),
        device_bytes=device_budget(offload), device_is_host=device == "cpu",
        disk_bytes=disk_free(state_folder),
    )  # fmt: skip


def machine_of(rates: Rates, *, bf16: bool, told: str = "measured here just now") -> Machine:
    """The processor as the device, at these rates; room is not limited.

    Args:
        told: where the rates come from, in words.
    """
    gemm = rates.gemm_bf16_flop_s if bf16 else rates.gemm_fp32_flop_s
    names = ("compute", "link", "adamw", *(["disk"] if rates.disk else []))
    return Machine(
        name="cpu", flop_s=gemm, peak_flop_s=gemm, memory_bytes_s=rates.triad_bytes_s,
        link_bytes_s=rates.copy_bytes_s, adamw_bytes_s=rates.adamw_lane_bytes_s,
        disk_bytes_s=rates.disk.both_bytes_s if rates.disk else None,
        device_is_host=True, basis=dict.fromkeys(names, told),
    )  # fmt: skip


def with_gpu(machine: Machine, driver_name: str, *, bf16: bool = True) -> Machine:
    """A measured processor with a GPU as the device, at its table's rates if it is a known one."""
    known = device_called(driver_name)
    if known is None:
        basis = {"compute": f"{machine.basis['compute']}, by the processor: no rates are known of "
                 f"{driver_name}"}  # fmt: skip
        return replace(machine, name=driver_name, basis={**machine.basis, **basis})
    gpu = accelerator(known, bf16=bf16)
    basis = {key: gpu.basis[key] for key in ("compute", "link")}
    return replace(
        gpu, adamw_bytes_s=machine.adamw_bytes_s, disk_bytes_s=machine.disk_bytes_s,
        basis={**machine.basis, **basis},
    )  # fmt: skip


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
