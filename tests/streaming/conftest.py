"""Every test of the engine that asks for `backend` runs on each of the transfer backends.

`cpu` is the one of the machine, `streams` that of a GPU on a runtime made of threads
(`threaded_runtime`), `cuda` the same on a GPU, where there is one (`pytest -m gpu`).
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # toys and others are importable by name

import toys
from threaded_runtime import ThreadedRuntime

from megaslide.streaming import TransferHooks, model
from megaslide.streaming.accelerator import AcceleratorTransfer, TorchRuntime
from megaslide.streaming.lanes import Lanes
from megaslide.streaming.options import StreamOptions
from megaslide.tracing import Trace

BACKENDS = ["cpu", "streams", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        cpu_only = metafunc.definition.get_closest_marker("cpu_backend") is not None
        metafunc.parametrize("backend", BACKENDS[:1] if cpu_only else BACKENDS, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Within, `stream` opens this backend whatever device it is told."""
    runtimes: list[ThreadedRuntime] = []

    def streams(options: StreamOptions) -> AcceleratorTransfer:
        hooks = options.hooks or TransferHooks()
        runtimes.append(ThreadedRuntime(hooks.max_delay_s, hooks.seed))
        return AcceleratorTransfer(Lanes(options.trace or Trace()), runtimes[-1])

    def cuda(options: StreamOptions) -> AcceleratorTransfer:
        return AcceleratorTransfer(
            Lanes(options.trace or Trace()), TorchRuntime(torch.device("cuda"))
        )

    opened = {"streams": streams, "cuda": cuda}.get(request.param)
    if opened is not None:
        monkeypatch.setattr(model, "open_transfer", opened)
    monkeypatch.setattr(toys, "DEVICE", "cuda" if request.param == "cuda" else "cpu")
    yield request.param
    for stream in (s for runtime in runtimes for s in runtime.streams):
        stream.close()
