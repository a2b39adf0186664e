"""The whole transformer: shapes, what blocks are handed, conditioning, gradients, precision."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaslide.models.dit import VideoDiT, VideoDiTConfig
from megaslide.models.layers import rope_tables

KINDS = ["deformable", "neighborhood", "swin", "dense"]


def make(**fields: Any) -> VideoDiT:
    torch.manual_seed(1)
    base = {"in_channels": 3, "text_dim": 10, "hidden_size": 24, "num_layers": 2}
    base |= {"num_attention_heads": 2, "freq_dim": 32, "window": (2, 3, 3)}
    return VideoDiT(VideoDiTConfig(**{**base, **fields}))


def opened(model: VideoDiT) -> VideoDiT:
    """Fill what starts at zero, so that every branch acts."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def inputs(batch: int = 2, size: tuple[int, int, int] = (3, 6, 8)) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "hidden_states": torch.randn(batch, 3, *size),
        "timestep": torch.tensor([20.0, 700.0, 990.0])[:batch],
        "encoder_hidden_states": torch.randn(batch, 5, 10),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()[:batch],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("registers", [0, 2])
def test_shapes_and_zero_at_init(kind: str, registers: int) -> None:
    model, batch = make(attention_kind=kind, num_register_tokens=registers), inputs()
    out = model(**batch)
    assert out.shape == batch["hidden_states"].shape
    assert out.dtype == torch.float32
    assert not out.any()
    assert opened(model)(**batch).abs().mean() > 1e-3


@pytest.mark.parametrize("offset_kind", ["shift", "affine", "tap"])
def test_offset_nets_are_zero_after_the_models_init(offset_kind: str) -> None:
    model = make(offset_kind=offset_kind, offset_groups=2)
    names = [name for name, _ in model.named_parameters() if "offset_net.proj" in name]
    assert len(names) == 2 * model.config.num_layers
    for reset in (lambda: None, model.reset_parameters):
        reset()
        state = model.state_dict()
        assert not any(state[name].any() for name in names)


def test_reset_fills_a_model_built_on_meta_as_construction_does() -> None:
    with torch.device("meta"):
        model = make(num_register_tokens=2, conv_branch=True)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    model.reset_parameters()
    built = make(num_register_tokens=2, conv_branch=True).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), name
        assert bool(tensor.any()) == bool(built[name].any()), name


