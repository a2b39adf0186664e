"""The attention kinds against brute force, against each other, and the bound on offsets."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from megaslide.models.attention import (
    AttentionSettings,
    DeformableSlideAttention,
    SelfAttention,
    build_attention,
)
from megaslide.models.layers import apply_rope, rope_tables
from megaslide.models.offsets import bound_offsets
from megaslide.ops.deformable_attention import offset_channels

Grid = tuple[int, int, int]
KINDS = ["deformable", "neighborhood", "swin", "dense"]
DIM, HEADS = 24, 2


def make(kind: str, *, block_index: int = 0, **settings: object) -> SelfAttention:
    torch.manual_seed(1)
    base = {"hidden_size": DIM, "num_heads": HEADS, "window": (2, 3, 3), "kind": kind}
    return build_attention(
        AttentionSettings(**{**base, "backend": "reference", **settings}), block_index=block_index
    )


def run(module: SelfAttention, x: Tensor, grid: Grid, registers: Tensor | None = None) -> Tensor:
    return module(x, rope_tables(grid, DIM // HEADS), registers, grid=grid)


def masked_attention(
    module: SelfAttention, x: Tensor, grid: Grid, allowed: Tensor, registers: Tensor | None
) -> Tensor:
    """Attention of every token pair with an explicit softmax, on the module's own projections."""
    rope = rope_tables(grid, DIM // HEADS)
    q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (module.to_q, module.to_k, module.to_v))
    q, k = apply_rope(module.norm_q(q), rope), apply_rope(module.norm_k(k), rope)
    if registers is not None:
        tokens = registers.expand(len(x), -1, -1)
        extra_k = module.norm_k(module.to_k(tokens).unflatten(-1, (HEADS, -1)))
        k = torch.cat([k, extra_k], dim=1)
        v = torch.cat([v, module.to_v(tokens).unflatten(-1, (HEADS, -1))], dim=1)
        allowed = torch.cat([allowed, torch.ones(len(allowed), tokens.shape[1]).bool()], dim=1)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * (DIM // HEADS) ** -0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return module.to_out(torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2))


def tokens_of(grid: Grid) -> list[Grid]:
    return list(itertools.product(*(range(size) for size in grid)))


def swin_pairs(grid: Grid, window: Grid, shifted: bool) -> Tensor:
    """Token pairs of one window: windows laid from k//2 - k on, cut at the volume's border."""

    def cell(position: int, size: int, k: int) -> int:
        k = min(k, size)
        shift = k // 2 if shifted and k < size else 0
        return (position - shift) // k

    labels = [tuple(map(cell, token, grid, window)) for token in tokens_of(grid)]
    return torch.tensor([[a == b for b in labels] for a in labels])


def neighborhood_pairs(grid: Grid, window: Grid) -> Tensor:
    def near(query: int, key: int, size: int, k: int) -> bool:
        k = min(k, size)
        start = min(max(query - k // 2, 0), size - k)
        return start <= key < start + k

    tokens = tokens_of(grid)
    rows = [[all(map(near, a, b, grid, window)) for b in tokens] for a in tokens]
    return torch.tensor(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [(2, 4, 6), (3, 5, 7), (1, 1, 1), (1, 3, 2)])
@pytest.mark.parametrize("registers", [0, 3])
def test_all_kinds_on_any_grid(kind: str, grid: Grid, registers: int) -> None:
    x = torch.randn(2, grid[0] * grid[1] * grid[2], DIM)
    extra = torch.randn(1, registers, DIM) if registers else None
    out = run(make(kind, block_index=1), x, grid, extra)
    assert out.shape == x.shape
    assert torch.isfinite(out).all()


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'sparse' is not one of"):
        make("sparse")


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize(
    ("grid", "window"),
    [
        ((2, 6, 6), (2, 3, 3)),  # divisible
        ((4, 6, 4), (2, 3, 2)),  # divisible, shifted on t too
        ((3, 5, 7), (2, 3, 3)),  # nothing divisible
        ((3, 5, 7), (2, 4, 2)),  # even windows
        ((2, 3, 8), (4, 3, 5)),  # window longer than t, as long as h
        ((5, 1, 4), (4, 1, 3)),  # last window holds wrapped, body and padding at once
    ],
)
def test_swin_equals_brute_force(grid: Grid, window: Grid, shifted: bool, registers: int) -> None:
    module = make("swin", window=window, block_index=int(shifted))
    x = torch.randn(2, grid[0] * grid[1] * grid[2], DIM)
    extra = torch.randn(1, registers, DIM) if registers else None
    expected = masked_attention(module, x, grid, swin_pairs(grid, window, shifted), extra)
    torch.testing.assert_close(run(module, x, grid, extra), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize(("grid", "window"), [((3, 5, 6), (2, 3, 3)), ((2, 4, 4), (3, 1, 4))])
def test_neighborhood_equals_brute_force(grid: Grid, window: Grid, registers: int) -> None:
    module = make("neighborhood", window=window)
    x = torch.randn(2, grid[0] * grid[1] * grid[2], DIM)
    extra = torch.randn(1, registers, DIM) if registers else None
    expected = masked_attention(module, x, grid, neighborhood_pairs(grid, window), extra)
    torch.testing.assert_close(run(module, x, grid, extra), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["neighborhood", "deformable", "swin"])
@pytest.mark.parametrize("registers", [0, 2])
def test_window_over_the_whole_volume_is_dense(kind: str, registers: int) -> None:
    grid = (2, 3, 4)
    x = torch.randn(2, 24, DIM)
    extra = torch.randn(1, registers, DIM) if registers else None
    local, dense = make(kind, window=(5, 3, 9), block_index=1), make("dense")
    local.load_state_dict(dense.state_dict(), strict=False)
    torch.testing.assert_close(
        run(local, x, grid, extra), run(dense, x, grid, extra), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("offset_kind", ["shift", "affine", "tap"])
@pytest.mark.parametrize("groups", [1, 2])
def test_deformable_at_init_is_neighborhood_exactly(offset_kind: str, groups: int) -> None:
    grid = (2, 4, 5)
    x = torch.randn(2, 40, DIM)
    fixed = make("neighborhood")
    slides = make("deformable", offset_kind=offset_kind, offset_groups=groups)
    slides.load_state_dict(fixed.state_dict(), strict=False)
    assert torch.equal(run(slides, x, grid), run(fixed, x, grid))


def test_default_backend_agrees_with_the_reference() -> None:
    grid = (2, 4, 5)
    x, extra = torch.randn(2, 40, DIM), torch.randn(1, 2, DIM)
    reference, default = make("deformable"), make("deformable", backend="auto")
    for module in (reference, default):
        torch.manual_seed(3)
        nn.init.normal_(offset_net(module).proj.weight)
    expected = run(reference, x, grid, extra)
    torch.testing.assert_close(run(default, x, grid, extra), expected, rtol=1e-5, atol=1e-5)


def offset_net(module: SelfAttention) -> nn.Module:
    assert isinstance(module, DeformableSlideAttention)
    return module.offset_net


def test_offsets_deform_and_have_a_gradient_from_the_first_step() -> None:
    grid = (3, 5, 5)
    module = make("deformable", window=(2, 3, 3))
    x = torch.randn(1, 75, DIM)
    before = run(module, x, grid)
    before.square().mean().backward()
    grad = offset_net(module).proj.weight.grad
    assert (grad.abs().sum(dim=1) > 0).all()  # every one of the 12 outputs, on every axis
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module.zero_grad()
    run(module, x, grid).square().mean().backward()
    assert offset_net(module).conv.weight.grad.abs().sum() > 0


def test_single_tap_axes_are_never_stretched() -> None:
    raw = 50 * torch.randn(100, 12)
    rows = bound_offsets(raw, "affine", (1, 3, 1), (1.0, 3.0, 3.0))[:, 3:].unflatten(-1, (3, 3))
    assert not rows[:, 0].any()
    assert not rows[:, 2].any()
    assert rows[:, 1].abs().min() > 0


def displacements(offsets: Tensor, kind: str, window: Grid) -> Tensor:
    """[..., K, 3]: how far each tap moves in an unbounded volume, straight from the definition."""
    taps = torch.tensor(tokens_of(window), dtype=offsets.dtype)  # [K, 3]
    if kind == "tap":
        return offsets
    slide = offsets[..., None, :3].expand(*offsets.shape[:-1], len(taps), 3)
    if kind == "shift":
        return slide
    tau = taps - (torch.tensor(window) - 1) / 2
    return slide + torch.einsum("kb,...ba->...ka", tau, offsets[..., 3:].unflatten(-1, (3, 3)))


@pytest.mark.parametrize("kind", ["shift", "affine", "tap"])
@pytest.mark.parametrize("window", [(3, 3, 3), (1, 2, 7), (2, 1, 5)])
@pytest.mark.parametrize("size", [1e-3, 0.3, 3.0, 1e2, 1e30])
def test_no_tap_moves_beyond_the_range(kind: str, window: Grid, size: float) -> None:
    limits = (1.0, 3.0, 2.5)
    raw = size * torch.randn(2000, offset_channels(kind, window))
    raw = torch.cat([raw, size * torch.sign(raw), torch.zeros_like(raw[:1])])
    offsets = bound_offsets(raw, kind, window, limits)
    assert offsets.dtype == torch.float32
    assert torch.isfinite(offsets).all()
    reach = displacements(offsets.double(), kind, window).abs().amax(dim=(0, -2))
    assert (reach <= torch.tensor(limits)).all()
    if 3 <= size <= 100:
        assert (reach > 0.9 * torch.tensor(limits)).all()  # the range is usable, too
    assert not offsets[-1].any()


def test_slide_alone_and_one_row_alone_reach_the_range() -> None:
    raw = torch.zeros(2, 12)
    raw[0, 1] = raw[1, 3 + 3 * 2 + 1] = 20.0  # slide along h; h displaced per w-tap
    offsets = bound_offsets(raw, "affine", (3, 3, 5), (1.0, 3.0, 3.0))
    assert offsets[0, 1] == pytest.approx(3.0, rel=1e-4)
    assert offsets[1, 10] == pytest.approx(3.0 / 2, rel=1e-4)  # tau reaches 2


def test_bound_has_unit_slope_at_zero_and_correct_gradients() -> None:
    zeros = torch.zeros(12, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(
        lambda raw: bound_offsets(raw, "affine", (3, 5, 2), (1.0, 3.0, 2.0)), zeros
    )
    limit, reach = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([1.0, 1.0, 2.0, 0.5])
    expected = torch.diag((limit / reach[:, None]).flatten())
    torch.testing.assert_close(jacobian, expected, rtol=1e-4, atol=1e-6)
    raw = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda r: bound_offsets(r, "affine", (3, 5, 1), (1.0, 3.0, 2.0)), raw
    )


def test_module_obeys_the_range_with_huge_weights_and_bf16() -> None:
    module = make("deformable", window=(3, 3, 3), offset_range=(1.0, 2.0, 3.0))
    net = offset_net(module)
    nn.init.normal_(net.proj.weight, std=1e4)
    for dtype in (torch.float32, torch.bfloat16):
        offsets = net.to(dtype)(torch.randn(2, 3, 4, 5, DIM).to(dtype))
        assert offsets.dtype == torch.float32
        assert offsets.shape == (2, 3, 4, 5, 1, 12)
        reach = displacements(offsets.double(), "affine", (3, 3, 3)).abs().amax(dim=-2)
        assert (reach <= torch.tensor([1.0, 2.0, 3.0])).all()
        assert reach.max() > 2.9


@pytest.mark.parametrize("kind", KINDS)
def test_convolution_branch_starts_absent_and_then_acts(kind: str) -> None:
    grid = (2, 3, 4)
    x = torch.randn(1, 24, DIM)
    plain, branch = make(kind), make(kind, conv_branch=True)
    branch.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(run(plain, x, grid), run(branch, x, grid))
    assert branch.conv_branch is not None
    nn.init.normal_(branch.conv_branch.weight)
    assert not torch.allclose(run(plain, x, grid), run(branch, x, grid), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_query_sees_registers(kind: str) -> None:
    grid = (2, 4, 4)
    module, x = make(kind, block_index=1), torch.randn(2, 32, DIM)
    one, other = torch.randn(1, 2, DIM), torch.randn(1, 2, DIM)
    change = (run(module, x, grid, one) - run(module, x, grid, other)).abs().amax(dim=-1)
    assert (change > 1e-4).all()
