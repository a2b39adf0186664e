"""Memory with more than one node: pages of the state are dealt out to all of them in turn.

By default a page comes to the node of the thread that touches it first, which here is one thread:
the whole state would be behind one node's memory controllers. AdamW, with threads on every node, is
bound by memory bandwidth and wants all controllers at once; the link to the device needs a tenth of
it and does not mind where a page is. Hence interleaving, and no pinning of threads.

The kernel is asked directly (mbind(2)); libnuma would be one more library for one call.
"""

import ctypes
import logging
import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

ONLINE = Path("/sys/devices/system/node/online")
MPOL_INTERLEAVE = 3
MBIND = {"x86_64": 237, "aarch64": 235}
"""The call's number by machine (asm/unistd.h of Linux)."""
BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@cache
def online_nodes() -> tuple[int, ...]:
    """The nodes of memory that this machine has; none where the system does not say."""
    try:
        return parse_nodes(ONLINE.read_text())
    except OSError:
        return ()


def parse_nodes(text: str) -> tuple[int, ...]:
    """The numbers in a list of the kernel's, such as `0-1,3`."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return tuple(n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1))


def interleave(region: torch.Tensor, nodes: Sequence[int]) -> bool:
    """Deal the pages of page-aligned memory, untouched so far, out to the nodes.

    Returns:
        Whether the kernel does; if not, memory is as good as without, and a debug line says why.
    """
    number = MBIND.get(platform.machine())
    if number is None:
        return False
    words = (ctypes.c_ulong * (max(nodes) // BITS + 1))()
    for node in nodes:
        words[node // BITS] |= 1 << (node % BITS)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(region.data_ptr()), ctypes.c_ulong(region.nbytes),
        ctypes.c_long(MPOL_INTERLEAVE), words, ctypes.c_ulong(BITS * len(words) + 1),
        ctypes.c_ulong(0),
    )  # fmt: skip
    if failed:
        log.debug("pages stay where they are touched: mbind: %s", os.strerror(ctypes.get_errno()))
    return not failed
