"""3D-DSA's definition against independent oracles: loops, NATTEN, ramps, finite differences.

The oracles here share nothing with the package: the loop visits every query, tap and corner in
Python floats. Shapes: q, k, v [B, T, H, W, heads, d]; offsets [B, T, H, W, G, 3 | 12 | K, 3].
"""

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megaslide.ops.deformable_attention import deformable_attention, offset_channels

KINDS: tuple[Any, ...] = ("shift", "affine", "tap")


def offset_shape(kind: Any, window: tuple[int, int, int]) -> list[int]:
    channels = offset_channels(kind, window)
    return [channels // 3, 3] if kind == "tap" else [channels]


def random_case(
    size: tuple[int, int, int],
    window: tuple[int, int, int],
    kind: Any,
    *,
    batch: int = 1,
    heads: int = 2,
    groups: int = 1,
    d: int = 4,
    extra: int = 0,
    spread: float = 0.6,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    case: dict[str, Any] = {name: draw(batch, *size, heads, d) for name in "qkv"}
    case |= {"offsets": None, "window": window}
    if kind is not None:
        shape = (batch, *size, groups, *offset_shape(kind, window))
        case |= {"offsets": spread * draw(*shape), "kind": kind}
    if extra:
        case |= {f"extra_{name}": draw(batch, extra, heads, d) for name in "kv"}
    return case


# ---- the oracle ----------------------------------------------------------------------------------


def bounded(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def tap_positions(
    voxel: tuple[int, int, int],
    size: tuple[int, int, int],
    window: tuple[int, int, int],
    kind: Any,
    offset: Any,
) -> list[list[float]]:
    """Voxel coordinates of every tap of one query, straight from the definition."""
    k = [min(a, b) for a, b in zip(window, size, strict=True)]
    start = [bounded(voxel[a] - k[a] // 2, 0, size[a] - k[a]) for a in range(3)]
    if kind in ("shift", "affine"):
        start = [bounded(start[a] + offset[a], 0, size[a] - k[a]) for a in range(3)]
    positions = []
    for j in itertools.product(*(range(length) for length in k)):
        x = [start[a] + j[a] for a in range(3)]
        if kind == "affine":
            matrix = offset[3:].reshape(3, 3)
            centred = [j[a] - (k[a] - 1) / 2 for a in range(3)]
            x = [x[a] + sum(centred[r] * matrix[r, a] for r in range(3)) for a in range(3)]
        if kind == "tap":
            full = [j[a] - k[a] // 2 + window[a] // 2 for a in range(3)]
            number = (full[0] * window[1] + full[1]) * window[2] + full[2]
            x = [x[a] + offset[number, a] for a in range(3)]
        positions.append([bounded(x[a], 0, size[a] - 1) for a in range(3)])
    return positions


def sample(volume: np.ndarray, x: list[float]) -> np.ndarray:
    """Trilinear sample of [T,H,W,d]: every voxel near x, weighted by a hat per axis."""
    low = [math.floor(c) for c in x]
    near = [range(low[a], min(low[a] + 1, volume.shape[a] - 1) + 1) for a in range(3)]
    total = np.zeros(volume.shape[-1])
    for p in itertools.product(*near):
        total += math.prod(max(0.0, 1 - abs(x[a] - p[a])) for a in range(3)) * volume[p]
    return total


def loop_attention(case: dict[str, Any]) -> Tensor:
    q, k, v = (case[name].numpy() for name in "qkv")
    B, T, H, W, heads, d = q.shape
    offsets, extra = case["offsets"], "extra_k" in case
    out = np.zeros_like(q)
    for b, t, h, w, head in itertools.product(*(range(n) for n in (B, T, H, W, heads))):
        offset = None
        if offsets is not None:
            offset = offsets[b, t, h, w, head // (heads // offsets.shape[4])].numpy()
        positions = tap_positions((t, h, w), (T, H, W), case["window"], case.get("kind"), offset)
        keys = [sample(k[b, :, :, :, head], x) for x in positions]
        values = [sample(v[b, :, :, :, head], x) for x in positions]
        if extra:
            keys += list(case["extra_k"][b, :, head].numpy())
            values += list(case["extra_v"][b, :, head].numpy())
        scores = np.array([q[b, t, h, w, head] @ key for key in keys]) / math.sqrt(d)
        weights = np.exp(scores - scores.max())
        out[b, t, h, w, head] = weights @ np.array(values) / weights.sum()
    return torch.from_numpy(out)


LOOP_CASES: dict[str, Any] = {
    "no offsets": ((3, 5, 7), (3, 3, 3), None, {}),
    "even window, no offsets": ((4, 5, 6), (2, 4, 2), None, {}),
    "shift": ((3, 5, 7), (3, 3, 3), "shift", {"spread": 2.0}),
    "affine": ((3, 5, 7), (3, 3, 3), "affine", {}),
    "tap": ((3, 5, 7), (1, 3, 3), "tap", {"spread": 2.0}),
    "affine, even window": ((4, 5, 6), (2, 4, 2), "affine", {}),
    "groups and extra keys": (
        (3, 5, 3),
        (3, 3, 1),
        "affine",
        {"heads": 4, "groups": 2, "extra": 3},
    ),
    "tap, a group per head": ((2, 3, 5), (1, 2, 3), "tap", {"groups": 2, "batch": 2, "extra": 1}),
    "image": ((1, 5, 7), (1, 3, 3), "affine", {}),
    "window cut on every axis, affine": ((1, 2, 3), (3, 4, 7), "affine", {}),
    "window cut on two axes, tap": ((1, 3, 5), (3, 4, 3), "tap", {}),
    "one voxel": ((1, 1, 1), (3, 3, 3), "affine", {}),
    "far outside": ((3, 4, 5), (3, 3, 3), "affine", {"spread": 30.0}),
}


@pytest.mark.parametrize("name", LOOP_CASES)
def test_equals_the_loop(name: str) -> None:
    size, window, kind, options = LOOP_CASES[name]
    case = random_case(size, window, kind, **options)
    torch.testing.assert_close(
        deformable_attention(**case, backend="reference"), loop_attention(case), rtol=0, atol=1e-12
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize(
    ("size", "window"), [((4, 6, 7), (3, 3, 3)), ((3, 5, 7), (3, 5, 7)), ((4, 6, 7), (2, 4, 5))]
)
def test_equals_natten_without_offsets(
    size: tuple[int, int, int], window: tuple[int, int, int], kind: Any
) -> None:
    natten = pytest.importorskip("natten")
    case = random_case(size, window, kind, d=32, spread=0.0, dtype=torch.float32)
    expected = natten.na3d(case["q"], case["k"], case["v"], kernel_size=window, backend="flex-fna")
    torch.testing.assert_close(deformable_attention(**case, backend="reference"), expected)


# ---- geometry ------------------------------------------------------------------------------------


def ramps(size: tuple[int, int, int]) -> Tensor:
    """[1,T,H,W,1,3]: every voxel holds its own coordinates."""
    axes = (torch.arange(n, dtype=torch.float64) for n in size)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)[None, ..., None, :]


def mean_position(offsets: Tensor, kind: Any, size: tuple[int, int, int]) -> Tensor:
    """Mean coordinates [T,H,W,3] that a 3x3x3 window samples: equal scores, values are ramps."""
    v = ramps(size)
    zero = torch.zeros_like(v)
    out = deformable_attention(
        zero, zero, v, offsets, window=(3, 3, 3), kind=kind, backend="reference"
    )
    return out[0, ..., 0, :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("amount", [1.0, -1.0, 0.25])
def test_offset_moves_its_own_axis_by_its_own_size(kind: Any, axis: int, amount: float) -> None:
    size = (7, 8, 9)
    offsets = torch.zeros(1, *size, 1, *offset_shape(kind, (3, 3, 3)), dtype=torch.float64)
    offsets[..., axis] = amount
    moved = mean_position(offsets, kind, size) - mean_position(0 * offsets, kind, size)
    expected = torch.zeros(3, dtype=torch.float64)
    expected[axis] = amount
    inner = moved[2:-2, 2:-2, 2:-2]
    torch.testing.assert_close(inner, expected.expand_as(inner), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("row", "column"), list(itertools.product(range(3), range(3))))
def test_affine_entry_displaces_column_in_proportion_to_row(row: int, column: int) -> None:
    """Scores that pick the taps at +1 on axis `row` see `column` displaced by the entry."""
    size, voxel = (7, 7, 7), (3, 3, 3)
    offsets = torch.zeros(1, *size, 1, 12, dtype=torch.float64)
    offsets[..., 3 + 3 * row + column] = 0.25
    v = ramps(size)
    q = torch.zeros_like(v)
    q[..., row] = 1e4  # a ramp as key: the furthest tap takes all the weight
    out = deformable_attention(q, v, v, offsets, window=(3, 3, 3), scale=1.0, backend="reference")
    expected = torch.tensor(voxel, dtype=torch.float64)
    expected[row] += 1
    expected[column] += 0.25
    at = out[0, *voxel, 0]
    torch.testing.assert_close(at[[row, column]], expected[[row, column]], rtol=0, atol=1e-9)


def test_affine_without_matrix_is_shift() -> None:
    case = random_case((3, 5, 7), (3, 3, 3), "shift", groups=2, spread=1.5)
    shift = deformable_attention(**case, backend="reference")
    padded = torch.cat([case["offsets"], case["offsets"].new_zeros(1, 3, 5, 7, 2, 9)], -1)
    affine = deformable_attention(
        **case | {"offsets": padded, "kind": "affine"}, backend="reference"
    )
    assert torch.equal(shift, affine)


def test_affine_expanded_to_taps_is_tap_away_from_borders() -> None:
    size, window = (7, 8, 9), (3, 3, 3)
    case = random_case(size, window, "affine", spread=0.1)
    affine = deformable_attention(**case, backend="reference")
    centred = torch.tensor(list(itertools.product((-1, 0, 1), repeat=3)), dtype=torch.float64)
    slide, matrix = case["offsets"][..., :3], case["offsets"][..., 3:].unflatten(-1, (3, 3))
    expanded = slide.unsqueeze(-2) + centred @ matrix
    tap = deformable_attention(**case | {"offsets": expanded, "kind": "tap"}, backend="reference")
    inner = (slice(None), slice(2, -2), slice(2, -2), slice(2, -2))
    torch.testing.assert_close(affine[inner], tap[inner], rtol=0, atol=1e-12)
    assert not torch.allclose(affine, tap)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_serve_consecutive_heads(kind: Any) -> None:
    case = random_case((3, 4, 5), (3, 3, 3), kind, heads=6, groups=3)
    spread = case["offsets"].repeat_interleave(2, 4)
    one_each = deformable_attention(**case | {"offsets": spread}, backend="reference")
    assert torch.equal(deformable_attention(**case, backend="reference"), one_each)


def test_extra_keys_join_the_softmax() -> None:
    """With all scores equal, K taps of value 0 and E extra keys of value 1 average to E/(K+E)."""
    zero = torch.zeros(1, 3, 4, 5, 2, 4)
    extra = torch.zeros(1, 3, 2, 4)
    out = deformable_attention(
        zero, zero, zero, window=(3, 3, 3), extra_k=extra, extra_v=extra + 1, backend="reference"
    )
    torch.testing.assert_close(out, torch.full_like(out, 3 / 30))


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_gradients_by_finite_differences(kind: Any) -> None:
    """Offsets keep coordinates 0.1 to 0.4 from integers, where the derivative jumps."""
    case = random_case((2, 3, 4), (1, 2, 3), kind, groups=2, d=2, extra=1)
    if kind is not None:
        drawn = 0.1 + 0.3 * torch.rand_like(case["offsets"])
        if kind == "affine":
            drawn[..., 3:] *= 0.1
        case["offsets"] = drawn * torch.where(torch.rand_like(drawn) < 0.5, -1.0, 1.0)
    names = [name for name in case if isinstance(case[name], Tensor)]

    def attend(*tensors: Tensor) -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        return deformable_attention(**case | given, backend="reference")

    inputs = [case[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(attend, inputs, atol=1e-6, fast_mode=True)


def one_sided(case: dict[str, Any], direction: int, seed: Tensor) -> Tensor:
    """Derivative of sum(seed * out) by each query's s along one axis pair, by a finite step."""
    step = 1e-6 * direction
    rows = []
    for axis in range(3):
        moved = case["offsets"].clone()
        moved[..., axis] += step
        change = deformable_attention(**case | {"offsets": moved}) - deformable_attention(**case)
        rows.append((seed * change).sum((-1, -2)) / step)
    return torch.stack(rows, -1)  # [B,T,H,W,3]


def test_zero_offsets_have_the_derivative_of_the_way_the_window_can_move() -> None:
    size, window = (4, 5, 6), (3, 3, 3)
    case = random_case(size, window, "affine", spread=0.0) | {"backend": "reference"}
    seed = torch.randn(1, *size, 2, 4, dtype=torch.float64)
    offsets = case["offsets"].requires_grad_()
    (deformable_attention(**case) * seed).sum().backward()
    case["offsets"] = offsets.detach()
    up, down = one_sided(case, 1, seed), one_sided(case, -1, seed)
    expected = up.clone()
    for axis, length in enumerate(size):
        at_end = torch.arange(length) - window[axis] // 2 >= length - window[axis]
        index: list[Any] = [slice(None)] * 4 + [axis]
        index[1 + axis] = at_end
        expected[tuple(index)] = down[tuple(index)]
    assert offsets.grad is not None
    torch.testing.assert_close(offsets.grad[..., 0, :3], expected, rtol=0, atol=1e-5)
    assert (up - down).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("far", [40.0, -40.0])
def test_clamped_coordinates_have_no_gradient(kind: Any, far: float) -> None:
    case = random_case((3, 4, 5), (3, 3, 3), kind)
    offsets = torch.zeros_like(case["offsets"])
    offsets[..., :3] = far  # the slide; every tap's triple
    case["offsets"] = offsets.requires_grad_()
    deformable_attention(**case, backend="reference").square().sum().backward()
    assert offsets.grad is not None
    assert torch.equal(offsets.grad[..., :3], torch.zeros_like(offsets[..., :3]))


@pytest.mark.parametrize("kind", ["shift", "affine"])
def test_a_window_that_fills_an_axis_does_not_slide_on_it(kind: Any) -> None:
    case = random_case((3, 5, 6), (3, 3, 3), kind, spread=0.0)
    offsets = case["offsets"].requires_grad_()
    out = deformable_attention(**case, backend="reference")
    out.square().sum().backward()
    assert offsets.grad is not None
    assert not offsets.grad[..., 0].any()
    assert offsets.grad[..., 1].any()
    offsets.data[..., 0] = 0.7
    assert torch.equal(out, deformable_attention(**case, backend="reference"))


# ---- numerics, arguments, memory -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_inputs_and_output(dtype: torch.dtype) -> None:
    case = random_case((3, 5, 7), (3, 3, 3), "affine", dtype=torch.float32, extra=2)
    case = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in case.items()}
    case["offsets"] = case["offsets"].float()
    wide: dict[str, Any] = {k: v.double() if isinstance(v, Tensor) else v for k, v in case.items()}
    out = deformable_attention(**case, backend="reference")
    assert out.dtype == dtype
    expected = deformable_attention(**wide, backend="reference").to(dtype)
    torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_autocast_leaves_the_reference_alone() -> None:
    case = random_case((3, 4, 5), (3, 3, 3), "affine", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = deformable_attention(**case, backend="reference")
    assert torch.equal(inside, deformable_attention(**case, backend="reference"))


def test_chunks_of_queries_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case((3, 5, 7), (3, 3, 3), "affine", extra=2, batch=2)
    whole = deformable_attention(**case, backend="reference")
    name = "megaslide.ops.deformable_attention.reference.CHUNK_ELEMENTS"
    monkeypatch.setattr(name, 40_000)
    torch.testing.assert_close(deformable_attention(**case, backend="reference"), whole)


def test_nan_offset_spoils_its_own_query_only() -> None:
    case = random_case((3, 4, 5), (3, 3, 3), "affine")
    case["offsets"][0, 1, 2, 3, 0, 5] = math.nan
    bad = deformable_attention(**case, backend="reference").isnan().flatten(4).any(-1)
    assert bad.nonzero().tolist() == [[0, 1, 2, 3]]


def test_meta_tensors_give_the_shape() -> None:
    case = random_case((3, 4, 5), (3, 3, 3), "affine", extra=2, dtype=torch.float32)
    case = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in case.items()}
    out = deformable_attention(**case, backend="reference")
    assert out.shape == case["q"].shape
    assert out.is_meta


def shaped(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


VOLUME = (1, 3, 4, 5, 2, 4)
BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "window of two": ({"window": (3, 3)}, r"window \(3, 3\): needs 3 whole numbers"),
    "window of zero": ({"window": (3, 0, 3)}, r"window \(3, 0, 3\)"),
    "window of fractions": ({"window": (3, 1.5, 3)}, r"window \(3, 1.5, 3\)"),
    "q of five axes": ({"q": shaped(1, 3, 4, 5, 2)}, r"q has shape \[1, 3, 4, 5, 2\]; needs \[B"),
    "q integer": ({"q": shaped(*VOLUME, dtype=torch.int64)}, "q is torch.int64; accepted"),
    "k of other heads": ({"k": shaped(1, 3, 4, 5, 1, 4)}, r"k has shape \[1, 3, 4, 5, 1, 4\]"),
    "v of other dtype": ({"v": shaped(*VOLUME, dtype=torch.bfloat16)}, "v is torch.bfloat16"),
    "kind": ({"kind": "warp"}, "kind 'warp' is unknown; accepted: shift, affine, tap"),
    "channels": ({"offsets": shaped(*VOLUME[:4], 1, 3)}, r"needs \[1, 3, 4, 5, G, 12\]"),
    "tap channels": (
        {"offsets": shaped(*VOLUME[:4], 1, 9, 3), "kind": "tap"},
        r"needs \[1, 3, 4, 5, G, 27, 3\]",
    ),
    "groups": ({"offsets": shaped(*VOLUME[:4], 3, 12)}, "have 3 groups; needs a divisor of the 2"),
    "integer offsets": (
        {"offsets": shaped(*VOLUME[:4], 1, 12, dtype=torch.int64)},
        "offsets are torch.int64",
    ),
    "extra_k alone": ({"extra_k": shaped(1, 2, 2, 4)}, "extra_v is None"),
    "extra_v shape": (
        {"extra_k": shaped(1, 2, 2, 4), "extra_v": shaped(1, 3, 2, 4)},
        r"extra_v has shape \[1, 3, 2, 4\]; .* needs \[1, 2, 2, 4\]",
    ),
    "backend": ({"backend": "cuda"}, "backend 'cuda' is unknown; accepted: None, auto"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_is_named_with_what_would_do(name: str) -> None:
    change, message = BAD_ARGUMENTS[name]
    good: dict[str, Any] = {"q": shaped(*VOLUME), "k": shaped(*VOLUME), "v": shaped(*VOLUME)}
    good |= {"offsets": shaped(*VOLUME[:4], 1, 12), "window": (3, 3, 3)}
    deformable_attention(**good)
    with pytest.raises(ValueError, match=message):
        deformable_attention(**good | change)


def test_offset_channels() -> None:
    assert [offset_channels(kind, (3, 7, 7)) for kind in KINDS] == [3, 12, 441]
    with pytest.raises(ValueError, match="kind 'warp'"):
        offset_channels("warp", (3, 3, 3))  # type: ignore[arg-type, unused-ignore]


PEAK_PROGRAM = """
import resource, sys, torch
from megaslide.ops.deformable_attention import deformable_attention
torch.set_num_threads(1)
backend, extra = sys.argv[1], 4
def attend(size, window):
    q, k, v = (torch.randn(1, *size, 4, 64, requires_grad=True) for _ in range(3))
    offsets = torch.zeros(1, *size, 2, 12, requires_grad=True)
    extras = [torch.randn(1, extra, 4, 64, requires_grad=True) for _ in range(2)]
    deformable_attention(q, k, v, offsets, window=window, extra_k=extras[0], extra_v=extras[1],
                         backend=backend).sum().backward()
attend((2, 4, 4), (1, 3, 3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attend((4, 16, 20), (3, 9, 9))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def peak_mebibytes(backend: str) -> int:
    """Growth of peak memory, forward and backward; N*K*d would be 304 MiB, q is 1.25 MiB."""
    command = [sys.executable, "-c", PEAK_PROGRAM, backend]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_reference_never_holds_the_samples() -> None:
    assert peak_mebibytes("reference") < 150
