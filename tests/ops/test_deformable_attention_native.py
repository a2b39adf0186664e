"""The C++ kernels of 3D-DSA against the reference in fp64, on every instruction set there is.

Offsets are multiples of 1/64, so that fp32 and fp64 coordinates are the same numbers: positions on
voxels, where the derivative is a matter of convention, occur often and must agree.
"""

import ctypes
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaslide.ops import library
from megaslide.ops.deformable_attention import deformable_attention, native, offset_channels

needs_library = pytest.mark.skipif(
    library.why_absent() is not None, reason=library.why_absent() or "present"
)
INSTRUCTION_SETS = (
    "x86-64-v4-amx", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "baseline",
)  # fmt: skip
NAMES = ("q", "k", "v", "offsets", "extra_k", "extra_v")
INVALID_ARGUMENT, UNSUPPORTED = 1, 3


def random_case(
    size: tuple[int, int, int],
    window: tuple[int, int, int],
    kind: Any,
    *,
    batch: int = 1,
    heads: int = 2,
    groups: int = 1,
    d: int = 16,
    extra: int = 0,
    spread: float = 0.5,
) -> dict[str, Any]:
    case: dict[str, Any] = {n: torch.randn(batch, *size, heads, d) for n in "qkv"}
    case |= {"window": window, "offsets": None, "kind": kind or "affine"}
    if kind is not None:
        channels = offset_channels(kind, window)
        shape = [channels // 3, 3] if kind == "tap" else [channels]
        drawn = spread * torch.randn(batch, *size, groups, *shape)
        case["offsets"] = (drawn * 64).round() / 64
    for name in ("extra_k", "extra_v"):
        case[name] = torch.randn(batch, extra, heads, d) if extra else None
    return case


def results(case: dict[str, Any], backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of sum(out * seed), with a seed that depends on the shape alone."""
    inputs = {n: case[n].to(dtype).clone().requires_grad_() for n in NAMES if case[n] is not None}
    out = deformable_attention(**case | inputs, backend=backend)
    seed = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view_as(out)
    out.backward(seed.to(dtype))
    found = {"out": out.detach()}
    for name, x in inputs.items():
        assert x.grad is not None, name
        found[name] = x.grad
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within 1e-5 of 1 (the scale of the inputs) plus each array's largest value."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        error = (found[name].double() - x).abs().max().item()
        assert error <= 1e-5 * (1 + x.abs().max().item()), f"{name}: {error:.2e}"


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


# ---- equal to the reference ----------------------------------------------------------------------

sizes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 7))
windows = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))


@needs_library
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=sizes,
    window=windows,
    kind=st.sampled_from([None, "shift", "affine", "tap"]),
    batch=st.integers(1, 2),
    heads_groups=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    d=st.sampled_from([1, 3, 4, 8, 12, 16, 20, 24, 32, 48]),
    extra=st.sampled_from([0, 1, 17]),
    spread=st.sampled_from([0.0, 0.25, 1.0, 8.0]),
)
def test_equals_the_reference(
    size: tuple[int, int, int],
    window: tuple[int, int, int],
    kind: Any,
    batch: int,
    heads_groups: tuple[int, int],
    d: int,
    extra: int,
    spread: float,
) -> None:
    torch.manual_seed(0)
    heads, groups = heads_groups
    case = random_case(
        size, window, kind, batch=batch, heads=heads, groups=groups, d=d, extra=extra, spread=spread
    )
    assert_same(results(case, "native", torch.float32), results(case, "reference", torch.float64))


@needs_library
@pytest.mark.parametrize("d", [3, 8, 16, 20, 24, 32, 48, 64, 128, 160])
def test_every_head_size_on_every_instruction_set(instruction_set: str, d: int) -> None:
    case = random_case((3, 5, 7), (3, 3, 3), "affine", d=d, extra=5)
    assert_same(results(case, "native", torch.float32), results(case, "reference", torch.float64))


@needs_library
@pytest.mark.parametrize("kind", [None, "shift", "affine", "tap"])
@pytest.mark.parametrize("spread", [0.0, 0.5, 20.0])
def test_every_kind_on_every_instruction_set(
    instruction_set: str, kind: Any, spread: float
) -> None:
    case = random_case((3, 5, 11), (3, 3, 5), kind, spread=spread, batch=2, extra=3)
    assert_same(results(case, "native", torch.float32), results(case, "reference", torch.float64))


@needs_library
def test_shared_offsets_gather_from_heads_across_chunks_of_queries() -> None:
    """2560 queries x 4 heads x 441 numbers exceed the kernel's 4 Mi floats of partial sums."""
    case = random_case((5, 16, 32), (3, 7, 7), "tap", heads=4, d=4)
    own = case | {"offsets": case["offsets"].expand(-1, -1, -1, -1, 4, -1, -1)}
    shared = results(case, "native", torch.float32)
    separate = results(own, "native", torch.float32)
    separate["offsets"] = separate["offsets"].double().sum(4, keepdim=True)
    assert_same(shared, {name: x.double() for name, x in separate.items()})


@needs_library
def test_affine_without_matrix_is_shift() -> None:
    case = random_case((3, 5, 7), (3, 3, 3), "shift", groups=2)
    matrix = torch.zeros(*case["offsets"].shape[:-1], 9)
    affine = case | {"offsets": torch.cat([case["offsets"], matrix], -1), "kind": "affine"}
    found, expected = (results(c, "native", torch.float32) for c in (affine, case))
    found["offsets"] = found["offsets"][..., :3]
    assert_same(found, {name: x.double() for name, x in expected.items()})


@needs_library
@pytest.mark.parametrize("kind", [None, "shift", "affine", "tap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(kind: Any, dtype: torch.dtype) -> None:
    case = random_case((5, 9, 11), (3, 3, 3), kind, heads=3, batch=2, extra=2)
    case = {n: x.to(dtype) if isinstance(x, Tensor) else x for n, x in case.items()}
    found = []
    for threads in (1, 2, 5):
        inputs: list[Any] = [
            None if case[n] is None else case[n].clone().requires_grad_() for n in NAMES
        ]
        out = native.deformable_attention_native(
            *inputs, window=(3, 3, 3), kind=case["kind"], scale=0.3, num_threads=threads
        )
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in inputs if x is not None)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ---- bf16 ----------------------------------------------------------------------------------------


def in_bf16(case: dict[str, Any]) -> dict[str, Any]:
    """The case with all but the offsets in bf16."""
    keep = ("offsets", "window", "kind")
    return {n: x if n in keep or x is None else x.bfloat16() for n, x in case.items()}


def assert_near(case: dict[str, Any], found: dict[str, Tensor]) -> None:
    """Within 2 % of 1 plus the largest value, of the fp64 reference on the same bf16 numbers.

    Weights are rounded to bf16 (0.2 % each) before sums over up to hundreds of voxels.
    """
    exact = {n: x.double() if isinstance(x, Tensor) else x for n, x in case.items()}
    expected = results(exact, "reference", torch.float64)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        error = (found[name].double() - x).abs().max().item()
        assert error <= 0.02 * (1 + x.abs().max().item()), f"{name}: {error:.2e}"
        norm = (found[name].double() - x).norm() / (x.norm() + 0.05 * x.numel() ** 0.5)
        assert norm <= 0.03, f"{name}: {norm:.2e} in all"


def bf16_results(case: dict[str, Any]) -> dict[str, Tensor]:
    inputs = {n: case[n].clone().requires_grad_() for n in NAMES if case[n] is not None}
    out = deformable_attention(**case | inputs, backend="native")
    seed = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view_as(out)
    out.backward(seed.bfloat16())
    return {"out": out.detach()} | {n: x.grad for n, x in inputs.items() if x.grad is not None}


@needs_library
@pytest.mark.parametrize("kind", [None, "shift", "affine", "tap"])
@pytest.mark.parametrize("d", [24, 64, 128, 264])
def test_bf16_on_every_instruction_set(instruction_set: str, kind: Any, d: int) -> None:
    case = in_bf16(random_case((5, 9, 11), (3, 5, 5), kind, d=d, extra=7, groups=2))
    assert_near(case, bf16_results(case))


@needs_library
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 19)),
    window=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 18)),
    kind=st.sampled_from([None, "shift", "affine", "tap"]),
    heads_groups=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    d=st.sampled_from([1, 7, 16, 32, 40, 64, 96]),
    extra=st.sampled_from([0, 1, 33]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
)
def test_bf16_equals_the_reference(
    size: tuple[int, int, int],
    window: tuple[int, int, int],
    kind: Any,
    heads_groups: tuple[int, int],
    d: int,
    extra: int,
    spread: float,
) -> None:
    torch.manual_seed(0)
    heads, groups = heads_groups
    case = in_bf16(
        random_case(size, window, kind, heads=heads, groups=groups, d=d, extra=extra, spread=spread)
    )
    assert_near(case, bf16_results(case))


