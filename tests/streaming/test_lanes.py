"""Lanes stay off the cores that compute: one thread each, whatever runs on them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, torch
from megaslide.streaming.lanes import Lane
from megaslide.tracing import Trace

torch.set_num_threads(3)
big = torch.ones(4_000_000)
big.add_(1)  # this thread's own workers exist from here on
before, seen = len(os.listdir("/proc/self/task")), []

def work():
    big.mul_(2)
    torch.linalg.vector_norm(big)
    seen.append((torch.get_num_threads(), len(os.listdir("/proc/self/task"))))

lane = Lane("test", Trace())
lane.submit(work, "work").wait("work")
print(seen[0][0], seen[0][1] - before, torch.get_num_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_a_lane_starts_no_workers_and_leaves_the_other_threads_theirs() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout.split() == ["1", "1", "3"]