def test_blocks_get_batched_tensors_or_tensors_with_a_leading_one() -> None:
    model, batch = make(num_register_tokens=2), inputs()
    calls: list[tuple[Any, ...]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
    model(**batch)
    assert len(calls) == 2
    (hidden, text, mask, modulation, (cos, sin), registers), kwargs = calls[0]
    assert kwargs == {"grid": (3, 3, 4)}
    assert hidden.shape == (2, 36, 24)
    assert text.shape == (2, 5, 24)
    assert mask.shape == (2, 5)
    assert mask.dtype == torch.bool
    assert modulation.shape == (2, 6, 24)
    assert cos.shape == sin.shape == (1, 36, 1, 6)
    assert registers.shape == (1, 2, 24)
    assert all(a is b for a, b in zip(calls[0][0][1:], calls[1][0][1:], strict=True))


def test_blocks_are_identical_in_names_and_shapes() -> None:
    for kind in KINDS:
        blocks = make(attention_kind=kind, num_layers=3).blocks
        shapes = [{n: p.shape for n, p in block.named_parameters()} for block in blocks]
        assert shapes[0] == shapes[1] == shapes[2]


def test_gates_start_open_by_the_depth() -> None:
    """Shut gates keep tokens from learning of each other; wide open ones drown the residual."""
    for layers in (2, 8):
        table = make(num_layers=layers).blocks[1].scale_shift_table
        expected = torch.zeros(6)
        expected[[2, 5]] = 1 / math.sqrt(2 * layers)
        torch.testing.assert_close(table, expected[:, None].expand_as(table))


def test_the_input_comes_back_with_a_gain_of_its_timestep() -> None:
    model, batch = make(), inputs()
    nn.init.normal_(model.final.gain.weight)
    embedded = nn.functional.silu(model.time_embed(batch["timestep"]))
    gain = embedded @ model.final.gain.weight.T  # [B, C]
    expected = batch["hidden_states"] * gain[:, :, None, None, None]
    torch.testing.assert_close(model(**batch), expected)


def test_a_block_is_its_formula() -> None:
    block = make(attention_kind="dense").blocks[0]
    hidden, text, modulation = torch.randn(2, 8, 24), torch.randn(2, 5, 24), torch.randn(2, 6, 24)
    rope = rope_tables((2, 2, 2), 12)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    shift1, scale1, gate1, shift2, scale2, gate2 = (
        (modulation + block.scale_shift_table)[:, i : i + 1] for i in range(6)
    )

    def norm(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    x = norm(hidden) * (1 + scale1) + shift1
    expected = hidden + gate1 * block.attn1(x, rope, grid=(2, 2, 2))
    expected = expected + block.attn2(norm(expected), text, None)
    expected = expected + gate2 * block.ffn(norm(expected) * (1 + scale2) + shift2)
    out = block(hidden, text, None, modulation, rope, None, grid=(2, 2, 2))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_patch_comes_out_where_it_went_in() -> None:
    model = opened(make(attention_kind="neighborhood", window=(1, 1, 1)))  # tokens never mix
    batch = inputs()
    out = model(**batch)
    batch["hidden_states"][:, :, 1, 2:4, 6:8] += 1
    changed = (model(**batch) - out).abs().amax(dim=(0, 1)) > 1e-4
    expected = torch.zeros(3, 6, 8, dtype=torch.bool)
    expected[1, 2:4, 6:8] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_two_equals_two_of_one(kind: str) -> None:
    model, batch = opened(make(attention_kind=kind, num_register_tokens=2)), inputs()
    out = model(**batch)
    for i in range(2):
        single = model(**{name: tensor[i : i + 1] for name, tensor in batch.items()})
        torch.testing.assert_close(out[i : i + 1], single, rtol=1e-5, atol=1e-6)


def test_masked_text_has_no_influence_and_real_text_has() -> None:
    model, batch = opened(make()), inputs()
    out = model(**batch)
    mask = batch["encoder_attention_mask"][..., None]
    other = torch.where(mask, batch["encoder_hidden_states"], torch.randn(2, 5, 10))
    assert torch.equal(out, model(**{**batch, "encoder_hidden_states": other}))
    floats = batch["encoder_attention_mask"].float()
    assert torch.equal(out, model(**{**batch, "encoder_attention_mask": floats}))
    changed = model(**{**batch, "encoder_hidden_states": -batch["encoder_hidden_states"]})
    assert ((out - changed).flatten(1).norm(dim=1) > 1e-3).all()


def test_every_sample_follows_its_own_timestep() -> None:
    model, batch = opened(make()), inputs()
    out = model(**batch)
    changed = model(**{**batch, "timestep": torch.tensor([20.0, 710.0])})
    assert torch.equal(out[0], changed[0])
    assert (out[1] - changed[1]).norm() > 1e-3
    same = model(**{**batch, "timestep": torch.tensor(20.0)})
    torch.testing.assert_close(same[0], out[0])


# Which parameters get their first gradient in which step of plain SGD. The head is zero, so at
# first only it learns; then all that feeds it, except what lies behind another zero: the output of
# cross-attention and the offset net's linear layer.
FIRST_GRADIENT = {
    0: ("final.proj.", "final.gain."),
    1: ("attn2.to_out.",),
    2: ("offset_net.conv.", "attn2.", "text_embed."),
}


def first_step(name: str) -> int:
    steps = (step for step, parts in FIRST_GRADIENT.items() if any(p in name for p in parts))
    return next(steps, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_all_parameters_in_the_expected_step(kind: str) -> None:
    model = make(attention_kind=kind, num_register_tokens=2, conv_branch=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    target = torch.randn_like(inputs()["hidden_states"])
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        (model(**inputs()) - target).square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            reached = bool(parameter.grad.any())
            assert reached == (step >= first_step(name)), f"{name} at step {step}"
        optimizer.step()


def test_it_learns_a_fixed_batch() -> None:
    model, batch = make(), inputs(size=(2, 4, 4))
    target = batch["hidden_states"].flip(-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(40):
        loss = (model(**batch) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(target.square().mean().item(), rel=1e-6)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_near_fp32(kind: str) -> None:
    model = opened(make(attention_kind=kind, num_register_tokens=2, conv_branch=True)).bfloat16()
    low = model(**inputs())
    assert low.dtype == torch.float32  # the dtype of the latents
    exact = model.float()(**inputs())
    assert (low - exact).norm() / exact.norm() < 0.03
    latents = inputs()["hidden_states"].bfloat16()
    assert model.bfloat16()(**{**inputs(), "hidden_states": latents}).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_near_fp32_with_gradients(kind: str) -> None:
    model = opened(make(attention_kind=kind, conv_branch=True))
    exact = model(**inputs())
    with torch.autocast("cpu", torch.bfloat16):
        low = model(**inputs())
    low.square().mean().backward()
    assert (low - exact).norm() / exact.norm() < 0.03
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.zeros(2, 4, 3, 6, 8)}, r"\[2, 4, 3, 6, 8\], expected \[B, 3,"),
        ({"hidden_states": torch.zeros(2, 3, 3, 7, 8)}, "H=7 .* patch size 2; use 6 or 8"),
        ({"hidden_states": torch.zeros(2, 3, 3, 6, 1)}, "W=1 .* patch size 2; use 2 or 2"),
        ({"encoder_hidden_states": torch.zeros(2, 5, 9)}, r"\[2, 5, 9\], expected \[2, L, 10\]"),
        ({"encoder_hidden_states": torch.zeros(3, 5, 10)}, r"\[3, 5, 10\], expected \[2, L"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(**{**inputs(), **change})


def test_forward_on_meta_gives_shapes_without_memory() -> None:
    with torch.device("meta"):
        model = make()
        out = model(torch.empty(2, 3, 3, 6, 8), torch.empty(2), torch.empty(2, 5, 10))
    assert out.device.type == "meta"
    assert out.shape == (2, 3, 3, 6, 8)
