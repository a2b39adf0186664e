"""Layers against independent forms: plain loops, complex numbers, torch's own backward."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaslide.models.layers import (
    CrossAttention,
    DepthwiseConv3d,
    FinalLayer,
    PositionEmbedding,
    TimestepEmbedding,
    ZeroDepthwiseConv3d,
    apply_rope,
    modulated_norm,
    patchify,
    rope_pairs,
    rope_tables,
    sinusoid,
    unpatchify,
)

HEAD_DIMS = [6, 16, 24, 32, 48, 64, 128]


def test_patchify_takes_the_voxels_of_each_patch() -> None:
    x = torch.randn(2, 3, 4, 6, 10)
    tokens = patchify(x, (2, 3, 5))
    assert tokens.shape == (2, 2 * 2 * 2, 3 * 2 * 3 * 5)
    for n, (t, h, w) in enumerate((t, h, w) for t in range(2) for h in range(2) for w in range(2)):
        patch = x[:, :, 2 * t : 2 * t + 2, 3 * h : 3 * h + 3, 5 * w : 5 * w + 5]
        torch.testing.assert_close(tokens[:, n], patch.reshape(2, -1), rtol=0, atol=0)
    assert torch.equal(unpatchify(tokens, (2, 2, 2), (2, 3, 5)), x)


def complex_rope(x: Tensor, grid: tuple[int, int, int], theta: float) -> Tensor:
    """x [N, d] rotated one token and one pair at a time, in complex numbers."""
    d = x.shape[-1]
    values = torch.complex(x[:, : d // 2].double(), x[:, d // 2 :].double())
    axis_pairs = [(axis, i, n) for axis, n in enumerate(rope_pairs(d)) for i in range(n)]
    tokens = [(t, h, w) for t in range(grid[0]) for h in range(grid[1]) for w in range(grid[2])]
    for n, position in enumerate(tokens):
        for pair, (axis, i, count) in enumerate(axis_pairs):
            angle = position[axis] * theta ** (-i / count)
            values[n, pair] *= complex(math.cos(angle), math.sin(angle))
    return torch.cat([values.real, values.imag], dim=-1)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rope_equals_its_complex_form(head_dim: int) -> None:
    grid = (2, 3, 4)
    x = torch.randn(1, 24, 2, head_dim)
    rope = rope_tables(grid, head_dim, theta=100.0)
    assert [table.shape for table in rope] == [(1, 24, 1, head_dim // 2)] * 2
    expected = complex_rope(x[0, :, 1], grid, 100.0)
    torch.testing.assert_close(apply_rope(x, rope)[0, :, 1].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rope_scores_depend_on_relative_positions_only(head_dim: int) -> None:
    grid = (4, 5, 6)
    rope = rope_tables(grid, head_dim)
    q, k = (torch.randn(head_dim).expand(1, 120, 1, head_dim) for _ in range(2))
    scores = torch.einsum("bnhd,bmhd->nm", apply_rope(q, rope), apply_rope(k, rope))
    scores = scores.reshape(*grid, *grid)
    a = scores[0, 1, 2, 2, 0, 5]  # from (0, 1, 2) to (2, 0, 5)
    torch.testing.assert_close(a, scores[1, 4, 0, 3, 3, 3], rtol=1e-5, atol=1e-5)
    assert (a - scores[0, 1, 2, 2, 0, 4]).abs() > 1e-4  # w matters
    assert (a - scores[0, 1, 2, 2, 1, 5]).abs() > 1e-4  # h matters
    assert (a - scores[0, 1, 2, 1, 0, 5]).abs() > 1e-4  # t matters


def test_rope_keeps_precision_far_out() -> None:
    cos, _ = rope_tables((1, 1, 3000), 128, theta=10000.0)
    fastest_w = cos[0, 2999, 0, 64 - rope_pairs(128)[2]]
    assert abs(fastest_w.item() - math.cos(2999)) < 1e-7


def test_rope_shares_out_all_pairs_and_t_takes_the_rest() -> None:
    assert [rope_pairs(d) for d in (6, 16, 64, 128)] == [
        (1,) * 3,
        (4, 2, 2),
        (12, 10, 10),
        (22, 21, 21),
    ]


@pytest.mark.parametrize("head_dim", [4, 7, 15])
def test_head_dims_without_three_pairs_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head dim {head_dim}"):
        rope_pairs(head_dim)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 6), (1, 1, 1, 1, 6), (1, 2, 7, 3, 6)])
def test_depthwise_convolution_and_its_gradients_equal_torch(shape: tuple[int, ...]) -> None:
    conv = DepthwiseConv3d(6).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = conv(x)
    expected = F.conv3d(x.movedim(-1, 1), conv.weight, conv.bias, padding=1, groups=6)
    torch.testing.assert_close(out, expected.movedim(1, -1))
    inputs = (x, conv.weight, conv.bias)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    theirs = torch.autograd.grad(expected.movedim(1, -1), inputs, grad)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference)


def test_zero_depthwise_convolution_stays_zero_when_reset() -> None:
    conv = ZeroDepthwiseConv3d(4)
    conv.reset_parameters()
    assert not conv(torch.randn(1, 2, 2, 2, 4)).any()


def test_sinusoid_is_fp32_and_tells_neighbours_apart() -> None:
    t = torch.tensor([0.0, 1.0, 999.0, 999.5], dtype=torch.float64)
    table = sinusoid(t, 64)
    assert table.dtype == torch.float32
    angle = 999.0 * 10000.0 ** (-2 * 3 / 64)
    assert abs(table[2, 3].item() - math.cos(angle)) < 1e-4
    assert abs(table[2, 35].item() - math.sin(angle)) < 1e-4
    assert (table[2] - table[3]).norm() > 0.1
    assert TimestepEmbedding(64, 8)(t).shape == (4, 8)


def test_position_embedding_sums_one_vector_per_axis_in_token_order() -> None:
    embed = PositionEmbedding(8)
    table = embed((2, 3, 4))
    assert table.shape == (1, 24, 8)
    for n, position in enumerate((t, h, w) for t in range(2) for h in range(3) for w in range(4)):
        expected = torch.zeros(8, dtype=torch.float64)
        for p, proj in zip(position, embed.proj, strict=True):
            angles = [p * 256.0 ** (-2 * i / 64) for i in range(32)]
            features = [*map(math.cos, angles), *map(math.sin, angles)]
            expected += proj.weight.double() @ torch.tensor(features, dtype=torch.float64)
        torch.testing.assert_close(table[0, n].double(), expected, rtol=0, atol=1e-5)


def test_modulated_norm_rounds_once() -> None:
    x, shift, scale = torch.randn(2, 5, 64), torch.randn(2, 1, 64), 0.1 * torch.randn(2, 1, 64)
    exact = F.layer_norm(x, (64,), eps=1e-6) * (1 + scale) + shift
    torch.testing.assert_close(modulated_norm(x, shift, scale), exact)
    low = modulated_norm(x.bfloat16(), shift, scale)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, rtol=0.02, atol=0.02)


def test_final_layer_predicts_zero_at_init_and_modulates_per_sample() -> None:
    layer = FinalLayer(8, (1, 2, 2), 3)
    x, emb = torch.randn(1, 12, 8).expand(2, -1, -1), torch.randn(2, 8)
    latents = torch.randn(2, 3, 1, 6, 8)
    assert not layer(x, emb, latents, (1, 3, 4)).any()
    torch.nn.init.normal_(layer.proj.weight)
    torch.nn.init.normal_(layer.modulation.weight)
    out = layer(x, emb, latents, (1, 3, 4))
    assert out.shape == (2, 3, 1, 6, 8)
    assert not torch.allclose(out[0], out[1])


def opened_cross_attention() -> CrossAttention:
    layer = CrossAttention(24, 2)
    torch.nn.init.normal_(layer.to_out.weight)
    return layer


def test_cross_attention_is_absent_at_init() -> None:
    assert not CrossAttention(24, 2)(torch.randn(2, 5, 24), torch.randn(2, 3, 24), None).any()


def test_masked_text_has_no_influence() -> None:
    layer = opened_cross_attention()
    x, text = torch.randn(2, 5, 24), torch.randn(2, 4, 24)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    out = layer(x, text, mask)
    torch.testing.assert_close(out[:1], layer(x[:1], text[:1, :2], None), rtol=1e-6, atol=1e-6)
    other = torch.where(mask[..., None], text, 100 * torch.randn_like(text))
    assert torch.equal(out, layer(x, other, mask))
    assert not torch.allclose(out, layer(x, other, None))


def test_fully_masked_text_gives_zero_and_finite_gradients() -> None:
    layer = opened_cross_attention()
    x = torch.randn(2, 5, 24, requires_grad=True)
    mask = torch.tensor([[False, False], [True, False]])
    out = layer(x, torch.randn(2, 2, 24), mask)
    assert torch.equal(out[0], torch.zeros(5, 24))
    assert out[1].abs().min() > 0
    out.square().sum().backward()
    for grad in [x.grad, *(p.grad for p in layer.parameters())]:
        assert grad is not None
        assert torch.isfinite(grad).all()
