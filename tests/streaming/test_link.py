"""The emulated link and disk: transfers take what the bandwidth says, asleep."""

import threading
import time
from pathlib import Path

import pytest
import torch
import toys

from megaslide.errors import InputError
from megaslide.streaming import stream
from megaslide.streaming.disk import RecordFile
from megaslide.streaming.lanes import Lanes
from megaslide.streaming.layout import find_blocks, plan_units
from megaslide.streaming.memory import host_memory, planned_device_bytes
from megaslide.streaming.transfer import CpuTransfer
from megaslide.tracing import Span, Trace

NBYTES = 1_000_000


def copies(link_gb_s: float, count: int, both: bool) -> tuple[list[Span], float]:
    """The copies' spans and the CPU time of the process, in seconds."""
    trace = Trace()
    transfer = CpuTransfer(Lanes(trace), link_gb_s=link_gb_s)
    host, device = transfer.host(NBYTES), transfer.allocate(NBYTES, "slots")
    host2, device2 = transfer.host(NBYTES), transfer.allocate(NBYTES, "slots")
    cpu = time.process_time()
    for _ in range(count):
        last = [transfer.h2d(device, lambda: host, {}, "down")]
        if both:
            last.append(transfer.d2h(host2, device2, {}, "up"))
    for event in last:
        transfer.join(event, "test")
    used = time.process_time() - cpu
    transfer.close()
    return [s for s in trace.spans if s.lane != "wait"], used


def test_no_copy_is_faster_than_the_link_and_none_is_much_slower() -> None:
    spans, _ = copies(link_gb_s=0.1, count=20, both=False)  # 10 ms each
    seconds = [s.end - s.start for s in spans]
    assert min(seconds) >= 0.01
    assert min(seconds) < 0.0103  # a busy machine may delay some, but hardly all


def test_directions_are_independent_and_nothing_spins() -> None:
    spans, cpu = copies(link_gb_s=0.05, count=5, both=True)  # 20 ms each
    assert min(s.end - s.start for s in spans) >= 0.02
    down, up = ([s for s in spans if s.lane == lane] for lane in ("h2d", "d2h"))
    assert down[0].start < up[0].end
    assert up[0].start < down[0].end  # at the same time
    assert cpu < 0.1  # of 0.2 s of copies


def test_the_disk_is_one_for_both_directions(tmp_path: Path) -> None:
    file, memory = RecordFile(tmp_path, 8192, gb_per_s=8192e-9 / 0.05), host_memory(8192)
    start = time.perf_counter()
    threads = [
        threading.Thread(target=call, args=(memory, 0))
        for call in (file.write, file.read)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert 0.2 <= time.perf_counter() - start < 0.3  # four of 50 ms, one after another


def test_results_do_not_depend_on_the_disk(tmp_path: Path) -> None:
    data, options = toys.batches(2), {"tier": "disk", "disk_path": tmp_path}
    fast, slow = (stream(toys.net(), **options, disk_gb_s=rate) for rate in (None, 0.01))
    assert toys.train_streamed(slow, data) == toys.train_streamed(fast, data)
    seconds = [sum(s.end - s.start for s in m.trace.spans if s.lane == "disk_read")
               for m in (fast, slow)]  # fmt: skip
    assert seconds[1] > seconds[0]
    with pytest.raises(ValueError, match="disk_gb_s=0 is not above 0"):
        stream(toys.net(), **options, disk_gb_s=0)


def test_results_do_not_depend_on_the_link() -> None:
    data = toys.batches(2)
    fast, slow = stream(toys.net()), stream(toys.net(), link_gb_s=0.005)
    assert toys.train_streamed(slow, data) == toys.train_streamed(fast, data)
    with pytest.raises(ValueError, match="link_gb_s=0 is not above 0"):
        stream(toys.net(), link_gb_s=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_budget_is_checked_before_anything_is_allocated(dtype: torch.dtype) -> None:
    streamed = stream(toys.net(), dtype=dtype, slots=3)
    held = {k: v for k, v in streamed.device_bytes.items() if k != "activations"}
    model = toys.net()
    resident, blocks = plan_units(model, find_blocks(model), dtype)
    planned = planned_device_bytes([u.layout for u in (resident, *blocks)], slots=3)
    assert planned == held
    total = sum(planned.values())
    stream(toys.net(), dtype=dtype, slots=3, device_budget=total)
    weights = blocks[0].layout.weight_nbytes
    message = f"budget of {total - 1} bytes is too small: block 'blocks.0' takes {weights} bytes"
    with pytest.raises(InputError, match=message) as refusal:
        stream(toys.net(), dtype=dtype, slots=3, device_budget=total - 1)
    assert f"fewer slots ({total - weights} bytes with 2)" in str(refusal.value)
