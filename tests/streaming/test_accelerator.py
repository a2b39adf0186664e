"""The backend of GPUs, on streams made of threads: what it does beyond the contract of all."""

import gc
import inspect
import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from threaded_runtime import Place, Stream, ThreadedRuntime

from megaslide.streaming import NonFiniteGradientError, TransferHooks, model, stream
from megaslide.streaming.accelerator import MOST_PENDING, AcceleratorTransfer, TorchRuntime
from megaslide.streaming.lanes import Event, Lanes
from megaslide.tracing import Trace, summarize

DELAY_S = 0.002


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ThreadedRuntime]:
    """The runtimes of the models streamed within the test."""
    runtimes: list[ThreadedRuntime] = []

    def open_transfer(options: Any) -> AcceleratorTransfer:
        synchronous = options.hooks is not None and options.hooks.synchronous
        runtimes.append(ThreadedRuntime(DELAY_S, seed=len(runtimes)))
        lanes = Lanes(options.trace or Trace())
        return AcceleratorTransfer(lanes, runtimes[-1], synchronous=synchronous)

    monkeypatch.setattr(model, "open_transfer", open_transfer)
    return runtimes


def trained(**options: Any) -> tuple[Any, Any]:
    streamed = stream(toys.net(depth=4, dim=8), activations="host", **options)
    result = toys.train_streamed(streamed, toys.batches(2))
    weights = {name: w.tolist() for name, w in streamed.state_dict().items()}
    return streamed, (result, weights)


def test_host_memory_is_page_locked_once_and_given_back(
    opened: list[ThreadedRuntime], tmp_path: Any
) -> None:
    for tier in ("ram", "disk"):
        streamed = stream(toys.net(), tier=tier, disk_path=tmp_path, activations="host")
        toys.train_streamed(streamed, toys.batches(1))
        locked = opened[-1].locked.copy()
        buffers = {(b.data_ptr(), b.nbytes) for b in streamed.store.crossing if b.nbytes}
        assert buffers <= set(locked)
        if tier == "ram":  # what only AdamW reads need not be
            arenas = {k: (a.data_ptr(), a.nbytes) for k, a in streamed.store.arenas.items()}
            assert {k for k, place in arenas.items() if place in locked} == {"weights", "gradients"}
        kept = len(locked)
        toys.train_streamed(streamed, toys.batches(2))
        assert len(opened[-1].locked) == kept  # nothing new from step to step
        streamed.close()
        assert opened[-1].locked == []
    streamed = stream(toys.net())
    assert opened[-1].locked
    streamed._transfer.join(streamed._resident_ready, "test")  # or a lane has it in its hands
    del streamed
    gc.collect()
    assert opened[-1].locked == []


def test_time_on_the_device_is_the_devices(opened: list[ThreadedRuntime]) -> None:
    trace = Trace()
    streamed, _ = trained(trace=trace)
    before = trace.snapshot()
    assert before["compute_s"] > 0
    streamed.close()
    compute = sorted((s.start, s.end) for s in trace.spans if s.lane == "compute")
    blocks = 4 * 5  # forward, recompute, backward, clear, round
    assert len(compute) == 2 * (blocks + 1)  # and the resident unit's gradients are rounded
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(compute))
    assert {s.lane for s in trace.spans} == {"compute", "h2d", "d2h", "adamw", "wait"}


def test_waits_are_the_devices_not_the_threads() -> None:
    runtime = ThreadedRuntime(0, 0)
    transfer = AcceleratorTransfer(Lanes(Trace()), runtime)
    before = transfer.trace.snapshot()
    late = Event()
    threading.Timer(0.1, late.set).start()
    runtime.current_stream().enqueue(lambda: None, delay_s=0.4)  # has work for longer
    transfer.join(late, "busy")
    transfer.record().wait("test")
    between = transfer.trace.snapshot()
    assert summarize(before, between).wait_s < 0.05

    def read_late() -> torch.Tensor:
        time.sleep(0.2)
        return torch.zeros(8, dtype=torch.uint8)

    transfer.wait(transfer.h2d(transfer.allocate(8, "slots"), read_late, {}, "x"), "idle")
    transfer.record().wait("test")
    assert summarize(between, transfer.trace.snapshot()).wait_s > 0.15
    transfer.close()


