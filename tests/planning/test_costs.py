"""Costs from shapes, held to real runs: torch's own counter, the engine's own memory."""

import itertools
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_diffusers as tiny
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from megaslide.config import AttentionConfig, ModelConfig
from megaslide.errors import InputError
from megaslide.models.dit import VideoDiT, build_model
from megaslide.models.network import PretrainedNetwork
from megaslide.models.pretrained import family_of, find_source
from megaslide.ops.library import is_counting_only, why_absent
from megaslide.planning import dry_run
from megaslide.planning.costs import ModelCosts, model_costs
from megaslide.planning.flops import FlopCounter
from megaslide.streaming import planned_state_bytes, stream
from megaslide.streaming.records import FORMATS
from megaslide.streaming.store import StoreSettings

aten, ours = torch.ops.aten, torch.ops.megaslide
KINDS = ("dense", "swin", "neighborhood", "deformable")
BATCH, GRID, TEXT, REGISTERS = 2, (3, 6, 5), 7, 2
TOKENS = BATCH * GRID[0] * GRID[1] * GRID[2]
DIM, HEADS, LAYERS, WINDOW = 32, 2, 3, (3, 3, 3)
Inputs = dict[str, torch.Tensor]


def build(kind: str, *, layers: int = LAYERS, **attention: Any) -> VideoDiT:
    torch.manual_seed(0)
    return build_model(
        ModelConfig(
            hidden_size=DIM, num_layers=layers, num_attention_heads=HEADS, patch_size=(1, 1, 1)
        ),
        AttentionConfig(
            kind=kind, num_register_tokens=REGISTERS, window=WINDOW, **attention
        ),
        in_channels=4,
        text_dim=8,
    )  # fmt: skip


def inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(BATCH, 4, *GRID),
        "timestep": torch.full((BATCH,), 500.0),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 8),
    }


def on_meta(values: Any) -> Any:
    return tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, values)


def none(*_: Any, out_shape: Any = None, **__: Any) -> int:
    return 0


OURS = (
    ours.deformable_attention,
    ours.deformable_attention_backward,
    ours.depthwise_conv3d,
    ours.depthwise_conv3d_sums,
)
UNCOUNTED = dict.fromkeys(OURS, none)
FUSED_ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop.__wrapped__,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop.__wrapped__,
}
"""The CPU's fused attention is not in torch's table; the formulas are torch's."""


def torch_count(model: torch.nn.Module, loss_of: Any, mapping: Any) -> tuple[int, int]:
    """(forward, backward) of a real run, as torch's counter sees it."""
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        loss = loss_of(model)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


def video_loss(model: torch.nn.Module) -> torch.Tensor:
    return model(**inputs()).square().mean()


def costs_of(kind: str, **options: Any) -> ModelCosts:
    return model_costs(build(kind, **options).to("meta"), on_meta(inputs()))


# -- FLOP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "swin"])
def test_flop_of_videodit_are_those_of_a_real_run(kind: str) -> None:
    forward, backward = torch_count(build(kind), video_loss, FUSED_ON_CPU)
    costs = costs_of(kind)
    assert costs.forward_flop == pytest.approx(forward, rel=0.02)
    assert costs.backward_flop == pytest.approx(backward, rel=0.02)


def test_dense_attention_counts_its_products_once() -> None:
    """Unfused, every product is a `bmm`; fused, backward computes the scores once more."""
    with sdpa_kernel(SDPBackend.MATH):
        forward, backward = torch_count(build("dense"), video_loss, {})
    keys = TOKENS // BATCH + REGISTERS + TEXT  # of self- and of cross-attention
    again = LAYERS * TOKENS * keys * 2 * DIM
    costs = costs_of("dense")
    assert costs.forward_flop == pytest.approx(forward, rel=0.001)
    assert costs.backward_flop == pytest.approx(backward + again, rel=0.001)


