"""Accelerators that a plan can be made for without having one.

Figures are the vendors' own peaks, which no program reaches: what a kernel gets of them is for the
planner to say. Matrix rates are dense (vendors like to print the double, for 2:4 sparse matrices)
and accumulate in fp32, which on GeForce cards is half of the fp16 figure. Memory is in decimal
bytes, a little below what the driver reports.
"""

import difflib
from dataclasses import asdict, dataclass
from typing import Any

from megaslide.errors import InputError

__all__ = ["DEVICES", "Device", "device_called", "device_named"]

PCIE4_X16 = 16e9 * 16 * (128 / 130) / 8
"""Bytes per second in each direction: 16 GT/s on 16 lanes, 128 of 130 bits data (PCI Express Base
Specification 4.0). Packet headers take some percent more."""
PCIE5_X16 = 2 * PCIE4_X16
"""32 GT/s (PCI Express Base Specification 5.0)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator."""

    name: str
    bf16_flop_s: float
    """Peak of dense matrix products in bf16 with fp32 sums; a multiply and an add are two."""
    memory_bytes: int
    memory_bytes_s: float
    link_bytes_s: float
    """From the host, and at the same time as much to it."""
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _device(
    name: str, *, tflop_s: float, gb: int, gb_s: float, link: float, source: str
) -> tuple[str, Device]:
    device = Device(
        name=name, bf16_flop_s=tflop_s * 1e12, memory_bytes=gb * 10**9, memory_bytes_s=gb_s * 1e9,
        link_bytes_s=link, source=source,
    )  # fmt: skip
    return name, device


DEVICES: dict[str, Device] = dict(
    (
        _device(
            "h100", tflop_s=989.4, gb=80, gb_s=3350, link=PCIE5_X16,
            source="NVIDIA H100 Tensor Core GPU datasheet, SXM5: 1,979 TFLOPS with sparsity",
        ),
        _device(
            "h200", tflop_s=989.4, gb=141, gb_s=4800, link=PCIE5_X16,
            source="NVIDIA H200 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS with sparsity",
        ),
        _device(
            "b200", tflop_s=2250, gb=180, gb_s=8000, link=PCIE5_X16,
            source="NVIDIA HGX B200 / DGX B200 datasheet, an eighth of 36 PFLOPS with sparsity, "
            "1,440 GB, 64 TB/s",
        ),
        _device(
            "a100-80gb", tflop_s=312, gb=80, gb_s=2039, link=PCIE4_X16,
            source="NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM",
        ),
        _device(
            "rtx3090", tflop_s=71, gb=24, gb_s=936, link=PCIE4_X16,
            source="NVIDIA Ampere GA102 GPU Architecture whitepaper, GeForce RTX 3090",
        ),
        _device(
            "rtx4090", tflop_s=165.2, gb=24, gb_s=1008, link=PCIE4_X16,
            source="NVIDIA Ada GPU Architecture whitepaper, GeForce RTX 4090",
        ),
        _device(
            "rtx5090", tflop_s=209.5, gb=32, gb_s=1792, link=PCIE5_X16,
            source="NVIDIA RTX Blackwell GPU Architecture whitepaper, GeForce RTX 5090: a quarter "
            "of 838 TFLOPS, which are with sparsity and sums in fp16",
        ),
        _device(
            "l40s", tflop_s=362.05, gb=48, gb_s=864, link=PCIE4_X16,
            source="NVIDIA L40S GPU datasheet: 733 TFLOPS with sparsity, PCIe Gen4 x16",
        ),
        _device(
            "mi300x", tflop_s=1307.4, gb=192, gb_s=5300, link=PCIE5_X16,
            source="AMD Instinct MI300X data sheet",
        ),
    )
)  # fmt: skip
"""By name."""


def device_named(name: str) -> Device:
    """The accelerator of that name; case, spaces and dashes do not matter.

    Raises:
        InputError: none is known by it; names the nearest and all that are.
    """
    known = {_key(device): device for device in DEVICES}
    if (key := _key(name)) in known:
        return DEVICES[known[key]]
    close = difflib.get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InputError(f"device {name!r} is unknown", f"{hint}choose from {', '.join(DEVICES)}")


def device_called(driver_name: str) -> Device | None:
    """The device that a driver calls so, such as `NVIDIA H200 NVL`; None if none is known."""
    key = _key(driver_name)
    known = [name for name in DEVICES if all(_key(part) in key for part in name.split("-"))]
    return DEVICES[max(known, key=len)] if known else None


def _key(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