def test_time_is_exact_after_days(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Place.elapsed_time

    def rounded(self: Place, later: Place) -> float:  # the device's library gives a float
        return torch.tensor(exact(self, later), dtype=torch.float32).item()

    monkeypatch.setattr(Place, "elapsed_time", rounded)
    transfer = AcceleratorTransfer(Lanes(Trace()), ThreadedRuntime(0, 0))
    transfer._clock._zero._time -= 10**7
    transfer._clock._zero_s -= 10**7
    for _ in range(3):
        with transfer.computing("nap"):
            time.sleep(0.01)
    transfer.close()
    assert all(0.009 < s.end - s.start < 0.5 for s in transfer.trace.spans)
    assert time.perf_counter() - transfer._clock._zero_s < 60


def test_spans_that_nobody_asks_for_do_not_pile_up(opened: list[ThreadedRuntime]) -> None:
    transfer = AcceleratorTransfer(Lanes(Trace()), ThreadedRuntime(DELAY_S, 0))  # falls behind
    for _ in range(1000):
        with transfer.computing("nothing"):
            pass
    assert len(transfer._clock._pending) <= MOST_PENDING
    transfer.close()
    assert len([s for s in transfer.trace.spans if s.lane == "compute"]) == 1000


def test_without_overlap_nothing_runs_beside_anything(opened: list[ThreadedRuntime]) -> None:
    trace = Trace()
    _, overlapped = trained()
    streamed, alone = trained(trace=trace, hooks=TransferHooks(synchronous=True))
    streamed.close()
    assert alone == overlapped
    off = 5e-4  # seconds by which the clocks of host and device may differ on a busy machine
    spans = sorted((s.start, s.end) for s in trace.spans if s.lane in ("compute", "h2d", "d2h"))
    assert all(a[1] <= b[0] + off for a, b in itertools.pairwise(spans))


def test_a_copy_that_fails_before_it_is_issued_is_reported(opened: list[ThreadedRuntime]) -> None:
    streamed = stream(toys.net())
    x, c, _ = toys.batches(1)[0]
    streamed._slots.invalidate()

    def broken(unit: int) -> torch.Tensor:
        raise OSError("no such page")

    streamed.store.weights = broken
    with pytest.raises(RuntimeError, match="no such page"):
        streamed(x, c)


class Impatient(Stream):
    """A stream on which nothing waits."""

    def wait_event(self, event: Place) -> None: ...


def _nowhere(self: Place, stream: Stream) -> None:
    self._reach()


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "compute does not wait for a load": lambda patch: patch.setattr(
        ThreadedRuntime, "current_stream", lambda self: Impatient()
    ),
    "events are done when they are recorded": lambda patch: patch.setattr(
        Place, "record", _nowhere
    ),
    "nobody waits for an event": lambda patch: patch.setattr(
        Place, "synchronize", lambda self: None
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_streams_is_a_wrong_number(
    fault: str, opened: list[ThreadedRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = trained()
    for delay_s in (DELAY_S, 10 * DELAY_S, 50 * DELAY_S):  # a busy machine may compute late, too
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], "DELAY_S", delay_s)
            FAULTS[fault](patch)
            try:
                _, result = trained()
            except NonFiniteGradientError:  # what is not yet copied is NaN
                return
        if result != expected:
            return
    pytest.fail(f"{fault}: nobody noticed, however late copies were")


def test_torch_has_what_its_runtime_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's own signatures take the calls, on a build without CUDA too."""
    calls: list[str] = []

    class Module:
        def __getattr__(self, name: str) -> Any:
            real = getattr(torch.cuda, name)
            signature = inspect.signature(real.__new__ if inspect.isclass(real) else real)
            given = ("cls",) if inspect.isclass(real) else ()

            def call(*args: Any, **kwargs: Any) -> Any:
                signature.bind(*given, *args, **kwargs)
                calls.append(name)
                return {"current_device": 1, "is_available": True, "max_memory_allocated": 5}.get(
                    name
                )

            return call

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module())
    runtime = TorchRuntime(torch.device("cuda"))
    assert runtime.device == torch.device("cuda:1")
    runtime.stream()
    runtime.current_stream()
    runtime.event()
    runtime.on(None)
    runtime.reset_peak()
    assert runtime.peak() == 5
    assert {"Stream", "Event", "current_stream", "stream", "reset_peak_memory_stats"} <= set(calls)