@needs_library
@pytest.mark.parametrize("kind", ["affine", "tap"])
def test_bf16_where_a_tile_reads_most_of_a_large_volume(kind: Any) -> None:
    """Boxes of more voxels than matrix tiles are used for, next to boxes of fewer."""
    case = in_bf16(random_case((5, 30, 31), (2, 3, 3), kind, heads=1, d=32, spread=30.0))
    case["offsets"][:, :, :12] *= 2**-7  # a power of two: see the head of this file
    assert_near(case, bf16_results(case))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, "shift", "affine", "tap"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_not_finite_stay_in_their_head(
    dtype: torch.dtype, kind: Any, value: float
) -> None:
    case = random_case((3, 5, 9), (3, 3, 3), kind, heads=2, groups=2, d=16, extra=2)
    case = {n: x.to(dtype) if isinstance(x, Tensor) else x for n, x in case.items()}
    spoilt = {n: x.clone() if isinstance(x, Tensor) else x for n, x in case.items()}
    for name in "qkv":
        spoilt[name][0, 1, 2, 3, 0, 5] = value
    found, expected = (results(c, "native", dtype) for c in (spoilt, case))
    for name, x in expected.items():
        heads = 2 if name.startswith("extra") else 4
        assert torch.equal(found[name].select(heads, 1), x.select(heads, 1)), name
    assert not found["out"][..., 0, :].isfinite().all()


