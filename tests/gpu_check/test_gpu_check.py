"""`make gpu-check` on a machine without a GPU: every part runs, none can take the others along.

What it would find on a GPU cannot be tested here. That it finds wrong kernels, unwritten outputs,
hanging parts and used-up budgets can.
"""

import argparse
import ctypes
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import copies, kernels, long_block, native, steps
from benchmarks.gpu_check.session import Chip, Session, poisoned
from megaslide.planning.devices import DEVICES
from megaslide.streaming import stream
from megaslide.streaming.memory import DeviceMemory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(chip=Chip("cpu"), smoke=True, out=tmp_path, part="parity", budget_s=60)


def test_every_part_runs_at_toy_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [part.name for part in command.PARTS if part.name != "engine"]
    options = ["--device", "cpu", "--smoke", "--in-process", "--out", str(tmp_path)]
    assert command.main([*options, "--parts", *names]) == 0
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert list(report["parts"]) == names
    for part in report["parts"].values():
        assert part["ended"] == "done"
        assert part["rows"]
        assert not [row for row in part["rows"] if "error" in row or "skipped" in row]
    assert {row["name"].split()[0] for row in report["parts"]["attention"]["rows"]} >= {
        "none", "shift", "affine", "tap", "dense", "grid_sample",
    }  # fmt: skip
    spans = json.loads((tmp_path / "trace-4b.json").read_text())["traceEvents"]
    assert {"compute", "h2d", "d2h"} <= {e["args"]["name"] for e in spans if e["ph"] == "M"}
    assert report["machine"]["cpu"]
    assert "mfu" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"gpu-check.json", "trace-4b.json"}


@pytest.mark.slow
def test_a_part_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--smoke", "--out", str(tmp_path), "--parts", "engine", "link"]
    assert command.main(options) == 0
    parts = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]
    assert [row["name"] for row in parts["link"]["rows"]][1:] == ["h2d", "d2h", "duplex"]
    assert parts["engine"]["rows"][0]["tests"] > 50  # collected: without a GPU they do not run


# ---- checks that must fail -----------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["out", "nan", "raises"])
def test_a_wrong_kernel_fails_and_is_not_measured(
    session: Session, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    right = kernels.deformable_attention

    def attend(*args: Any, backend: str | None = None, **options: Any) -> torch.Tensor:
        out = right(*args, backend=backend, **options)
        if backend == "reference":
            return out
        if wrong == "raises":
            raise RuntimeError("no such kernel")
        return out * 1.05 if wrong == "out" else out + torch.empty_like(out)

    monkeypatch.setattr(kernels, "deformable_attention", attend)
    kernels.attention(session)
    rows = {row["name"]: row for row in session.rows}
    assert all("error" in row for name, row in rows.items() if name.startswith("gate"))
    assert "gate failed" in rows["affine 128 x 2 fwd"]["skipped"]
    assert "ms" in rows["dense 128 x 2 fwd"]
    assert command.failed({"parts": {"attention": {"ended": "done", "rows": session.rows}}})


def test_unwritten_memory_is_nan_within() -> None:
    with poisoned():
        assert torch.empty(1000).isnan().all()
        assert torch.zeros(8).new_empty(100, dtype=torch.bfloat16).isnan().all()
        assert torch.empty_like(torch.zeros(10, dtype=torch.float16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_rows_are_kept_one_by_one_and_later_ones_run_after_an_error(session: Session) -> None:
    def full() -> dict[str, Any]:
        raise torch.OutOfMemoryError("no room")

    def explained() -> dict[str, Any]:
        with DeviceMemory().explained():
            return full()

    session.row("good", lambda: {"worst": 1.0})
    session.row("full", full)
    session.row("explained", explained)  # as the engine says it
    names = [row["name"] for row in json.loads(session.file.read_text())]
    assert names == ["good", "full", "explained"]
    assert all("out of device memory" in row["skipped"] for row in session.rows[1:])
    session.budget_s = 0
    assert "are over" in session.row("late", full)["skipped"]


@pytest.mark.parametrize("why", [torch.OutOfMemoryError("no room"), RuntimeError("wrong")])
def test_nothing_is_measured_behind_a_gate_that_did_not_pass(
    session: Session, monkeypatch: pytest.MonkeyPatch, why: Exception
) -> None:
    def gate(*_: Any) -> Any:
        raise why

    for module, names in (
        (copies, ("_arrive", "_same_update")), (steps, ("_parity",)), (long_block, ("gate",)),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, gate)
    for part in (copies.link, copies.optimizer, steps.small, long_block.run):
        session.rows.clear()
        part(session)
        assert len(session.rows) == 1


# ---- processes and budgets -----------------------------------------------------------------------


def _ends(pid: int) -> bool:
    """Whether a process that was told to end does within 10 s, whoever has to reap it."""
    status, last = Path(f"/proc/{pid}/status"), time.monotonic() + 10
    while time.monotonic() < last:
        try:
            if "zombie" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hanging = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid)); print('said', flush=True)\n"
        "time.sleep(60)"
    )
    start = time.monotonic()
    ended = command.run_child([sys.executable, "-c", hanging], 3.0, tmp_path / "log")
    assert ended.startswith("killed after 3 s")
    assert "said" in ended
    assert time.monotonic() - start < 20
    assert _ends(int(pid.read_text()))
    assert command.failed({"parts": {"parity": {"ended": ended, "rows": [{"worst": 0.0}]}}})
    code = "import sys; sys.exit('broke')"
    ended = command.run_child([sys.executable, "-c", code], 20, tmp_path / "log")
    assert ended.startswith("failed: exit code 1")
    assert "broke" in ended


