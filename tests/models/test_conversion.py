"""Converted attention: what it must equal, what it must keep, and what it refuses.

The oracle of every family is its stock class in diffusers: with a window that covers the grid the
converted model is the dense one, and with a smaller window it is the dense one under a mask that is
built here, token by token, from the definition of neighbourhood attention.
"""

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_diffusers as tiny
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import megaslide
from megaslide.cli import app
from megaslide.config import AttentionConfig, Config, load_config
from megaslide.errors import InputError
from megaslide.models.dit import VideoDiT
from megaslide.models.network import network_of
from megaslide.models.presets import VideoDiTConfig
from megaslide.models.pretrained import CONVERTIBLE, convert, find_source
from megaslide.models.pretrained.conversion import chosen_layers
from megaslide.models.pretrained.converted_folder import write_converted
from megaslide.models.pretrained.video_attention import Registers
from megaslide.streaming import StreamedModel, TransferHooks, stream

# Mochi asks for fp32 in autocast, which torch's CPU cannot turn off in a better way than saying so.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
HALVED, WHOLE = (tiny.T, tiny.H // 2, tiny.W // 2), (tiny.T, tiny.H, tiny.W)
GRIDS = {
    "wan": HALVED, "wan-ti2v": HALVED, "wan-i2v": HALVED, "skyreels": HALVED, "chronoedit": HALVED,
    "ltx": WHOLE, "ltx2": WHOLE, "cosmos": HALVED, "cosmos2": HALVED, "cosmos2-v2w": HALVED,
    "allegro": HALVED, "kandinsky5": HALVED, "cogvideox": HALVED, "cogvideox-rope": HALVED,
    "cogvideox1.5": (2, tiny.H // 2, tiny.W // 2), "consisid": HALVED, "mochi": HALVED,
    "hunyuan": HALVED, "hunyuan-i2v": HALVED, "hunyuan-token-replace": HALVED, "hunyuan1.5": WHOLE,
}  # fmt: skip
"""Token grid (T, H, W) of each family's tiny inputs."""
ALL = (99, 99, 99)
WINDOW = (2, 3, 4)
"""Even and odd, shorter than every grid."""


@pytest.fixture(autouse=True)
def _resize() -> None:
    tiny.install_resize()


def inputs_of(name: str) -> tiny.Inputs:
    """Allegro's mask of ones is left out: a converted attention takes none."""
    inputs = tiny.MODELS[name].inputs()
    inputs.pop("attention_mask", None)
    return inputs


def converted(name: str, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    return convert(tiny.build(name), AttentionConfig(**settings))


def opened(model: nn.Module) -> nn.Module:
    """With offsets far from zero, a learned model's."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".dsa." in name and name.endswith((".proj.weight", ".proj.bias", ".gate")):
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(7))
    return model


def forward(model: Any, inputs: tiny.Inputs) -> list[Tensor]:
    return tiny.outputs(model(**inputs, return_dict=False))


def run(model: nn.Module, inputs: tiny.Inputs) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients."""
    tiny.loss(model, inputs).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return forward(model, inputs), grads


def assert_equal(model: nn.Module, stock: nn.Module, inputs: tiny.Inputs) -> None:
    (got, grads), (want, expected) = run(model, inputs), run(stock, inputs)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-5
    assert expected.keys() == {n for n in grads if ".dsa." not in n}
    for name, gradient in expected.items():
        assert (grads[name] - gradient).abs().max() <= 1e-5, name


def neighbourhoods(grid: tuple[int, int, int], window: tuple[int, int, int]) -> Tensor:
    """Who sees whom, bool [N, N]: `window` voxels around each, moved inward at the borders."""
    places = [(t, h, w) for t in range(grid[0]) for h in range(grid[1]) for w in range(grid[2])]
    starts = [
        [min(max(i - k // 2, 0), n - k) for i, n, k in zip(place, grid, window, strict=True)]
        for place in places
    ]
    return torch.tensor(
        [
            [all(s <= j < s + k for s, j, k in zip(start, key, window, strict=True))
             for key in places]
            for start in starts
        ]
    )  # fmt: skip


def text_sees_all(mask: Tensor, size: int, first: bool) -> Tensor:
    """[N, N] to [S, S]: text tokens see everything and are seen by everything."""
    count = size - len(mask)
    wider = torch.ones(size, size, dtype=torch.bool)
    (wider[count:, count:] if first else wider[: len(mask), : len(mask)]).copy_(mask)
    return wider


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The mask in this list applies to every dense attention over video, alone or with text.

    A second entry says that the text comes first.
    """
    masks: list[Tensor] = []
    dense = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if masks and query.shape[-2] == key.shape[-2] >= len(masks[0]):
            given = options.get("attn_mask")
            wider = text_sees_all(masks[0], key.shape[-2], first=masks[1:] != [])
            options["attn_mask"] = wider if given is None else given & wider
        return dense(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return masks


# -- equal to the stock model ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deformable", "neighborhood", "swin"])
@pytest.mark.parametrize("name", GRIDS)
def test_a_window_over_the_whole_grid_is_dense_attention(name: str, kind: str) -> None:
    model = converted(name, kind=kind, window=ALL, conv_branch=True, num_register_tokens=3)
    assert_equal(model, tiny.build(name), inputs_of(name))


@pytest.mark.parametrize("name", GRIDS)
def test_a_window_of_exactly_the_grid_is_enough(name: str) -> None:
    model = converted(name, kind="deformable", window=GRIDS[name])
    assert_equal(model, tiny.build(name), inputs_of(name))


@pytest.mark.parametrize("name", GRIDS)
def test_a_small_window_is_dense_attention_under_its_mask(name: str, masked: list[Tensor]) -> None:
    stock, inputs = tiny.build(name), inputs_of(name)
    dense = forward(stock, inputs)
    masked.append(neighbourhoods(GRIDS[name], WINDOW))
    if name.startswith(("cogvideox", "consisid")):
        masked.append(masked[0])
    (want, expected) = run(stock, inputs)
    masked.clear()
    for kind in ("neighborhood", "deformable"):
        got, grads = run(converted(name, kind=kind, window=WINDOW), inputs)
        for a, b, c in zip(got, want, dense, strict=True):
            assert (a - b).abs().max() <= 1e-5
            assert (b - c).abs().max() > 1e-5  # the window is felt
        assert all((grads[n] - g).abs().max() <= 1e-5 for n, g in expected.items())


@pytest.mark.parametrize("name", GRIDS)
def test_offsets_learn_from_the_first_step_and_move_the_taps(name: str) -> None:
    inputs = inputs_of(name)
    model = converted(name, kind="deformable", window=WINDOW)
    before, grads = run(model, inputs)
    # A sampling point whose offsets are zero has a gradient; the convolution in front has none yet.
    assert all(grads[n].any() for n in grads if ".dsa." in n and ".proj." in n)
    after = forward(opened(model), inputs)
    assert any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("offset_kind", ["shift", "affine", "tap"])
def test_every_kind_of_offsets(offset_kind: str) -> None:
    settings = {"window": WINDOW, "offset_kind": offset_kind, "offset_groups": 2}
    plain = forward(converted("wan", kind="neighborhood", window=WINDOW), inputs_of("wan"))[0]
    model = converted("wan", kind="deformable", **settings)
    assert (forward(model, inputs_of("wan"))[0] - plain).abs().max() <= 1e-5
    _, grads = run(opened(model), inputs_of("wan"))
    assert (forward(model, inputs_of("wan"))[0] - plain).abs().max() > 1e-4
    assert all(g.any() for n, g in grads.items() if ".dsa." in n)


def test_registers_are_a_softmax_of_their_own_behind_a_gate() -> None:
    torch.manual_seed(0)
    registers = Registers(5, 2, 12)
    q = tiny.random(2, 2, 1, 3, 2, 6)
    assert not registers(q).any()
    with torch.no_grad():
        registers.gate.copy_(torch.tensor([[0.5], [-2.0]]))
    scores = torch.einsum("bthwnd,end->bthwne", q.double(), registers.keys.double()) / 6**0.5
    want = torch.einsum("bthwne,end->bthwnd", scores.softmax(-1), registers.values.double())
    want[..., 0, :], want[..., 1, :] = 0.5 * want[..., 0, :], -2 * want[..., 1, :]
    assert (registers(q) - want).abs().max() <= 1e-6


def test_registers_learn_from_the_first_step() -> None:
    _, grads = run(converted("wan", kind="deformable", num_register_tokens=3), inputs_of("wan"))
    gates = [g for n, g in grads.items() if n.endswith("attn1.dsa.registers.gate")]
    assert len(gates) == 2
    assert all(gate.all() for gate in gates)


def test_every_convertible_class_is_in_these_tests() -> None:
    assert {tiny.MODELS[name].class_name for name in GRIDS} == set(CONVERTIBLE)


def test_chosen_layers_alone_are_converted(masked: list[Tensor]) -> None:
    """Block 1 of two: the mask is given to the second self-attention only."""
    inputs = inputs_of("wan")
    stock = tiny.build("wan")
    dense = stock.blocks[0].attn1.forward  # type: ignore[union-attr, index]
    mask = neighbourhoods(GRIDS["wan"], WINDOW)

    def unmasked(*args: Any, **kwargs: Any) -> Any:
        masked.clear()
        try:
            return dense(*args, **kwargs)
        finally:
            masked.append(mask)

    stock.blocks[0].attn1.forward = unmasked  # type: ignore[union-attr, index]
    masked.append(mask)
    want = forward(stock, inputs)
    masked.clear()
    got = forward(converted("wan", kind="neighborhood", window=WINDOW, layers=[1]), inputs)
    assert (got[0] - want[0]).abs().max() <= 1e-5
    every = forward(converted("wan", kind="neighborhood", window=WINDOW), inputs)
    assert (got[0] - every[0]).abs().max() > 1e-5


def test_layers() -> None:
    assert chosen_layers("all", 3) == [0, 1, 2]
    assert chosen_layers("every-2", 5) == [0, 2, 4]
    assert chosen_layers((3, 1, 3), 4) == [1, 3]


def test_swin_shifts_every_other_converted_block() -> None:
    model = converted("wan", kind="swin", window=(1, 2, 2))
    shifted = [m.shifted for n, m in model.named_modules() if n.endswith(".dsa")]
    assert shifted == [False, True]
    assert not torch.equal(
        forward(model, inputs_of("wan"))[0],
        forward(converted("wan", kind="neighborhood", window=(1, 2, 2)), inputs_of("wan"))[0],
    )


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_computes_as_the_stock_model_does() -> None:
    model, stock = converted("wan", kind="neighborhood", window=ALL), tiny.build("wan")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        got, want = (forward(m, inputs_of("wan"))[0] for m in (model, stock))
    assert got.dtype == want.dtype
    assert (got.float() - want.float()).abs().max() <= 0.02


def test_bf16_weights_compute() -> None:
    model, stock = converted("ltx", kind="deformable", window=ALL), tiny.build("ltx")
    inputs = {k: v.bfloat16() if k == "hidden_states" else v for k, v in inputs_of("ltx").items()}
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].bfloat16()
    got, want = (forward(m.bfloat16(), inputs)[0] for m in (model, stock))
    assert got.dtype == torch.bfloat16
    assert (got.float() - want.float()).abs().max() <= 0.05


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model = opened(converted("wan", kind="deformable", window=WINDOW))
    twin = copy.deepcopy(model)
    assert torch.equal(*(forward(m, inputs_of("wan"))[0] for m in (model, twin)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert forward(twin, inputs_of("wan"))[0].abs().max() > 0.01


# -- streamed -------------------------------------------------------------------------------------


def gradients(model: StreamedModel, folder: Path) -> dict[str, Tensor]:
    """With beta1 = 0 and no clipping, exp_avg is the gradient."""
    model.save_optimizer(folder)
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {
        key.removeprefix("exp_avg."): tensor
        for file in files
        for key, tensor in file.items()
        if key.startswith("exp_avg.")
    }


@pytest.mark.parametrize("micro_batch_size", [None, 1])
@pytest.mark.parametrize("name", ["wan", "ltx", "kandinsky5", "cogvideox", "hunyuan", "mochi"])
def test_streamed_gradients_are_the_resident_ones(
    name: str, micro_batch_size: int | None, tmp_path: Path
) -> None:
    settings = {"kind": "deformable", "window": WINDOW, "num_register_tokens": 2}
    inputs = inputs_of(name)
    _, expected = run(opened(converted(name, **settings)), inputs)
    blocks = None if tiny.MODELS[name].found else tiny.MODELS[name].blocks
    model = stream(
        opened(converted(name, **settings)), betas=(0.0, 0.9), max_grad_norm=None, blocks=blocks,
        micro_batch_size=micro_batch_size,
        hooks=TransferHooks(max_delay_s=0.0005, seed=3, poison=True),
    )  # fmt: skip
    tiny.loss(model, inputs).backward()
    model.step()
    found = gradients(model, tmp_path)
    model.close()
    largest = max(g.abs().max() for g in expected.values())
    assert any(".dsa." in n and g.any() for n, g in expected.items())
    for key, gradient in expected.items():
        assert (found[key] - gradient).abs().max() <= 1e-6 * largest, key


def resized(grid: tuple[int, int, int]) -> tiny.Inputs:
    return {**inputs_of("wan"), "hidden_states": tiny.random(tiny.B, tiny.C, *grid)}


def test_a_recompute_has_the_grid_of_its_own_call() -> None:
    """Two clips of as many tokens but another shape, before either's backward."""
    first, second = resized((3, 8, 10)), resized((3, 10, 8))
    model = opened(converted("wan", kind="deformable", window=WINDOW))
    tiny.loss(model, first).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    streamed = stream(copy.deepcopy(model), betas=(0.0, 0.9), max_grad_norm=None)
    loss = tiny.loss(streamed, first)
    with torch.no_grad():
        tiny.loss(streamed, second)
    loss.backward()
    result = streamed.step()
    streamed.close()
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_three_steps_streamed_are_three_steps_resident() -> None:
    resident = converted("cosmos2", kind="deformable", window=WINDOW)
    streamed = stream(
        copy.deepcopy(resident), lr=1e-2, eps=1e-2, weight_decay=0.01, max_grad_norm=1.0,
        micro_batch_size=1,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(resident.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.01)
    inputs = inputs_of("cosmos2")
    for _ in range(3):
        losses = [tiny.loss(model, inputs) for model in (resident, streamed)]
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        for loss in losses:
            loss.backward()
        nn.utils.clip_grad_norm_(resident.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        streamed.step()
    found = streamed.state_dict()
    streamed.close()
    moved = [n for n, p in resident.named_parameters() if ".dsa." in n and p.any()]
    assert any(n.endswith("proj.weight") for n in moved)
    for name, parameter in resident.named_parameters():
        assert (found[name] - parameter).abs().max() <= 1e-5, name


def test_torch_checkpointing_recomputes_alike() -> None:
    model = opened(converted("wan", kind="deformable", window=WINDOW)).train()
    _, expected = run(model, inputs_of("wan"))
    expected = {n: g.clone() for n, g in expected.items()}
    model.zero_grad()
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    _, found = run(model, inputs_of("wan"))
    assert all(torch.equal(found[n], g) for n, g in expected.items())


# -- folders --------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    model = opened(converted("wan", kind="deformable", window=WINDOW, layers=[1]))
    model.save_pretrained(tmp_path / "transformer")  # type: ignore[operator]
    entry = json.loads((tmp_path / "transformer" / "config.json").read_text())["attention"]
    assert (entry["kind"], entry["window"], entry["layers"]) == ("deformable", [2, 3, 4], [1])
    again = megaslide.load(tmp_path)
    assert not again.training
    state = model.state_dict()
    assert state.keys() == again.state_dict().keys()
    assert all(torch.equal(state[n], t) for n, t in again.state_dict().items())
    assert torch.equal(*(forward(m, inputs_of("wan"))[0] for m in (model, again)))


def test_load_reads_models_that_were_not_converted(tmp_path: Path) -> None:
    stock = tiny.write_pipeline(tmp_path / "ltx", "ltx")
    same = megaslide.load(tmp_path / "ltx")
    assert torch.equal(*(forward(m, inputs_of("ltx"))[0] for m in (stock, same)))
    own = VideoDiT(VideoDiTConfig(in_channels=4, text_dim=8, num_layers=1, hidden_size=24))
    own.save_pretrained(tmp_path / "own" / "transformer")
    again = megaslide.load(tmp_path / "own")
    assert isinstance(again, VideoDiT)
    assert all(torch.equal(p, q) for p, q in zip(own.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", ["wan", "cosmos2", "kandinsky5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_converted_folder_is_the_original_with_more(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    stock = tiny.write_pipeline(tmp_path / "src", name, dtype=dtype, shard_size="20KB")
    written = write_converted(
        find_source(str(tmp_path / "src")), tmp_path / "out",
        AttentionConfig(kind="deformable", window=WINDOW, num_register_tokens=2),
        max_shard_bytes=20_000,
    )  # fmt: skip
    assert len(list(written.folder.glob("*.safetensors"))) > 1
    model, base = megaslide.load(tmp_path / "out"), stock.state_dict()
    state = model.state_dict()
    added = state.keys() - base.keys()
    assert all(torch.equal(state[n], t) and state[n].dtype == t.dtype for n, t in base.items())
    assert added
    assert all(".dsa." in n and state[n].dtype == dtype for n in added)
    assert written.added_parameters == sum(state[n].numel() for n in added)
    assert written.base_parameters == sum(t.numel() for t in base.values())
    assert written.converted == 2


def test_stock_diffusers_loads_the_base_of_a_converted_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from diffusers import WanTransformer3DModel
    from diffusers.utils import logging as diffusers_logging

    stock = tiny.write_pipeline(tmp_path / "src", "wan")
    source = find_source(str(tmp_path / "src"))
    write_converted(source, tmp_path / "out", AttentionConfig(kind="deformable"))
    diffusers_logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            loaded = WanTransformer3DModel.from_pretrained(
                tmp_path / "out", subfolder="transformer"
            )
    finally:
        diffusers_logging.disable_propagation()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert any("dsa.offsets" in text for text in said)
    state = loaded.state_dict()
    assert state.keys() == stock.state_dict().keys()
    assert all(torch.equal(state[n], t) for n, t in stock.state_dict().items())
    assert torch.equal(*(forward(m, inputs_of("wan"))[0] for m in (stock, loaded)))


def test_the_command_converts_and_says_what_it_did(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path / "src", "wan")
    (tmp_path / "src" / "scheduler").mkdir()
    (tmp_path / "src" / "scheduler" / "scheduler_config.json").write_text("{}")
    (tmp_path / "src" / "model_index.json").write_text('{"boundary_ratio": 0.9}')
    arguments = [
        "convert", str(tmp_path / "src"), str(tmp_path / "out"), "attention.kind=deformable",
        "attention.window=[1,3,3]", "attention.layers=every-2",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "converted 1 attention modules to deformable" in result.stdout
    found = find_source(str(tmp_path / "out"))
    assert found.scheduler == {}
    assert found.pipeline == {"boundary_ratio": 0.9}
    names = [n for n, _ in megaslide.load(tmp_path / "out").named_parameters() if ".dsa." in n]
    assert names
    assert all(n.startswith("blocks.0.attn1.dsa.") for n in names)
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "holds a model already" in again.output


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("framepack", "the attention of HunyuanVideoFramepackTransformer3DModel cannot be conv"),
        ("latte", "the attention of LatteTransformer3DModel cannot be converted"),
    ],
)
def test_families_that_cannot_be_converted_are_named(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=why) as refusal:
        convert(tiny.build(name), AttentionConfig(kind="deformable"))
    assert "WanTransformer3DModel" in str(refusal.value)
    tiny.write_pipeline(tmp_path, name)
    with pytest.raises(InputError, match=r"config\.json: the attention of"):
        write_converted(find_source(str(tmp_path)), tmp_path / "o", AttentionConfig(kind="swin"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"layers": [0, 2]}, r"layers=\[0, 2\]: no blocks \[2\]\n  fix: use 0 to 1"),
        ({"layers": [-1]}, r"no blocks \[-1\]"),
        ({"offset_groups": 3}, "offset_groups=3 does not divide the 2 heads"),
    ],
)
def test_settings_that_do_not_fit_the_model(
    settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    tiny.write_pipeline(tmp_path / "src", "wan")
    source = find_source(str(tmp_path / "src"))
    chosen = AttentionConfig(kind="deformable", **settings)
    with pytest.raises(InputError, match=f"^{source.folder}: attention.*{why}"):
        write_converted(source, tmp_path / "out", chosen)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layers", "why"),
    [("every-0", "every-k"), ("some", "every-k"), ([], "list of indices"), (2, "list of indices")],
)
def test_layers_that_are_none(layers: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        AttentionConfig(layers=layers)


def test_a_model_is_converted_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1 is converted already"):
        convert(converted("wan", kind="swin"), AttentionConfig(kind="deformable"))
    tiny.write_pipeline(tmp_path / "a", "wan")
    chosen = AttentionConfig(kind="deformable")
    write_converted(find_source(str(tmp_path / "a")), tmp_path / "b", chosen)
    second = find_source(str(tmp_path / "b"))
    with pytest.raises(
        InputError, match=r"already converted, with attention \{'kind': 'deformable'"
    ):
        write_converted(second, tmp_path / "c", AttentionConfig(kind="swin"))
    with pytest.raises(InputError, match=r"nothing of .* would change\n.*use it as it is"):
        write_converted(second, tmp_path / "c", chosen)


def test_tensors_that_do_not_fit_are_named_before_anything_is_written(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path / "src", "wan")
    path = tmp_path / "src" / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": 3}))
    source = find_source(str(tmp_path / "src"))
    with pytest.raises(InputError, match=r"do not fit config.json, first 'blocks\.2\."):
        write_converted(source, tmp_path / "out", AttentionConfig(kind="deformable"))
    assert not (tmp_path / "out").exists()


def test_a_damaged_entry_is_named(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path, "wan")
    path = tmp_path / "transformer" / "config.json"
    values = json.loads(path.read_text())
    for entry, why in (
        ({"kind": "sparse"}, r"config\.json: attention\.kind: Input should be"),
        ({"kind": "deformable", "windows": 3}, r"config\.json: attention\.windows: Extra inputs"),
        ("deformable", r"config\.json: attention: 'str' object"),
        ({"kind": "dense"}, r"config\.json: attention: kind 'dense'"),
    ):
        path.write_text(json.dumps({**values, "attention": entry}))
        with pytest.raises(InputError, match=why):
            megaslide.load(tmp_path)


def test_calls_that_a_converted_model_cannot_answer() -> None:
    model = converted("allegro", kind="neighborhood")
    with pytest.raises(ValueError, match="takes no mask; call the model without attention_mask"):
        model(**tiny.MODELS["allegro"].inputs())
    model = converted("cogvideox", kind="neighborhood")
    mask = torch.zeros(tiny.B, 1, tiny.TOKENS + 8)
    with pytest.raises(ValueError, match=r"no mask of torch.float32 .* text tokens alone"):
        model(**inputs_of("cogvideox"), attention_kwargs={"attention_mask": mask})
    model = converted("ltx", kind="neighborhood")
    inputs = inputs_of("ltx")
    with pytest.raises(ValueError, match="needs num_frames, height, width"):
        model(**{**inputs, "num_frames": None})
    longer = torch.cat([inputs["hidden_states"], inputs["hidden_states"][:, :7]], 1)
    coords = torch.zeros(tiny.B, 3, longer.shape[1])
    with pytest.raises(ValueError, match="needs 3·8·10 tokens"):
        model(**{**inputs, "hidden_states": longer, "video_coords": coords})
    wan = converted("wan", kind="neighborhood")
    with pytest.raises(RuntimeError, match="only within its model's forward"):
        wan.blocks[0].attn1(torch.zeros(1, 60, 24))  # type: ignore[union-attr, index, operator]


def test_another_attention_backend_is_not_passed_over() -> None:
    model = converted("wan", kind="neighborhood")
    model.set_attention_backend("_native_math")  # type: ignore[operator]
    forward(model, inputs_of("wan"))  # calls torch's SDPA like the default

    def elsewhere(attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    model.blocks[0].attn1.processor = elsewhere  # type: ignore[union-attr, index]
    with pytest.raises(RuntimeError, match="did not call torch's scaled_dot_product_attention"):
        forward(model, inputs_of("wan"))


# -- in a run -------------------------------------------------------------------------------------


def config_for(folder: Path, *overrides: str) -> Config:
    named = f"model.pretrained_model_name_or_path={json.dumps(str(folder))}"
    sizes = (f"data.codec.channels={tiny.C}", f"data.text.dim={tiny.TEXT}")
    return load_config(None, [named, *sizes, *overrides])


def network(folder: Path, *overrides: str) -> Any:
    return network_of(config_for(folder, *overrides), channels=tiny.C, text_dim=tiny.TEXT)


def test_a_run_converts_a_dense_model(tmp_path: Path) -> None:
    stock = tiny.write_pipeline(tmp_path, "wan")
    chosen = network(tmp_path, "attention.kind=deformable", "attention.window=[99,99,99]")
    model = chosen.build(torch.float32)
    streamed = stream(model)
    with pytest.raises(InputError, match=r"dsa"):
        streamed.load(chosen.weights)
    streamed.load(chosen.weights, keep=chosen.unsaved_parameters(model))
    with torch.no_grad():
        got, want = (forward(m, inputs_of("wan"))[0] for m in (streamed, stock))
    assert (got - want).abs().max() <= 1e-5
    state = streamed.state_dict()
    assert state["blocks.0.attn1.dsa.offsets.conv.weight"].any()
    streamed.save_pretrained(tmp_path / "saved" / "transformer")
    streamed.close()
    again = megaslide.load(tmp_path / "saved")
    assert all(torch.equal(state[n], t) for n, t in again.state_dict().items())


def test_a_run_keeps_what_a_folder_has(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path / "a", "wan")
    settings = AttentionConfig(kind="deformable", window=(1, 3, 3))
    write_converted(find_source(str(tmp_path / "a")), tmp_path / "b", settings)
    for overrides in ((), ("attention.kind=deformable", "attention.window=[1,3,3]")):
        chosen = network(tmp_path / "b", *overrides, "attention.backend=reference")
        model = chosen.build(torch.float32)
        assert chosen.unsaved_parameters(model) == ()
        assert model.blocks[1].attn1.dsa.settings.backend == "reference"
        assert model.blocks[1].attn1.dsa.settings.window == (1, 3, 3)
    for kind in ("swin", "dense"):
        with pytest.raises(InputError, match="already converted"):
            network(tmp_path / "b", f"attention.kind={kind}")
    assert network(tmp_path / "a", "attention.kind=dense").unsaved_parameters(model) == ()


def test_what_a_run_cannot_ask_for(tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path, "wan")
    with pytest.raises(InputError, match=r"attention\.window without attention\.kind"):
        config_for(tmp_path, "attention.window=[1,3,3]")
    with pytest.raises(InputError, match=r"attention\.layers is for pretrained models"):
        load_config(None, ["attention.layers=[0]"])


def test_neighbourhoods_of_this_file_have_as_many_keys_as_the_window() -> None:
    for grid, window in (((3, 4, 5), WINDOW), ((3, 4, 5), (3, 4, 5))):
        assert (neighbourhoods(grid, window).sum(-1) == math.prod(window)).all()
