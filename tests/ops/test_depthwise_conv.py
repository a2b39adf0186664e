"""Depthwise convolution: both backends against plain loops and torch's conv3d in float64."""

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.depthwise_conv import depthwise_conv3d, native

needs_library = pytest.mark.skipif(
    library.why_absent() is not None, reason=library.why_absent() or "present"
)
BACKENDS = ["reference", pytest.param("native", marks=needs_library)]
INSTRUCTION_SETS = ("x86-64-v4", "x86-64-v3", "baseline")
FLOAT, BF16 = torch.float32, torch.bfloat16
INVALID_ARGUMENT, UNSUPPORTED = 1, 3
Shape = tuple[int, int, int, int, int]

# Of several tiles of rows (more than 2048 tokens) and of channels (more than 128), both cut.
LARGE: Shape = (3, 2, 37, 13, 149)


def random_case(shape: Shape, dtype: torch.dtype = FLOAT, weight_dtype: torch.dtype = FLOAT) -> Any:
    """x, weight, bias and a gradient of the output."""
    channels = shape[-1]
    x, grad = torch.randn(shape), torch.randn(shape)
    weight, bias = torch.randn(channels, 1, 3, 3, 3), torch.randn(channels)
    return x.to(dtype), *(tensor.to(weight_dtype) for tensor in (weight, bias, grad))


def results(case: Any, backend: str, threads: int | None = None) -> list[Tensor]:
    """Output and gradients of x, weight and bias."""
    *inputs, grad = case
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    if threads is None:
        out = depthwise_conv3d(*inputs, backend=backend)
    else:
        out = native.depthwise_conv3d_native(*inputs, num_threads=threads)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def by_torch(case: Any) -> list[Tensor]:
    """The same by torch in float64."""
    *inputs, grad = (tensor.double() for tensor in case)
    for tensor in inputs:
        tensor.requires_grad_()
    x, weight, bias = inputs
    out = F.conv3d(x.movedim(-1, 1), weight, bias, padding=1, groups=x.shape[-1]).movedim(1, -1)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def assert_near(found: list[Tensor], case: Any, *, roundings: float = 4.0) -> None:
    """Within one unit of the result's dtype, and so many fp32 units of its terms' magnitudes.

    The same formulas applied to magnitudes add these up; a sum in fp32 is off by a few units of
    that, however much cancels.
    """
    terms = by_torch([tensor.double().abs() for tensor in case])
    for mine, exact, size in zip(found, by_torch(case), terms, strict=True):
        own = torch.finfo(mine.dtype).eps * exact.abs()
        error = (mine.double() - exact).abs() - own
        assert (error <= roundings * torch.finfo(FLOAT).eps * size).all()


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    use = library.load().megaslide_use_instruction_set
    current = library.load().megaslide_instruction_set
    current.restype = ctypes.c_char_p
    best = current()
    if use(request.param.encode()) == UNSUPPORTED:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    use(best)


# ---- what it computes ----------------------------------------------------------------------------