# ---- inputs as they come -------------------------------------------------------------------------


@needs_library
def test_strided_inputs_and_expanded_gradients() -> None:
    fused = torch.randn(2, 3, 4, 5, 2, 3, 16).permute(0, 2, 3, 1, 4, 5, 6)  # [B, H, W, T, ...]
    q, k, v = fused.unbind(-2)
    offsets = torch.zeros(2, 4, 5, 3, 12, 2).transpose(-1, -2)
    assert not q.is_contiguous()
    assert not offsets.is_contiguous()
    case: dict[str, Any] = {"q": q, "k": k, "v": v, "offsets": offsets, "window": (3, 3, 3)}
    q.requires_grad_()
    out = deformable_attention(**case, backend="native")
    out.sum().backward()
    found, q.grad = q.grad, None
    dense: dict[str, Any] = {
        n: x.contiguous() if isinstance(x, Tensor) else x for n, x in case.items()
    }
    torch.testing.assert_close(deformable_attention(**dense, backend="reference"), out)
    assert found is not None
    deformable_attention(**case, backend="reference").sum().backward()
    torch.testing.assert_close(found, q.grad, rtol=0, atol=1e-5)


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out(dtype: torch.dtype) -> None:
    case = random_case((3, 5, 7), (3, 3, 3), "affine", extra=2)
    case = {n: x.to(dtype) if isinstance(x, Tensor) else x for n, x in case.items()}
    found, expected = (results(case, b, dtype) for b in ("native", "reference"))
    for name, x in expected.items():
        assert found[name].dtype == dtype
        bound = 4 * torch.finfo(dtype).eps * x.abs().max().item()
        torch.testing.assert_close(found[name], x, rtol=0, atol=bound)


