"""What the engine promises besides parity: traffic, memory, state, lifetimes."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
import toys
from torch import nn

from megaslide.errors import InputError
from megaslide.streaming import TransferHooks, stream
from megaslide.streaming.layout import find_blocks
from megaslide.streaming.memory import DeviceMemory
from megaslide.tracing import Trace

pytestmark = pytest.mark.usefixtures("backend")

POISON = TransferHooks(max_delay_s=0.001, poison=True)


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_weights_cross_twice_minus_the_turn_gradients_once(micro: int, slots: int) -> None:
    trace = Trace()
    streamed = stream(toys.net(depth=6), micro_batch_size=micro, slots=slots, trace=trace)
    store, steps = streamed.store, 3
    toys.train_streamed(streamed, toys.batches(steps))
    streamed.close()
    block = store.units[1].weight_nbytes
    resident = store.units[0].weight_nbytes
    # Per step: every block twice, less the `slots` still loaded at the turn. After the last step
    # the first `slots` blocks are already on their way; the resident unit is refreshed per step.
    blocks = steps * (2 * 6 - slots) + slots
    assert trace.counters["h2d_bytes"] == blocks * block + (steps + 1) * resident
    gradients = sum(unit.gradient_nbytes for unit in store.units)
    assert trace.counters["d2h_bytes"] == steps * gradients


def test_forward_only_streams_each_block_once_per_call() -> None:
    trace = Trace()
    streamed = stream(toys.net(depth=5), trace=trace, hooks=POISON)
    plain = toys.net(depth=5)
    with torch.no_grad():
        for x, c, _ in toys.batches(3):
            assert toys.same(streamed(x, c), plain(x, c))
    streamed.close()
    block = streamed.store.units[1].weight_nbytes
    loads = (trace.counters["h2d_bytes"] - streamed.store.units[0].weight_nbytes) / block
    assert loads == 3 * 5 + 1  # the second call's first block was prefetched, and a fourth call's


def test_model_weights_leave_the_module() -> None:
    model = toys.net()
    streamed = stream(model)
    assert all(p.is_meta for p in model.blocks.parameters())
    assert not any(p.is_meta for p in model.head.parameters())
    assert sum(p.numel() for p in model.parameters()) == streamed.num_parameters


@pytest.mark.cpu_backend
def test_device_memory_counts_arenas_and_activations() -> None:
    streamed = stream(toys.net(dim=64, depth=8))
    (x, c, y), *_ = toys.batches(1)
    with streamed.observing_memory():
        (streamed(x, c) - y).square().mean().backward()
        streamed.step()
    held = streamed.device_bytes
    store = streamed.store
    assert held["slots"] == 2 * store.units[1].weight_nbytes
    assert held["resident"] == store.units[0].weight_nbytes
    boundary = 8 * x[..., :1].numel() * 64 * 4  # the input of each of 8 blocks, fp32
    assert boundary < held["activations"] < 4 * boundary
    assert streamed.device_peak_bytes == sum(held.values())
    assert streamed.device_peak_bytes < 0.5 * streamed.state_bytes


def test_observed_peak_of_a_known_sequence() -> None:
    memory = DeviceMemory()
    n = 1000
    with memory.observing():
        a = torch.zeros(n)
        b = a + 1  # a and b live
        del a
        c = b * 2  # b and c live
        c.add_(1)
        d = c.view(10, 100)[2:]  # a view holds nothing new
        del b, c
        e = d + d  # c's storage and 800 elements
        del e
    assert memory.peak_activations == 2 * n * 4


def test_ema_follows_the_master_and_swaps_without_a_trace() -> None:
    data = toys.batches(6)
    streamed = stream(toys.net(), lr=1e-2, ema_decay=0.8, hooks=POISON)
    expected = {k: v.clone() for k, v in streamed.state_dict().items()}
    for item in data:
        toys.train_streamed(streamed, [item])
        now = streamed.state_dict()
        expected = {k: torch.lerp(expected[k], now[k], 1 - 0.8) for k in now}
    x, c, _ = data[0]
    with torch.no_grad():
        before = streamed(x, c)
        with streamed.use_ema():
            averaged = streamed(x, c)
            assert toys.largest_relative(dict(streamed.store.named_weights()), expected) < 1e-6
        with pytest.raises(KeyError), streamed.use_ema():
            raise KeyError
        assert torch.equal(streamed(x, c), before)
    assert not torch.equal(averaged, before)
    model = toys.net()
    model.load_state_dict(expected, strict=False)
    torch.testing.assert_close(averaged, model(x, c), rtol=1e-5, atol=1e-6)


def test_a_closed_engine_is_gone_without_the_collector() -> None:
    streamed = stream(toys.net())
    toys.train_streamed(streamed, toys.batches(1))
    module, store = streamed.module, weakref.ref(streamed.store)
    gc.disable()
    try:
        streamed.close()
        del streamed
        assert store() is None
    finally:
        gc.enable()
    assert "forward" not in vars(module.blocks[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_from_files_is_bit_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    def build(seed: int) -> object:
        model = toys.net(seed)
        model.table = model.table.to(dtype)
        return stream(model, lr=1e-2, dtype=dtype, ema_decay=0.9)

    data = [tuple(t.to(dtype) for t in item) for item in toys.batches(8)]
    through = build(0)
    losses, _ = toys.train_streamed(through, data)
    first = build(0)
    toys.train_streamed(first, data[:4])
    first.save_pretrained(tmp_path / "transformer")
    first.save_optimizer(tmp_path / "optimizer")
    first.save_ema(tmp_path / "ema")
    second = build(99)
    second.load(tmp_path / "transformer", tmp_path / "optimizer")
    rest, _ = toys.train_streamed(second, data[4:])
    assert rest == losses[4:]
    for name, weight in through.state_dict().items():
        assert torch.equal(second.state_dict()[name], weight), name
    with through.use_ema(), second.use_ema():
        a, b = (dict(s.store.named_weights()) for s in (through, second))
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_load_refuses_another_model_and_incomplete_files(tmp_path: Path) -> None:
    streamed = stream(toys.net())
    streamed.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="which this model does not have"):
        stream(toys.net(depth=3)).load(tmp_path)
    with pytest.raises(InputError, match="are missing"):
        stream(toys.net(depth=5)).load(tmp_path)
    with pytest.raises(InputError, match=r"\(16,\), this model has \(8,\)"):
        stream(toys.net(dim=8)).load(tmp_path)
    with pytest.raises(InputError, match="No such file"):
        streamed.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="incomplete"):
        streamed.load(tmp_path, tmp_path)


def test_sharded_files_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaslide.streaming.checkpoint.MAX_SHARD_BYTES", 4000)
    streamed = stream(toys.net(0))
    streamed.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*-of-*.safetensors"))) > 2
    other = stream(toys.net(1))
    other.load(tmp_path)
    for name, weight in streamed.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight)


def test_blocks_are_found_or_asked_for() -> None:
    assert list(find_blocks(toys.net())) == [f"blocks.{i}" for i in range(4)]
    assert list(find_blocks(toys.net(), ["blocks.1", "head"])) == ["blocks.1", "head"]
    with pytest.raises(ValueError, match="no repeated blocks"):
        find_blocks(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="is no module"):
        find_blocks(toys.net(), ["layers"])


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="slots=1"):
        stream(toys.net(), slots=1)
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        stream(toys.net(), micro_batch_size=0)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        stream(toys.net().half())
    with pytest.raises(RuntimeError, match="ema_decay"), stream(toys.net()).use_ema():
        pass


@pytest.mark.cpu_backend
def test_devices_that_are_not_there_are_refused() -> None:
    for device, message in (
        ("meta", "'meta' is none that torch knows"),
        ("cuda", "finds no device 'cuda' on this machine; use device='cpu'"),
    ):
        if device == "meta" or not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match=message):
                stream(toys.net(), device=device)
    with pytest.raises(ValueError, match="need device='cpu', not cuda"):
        stream(toys.net(), device="cuda", link_gb_s=1)


def test_failed_copy_is_reported_not_swallowed() -> None:
    streamed = stream(toys.net())
    x, c, _ = toys.batches(1)[0]
    streamed._slots.invalidate()

    def broken(unit: int) -> torch.Tensor:
        raise OSError("read error")

    streamed.store.weights = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="read error"):
        streamed(x, c)


def test_load_replaces_what_is_on_the_device_already(tmp_path: Path) -> None:
    (x, c, y), *_ = toys.batches(1)
    fresh = stream(toys.net(5))
    fresh.save_pretrained(tmp_path)
    used = stream(toys.net(0), hooks=POISON)
    toys.train_streamed(used, [(x, c, y)])  # the next pass's first blocks are prefetched
    (used(x, c) - y).square().mean().backward()  # gradients that belong to the old weights
    used.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(used(x, c), fresh(x, c))
    assert used.step().grad_norm == 0
