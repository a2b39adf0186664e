"""Lanes: order, errors, and an end that does not depend on who collects the garbage."""

import gc
import subprocess
import sys
import threading

import pytest

from megaslide.streaming.lanes import Lane
from megaslide.tracing import Trace


def test_order_and_errors() -> None:
    lane, seen = Lane("lane", Trace()), []

    def fail() -> None:
        raise OSError("read error")

    first = lane.submit(lambda: seen.append(1), "one")
    failed = lane.submit(fail, "two")
    after = lane.submit(lambda: seen.append(3), "three", after={"test": failed})
    last = lane.submit(lambda: seen.append(4), "four")
    first.wait("test")
    last.wait("test")
    for event in (failed, after):  # what needed it fails with it
        with pytest.raises(RuntimeError, match="read error"):
            event.wait("test")
    assert seen == [1, 4]
    lane.close()
    lane.close()


def test_lane_collected_on_the_lane_it_waits_for() -> None:
    """An engine dropped with work under way: the collector may run on any of its threads."""
    gc.collect()
    go, trace = threading.Event(), Trace()
    waiting, collecting = Lane("waiting", trace), Lane("collecting", trace)
    collecting.submit(lambda: (go.wait(), gc.collect()), "collect")
    second = collecting.submit(lambda: None, "second")
    last = waiting.submit(lambda: None, "last", after={"test": second})
    cycle: list[object] = [waiting]
    cycle.append(cycle)
    del waiting, cycle
    go.set()
    assert last._flag.wait(timeout=20)
    collecting.close()


def test_process_ends_with_work_under_way() -> None:
    code = """
import torch, time
from megaslide.streaming.lanes import Lane
from megaslide.tracing import Trace
lane = Lane("lane", Trace())
lane.submit(lambda: (time.sleep(0.3), torch.randn(100, 100).mm(torch.randn(100, 100)),
                     print("finished", flush=True)), "work")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "finished"), done.stderr
