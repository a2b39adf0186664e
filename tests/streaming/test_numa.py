"""Memory nodes: the kernel's lists, and that it does take the policy."""

import ctypes
import mmap
import platform

import pytest
import torch

from megaslide.streaming import memory, numa

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS = 2


def policy_at(region: torch.Tensor) -> int:
    """The policy of the memory, by the kernel's own word."""
    mode = ctypes.c_int(-1)
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(GET_MEMPOLICY[platform.machine()]), ctypes.byref(mode), None,
        ctypes.c_ulong(0), ctypes.c_void_p(region.data_ptr()), ctypes.c_ulong(OF_ADDRESS),
    )  # fmt: skip
    if failed:
        pytest.skip("this system does not tell memory policies")
    return mode.value


def test_lists_of_nodes() -> None:
    assert numa.parse_nodes("0\n") == (0,)
    assert numa.parse_nodes("0-2,5,8-9\n") == (0, 1, 2, 5, 8, 9)
    assert numa.parse_nodes("\n") == ()


@pytest.mark.skipif(platform.machine() not in numa.MBIND, reason="numbers of calls unknown here")
def test_the_kernel_interleaves(monkeypatch: pytest.MonkeyPatch) -> None:
    if not numa.online_nodes():
        pytest.skip("this system has no list of nodes")
    node = numa.online_nodes()[0]
    region = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    assert policy_at(region) == 0
    assert numa.interleave(region, (node,))
    assert policy_at(region) == numa.MPOL_INTERLEAVE
    assert not numa.interleave(region, (1000,))  # no such node: memory stays as it is
    monkeypatch.setattr(memory, "online_nodes", lambda: (node, node))
    assert policy_at(memory.host_memory(1 << 20)) == numa.MPOL_INTERLEAVE
    monkeypatch.setattr(memory, "online_nodes", lambda: (node,))
    assert policy_at(memory.host_memory(1 << 20)) == 0