@needs_library
def test_nan_offset_spoils_its_own_query_only() -> None:
    case = random_case((3, 4, 5), (3, 3, 3), "affine")
    case["offsets"][0, 1, 2, 3, 0, 5] = torch.nan
    bad = deformable_attention(**case, backend="native").isnan().flatten(4).any(-1)
    assert bad.nonzero().tolist() == [[0, 1, 2, 3]]


@needs_library
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1e30, -1e30])
def test_huge_offsets_stay_inside_the_volume(value: float) -> None:
    case = random_case((3, 4, 5), (3, 3, 3), "tap")
    case["offsets"][...] = value
    v = torch.ones_like(case["v"])
    out = deformable_attention(**case | {"v": v}, backend="native")
    torch.testing.assert_close(out, v)


@needs_library
def test_empty_batch() -> None:
    case = random_case((3, 4, 5), (3, 3, 3), "affine", batch=0)
    assert results(case, "native", torch.float32)["out"].shape == (0, 3, 4, 5, 2, 16)


# ---- a torch operator ----------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("kind", [None, "affine", "tap"])
def test_opcheck(kind: Any) -> None:
    case = random_case((2, 3, 4), (1, 3, 3), kind, d=4, extra=2)
    inputs = [None if case[n] is None else case[n].requires_grad_() for n in NAMES]
    arguments = (*inputs, (1, 3, 3), kind or "none", 0.5, 1)
    torch.library.opcheck(torch.ops.megaslide.deformable_attention.default, arguments)


@needs_library
def test_compiles_to_one_graph() -> None:
    case = random_case((2, 3, 4), (1, 3, 3), "affine", d=8)
    eager = results(case, "native", torch.float32)
    compiled = torch.compile(deformable_attention, fullgraph=True, backend="aot_eager")
    inputs = {n: case[n].clone().requires_grad_() for n in NAMES[:4]}
    torch.testing.assert_close(compiled(**case | inputs), eager["out"])


@needs_library
def test_meta_tensors_give_the_shape() -> None:
    case = random_case((2, 3, 4), (1, 3, 3), "affine", extra=2)
    case = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in case.items()}
    found = results_shapes(case)
    assert found == {n: case[n].shape for n in NAMES} | {"out": case["q"].shape}


def results_shapes(case: dict[str, Any]) -> dict[str, torch.Size]:
    inputs = {n: case[n].requires_grad_() for n in NAMES}
    out = deformable_attention(**case | inputs, backend="native")
    assert out.is_meta
    out.sum().backward()
    shapes = {n: x.grad.shape for n, x in inputs.items() if x.grad is not None}
    return shapes | {"out": out.shape}


@needs_library
def test_keeps_only_inputs_output_and_log_sum_exp() -> None:
    case = random_case((3, 5, 7), (3, 3, 3), "affine", d=32)
    inputs = {n: case[n].requires_grad_() for n in NAMES[:4]}
    kept = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal kept
        kept += x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = deformable_attention(**case | inputs, backend="native")
    given_bytes = sum(x.nbytes for x in inputs.values())
    assert kept == given_bytes + out.nbytes + 3 * 5 * 7 * 2 * 4


