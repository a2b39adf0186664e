"""The store in every tier and format: one trajectory, exact sizes, whole resume."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from plain_adamw import PlainAdamW
from torch import nn

from megaslide.errors import InputError
from megaslide.ops.adamw import BLOCK8, AdamWSettings
from megaslide.streaming import StreamedModel, TransferHooks, stream
from megaslide.streaming.filling import reset_parameters
from megaslide.streaming.gradients import Landed
from megaslide.streaming.lanes import Lanes
from megaslide.streaming.layout import ALIGN, PAGE, find_blocks, plan_units
from megaslide.streaming.optimizer import StreamedAdamW
from megaslide.streaming.records import FORMATS, Record
from megaslide.streaming.store import Store, StoreSettings, plan_store
from megaslide.tracing import Trace

BF16 = torch.bfloat16
TIERS = [("ram", "ram"), ("disk", "ram"), ("disk", "disk")]
every_tier = pytest.mark.parametrize(("tier", "gradient_tier"), TIERS)
every_format = pytest.mark.parametrize("state_format", FORMATS)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces per block; a page of scales in each."""
    monkeypatch.setattr("megaslide.streaming.records.PIECE", 1 << 18)


def build(tmp_path: Path, seed: int = 0, *, dtype: torch.dtype = BF16, **options: Any) -> Any:
    """Streamed net of three blocks of 1.02 pieces each, some parameters fp32 if dtype is None."""
    model = toys.net(seed, dim=256, depth=3)
    model.table = model.table.to(dtype)
    settings: dict[str, Any] = {"lr": 1e-2, "ema_decay": 0.9, "dtype": dtype}
    return stream(model, disk_path=tmp_path / "state", **settings | options)


def batches(count: int, dtype: torch.dtype = BF16) -> list[Any]:
    return [tuple(t.to(dtype) for t in item) for item in toys.batches(count)]


def everything(streamed: StreamedModel) -> dict[str, torch.Tensor]:
    """A copy of all persistent state by kind and parameter."""
    streamed.finish()
    result = {}
    for index, unit in enumerate(streamed.store.units):
        with streamed.store.unit(index) as state:
            for p in unit.trainable:
                for kind in streamed.store.optimizer_kinds:
                    if (part := state.part(kind, p)) is not None:
                        result[f"{kind}.{p.name}"] = part.clone()
                result[f"master.{p.name}"] = state.read_master(p)
                result[p.name] = state.weight(p).clone()
    return result


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in b:
        assert torch.equal(a[name], b[name]), name


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_tiers_are_bit_equal(tmp_path: Path, state_format: str, dtype: torch.dtype) -> None:
    data, results = batches(4, dtype), []
    for seed, (tier, gradient_tier) in enumerate(TIERS):
        hooks = TransferHooks(max_delay_s=0.002, seed=seed, poison=True)
        streamed = build(
            tmp_path, dtype=dtype, tier=tier, gradient_tier=gradient_tier,
            state_format=state_format, hooks=hooks,
        )  # fmt: skip
        losses = toys.train_streamed(streamed, data)
        results.append((losses, everything(streamed)))
        streamed.close()
    for losses, state in results[1:]:
        assert losses == results[0][0]
        assert_same(state, results[0][1])


def test_master_and_split_have_the_same_masters_and_weights(tmp_path: Path) -> None:
    data, results = batches(6), []
    for state_format in ("master", "split"):
        streamed = build(tmp_path, state_format=state_format)
        losses = toys.train_streamed(streamed, data)
        kept = {k: v for k, v in everything(streamed).items() if not k.startswith("residual")}
        results.append((losses, kept))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


