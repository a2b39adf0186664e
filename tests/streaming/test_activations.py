"""Boundary activations away from the device: same numbers, less memory, nothing left behind."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

from megaslide.errors import InputError
from megaslide.streaming import TransferHooks, stream

pytestmark = pytest.mark.usefixtures("backend")

ADAMW = {"lr": 3e-3, "weight_decay": 0.1}
HOOKS = TransferHooks(max_delay_s=0.001, poison=True)
AWAY = ("host", "disk")


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("where", AWAY)
def test_training_is_bit_equal_wherever_activations_wait(
    where: str, micro: int | None, tmp_path: Path
) -> None:
    data = toys.batches(4)
    results = []
    for place in ("device", where):
        streamed = stream(
            toys.net(depth=5), activations=place, activation_dir=tmp_path, micro_batch_size=micro,
            hooks=HOOKS, **ADAMW,
        )  # fmt: skip
        results.append((toys.train_streamed(streamed, data), streamed.state_dict()))
        streamed.close()
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][k], v) for k, v in results[1][1].items())
    assert os.listdir(tmp_path) == []  # a file without a name


@pytest.mark.parametrize("where", AWAY)
@pytest.mark.cpu_backend
def test_device_holds_a_few_blocks_inputs_whatever_the_depth(where: str) -> None:
    def peak(place: str, depth: int) -> int:
        streamed = stream(toys.net(dim=64, depth=depth), activations=place)
        item = toys.batches(1, size=32)[0]
        with streamed.observing_memory():
            for _ in range(2):
                toys.loss_of(streamed, item).backward()
                streamed.step()
        return streamed.device_bytes["activations"]

    boundary = 32 * 7 * 64 * 4
    assert peak("device", 14) - peak("device", 6) == pytest.approx(8 * boundary, rel=0.05)
    assert abs(peak(where, 14) - peak(where, 6)) < boundary
    assert peak("device", 14) - peak(where, 14) > 9 * boundary


@pytest.mark.cpu_backend
def test_a_slow_link_bounds_memory_not_the_results() -> None:
    def run(**options: Any) -> tuple[int, float]:
        streamed = stream(toys.net(dim=16, depth=24), activations="host", **options)
        item = toys.batches(1, size=512)[0]
        with streamed.observing_memory():
            toys.loss_of(streamed, item).backward()
        return streamed.device_bytes["activations"], streamed.step().grad_norm

    boundary = 512 * 7 * 16 * 4  # far larger than a block's weights, which come soon enough
    fast, slow = run(), run(link_gb_s=boundary / 0.03 / 1e9)
    assert slow[1] == fast[1]
    assert abs(slow[0] - fast[0]) < 2 * boundary


def test_only_what_one_block_alone_receives_travels() -> None:
    """Of hidden, shift and table, shared by all blocks are the last two."""
    depth, steps = 5, 3
    streamed = stream(toys.net(depth=depth), activations="host")
    toys.train_streamed(streamed, toys.batches(steps))
    streamed.close()
    hidden = 4 * 7 * 16 * 4
    for lane in ("d2h", "h2d"):
        spans = [s for s in streamed.trace.spans if s.lane == lane and s.name == "activation"]
        assert {s.nbytes for s in spans} == {hidden}
        left = steps * (depth - 1)  # the last block's inputs stay
        assert len(spans) == (left if lane == "d2h" else left - steps)  # one is not yet gone


def test_dense_strides_survive_the_journey() -> None:
    """A transposed input comes back transposed; a slice of something larger stays where it is."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(7, 7)
            self.strides: list[tuple[int, ...]] = []

        def forward(self, hidden: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            self.strides.append(hidden.stride())
            out = self.linear(hidden.transpose(1, 2).contiguous().transpose(1, 2).mT).mT
            return out + part.mean()

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return toys.Stack(
            [Wide() for _ in range(4)],
            lambda b, h, s: b(h.mT.contiguous().mT, h[..., :3]),
            6,
        )

    data = toys.batches(3)
    plain = build()
    expected = toys.train_plain(plain, data, **ADAMW)
    streamed = stream(build(), blocks=["blocks"], activations="host", hooks=HOOKS, **ADAMW)
    assert toys.train_streamed(streamed, data) == toys.like(expected)
    for block in streamed.module.blocks:
        assert len(set(block.strides)) == 1


def test_retained_graph_and_dropped_graph() -> None:
    item, other = toys.batches(2)
    plain, streamed = toys.net(), stream(toys.net(), activations="host", hooks=HOOKS)
    toys.loss_of(streamed, other)  # its activations are never asked for
    for model in (plain, streamed):
        loss = toys.loss_of(model, item)
        loss.backward(retain_graph=True)
        loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert streamed.step().grad_norm == pytest.approx(norm.item(), rel=toys.within(1e-6, 1e-4))


@pytest.mark.parametrize("early", [False, True])
def test_input_modified_in_place_is_an_error_as_in_autograd(early: bool) -> None:
    def call(block: Any, hidden: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        out = block(hidden)
        hidden.detach().add_(1)
        return out

    model = toys.Stack([torch.nn.Linear(6, 6) for _ in range(3)], call, 6)
    if not early:  # modified by the caller only after the whole forward
        kept: list[torch.Tensor] = []
        model.call = lambda b, h, s: (kept.append(h), b(h))[1]
    streamed = stream(model, blocks=["blocks"], activations="host")
    with pytest.raises(RuntimeError, match="modified"):  # noqa: PT012
        loss = toys.loss_of(streamed, toys.batches(1)[0])
        if not early:
            kept[-1].detach().add_(1)
        loss.backward()


def test_disk_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    streamed = stream(toys.net(), activations="disk", activation_dir=tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    message = f"writing activations in {tmp_path}: .*No space left"
    with pytest.raises(RuntimeError, match=message):
        toys.loss_of(streamed, toys.batches(1)[0]).backward()
    monkeypatch.undo()
    streamed.zero_grad()
    assert toys.train_streamed(streamed, toys.batches(2)) == toys.train_streamed(
        stream(toys.net()), toys.batches(2)
    )


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere: No such file.*\n.*activation_dir"):
        stream(toys.net(), activations="disk", activation_dir=tmp_path / "nowhere")


def test_unknown_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activations='moon'; accepted: device, host, disk"):
        stream(toys.net(), activations="moon")
