"""The disk tier: ordering under delay, errors that name the place, memory that stays bounded."""

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

from megaslide.errors import InputError, is_disk_full
from megaslide.streaming import TransferHooks, stream
from megaslide.streaming.disk import DiskError, RecordFile
from megaslide.streaming.lanes import Event, Lanes
from megaslide.streaming.layout import PAGE
from megaslide.streaming.memory import host_memory
from megaslide.streaming.staging import WeightsAhead
from megaslide.tracing import Trace

pytestmark = pytest.mark.usefixtures("backend")

POISON = TransferHooks(max_delay_s=0.001, poison=True)


def on_disk(tmp_path: Path, seed: int = 0, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "tier": "disk", "gradient_tier": "disk", "disk_path": tmp_path / "state",
        "hooks": POISON, "lr": 1e-2,
    }  # fmt: skip
    return stream(toys.net(seed, dim=64), **settings | options)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaslide.streaming.records.PIECE", PAGE)


@pytest.mark.parametrize("direct", [True, False])
def test_file_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        monkeypatch.setattr("megaslide.streaming.disk._DIRECT", 0)
    file = RecordFile(tmp_path, 16 * PAGE)
    assert not direct or file.direct
    wrote = host_memory(3 * PAGE)
    wrote.copy_(torch.randint(0, 256, (3 * PAGE,), dtype=torch.uint8))
    file.write(wrote, 5 * PAGE)
    read = host_memory(5 * PAGE)
    file.read(read, 4 * PAGE)
    assert torch.equal(read[PAGE : 4 * PAGE], wrote)
    assert not read[:PAGE].any()
    assert not read[4 * PAGE :].any()
    with pytest.raises(DiskError, match=f"{tmp_path}: reading .* the file ends early"):
        file.read(read, 14 * PAGE)
    file.close()