def pairs_of_query_and_tap() -> int:
    """Counted one by one: from every token, the voxels of its window, which stays inside."""
    pairs = 0
    for query in itertools.product(*(range(n) for n in GRID)):
        starts = [
            min(max(i - k // 2, 0), n - k) for i, k, n in zip(query, WINDOW, GRID, strict=True)
        ]
        for voxel in itertools.product(*(range(n) for n in GRID)):
            inside = (s <= i < s + k for i, s, k in zip(voxel, starts, WINDOW, strict=True))
            pairs += all(inside)
    return BATCH * pairs


@pytest.mark.skipif(why_absent() is not None, reason="the reference computes other products")
@pytest.mark.parametrize("kind", ["neighborhood", "deformable"])
def test_flop_of_window_attention_are_counted_tap_by_tap(kind: str) -> None:
    forward, backward = torch_count(build(kind), video_loss, FUSED_ON_CPU | UNCOUNTED)
    d, corners, axes = DIM // HEADS, 8, 3
    taps = HEADS * pairs_of_query_and_tap()
    others = HEADS * TOKENS * REGISTERS
    attention = [(taps + others) * 2 * 2 * d, (taps + others) * 5 * 2 * d]
    if kind == "deformable":
        attention[0] += taps * 2 * corners * 2  # scores interpolated, probabilities spread
        attention[1] += taps * 4 * corners * 2  # those two, and their gradients
        attention[1] += taps * corners * (3 + 2 * axes)  # corner weights' gradients, and positions'
        convolution = TOKENS * DIM * 27 * 2
        attention[0] += convolution
        attention[1] += 2 * convolution  # by the input, and by the weight
    costs = costs_of(kind)
    assert costs.forward_flop == pytest.approx(forward + LAYERS * attention[0], rel=0.001)
    assert costs.backward_flop == pytest.approx(backward + LAYERS * attention[1], rel=0.001)


@pytest.mark.parametrize("name", ["wan", "ltx", "cogvideox", "hunyuan", "allegro"])
def test_flop_of_diffusers_models_are_those_of_a_real_run(name: str) -> None:
    model, given = tiny.build(name), tiny.MODELS[name].inputs()
    forward, backward = torch_count(model, lambda m: tiny.loss(m, given), FUSED_ON_CPU)
    count = sum(p.numel() for p in model.parameters())
    costs = model_costs(model.to("meta"), on_meta(given) | {"return_dict": False})
    assert costs.forward_flop == pytest.approx(forward, rel=0.02)
    assert costs.backward_flop == pytest.approx(backward, rel=0.02)
    assert costs.parameters == count
    blocks = costs.forward_flop - costs.units[0].forward_flop
    assert costs.recompute_flop == blocks > 0
    assert costs.flop == costs.forward_flop + costs.backward_flop + blocks


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_padding_of_a_mask_counts_as_tokens() -> None:
    given = tiny.MODELS["mochi"].inputs()
    full = given | {"encoder_attention_mask": torch.ones(tiny.B, 16).bool()}
    forward, _ = torch_count(tiny.build("mochi"), lambda m: tiny.loss(m, full), FUSED_ON_CPU)
    costs = model_costs(tiny.build("mochi").to("meta"), on_meta(given) | {"return_dict": False})
    assert costs.forward_flop == pytest.approx(forward, rel=0.001)


def test_grouped_convolution_counts_its_groups_in_backward() -> None:
    """Each gradient has as many products as the forward."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(8, 16, 3, padding=1, groups=4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)[:, :8]

    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), Block(), Block())
    costs = model_costs(model.to("meta"), [torch.zeros(2, 8, 5, 5)], blocks=["1", "2"])
    products = 2 * 16 * 5 * 5 * (8 // 4) * 9
    for unit in costs.units[1:]:
        assert unit.forward_flop == 2 * products
        assert unit.backward_flop == 2 * 2 * products


def test_costs_do_not_depend_on_whether_kernels_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with_library = costs_of("deformable")
    monkeypatch.setattr("megaslide.ops.library._open", lambda: (None, "no compiler"))
    assert why_absent() == "no compiler"
    assert costs_of("deformable") == with_library
    assert costs_of("deformable", backend="reference") == with_library
    assert not is_counting_only()


# -- parameters and bytes -------------------------------------------------------------------------


def test_frozen_parameters_are_told_apart_and_have_no_backward() -> None:
    model = build("dense")
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    costs = model_costs(model, inputs())
    assert costs.parameters == sum(p.numel() for p in model.parameters())
    assert costs.trainable_parameters == trainable
    frozen, trained = costs.units[1], costs.units[3]
    assert frozen.forward_flop == trained.forward_flop
    assert 0 < frozen.backward_flop < 0.75 * trained.backward_flop
    assert frozen.gradient_bytes == 0 < trained.gradient_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_and_arenas_are_what_the_engine_allocates(dtype: torch.dtype) -> None:
    costs = model_costs(build("deformable").to("meta"), on_meta(inputs()), dtype=dtype)
    for state_format in FORMATS:
        settings = StoreSettings(state_format=state_format)
        planned = costs.store(settings)
        state = sum(n for kind, n in planned.kinds.items() if kind != "gradients")
        assert state == planned_state_bytes(
            build("deformable"), dtype=dtype, state_format=state_format
        )
        streamed = stream(build("deformable"), dtype=dtype, state_format=state_format, slots=3)
        assert streamed.store.plan == planned
        held = {k: n for k, n in streamed.device_bytes.items() if k != "activations"}
        assert held == costs.arenas(slots=3)
        moved = [layout.weight_nbytes for layout in streamed.store.units]
        assert [unit.weight_bytes for unit in costs.units] == moved
        streamed.close()


@pytest.mark.parametrize("kind", ["dense", "deformable"])
def test_boundary_bytes_are_what_the_engine_sends_away(kind: str) -> None:
    streamed = stream(build(kind, layers=5), activations="host")
    video_loss(streamed).backward()
    streamed.close()
    spans = [s for s in streamed.trace.spans if s.lane == "d2h" and s.name == "activation"]
    costs = costs_of(kind, layers=5)
    # The inputs of the last block stay, and what the blocks share.
    assert sum(s.nbytes for s in spans) == sum(u.boundary_bytes for u in costs.units[:-1])
    assert {u.boundary_bytes for u in costs.units[1:]} == {TOKENS * DIM * 4}


def test_boundary_bytes_are_what_a_deeper_model_holds_on_the_device() -> None:
    def peak(layers: int) -> int:
        streamed = stream(build("neighborhood", layers=layers))
        with streamed.observing_memory():
            video_loss(streamed).backward()
        streamed.close()
        return streamed.device_bytes["activations"]

    more = peak(9) - peak(3)
    deep, shallow = (costs_of("neighborhood", layers=n).boundary_bytes for n in (9, 3))
    assert more == pytest.approx(deep - shallow, rel=0.01)


def test_shared_inputs_are_counted_once_however_many_blocks_receive_them() -> None:
    text, modulation = BATCH * TEXT * DIM * 4, BATCH * 6 * DIM * 4
    rope = 2 * (TOKENS // BATCH) * (DIM // HEADS // 2) * 4
    for layers in (2, 6):
        assert costs_of("dense", layers=layers).shared_bytes == text + modulation + rope


class RealSaved:
    """What autograd really keeps of a block's forward: storages, its inputs and weights not."""

    def __init__(self, block: torch.nn.Module) -> None:
        self.kept: dict[int, torch.Tensor] = {}
        self.known = [p.untyped_storage().data_ptr() for p in block.parameters()]
        self.block, self.original = block, block.forward
        block.forward = self.forward  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.known += [x.untyped_storage().data_ptr() for x in tensors]
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda x: x):
            return self.original(*args, **kwargs)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        self.kept[x.untyped_storage().data_ptr()] = x
        return x

    @property
    def nbytes(self) -> int:
        kept = [x for key, x in self.kept.items() if key not in self.known]
        return sum(x.untyped_storage().nbytes() for x in kept)


@pytest.mark.skipif(why_absent() is not None, reason="the reference keeps other tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_working_bytes_are_what_autograd_really_keeps(kind: str) -> None:
    model = build(kind)
    saved = RealSaved(model.blocks[1])
    loss = video_loss(model)
    assert costs_of(kind).units[2].working_bytes == saved.nbytes > 0
    loss.backward()


def test_observed_peak_is_boundaries_and_one_blocks_work() -> None:
    streamed = stream(build("dense"))
    with streamed.observing_memory():
        video_loss(streamed).backward()
    streamed.close()
    costs = costs_of("dense")
    planned = costs.boundary_bytes + max(u.working_bytes for u in costs.units[1:])
    assert planned < streamed.device_bytes["activations"] < 1.5 * planned


class Pair(torch.nn.Module):
    """Two streams; the second output has a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.tanh(self.one(a + b))
        return a, torch.tanh(self.two(b))


class Pairs(torch.nn.Module):
    """What the last block makes of the second stream is not used."""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(6, 6)
        self.blocks = torch.nn.ModuleList(Pair() for _ in range(3))
        if frozen:
            self.embed.requires_grad_(False)
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = b = self.embed(x)
        for block in self.blocks:
            a, b = block(a, b)
        return a


@pytest.mark.parametrize("frozen", [0, 2])
def test_only_what_reaches_the_loss_has_a_backward(frozen: int) -> None:
    x = torch.randn(5, 6)
    forward, backward = torch_count(Pairs(frozen), lambda m: m(x).square().mean(), {})
    costs = model_costs(Pairs(frozen), [x])
    assert (costs.forward_flop, costs.backward_flop) == (forward, backward)
    product = 2 * 5 * 6 * 6
    assert costs.units[3].backward_flop == (2 if frozen == 0 else 1) * product


def test_frozen_blocks_before_the_first_that_learns_keep_nothing() -> None:
    streamed = stream(Pairs(frozen=2), activations="host")
    streamed(torch.randn(5, 6)).square().mean().backward()
    streamed.close()
    names = [s.name for s in streamed.trace.spans if s.name.startswith("recompute")]
    costs = model_costs(Pairs(frozen=2), [torch.randn(5, 6)])
    recomputed = [unit.name for unit in costs.units if unit.recompute_flop]
    assert [f"recompute {name}" for name in recomputed] == names == ["recompute blocks.2"]
    assert [unit.boundary_bytes for unit in costs.units] == [0, 0, 0, 2 * 5 * 6 * 4]
    assert [unit.working_bytes > 0 for unit in costs.units[1:]] == [False, False, True]


# -- how it is counted ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "different"), [("dense", 1), ("swin", 2)])
def test_equal_blocks_run_once(
    kind: str, different: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Every second block of swin shifts its windows, which only an attribute tells."""
    runs: list[int] = []
    original = dry_run._DryRun._run_block

    def counted(self: Any, unit: int, *args: Any) -> Any:
        runs.append(unit)
        return original(self, unit, *args)

    monkeypatch.setattr(dry_run._DryRun, "_run_block", counted)
    costs = costs_of(kind, layers=8)
    assert runs == list(range(1, different + 1))
    assert costs.order == tuple(range(1, 9))
    assert all(unit.calls == 1 for unit in costs.units)


def test_model_is_as_it_was() -> None:
    model = build("swin")
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    expected = model(**(given := inputs()))
    model_costs(model, given)
    assert all(p is before[n][0] and torch.equal(p, before[n][1])
               for n, p in model.named_parameters())  # fmt: skip
    assert torch.equal(model(**given), expected)
    assert not any("forward" in vars(block) for block in model.blocks)


def test_block_used_twice_counts_twice_and_tied_parameters_once() -> None:
    class Looped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(6, 6)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
            self.blocks[1].bias = self.blocks[0].bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
                x = torch.tanh(block(x))
            return x

    model = Looped()
    costs = model_costs(model, [torch.zeros(5, 6)])
    assert costs.order == (1, 2, 1)
    assert [unit.calls for unit in costs.units] == [1, 2, 1]
    assert costs.units[1].forward_flop == 2 * costs.units[2].forward_flop == 2 * 2 * 5 * 36
    assert costs.units[1].boundary_bytes == 2 * 5 * 6 * 4
    assert costs.parameters == sum(p.numel() for p in model.parameters())


def test_forward_that_looks_at_values_is_refused_in_words() -> None:
    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x) if x.sum() > 0 else self.blocks[1](x)

    model = Looks()
    with pytest.raises(InputError, match=r"Looks: its forward asks for values"):
        model_costs(model, [torch.zeros(2, 4)])
    assert not any("forward" in vars(block) for block in model.blocks)


def test_what_stands_around_the_model_may_be_called() -> None:
    model = build("dense").to("meta")
    given = on_meta(inputs())
    around = model_costs(model, given, call=lambda **named: model(**named) * 2)
    assert around == model_costs(model, given)


def test_layers_of_torch_itself() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    x = torch.zeros(2, 9, 16)
    forward, backward = torch_count(model, lambda m: m(x).square().mean(), FUSED_ON_CPU)
    costs = model_costs(model, [x], blocks=["layers"])
    assert costs.forward_flop == forward
    # Alone, torch skips the gradient of the first input; so do we, who are told that it needs none.
    assert costs.backward_flop == backward
    assert costs.units[1].backward_flop < costs.units[2].backward_flop


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("name", ["wan", "ltx", "cogvideox-rope", "mochi"])
def test_pretrained_transformer_behind_its_denoiser(name: str, tmp_path: Path) -> None:
    """As a run builds it: parameters on the meta device, tables real, inputs by the convention."""
    tiny.write_pipeline(tmp_path, name, dtype=torch.bfloat16)
    source = find_source(str(tmp_path))
    family = family_of(source.class_name)(source.config, fps=24, guidance=1.0)
    network = PretrainedNetwork(source=source, family=family)
    model = network.build(torch.bfloat16)
    given = {
        "hidden_states": torch.empty(2, family.channels, 5, 8, 10, device="meta"),
        "timestep": torch.empty(2, device="meta"),
        "encoder_hidden_states": torch.empty(2, 4, family.text_dim, device="meta"),
    }
    costs = model_costs(model, given, call=network.denoiser(model, torch.bfloat16))
    assert costs.parameters == network.count_parameters()
    assert len(costs.order) == 2
    assert all(unit.flop > 2 * 3 * unit.parameters for unit in costs.units[1:])


def test_a_hundred_billion_parameters_take_seconds_and_no_memory() -> None:
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = build_model(
            ModelConfig(preset="105b"), AttentionConfig(), in_channels=16, text_dim=4096
        )
        given = {
            "hidden_states": torch.empty(1, 16, 64, 136, 240),
            "timestep": torch.empty(1),
            "encoder_hidden_states": torch.empty(1, 512, 4096),
        }
    costs = model_costs(model, given, dtype=torch.bfloat16)
    seconds = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert costs.parameters > 100e9
    tokens = 64 * 68 * 120
    # 2 FLOP per parameter of a block and token are all but the attention's and the text's.
    per_block = 2 * costs.units[1].parameters * tokens
    assert 0.8 * per_block < costs.units[1].forward_flop < 1.2 * per_block
    assert costs.units[1].boundary_bytes == tokens * 8192 * 2
    assert seconds < 10
    assert grown < 2e9


# ---- blocks in chunks of frames ------------------------------------------------------------------


def long_inputs(frames: int) -> Inputs:
    return inputs() | {"hidden_states": torch.randn(BATCH, 4, frames, *GRID[1:])}


def test_flop_of_chunks_are_those_of_the_engine() -> None:
    given = long_inputs(9)
    costs = model_costs(build("deformable").to("meta"), on_meta(given), frames_per_chunk=2)
    streamed = stream(build("deformable"), frames_per_chunk=2)
    with FlopCounter() as counter:
        loss = streamed(**given).square().mean()
        assert counter.total == costs.forward_flop
        loss.backward()
    assert counter.total == costs.flop
    streamed.close()
    whole = model_costs(build("deformable").to("meta"), on_meta(given))
    assert costs.flop > 1.3 * whole.flop  # 2 frames are given 6, of which 4 for attention alone
    assert costs.boundary_bytes == whole.boundary_bytes


def test_working_set_of_chunks_does_not_grow_with_the_clip() -> None:
    def working(frames: int, per_chunk: int | None) -> int:
        model = build("deformable").to("meta")
        given = on_meta(long_inputs(frames))
        return model_costs(model, given, frames_per_chunk=per_chunk).units[1].working_bytes

    assert working(12, 2) == working(24, 2) < working(12, 4) < working(12, None)
    assert working(12, 12) == working(12, None)


@pytest.mark.parametrize("kind", ["dense", "swin"])
def test_chunks_of_blocks_that_cannot_be_cut_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"frames_per_chunk: blocks.0 .* relates all frames"):
        model_costs(build(kind).to("meta"), on_meta(inputs()), frames_per_chunk=1)