@every_tier
@pytest.mark.parametrize("state_format", ["master", "split"])
def test_updates_too_small_for_bf16_move_masters_as_fp32_does(
    tmp_path: Path, state_format: Any, tier: Any, gradient_tier: Any
) -> None:
    """The oracle is torch.optim.AdamW on fp32 parameters that get the same bf16 gradients."""
    model = toys.net(dim=256, depth=1)
    resident, blocks = plan_units(model, find_blocks(model), BF16)
    layout = blocks[0].layout
    settings = StoreSettings(
        tier=tier, gradient_tier=gradient_tier, state_format=state_format, disk_path=tmp_path
    )
    store = Store([resident.layout, layout], settings)
    plain = {p.name: nn.Parameter(model.get_parameter(p.name).detach()) for p in layout.trainable}
    with store.unit(1, write=True) as state:
        for p in layout.trainable:
            state.write(p, plain[p.name])
    before = store.unit(1)
    with before as state:
        first = state.memory["weights"].clone()
    oracle = PlainAdamW(plain.values(), lr=1e-7, weight_decay=0.0)
    optimizer = StreamedAdamW(store, Lanes(Trace()), None)
    adamw = AdamWSettings(lr=1e-7, weight_decay=0.0)
    for _ in range(10):
        with store.landing(1, keep=False) as region:
            for p in layout.trainable:
                gradient = torch.randn(p.shape).to(BF16)
                p.weight(region).copy_(gradient)
                plain[p.name].grad = gradient.float()
        optimizer.launch(1, Landed(dict.fromkeys(plain, torch.ones(()))), adamw, 1.0)
        optimizer.finish()
        oracle.step()
    with store.unit(1) as state:
        for p in layout.trainable:
            assert torch.equal(state.read_master(p), plain[p.name]), p.name
        still = (state.memory["weights"] == first).float().mean()
    assert still > 0.9  # in bf16 alone next to nothing would have moved
    optimizer.close()
    store.close()


@every_tier
@every_format
def test_resume_from_files_is_bit_exact(
    tmp_path: Path, state_format: str, tier: str, gradient_tier: str
) -> None:
    options = {"state_format": state_format, "tier": tier, "gradient_tier": gradient_tier}
    data = batches(4)
    through = build(tmp_path, **options)
    losses, _ = toys.train_streamed(through, data)
    first = build(tmp_path, **options)
    toys.train_streamed(first, data[:2])
    first.save_pretrained(tmp_path / "transformer")
    first.save_optimizer(tmp_path / "optimizer")
    second = build(tmp_path, 99, **options)
    toys.train_streamed(second, data[:1])  # what was read ahead must not survive `load`
    second.load(tmp_path / "transformer", tmp_path / "optimizer")
    assert toys.train_streamed(second, data[2:])[0] == losses[2:]
    assert_same(everything(second), everything(through))


def test_resume_in_another_format_is_refused(tmp_path: Path) -> None:
    saved = build(tmp_path, state_format="split")
    saved.save_optimizer(tmp_path / "optimizer")
    saved.save_pretrained(tmp_path / "transformer")
    for other, told in (("master", "no 'master"), ("split8", "float32 .* expected torch.uint8")):
        streamed = build(tmp_path, state_format=other)
        with pytest.raises(InputError, match=told) as refusal:
            streamed.load(tmp_path / "transformer", tmp_path / "optimizer")
        assert "offload.state_format" in str(refusal.value)


@every_tier
@every_format
@pytest.mark.parametrize("ema", [False, True])
def test_planned_bytes_are_the_allocated_bytes(
    tmp_path: Path, state_format: Any, tier: Any, gradient_tier: Any, ema: bool
) -> None:
    model = toys.net(dim=256, depth=3)
    model.blocks[1].norm.requires_grad_(False)
    model.head.float()
    resident, blocks = plan_units(model, find_blocks(model), BF16)
    units = [resident.layout, *(b.layout for b in blocks)]
    settings = StoreSettings(
        tier=tier, gradient_tier=gradient_tier, state_format=state_format, ema=ema,
        disk_path=tmp_path,
    )  # fmt: skip
    plan, store = plan_store(units, settings), Store(units, settings)
    assert store.nbytes == plan.kinds
    staging = store._disk.buffers if store._disk else []
    assert sum(x.nbytes for x in (*store.arenas.values(), *staging)) == plan.ram_bytes
    if tier == "disk":
        assert os.fstat(store._disk._file._fd).st_size == plan.disk_bytes
    per_element = store.state_bytes / sum(u.num_elements for u in units)
    expected = {"master": 14, "split": 12, "split8": 6 + 8 / BLOCK8}[state_format] + 4 * ema
    assert expected <= per_element < expected * 1.1  # pages are padded
    store.close()


def test_regions_can_be_cut_into_shards() -> None:
    """What data-parallel ranks will need: equal element ranges are whole in every region."""
    model = toys.net(dim=256, depth=1)
    model.blocks[0].norm.float()
    _, (block,) = plan_units(model, find_blocks(model), BF16)
    for state_format in FORMATS:
        record = Record(block.layout, state_format, ema=True)
        assert all(region.nbytes % PAGE == 0 for region in record.regions.values())
        for index, segment in enumerate(block.layout.segments):
            assert segment.numel % ALIGN == 0
            assert segment.byte_offset % PAGE == 0
            for region in record.regions.values():
                spans = [region.span(index, r * ALIGN, (r + 1) * ALIGN) for r in range(3)]
                assert all(a[1] == b[0] for a, b in pairwise(spans) if a and b)