def test_the_file_vanishes_with_its_owner(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, PAGE)
    assert not list(tmp_path.iterdir())
    fd = file._fd
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call with a seed: transfers then begin late, and memory is NaN until it is read into."""
    transfer = RecordFile._transfer

    def begin(seed: int) -> None:
        generator = random.Random(seed)

        def delayed(self: RecordFile, call: Any, verb: str, memory: Any, offset: int) -> None:
            if verb == "reading":
                memory.fill_(0xFF)
            time.sleep(generator.uniform(0, 0.004))
            transfer(self, call, verb, memory, offset)

        monkeypatch.setattr(RecordFile, "_transfer", delayed)

    return begin


@pytest.mark.parametrize("seed", range(3))
def test_delayed_reads_and_writes_change_nothing(
    tmp_path: Path, small_pieces: None, slow_disk: Callable[[int], None], seed: int
) -> None:
    plain = toys.net(dim=64)
    data = toys.batches(5)
    expected = toys.train_plain(plain, data, lr=1e-2)
    streamed = on_disk(tmp_path)
    slow_disk(seed)
    assert toys.train_streamed(streamed, data) == toys.like(expected)
    weights = streamed.state_dict()
    assert all(toys.same(weights[name], p) for name, p in plain.named_parameters())
    streamed.close()


@pytest.mark.parametrize("wait", ["weights read ahead", "piece read", "unit written"])
def test_a_missing_wait_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None,
    slow_disk: Callable[[int], None], wait: str,
) -> None:  # fmt: skip
    original = Event.wait
    monkeypatch.setattr(
        Event, "wait", lambda event, why: None if why == wait else original(event, why)
    )
    plain, data = toys.net(dim=64), toys.batches(5)
    expected = toys.train_plain(plain, data, lr=1e-2)
    streamed = on_disk(tmp_path)
    slow_disk(0)
    try:
        got = toys.train_streamed(streamed, data)
    except RuntimeError:  # a gradient of NaN
        return
    assert got != toys.like(expected)


def test_reading_ahead_waits_for_the_update() -> None:
    read, updated = threading.Event(), Event()
    ahead = WeightsAhead([PAGE] * 2, ["a", "b"], lambda unit, target: read.set(), Lanes(Trace()))
    ahead.want([1], lambda unit: updated)
    assert not read.wait(0.05)
    updated.set()
    assert read.wait(5)
    ahead.take(1)
    ahead.close()


def test_each_byte_crosses_as_often_as_it_must(tmp_path: Path) -> None:
    trace, steps, slots, depth = Trace(), 3, 2, 4
    streamed = on_disk(tmp_path, trace=trace, slots=slots)
    toys.train_streamed(streamed, toys.batches(steps))
    streamed.close()
    moved, store = trace.counters, streamed.store
    assert moved["disk_read_bytes"] == steps * (store.state_bytes + store.plan.kinds["gradients"])
    assert moved["disk_write_bytes"] == steps * (store.state_bytes + store.plan.kinds["gradients"])
    block, resident = (-(-store.units[i].weight_nbytes // PAGE) * PAGE for i in (1, 0))
    # As over the link: twice less the turn, and the slots of the pass that has begun.
    blocks = steps * (2 * depth - slots) + slots
    assert moved["disk_weights_bytes"] == blocks * block + (steps + 1) * resident


def test_disk_full_in_mid_step_is_told_and_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = toys.batches(4)
    streamed = on_disk(tmp_path)
    toys.train_streamed(streamed, data[:2])
    streamed.save_pretrained(tmp_path / "weights")
    streamed.save_optimizer(tmp_path / "optimizer")
    saved = streamed.state_dict()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_: Any) -> int:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        with pytest.raises(RuntimeError, match="No space left on device") as told:
            toys.train_streamed(streamed, data[2:])
        assert str(tmp_path / "state") in str(told.value)
        assert "resume from the latest checkpoint" in str(told.value)
        assert is_disk_full(told.value)
    for attempt in (streamed.state_dict, lambda: streamed.save_optimizer(tmp_path / "no")):
        with pytest.raises(RuntimeError, match="No space left on device"):
            attempt()
    again = on_disk(tmp_path, 1)
    again.load(tmp_path / "weights", tmp_path / "optimizer")
    restored = again.state_dict()
    assert all(torch.equal(restored[name], saved[name]) for name in saved)


def test_one_failed_write_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    streamed = on_disk(tmp_path)
    toys.train_streamed(streamed, toys.batches(1))
    streamed.finish()
    original, calls = os.pwritev, []

    def fail_once(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 10:  # in the middle of an update
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*arguments)

    monkeypatch.setattr(os, "pwritev", fail_once)
    (x, c, y), *_ = toys.batches(1)
    (streamed(x, c) - y).square().mean().backward()
    streamed.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Input/output error"):
            streamed.state_dict()


def test_read_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = on_disk(tmp_path)
    toys.train_streamed(streamed, toys.batches(1))
    streamed.finish()

    def refuse(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(RuntimeError, match=r"reading .* Input/output error"):
        toys.train_streamed(streamed, toys.batches(2))


def test_too_little_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaslide.streaming.store.available_disk", lambda folder: 10_000)
    with pytest.raises(InputError, match=r"disk of .*state: .* 1e-05 GB are available"):
        on_disk(tmp_path)
    monkeypatch.undo()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(InputError, match=r"reserving .* No space left"):
        on_disk(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"set offload\.disk_path"):
        on_disk(tmp_path, disk_path=tmp_path / "file" / "x")


def test_what_was_read_ahead_of_an_update_is_void() -> None:
    version = 1
    begin, reads = threading.Event(), []

    def read(unit: int, target: torch.Tensor) -> None:
        begin.wait()
        reads.append(unit)
        target.fill_(version)

    ahead = WeightsAhead([PAGE] * 4, list("abcd"), read, Lanes(Trace()))
    ahead.want([2, 3], lambda unit: Event.completed())
    ahead.forget(2)  # its read is still under way
    begin.set()
    version = 2
    assert ahead.take(2).unique().tolist() == [2]
    third = ahead.take(3)
    assert reads.count(3) == 1
    assert third.numel() == PAGE
    ahead.close()


def test_a_region_in_use_is_not_read_into() -> None:
    def read(unit: int, target: torch.Tensor) -> None:
        target.fill_(unit)

    ahead = WeightsAhead([PAGE] * 9, list("abcdefghi"), read, Lanes(Trace()))
    for unit in range(6):
        ahead.want([unit + 1, unit + 2], lambda unit: Event.completed())
        region = ahead.take(unit)
        ahead.want([unit + 2, unit + 1, unit + 3], lambda unit: Event.completed())
        time.sleep(0.005)
        assert region.unique().tolist() == [unit]
    ahead.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_on_disk_add_up_over_backwards(tmp_path: Path, dtype: torch.dtype) -> None:
    (x, c, y), (x2, c2, y2) = (tuple(t.to(dtype) for t in item) for item in toys.batches(2))
    states = []
    for tier in ("ram", "disk"):
        model = toys.net(dim=64)
        model.table = model.table.to(dtype)
        streamed = stream(
            model, tier=tier, gradient_tier=tier, disk_path=tmp_path, dtype=dtype, hooks=POISON
        )
        for _ in range(2):
            (streamed(x, c) - y).float().square().mean().backward()
            (streamed(x2, c2) - y2).float().square().mean().backward()
            streamed.step()
        states.append(streamed.state_dict())
        streamed.close()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_evaluation_between_steps_leaves_nothing_stale(
    tmp_path: Path, slow_disk: Callable[[int], None]
) -> None:
    """A pass that stops half-way leaves weights read ahead, which the next update outdates."""
    data = toys.batches(4)
    plain = toys.net(dim=64)
    expected = toys.train_plain(plain, data, lr=1e-2)
    streamed = on_disk(tmp_path, slots=2)
    slow_disk(0)
    losses = []
    for x, c, y in data:
        loss = (streamed(x, c) - y).square().mean()
        loss.backward()
        with torch.no_grad():
            streamed(x, c)
        time.sleep(0.05)  # what the pass foresees is read now, before the update
        streamed.step()
        losses.append(loss.item())
    assert losses == toys.like(expected[0])
    streamed.close()


def test_loading_replaces_what_was_read_ahead(tmp_path: Path) -> None:
    (x, c, _), *_ = toys.batches(1)
    fresh = stream(toys.net(5, dim=64))
    fresh.save_pretrained(tmp_path / "weights")
    used = on_disk(tmp_path)
    with torch.no_grad():
        used(x, c)
        used.store.read_ahead([1, 2], lambda unit: Event.completed())
        used.load(tmp_path / "weights")
        assert torch.equal(used(x, c), fresh(x, c))
    used.close()


UNFINISHED = """
import sys
sys.path[:0] = sys.argv[2:]
import toys
from megaslide.streaming import records, stream
records.PIECE = 4096
streamed = stream(toys.net(dim=64), tier="disk", gradient_tier="disk", disk_path=sys.argv[1])
toys.train_streamed(streamed, toys.batches(1))
"""


def test_a_script_may_end_in_mid_update(tmp_path: Path) -> None:
    modules = [str(folder) for folder in Path(__file__).parents[:2]]
    command = [sys.executable, "-c", UNFINISHED, str(tmp_path), *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