def neighbours(shape: Shape) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Token, tap and the token at that tap, for all that are inside."""
    sizes = shape[1:4]
    for token in itertools.product(*map(range, sizes)):
        for tap in itertools.product(range(3), repeat=3):
            at = tuple(n + i - 1 for n, i in zip(token, tap, strict=True))
            if all(0 <= n < size for n, size in zip(at, sizes, strict=True)):
                yield token, tap, at


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 2, 3, 4, 3), (1, 1, 1, 1, 1), (1, 3, 1, 6, 2)])
def test_equals_plain_loops(shape: Shape, backend: str) -> None:
    x, weight, bias, grad = random_case(shape)
    out, grad_x = bias.expand(shape).clone(), torch.zeros(shape)
    grad_weight = torch.zeros_like(weight)
    for (t, h, w), (i, j, k), (p, q, r) in neighbours(shape):
        out[:, t, h, w] += weight[:, 0, i, j, k] * x[:, p, q, r]
        grad_x[:, p, q, r] += weight[:, 0, i, j, k] * grad[:, t, h, w]
        grad_weight[:, 0, i, j, k] += (x[:, p, q, r] * grad[:, t, h, w]).sum(0)
    found = results((x, weight, bias, grad), backend)
    expected = [out, grad_x, grad_weight, grad.sum((0, 1, 2, 3))]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@needs_library
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    size=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 11)),
    channels=st.sampled_from([1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 48, 64, 100, 127, 131]),
    dtypes=st.sampled_from([(FLOAT, FLOAT), (BF16, BF16), (BF16, FLOAT), (FLOAT, BF16)]),
)
@example(batch=LARGE[0], size=LARGE[1:4], channels=LARGE[4], dtypes=(FLOAT, FLOAT))
@example(batch=LARGE[0], size=LARGE[1:4], channels=LARGE[4], dtypes=(BF16, BF16))
def test_native_is_torch_in_float64_rounded(
    batch: int,
    size: tuple[int, int, int],
    channels: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    torch.manual_seed(0)
    case = random_case((batch, *size, channels), *dtypes)
    found = results(case, "native")
    assert [tensor.dtype for tensor in found] == [dtypes[1], dtypes[0], dtypes[1], dtypes[1]]
    assert_near(found, case)


@needs_library
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("channels", [1, 7, 16, 24, 40, 64, 129])
def test_every_instruction_set(instruction_set: str, channels: int, dtype: torch.dtype) -> None:
    case = random_case((2, 3, 3, 7, channels), dtype, dtype)
    assert_near(results(case, "native"), case)


def test_reference_and_its_gradients_by_differences() -> None:
    inputs = [t.double().requires_grad_() for t in random_case((2, 2, 3, 2, 2))[:3]]
    assert torch.autograd.gradcheck(depthwise_conv3d, inputs)
    assert torch.autograd.gradgradcheck(depthwise_conv3d, inputs)


@needs_library
def test_native_differentiates_twice() -> None:
    def second(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x, weight, bias, grad = (t.to(dtype) for t in random_case((2, 2, 3, 4, 5)))
        inputs = [t.requires_grad_() for t in (x, weight, bias, grad)]
        out = depthwise_conv3d(*inputs[:3], backend=backend)
        first = torch.autograd.grad(out, inputs[:3], grad, create_graph=True)
        total = sum((torch.linspace(-1, 1, g.numel()).view_as(g) * g.sin()).sum() for g in first)
        return torch.autograd.grad(total, (x, weight, grad))  # type: ignore[arg-type]

    found, expected = second("native", FLOAT), second("reference", torch.float64)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs_and_no_bias(backend: str) -> None:
    shape = (2, 3, 4, 5, 6)
    x, weight, _, grad = random_case(shape)
    strided = torch.empty(2, 6, 3, 5, 4).permute(0, 2, 4, 3, 1).copy_(x).requires_grad_()
    flipped = weight.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0).requires_grad_()
    out = depthwise_conv3d(strided, flipped, backend=backend)
    assert out.shape == shape
    grad_out = grad.movedim(1, 2).contiguous().movedim(1, 2)
    gradients = torch.autograd.grad(out, (strided, flipped), grad_out)
    exact = by_torch((x, weight, torch.zeros(6), grad))
    for mine, theirs in zip((out, *gradients), exact, strict=False):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_reach_their_neighbours_only(backend: str) -> None:
    x, weight, bias, _ = random_case((1, 3, 3, 9, 20))
    x[0, 0, 0, 0, :] = torch.inf
    out = depthwise_conv3d(x, weight, bias, backend=backend)
    assert torch.isinf(out[0, :2, :2, :2]).all()
    assert torch.isfinite(out[0, 2:]).all()
    assert torch.isfinite(out[..., 2:, :]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(backend: str) -> None:
    case = random_case((2, 2, 3, 4, 8))
    expected = results(case, backend)
    with torch.autocast("cpu", dtype=BF16):
        found = results(case, backend)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == FLOAT
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_weight_gradient_is_summed_in_fp32(backend: str) -> None:
    """4096 equal terms of 1: bf16 sums would stall at 256."""
    ones = torch.ones(1, 16, 16, 16, 3, dtype=BF16)
    weight = torch.zeros(3, 1, 3, 3, 3, dtype=BF16, requires_grad=True)
    out = depthwise_conv3d(ones, weight, backend=backend)
    (grad,) = torch.autograd.grad(out, weight, ones)
    assert (grad[:, 0, 1, 1, 1] == 4096).all()
    assert (grad[:, 0, 0, 0, 0] == 3376).all()  # 15^3 = 3375, to the nearest bf16


@needs_library
def test_bf16_output_is_the_nearest_even_and_keeps_special_values() -> None:
    values = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8), torch.inf, -torch.inf,
         torch.nan, 0.0, -0.0, 3.4e38, 1e-40]
    )  # fmt: skip
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(FLOAT)  # a NaN that rounds to -0
    values = torch.cat([values, all_ones])
    weight = torch.zeros(len(values), 1, 3, 3, 3, dtype=BF16)
    weight[:, :, 1, 1, 1] = 1
    out = depthwise_conv3d(values.view(1, 1, 1, 1, -1), weight, backend="native")
    torch.testing.assert_close(out.view(-1), values.bfloat16(), rtol=0, atol=0, equal_nan=True)


# ---- threads -------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    case = random_case(LARGE, dtype, dtype)
    expected = results(case, "native", threads=1)
    for threads in (2, 3, 7):
        assert all(map(torch.equal, results(case, "native", threads=threads), expected))


@needs_library
def test_a_sample_has_the_same_bits_in_any_batch() -> None:
    x, weight, bias, grad = random_case((5, 2, 3, 6, 40))
    out, grad_x, *_ = results((x, weight, bias, grad), "native")
    for b in range(5):
        alone = results((x[b : b + 1], weight, bias, grad[b : b + 1]), "native")
        assert torch.equal(alone[0], out[b : b + 1])
        assert torch.equal(alone[1], grad_x[b : b + 1])


# ---- torch operators -----------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("mirrored", [False, True])
def test_opcheck(mirrored: bool) -> None:
    x, weight, bias, grad = (t.requires_grad_() for t in random_case((2, 2, 3, 4, 5)))
    convolve = torch.ops.megaslide.depthwise_conv3d.default
    torch.library.opcheck(convolve, (x, weight, bias, mirrored, FLOAT, 1))
    torch.library.opcheck(torch.ops.megaslide.depthwise_conv3d_sums.default, (x, grad, 1))


@needs_library
def test_compiles_to_one_graph() -> None:
    x, weight, bias, _ = random_case((2, 2, 3, 4, 5))
    compiled = torch.compile(depthwise_conv3d, fullgraph=True, backend="aot_eager")
    expected = depthwise_conv3d(x, weight, bias)
    torch.testing.assert_close(compiled(x, weight, bias), expected)


def test_meta_and_empty_batches_keep_the_shape() -> None:
    x, weight, bias, _ = random_case((2, 2, 3, 4, 5))
    out = depthwise_conv3d(x.to("meta"), weight.to("meta"), bias.to("meta"))
    assert out.shape == x.shape
    assert depthwise_conv3d(x[:0], weight, bias).shape == (0, 2, 3, 4, 5)


# ---- backends and refusals -----------------------------------------------------------------------


def test_what_the_native_kernels_do_not_take_goes_to_the_reference() -> None:
    x, weight, bias, _ = (t.double() for t in random_case((1, 2, 2, 2, 3)))
    assert depthwise_conv3d(x, weight, bias).dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"x is torch\.float64"):
        depthwise_conv3d(x, weight, bias, backend="native")


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, _ = random_case((1, 2, 2, 2, 3))
    monkeypatch.setattr(library, "why_absent", lambda: "no compiler")
    expected = depthwise_conv3d(x, weight, bias, backend="reference")
    assert torch.equal(depthwise_conv3d(x, weight, bias), expected)
    with pytest.raises(RuntimeError, match="no compiler"):
        depthwise_conv3d(x, weight, bias, backend="native")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(2, 3, 4, 5), r"x has shape \[2, 3, 4, 5\]"),
        ("x", torch.zeros(1, 2, 0, 3, 5), r"x has shape \[1, 2, 0, 3, 5\]"),
        ("x", torch.zeros(1, 2, 2, 3, 5, dtype=torch.int32), "x is torch.int32"),
        ("weight", torch.zeros(4, 1, 3, 3, 3), r"needs \[5, 1, 3, 3, 3\]"),
        ("weight", torch.zeros(5, 1, 3, 3, 3, device="meta"), "on meta"),
        ("bias", torch.zeros(4), r"bias has shape \[4\]; needs \[5\]"),
        ("bias", torch.zeros(5).double(), "bias is torch.float64"),
        ("backend", "triton", "backend 'triton' is unknown"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, value: Any, message: str) -> None:
    x, weight, bias, _ = random_case((1, 2, 2, 3, 5))
    arguments: dict[str, Any] = {"x": x, "weight": weight, "bias": bias}
    with pytest.raises(ValueError, match=message):
        depthwise_conv3d(**arguments | {name: value})


@needs_library
@pytest.mark.parametrize(
    ("field", "value"),
    [("batch", -1), ("channels", 0), ("threads", 0), ("size", (2, 0, 3)), ("size", (2**31,) * 3)],
)
def test_c_interface_refuses_shapes_it_cannot_take(field: str, value: Any) -> None:
    x = torch.zeros(1, 2, 2, 3, 5)
    shape = native._shape(x, FLOAT, 1)
    setattr(shape, field, (ctypes.c_int64 * 3)(*value) if isinstance(value, tuple) else value)
    at = native._pointer(x)
    loaded = library.load()
    by = ctypes.byref(shape)
    assert loaded.megaslide_depthwise_conv(by, at, at, at, at) == INVALID_ARGUMENT
    assert loaded.megaslide_depthwise_conv_sums(by, at, at, at) == INVALID_ARGUMENT
