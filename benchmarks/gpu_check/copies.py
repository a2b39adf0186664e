"""The link, and what the optimizer would cost on the other side of it.

Both go through the engine's own transfer and the kind of memory that the store has.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from benchmarks.gpu_check.session import Row, Session
from megaslide.ops.adamw import AdamWSettings, AdamWState, adamw_
from megaslide.streaming.accelerator import open_transfer
from megaslide.streaming.lanes import Event, copy_bytes
from megaslide.streaming.options import StreamOptions
from megaslide.streaming.transfer import Transfer

DIRECTIONS = {"h2d": (True, False), "d2h": (False, True), "duplex": (True, True)}
STATE_BYTES = 12
"""Per parameter: an fp32 master and two fp32 moments."""


def link(session: Session) -> None:
    """GB/s of one direction and of each of both at once, beside a bare loop of copies."""
    nbytes, copies = (2**16, 4) if session.smoke else (2**28, 24)
    transfer = open_transfer(StreamOptions(device=session.chip.device))
    host = [transfer.host(nbytes) for _ in range(2)]
    device = [transfer.allocate(nbytes, "slots") for _ in range(2)]
    for fill, region in enumerate(host, start=1):
        region.fill_(fill)

    passed = session.passes("copies arrive", lambda: _arrive(transfer, host, device))
    for name, (down, up) in DIRECTIONS.items() if passed else ():

        def both_ways(down: bool = down, up: bool = up) -> Row:
            ours = max(_through(transfer, host, device, copies, down, up) for _ in range(2))
            bare = max(_bare(session, nbytes, copies, down, up) for _ in range(2))
            return {"gb_s": ours / 1e9, "bare_gb_s": bare / 1e9, "of_bare": ours / bare}

        session.row(name, both_ways)
    transfer.close()


def _arrive(transfer: Transfer, host: list[torch.Tensor], device: list[torch.Tensor]) -> Row:
    """The gate: what goes down comes back up."""
    loaded = transfer.h2d(device[0], lambda: host[0], {}, "down")
    transfer.join(transfer.d2h(host[1], device[0], {"loaded": loaded}, "up"), "up")
    if not torch.equal(host[0], host[1]):
        raise RuntimeError("bytes that went to the device and back are not the same")
    return {"bytes": host[0].nbytes}


def _through(
    transfer: Transfer, host: list[torch.Tensor], device: list[torch.Tensor], copies: int,
    down: bool, up: bool,
) -> float:  # fmt: skip
    """Bytes per second in each direction."""
    events: list[Event] = []
    start = time.perf_counter()
    for _ in range(copies):
        if down:
            events.append(transfer.h2d(device[0], lambda: host[0], {}, "down"))
        if up:
            events.append(transfer.d2h(host[1], device[1], {}, "up"))
    for event in events:
        transfer.join(event, "all")
    return copies * host[0].nbytes / (time.perf_counter() - start)


def _bare(session: Session, nbytes: int, copies: int, down: bool, up: bool) -> float:
    """The same of copies alone, one after another, nobody looking after them."""
    chip = session.chip
    pinned = [
        torch.ones(nbytes, dtype=torch.uint8).pin_memory()
        if chip.is_gpu
        else torch.ones(nbytes, dtype=torch.uint8)
        for _ in range(2)
    ]
    device = [torch.ones(nbytes, dtype=torch.uint8, device=chip.device) for _ in range(2)]
    pairs = [(device[0], pinned[0])] * down + [(pinned[1], device[1])] * up
    chip.synchronize()
    start = time.perf_counter()
    threads = [threading.Thread(target=_loop(session, *pair, copies)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chip.synchronize()
    return copies * nbytes / (time.perf_counter() - start)


def _loop(
    session: Session, target: torch.Tensor, source: torch.Tensor, copies: int
) -> Callable[[], None]:
    def on_host() -> None:
        for _ in range(copies):
            copy_bytes(target, source)

    def on_device() -> None:
        module: Any = torch.get_device_module(session.chip.device)
        with module.stream(module.Stream(device=session.chip.device)):
            for _ in range(copies):
                target.copy_(source, non_blocking=True)

    return on_device if session.chip.is_gpu else on_host


# ---- AdamW ---------------------------------------------------------------------------------------


def optimizer(session: Session) -> None:
    """AdamW on the CPU, and on the device with its state brought there and back.

    The device's is torch's fused one. Its master and moments, 12 bytes a parameter, cross the link
    both ways, chunk by chunk, while it computes; gradients are on the device already, and nothing
    is counted for rounding weights, so it is shown at its best.
    """
    count, chunks = (4096, 3) if session.smoke else (2**26, 8)
    if session.passes("gate", lambda: _same_update(session)):
        session.row("cpu", lambda: _on_cpu(session, count))
        session.row("device, state streamed", lambda: _on_device(session, count, chunks))


def _same_update(session: Session) -> Row:
    """One step of both from the same state."""
    n, device = 4096, session.chip.device
    master, grad = torch.randn(n), torch.randn(n)
    state = AdamWState(weight=master.clone(), exp_avg=torch.zeros(n), exp_avg_sq=torch.zeros(n))
    adamw_(state, grad, AdamWSettings(lr=1e-3), step=1)
    flat = torch.cat([master, torch.zeros(2 * n)]).to(device)
    _fused(flat, grad.to(device), step=torch.zeros((), device=device))
    error = (flat[:n].cpu() - state.weight).abs().max().item()
    if not error <= 1e-6:
        raise RuntimeError(f"AdamW of the CPU and of the device differ by {error}")
    return {"largest_difference": error}


def _on_cpu(session: Session, count: int) -> Row:
    state = AdamWState(
        weight=torch.randn(count).bfloat16(), residual=torch.zeros(count, dtype=torch.int16),
        exp_avg=torch.zeros(count), exp_avg_sq=torch.zeros(count),
    )  # fmt: skip
    grad = torch.randn(count).bfloat16()
    settings, times = AdamWSettings(lr=1e-4), []
    for step in range(1, 6):
        start = time.perf_counter()
        adamw_(state, grad, settings, step=step)
        times.append(time.perf_counter() - start)
    held = (state.weight, state.residual, state.exp_avg, state.exp_avg_sq)
    moved = sum(2 * x.nbytes for x in held if x is not None) + grad.nbytes
    best = min(times)
    return {"ns_per_parameter": 1e9 * best / count, "gb_s": moved / best / 1e9,
            "threads": torch.get_num_threads()}  # fmt: skip


def _on_device(session: Session, count: int, chunks: int) -> Row:
    device = session.chip.device
    grad = torch.randn(count, device=device)
    step = torch.zeros((), device=device)
    flat = torch.zeros(3 * count, device=device)
    alone = session.chip.median_s(lambda: _fused(flat, grad, step))
    transfer = open_transfer(StreamOptions(device=device))
    host = [transfer.host(STATE_BYTES * count) for _ in range(2)]
    slots = [transfer.allocate(STATE_BYTES * count, "slots") for _ in range(2)]
    for region in host:
        region.zero_()
    _walk(transfer, host, slots, grad, step, 2)
    start = time.perf_counter()
    _walk(transfer, host, slots, grad, step, chunks)
    seconds = time.perf_counter() - start
    transfer.close()
    return {"ns_per_parameter": 1e9 * seconds / (chunks * count),
            "kernel_ns_per_parameter": 1e9 * alone / count}  # fmt: skip


def _walk(
    transfer: Transfer, host: list[torch.Tensor], slots: list[torch.Tensor], grad: torch.Tensor,
    step: torch.Tensor, chunks: int,
) -> None:  # fmt: skip
    """State of chunk i + 1 comes while chunk i is updated and chunk i - 1 leaves."""
    left = [Event.completed() for _ in slots]

    def load(chunk: int) -> Event:
        slot = chunk % 2
        return transfer.h2d(slots[slot], lambda: host[slot], {"left": left[slot]}, "state")

    loaded = load(0)
    for chunk in range(chunks):
        following = load(chunk + 1) if chunk + 1 < chunks else None
        transfer.wait(loaded, "state loaded")
        _fused(slots[chunk % 2].view(torch.float32), grad, step)
        computed = {"updated": transfer.record()}
        left[chunk % 2] = transfer.d2h(host[chunk % 2], slots[chunk % 2], computed, "state")
        loaded = following or loaded
    for event in left:
        transfer.join(event, "state left")


def _fused(flat: torch.Tensor, grad: torch.Tensor, step: torch.Tensor) -> None:
    """torch's fused AdamW on fp32 master, exp_avg and exp_avg_sq, one behind the other."""
    master, exp_avg, exp_avg_sq = flat.chunk(3)
    adamw(
        [master], [grad], [exp_avg], [exp_avg_sq], [], [step], foreach=False, fused=True,
        amsgrad=False, beta1=0.9, beta2=0.999, lr=1e-3, weight_decay=0.01, eps=1e-8,
        maximize=False,
    )  # fmt: skip
