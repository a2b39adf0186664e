"""The table of accelerators: figures against independent ones, and errors that help."""

import pytest

from megaslide.errors import InputError
from megaslide.planning.devices import DEVICES, device_called, device_named

WANTED = ("h100", "h200", "b200", "a100-80gb", "rtx4090", "rtx5090", "l40s", "mi300x")


def test_the_table_has_what_people_own() -> None:
    assert set(WANTED) <= set(DEVICES)
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.source
        assert device.link_bytes_s < device.memory_bytes_s < device.bf16_flop_s


@pytest.mark.parametrize(
    ("name", "multiprocessors", "flop_per_clock", "boost_hz"),
    [
        # Dense bf16 FLOP per clock and multiprocessor, of the architecture's whitepaper.
        ("a100-80gb", 108, 2048, 1.410e9),
        ("h100", 132, 4096, 1.830e9),
        ("rtx3090", 82, 512, 1.695e9),
        ("rtx4090", 128, 512, 2.520e9),
        ("rtx5090", 170, 512, 2.407e9),
        ("l40s", 142, 1024, 2.490e9),
        ("mi300x", 304, 2048, 2.100e9),
    ],
)
def test_peak_is_units_times_clock(
    name: str, multiprocessors: int, flop_per_clock: int, boost_hz: float
) -> None:
    peak = multiprocessors * flop_per_clock * boost_hz
    assert device_named(name).bf16_flop_s == pytest.approx(peak, rel=0.01)


def test_link_is_lanes_times_rate() -> None:
    assert device_named("h100").link_bytes_s == pytest.approx(63.0e9, rel=0.001)
    assert device_named("rtx4090").link_bytes_s == pytest.approx(31.5e9, rel=0.001)


@pytest.mark.parametrize("spelling", ["RTX 4090", "rtx-4090", "RTX4090", "rtx_4090"])
def test_spelling_is_forgiven(spelling: str) -> None:
    assert device_named(spelling) is DEVICES["rtx4090"]


def test_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(InputError, match=r"device 'H300' is unknown") as refused:
        device_named("H300")
    assert "did you mean 'h200'" in str(refused.value) or "'h100'" in str(refused.value)
    assert all(name in str(refused.value) for name in DEVICES)
    with pytest.raises(InputError) as refused:
        device_named("?")
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("Tesla T4", None),
    ],
)  # fmt: skip
def test_drivers_names(driver_name: str, name: str | None) -> None:
    found = device_called(driver_name)
    assert found == (None if name is None else device_named(name))