def test_too_little_ram_is_refused_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toys.net(dim=256)
    layouts = [b.layout for b in plan_units(model, find_blocks(model), BF16)[1]]
    split, split8 = (plan_store(layouts, StoreSettings(state_format=f)).ram_bytes
                     for f in ("split", "split8"))  # fmt: skip
    room = (split + split8) // 2
    monkeypatch.setattr("megaslide.streaming.store.available_ram", lambda: room)
    monkeypatch.setattr("megaslide.streaming.store.host_memory", None)  # nothing is allocated
    with pytest.raises(InputError, match=r"RAM: .*format split needs .* too little") as refusal:
        Store(layouts)
    assert "set offload.state_format to split8" in str(refusal.value)
    assert f"{(split - room) / 1e9:.3g} GB too little" in str(refusal.value)
    assert "offload.tier=disk" in str(refusal.value)
    monkeypatch.setattr("megaslide.streaming.store.available_ram", lambda: 1000)
    with pytest.raises(InputError, match="no format fits"):
        Store(layouts)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tier='tape'; one of ram, disk"):
        stream(toys.net(), tier="tape")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state_format='half'; one of master, split, split8"):
        stream(toys.net(), state_format="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs disk_path"):
        stream(toys.net(), tier="disk")
    with pytest.raises(ValueError, match="gradient_tier='disk' needs tier='disk'"):
        stream(toys.net(), gradient_tier="disk", disk_path=tmp_path)


@every_tier
def test_meta_models_are_initialised_block_by_block(
    tmp_path: Path, tier: str, gradient_tier: str
) -> None:
    with torch.device("meta"):
        model = toys.Net(dim=64, depth=5)
    model.table = torch.linspace(-1, 1, 7 * 64).view(1, 7, 64)
    alive: list[int] = []

    def init(module: nn.Module) -> None:
        held = sum(not p.is_meta for p in model.parameters())
        alive.append(held)
        reset_parameters(module)

    streamed = stream(
        model, init_weights=init, tier=tier, gradient_tier=gradient_tier, disk_path=tmp_path
    )
    assert max(alive) == 6  # parameters of one block, never two
    weights = streamed.state_dict()
    assert all(weights[f"blocks.{i}.norm.weight"].eq(1).all() for i in range(5))
    bound = 64**-0.5  # of nn.Linear's uniform distribution
    ups = torch.stack([weights[f"blocks.{i}.up.weight"] for i in range(5)])
    assert 0.95 * bound < ups.max() <= bound
    assert ups.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not torch.equal(ups[0], ups[1])
    streamed.close()


def test_meta_parameters_that_cannot_be_reset_are_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, device="meta"))

    model = nn.Module()
    model.blocks = nn.ModuleList(Scale() for _ in range(2))
    with pytest.raises(ValueError, match="Scale holds parameters and has no reset_parameters"):
        stream(model, init_weights=reset_parameters)


PEAK = """
import resource, sys
from pathlib import Path
import torch
from torch import nn
from megaslide.streaming import stream

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(16))
        self.head = nn.Linear(8, 8)

tier, folder = sys.argv[1], Path(sys.argv[2])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with torch.device("meta"):
    model = Net()
streamed = stream(model, dtype=torch.bfloat16, tier=tier, disk_path=folder / "state")
before = peak()  # the device's arenas are there
streamed.save_pretrained(folder / "weights")
streamed.load(folder / "weights")
block = 12 * 2048 * 2049
print((peak() - before) / block)
"""


@pytest.mark.parametrize(("tier", "limit"), [("ram", 16 * 4 / 12 + 2), ("disk", 2)])
def test_loading_and_saving_hold_no_second_copy(tmp_path: Path, tier: str, limit: float) -> None:
    """Peak growth in blocks of 12 bytes per parameter. Loading into RAM touches weights and
    residuals, 4 of 12 bytes; half a block is allowed for the interpreter's own growth."""
    command = [sys.executable, "-c", PEAK, tier, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert float(done.stdout) < limit + 0.5