def test_budgets_hand_on_what_is_left_over() -> None:
    parts = [command.Part(name, "", seconds) for name, seconds in (("a", 60), ("b", 30), ("c", 0))]
    assert command.allowed_s(100, parts) == 70  # 10 more than its own
    assert command.allowed_s(80, parts) == 60  # its own, at the cost of those behind it
    assert command.allowed_s(20, parts) == 20
    assert command.allowed_s(35, parts[2:]) == 35
    assert sum(part.budget_s for part in command.PARTS) < 460
    skipped = command.run_part(argparse.Namespace(), parts[2], 0.5, Path())
    assert skipped["ended"].startswith("skipped")


# ---- models and the machine ----------------------------------------------------------------------


@pytest.mark.parametrize("state_format", ["split", "split8"])
def test_largest_model_is_the_largest_that_the_store_takes(state_format: Any) -> None:
    room = 60_000_000
    size = steps.largest_size(state_format, room, hidden_size=256)
    one_more = steps.Size(hidden_size=256, num_layers=size.num_layers + 1)
    streamed = stream(
        size.on_meta(), dtype=torch.bfloat16, state_format=state_format,
        init_weights=steps.RandomWeights(2**12),
    )  # fmt: skip
    held = sum(streamed.store.nbytes.values())
    streamed.close()
    assert held <= room < steps._state_bytes(one_more, state_format)
    with pytest.raises(RuntimeError, match="not enough for one block"):
        steps.largest_size(state_format, 10_000, hidden_size=256)


def test_sizes_are_what_they_are_called() -> None:
    for name, billions in (("1b", 1.0), ("4b", 4.0)):
        count = sum(p.numel() for p in steps.SIZES[name].on_meta().parameters()) / 1e9
        assert count == pytest.approx(billions, rel=0.15)
    assert [load.tokens for load in steps.LOADS] == [4096, 16384, 65536]


def test_the_peak_is_that_of_the_device_by_its_driver_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chip, "name", "NVIDIA H200")
    assert Chip("cpu").peak_flop_s == DEVICES["h200"].bf16_flop_s
    monkeypatch.setattr(Chip, "name", "NVIDIA GeForce RTX 4090")
    assert Chip("cpu").peak_flop_s == DEVICES["rtx4090"].bf16_flop_s
    monkeypatch.setattr(Chip, "name", "cpu")
    assert Chip("cpu").peak_flop_s is None


def test_units_of_the_native_library_are_those_of_cmake() -> None:
    found = native.units((ROOT / "CMakeLists.txt").read_text(), amx=True)
    sources = {source for source, _ in found.values()}
    assert sources == {str(p.relative_to(ROOT)) for p in (ROOT / "csrc/src").glob("*.cpp")}
    assert "-ffp-contract=off" in found["adamw_baseline"][1]
    if platform.machine() == "x86_64":
        bf16 = found["deformable_attention_x86_64_v4_bf16"][1]
        assert {"-march=x86-64-v4", "-mavx512bf16"} <= set(bf16)
        assert {"-mavx512bf16", "-mamx-tile"} <= set(found["tiles"][1])
    with pytest.raises(RuntimeError, match="has nothing like"):
        native.units("project(other)", amx=False)


@pytest.mark.slow
def test_the_native_library_builds_without_cmake(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(native.build("g++", tmp_path)))
    assert library.megaslide_abi_version() == 3
    with pytest.raises(RuntimeError, match="no compiler 'no-such-compiler'"):
        native.build("no-such-compiler", tmp_path)


def test_needs_nothing_that_such_a_machine_lacks() -> None:
    lacking = ("pydantic", "diffusers", "av", "typer", "natten")
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({lacking}))\n"
        "from benchmarks.gpu_check import __main__, copies, engine, kernels, long_block, native\n"
        "from benchmarks.gpu_check import steps\n"
        "import pytest\n"
        "sys.exit(pytest.main([*engine.COMMAND[3:], '--collect-only']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