PEAK_PROGRAM = """
import resource, torch
from megaslide.ops.deformable_attention import deformable_attention
torch.set_num_threads(2)
def attend(size, window):
    q, k, v = (torch.randn(1, *size, 4, 64, requires_grad=True) for _ in range(3))
    offsets = torch.randn(1, *size, 2, 12, requires_grad=True)
    extras = [torch.randn(1, 4, 4, 64, requires_grad=True) for _ in range(2)]
    deformable_attention(q, k, v, offsets, window=window, extra_k=extras[0], extra_v=extras[1],
                         backend="native").sum().backward()
attend((2, 4, 4), (1, 3, 3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attend((4, 16, 20), (3, 9, 9))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_never_holds_the_samples() -> None:
    """N*K*d would be 304 MiB; q is 1.25 MiB, and inputs, output and gradients are 11 of those."""
    command = [sys.executable, "-c", PEAK_PROGRAM]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak < 32


# ---- choosing it, and its absence ----------------------------------------------------------------


@needs_library
def test_double_precision_takes_the_reference_or_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    q = torch.randn(1, 2, 3, 4, 1, 4, dtype=torch.float64)
    with caplog.at_level(logging.DEBUG, "megaslide.ops.deformable_attention"):
        assert deformable_attention(q, q, q, window=(1, 3, 3)).dtype == torch.float64
    assert "native kernels compute in float32, and q is torch.float64" in caplog.text
    with pytest.raises(RuntimeError, match=r"'native' cannot run here: .* q is torch.float64"):
        deformable_attention(q, q, q, window=(1, 3, 3), backend="native")


@needs_library
def test_auto_takes_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "deformable_attention_native", lambda *a, **k: "native")
    q = torch.randn(1, 2, 3, 4, 1, 4)
    for backend in (None, "auto"):
        assert deformable_attention(q, q, q, window=(1, 3, 3), backend=backend) == "native"


@pytest.fixture
def _fresh_library() -> Iterator[None]:
    library._open.cache_clear()
    yield
    library._open.cache_clear()


@pytest.mark.usefixtures("_fresh_library")
def test_absent_library_warns_once_and_names_the_build_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv(library.PATH_VARIABLE, str(tmp_path / "missing.so"))
    q = torch.randn(1, 2, 3, 4, 1, 4)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            deformable_attention(q, q, q, window=(1, 3, 3))
    assert len(caplog.records) == 1
    assert "missing.so does not exist" in caplog.text
    assert library.BUILD_COMMAND in caplog.text
    with pytest.raises(RuntimeError, match=r"missing\.so does not exist"):
        deformable_attention(q, q, q, window=(1, 3, 3), backend="native")


@pytest.mark.usefixtures("_fresh_library")
def test_a_file_that_is_no_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(b"not a library")
    monkeypatch.setenv(library.PATH_VARIABLE, str(path))
    assert "broken.so" in (library.why_absent() or "")


@needs_library
@pytest.mark.usefixtures("_fresh_library")
def test_another_interface_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", -1)
    assert f"interface version {built}, this package needs -1" in (library.why_absent() or "")


@needs_library
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heads", 0), ("head_dim", 0), ("groups", 3), ("threads", 0), ("kind", 4), ("extra", -1),
        ("window", (4, 3, 3)), ("size", (2, 0, 3)), ("size", (2**20, 2**20, 1)),
    ],
)  # fmt: skip
def test_c_interface_refuses_shapes_it_cannot_take(field: str, value: Any) -> None:
    q = torch.zeros(1, 3, 4, 5, 2, 4)
    shape = native._shape(q, None, None, (3, 3, 3), "none", 1.0, 1)
    converted = (ctypes.c_int64 * 3)(*value) if isinstance(value, tuple) else value
    setattr(shape, field, converted)
    inputs = native._Inputs(q=q.data_ptr(), k=q.data_ptr(), v=q.data_ptr())
    out = torch.zeros_like(q)
    status = library.load().megaslide_attention_forward(
        ctypes.byref(shape), ctypes.byref(inputs), native._pointer(out), native._pointer(out)
    )
    assert status == INVALID_ARGUMENT
    with pytest.raises(RuntimeError, match="invalid argument"):
        library.check_status(status)


def test_every_status_has_a_text() -> None:
    if library.why_absent() is not None:
        pytest.skip("no library")
    text = library.load().megaslide_status_string
    text.restype = ctypes.c_char_p
    texts = {text(status) for status in range(4)}
    assert len(texts) == 4
    assert b"unknown status" not in texts
