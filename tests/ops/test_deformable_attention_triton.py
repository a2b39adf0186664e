"""The Triton kernels of 3D-DSA without a GPU: interpreted, compiled ahead of time, refused.

Errors are relative to the largest value of each tensor. The oracle is the definition in fp64.
"""

import inspect
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megaslide.ops import deformable_attention as op
from megaslide.ops.deformable_attention import deformable_attention, triton_backend

HERE = Path(__file__).parent
CASES = (
    "none", "shift", "shift, 3x3x3", "shift, far outside", "zero shift", "affine", "affine, 3x3x3",
    "tap", "far outside", "zero offsets", "an axis of one voxel", "a frame at a time",
    "shift, bf16", "bf16", "fp16",
)  # fmt: skip
# v is left out: where products are dense, a bad row of it reaches all queries of a tile.
SPOILED = [
    f"{name} {value} {kind}"
    for kind in ("none", "shift", "affine", "tap")
    for name, value in (("q", "nan"), ("k", "inf"), ("k", "nan"), ("offsets", "nan"))
    if (name, kind) != ("offsets", "none")
]


# ---- interpreted ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'megaslide[gpu]'")
    done = subprocess.run(
        [sys.executable, str(HERE / "triton_interpreted.py"), *CASES, *SPOILED],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(interpreted: dict[str, dict[str, float]], name: str) -> None:
    # Halves round `out`; gradients of scores are differences from its product with grad_out.
    bound = {"bf16": 3e-2, "shift, bf16": 3e-2, "fp16": 4e-3}.get(name, 3e-6)
    found = interpreted[name]
    assert {"out", "q", "k", "v"} <= found.keys()
    assert ("offsets" in found) == (name != "none")
    assert all(error < bound for error in found.values()), found


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_no_number_stays_with_those_who_see_it(
    interpreted: dict[str, dict[str, float]], name: str
) -> None:
    assert interpreted[name]["out"] < 3e-6


# ---- compiled ahead of time ----------------------------------------------------------------------

POINTERS = {
    "fp32": {
        "offsets", "doffsets", "lse", "delta", "total", "dk", "dv",
    },
    "reach": {"reach_v", "reach_k", "reach"},  # as the products with them, where `shift` fills it
    "integers": {"cells"},
    "half": {"q", "k", "v", "extra_k", "extra_v", "out", "grad_out", "dq", "x"},
}  # fmt: skip


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def extra_blocks(kernel: Any, dtype: str) -> dict[str, int]:
    """As `triton_launch` has them for gradients of extra keys."""
    alone = "BLOCK_Q" in inspect.signature(kernel.fn).parameters and dtype == "fp32"
    return {"BLOCK_E": 16, "BLOCK_Q": 16} if alone else {}


SHAPES = {
    "T", "H", "W", "heads", "groups", "E", "rows", "split", "t0", "t1", "p0", "p1",
    *(f"{what}_{axis}" for what in ("low", "box") for axis in "thw"),
}  # fmt: skip


def compile_for(
    kernel: Any, arch: int, kind: int, d: int, tile: tuple[int, ...], dtype: str = "bf16"
) -> Any:
    """A window of 3x7x7, 32 extra keys at a time; nothing of it needs a GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(inspect.signature(kernel.fn).parameters)
    dot = getattr(triton.language, DTYPES[dtype])
    constants = {
        "D": d, "BLOCK_D": d, "DOT": dot, "KT": 3, "KH": 7, "KW": 7,
        "KIND": kind, "BLOCK_T": tile[0], "BLOCK_H": tile[1], "BLOCK_W": tile[2],
        "BLOCK_E": 32, "BLOCK_Q": 32, "BLOCK": 64, "BLOCK_P": 0 if len(tile) < 5 else tile[4],
        "ROW": 8, "S": 32, **extra_blocks(kernel, dtype),
    }  # fmt: skip
    constants = {name: x for name, x in constants.items() if name in names}
    types = dict.fromkeys(names, "i32") | {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(POINTERS["fp32"], "*fp32") | dict.fromkeys(POINTERS["half"], f"*{dtype}")
    shift = "slide" in kernel.__name__ or kind == 1
    types |= dict.fromkeys(POINTERS["reach"], f"*{dtype}" if shift else "*fp32")
    types |= dict.fromkeys(POINTERS["integers"], "*i32")
    types = {name: types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*"
    }
    source = ASTSource(kernel, types, constants, aligned)
    target = GPUTarget("cuda", arch, 32)
    stages = {"num_stages": tile[5]} if len(tile) > 5 else {}
    return triton.compile(
        source, target=target, options={"num_warps": tile[3], "enable_fp_fusion": True, **stages}
    )


def usage(compiled: Any, folder: Path) -> dict[str, int]:
    """Registers per thread and bytes of spilled ones, as NVIDIA's assembler tells them.

    A stack frame in the binary is no measure: sm_100 has one of 16 bytes in a kernel of 96
    registers.
    """
    triton = pytest.importorskip("triton")
    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    target = re.findall(r"\.target (\w+)", compiled.asm["ptx"])[0]
    tool = Path(triton.__path__[0]) / "backends/nvidia/bin/ptxas-blackwell"  # knows all three
    command = [tool, "-v", f"--gpu-name={target}", source, "-o", folder / "kernel.cubin"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = re.findall(r"(\d+) bytes spill", told)
    registers = re.findall(r"Used (\d+) registers", told)
    assert spilled, told
    return {
        "spilled": sum(map(int, spilled)),
        "registers": max(map(int, registers)),
        "shared": compiled.metadata.shared,
    }


def dense_tile(kernel: Any, dtype: str) -> tuple[int, ...]:
    from megaslide.ops.deformable_attention import triton_launch

    tiles = triton_launch.SINGLE_TILES if dtype == "fp32" else triton_launch.DENSE_TILES
    use = "forward" if "forward" in kernel.__name__ else "backward"
    use = f"slide {use}" if "slide" in kernel.__name__ else use
    return (*tiles[use], triton_launch.DENSE_STAGES)


def assert_fits(
    kernel: Any, arch: int, kind: int, d: int, folder: Path, dtype: str = "bf16"
) -> None:
    from megaslide.ops.deformable_attention import triton_launch

    dense = "BLOCK_P" in kernel.arg_names
    tile = dense_tile(kernel, dtype) if dense else triton_launch.BACKWARD_TILES[d]
    used = usage(compile_for(kernel, arch, kind, d, tile, dtype), folder)
    # Bytes: two numbers stored and loaded; in fp32, whose dense products use no tensor cores, more.
    # Dense kernels keep two frames of accumulators, which mma.sync of sm_80 spreads worst.
    few = (384 if arch == 80 else 128) if dense else 16
    assert used["spilled"] <= (512 if dtype == "fp32" else few), used
    assert used["registers"] <= 255, used
    programs = 2 if dense or dtype == "fp32" else 3  # that share a multiprocessor
    assert used["shared"] <= (164 if arch == 80 else 228) * 1024 // programs, used


def kernels() -> dict[str, Any]:
    pytest.importorskip("triton")
    from megaslide.ops.deformable_attention import (
        triton_kernels,
        triton_keys,
        triton_slide,
        triton_window,
    )

    modules = (triton_kernels, triton_keys, triton_slide, triton_window)
    found = {name: x for module in modules for name, x in vars(module).items()}
    return {name: x for name, x in found.items() if name.endswith("_kernel")}


def test_forward_compiles_without_a_gpu(tmp_path: Path) -> None:
    assert_fits(kernels()["forward_kernel"], 90, 2, 64, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    "name",
    [
        "forward_kernel", "queries_kernel", "keys_kernel", "extra_kernel", "share_kernel",
        "window_forward_kernel", "window_queries_kernel", "window_keys_kernel",
        "slide_forward_kernel", "slide_queries_kernel",
    ],
)  # fmt: skip
def test_compiles_within_bounds(name: str, arch: int, d: int, tmp_path: Path) -> None:
    kernel = kernels()[name]
    kinds = (1, 2, 3) if name == "keys_kernel" else (2, 3)  # `shift` has forms of its own
    for kind in kinds if "KIND" in kernel.arg_names else (0,):
        assert_fits(kernel, arch, kind, d, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(
    "name",
    [
        "forward_kernel", "queries_kernel", "keys_kernel", "extra_kernel",
        "window_forward_kernel", "window_queries_kernel", "window_keys_kernel",
        "slide_forward_kernel", "slide_queries_kernel",
    ],
)  # fmt: skip
def test_other_dtypes_compile_within_bounds(name: str, dtype: str, tmp_path: Path) -> None:
    assert_fits(kernels()[name], 90, 2, 128, tmp_path, dtype)


def test_no_kernel_is_compiled_anew_for_a_shape() -> None:
    """Triton compiles for integers that are 1 or multiples of 16, unless told not to."""
    for name, kernel in kernels().items():
        integers = [p.name for p in kernel.params if not p.is_constexpr and p.name in SHAPES]
        assert integers, name
        assert all(p.do_not_specialize for p in kernel.params if p.name in SHAPES), name
        known = {*integers, *(name for names in POINTERS.values() for name in names), "scale"}
        assert {p.name for p in kernel.params if not p.is_constexpr} == known & set(
            kernel.arg_names
        ), name


@pytest.mark.slow
def test_sums_of_the_reach_have_one_order() -> None:
    """All atomic additions of a kernel share a layout, so each address has one adding thread."""
    compiled = compile_for(kernels()["queries_kernel"], 90, 2, 64, (1, 2, 8, 4))
    lines = [x for x in compiled.asm["ttgir"].splitlines() if "tt.atomic_rmw" in x]
    layouts = {layout for line in lines for layout in re.findall(r"x!tt.ptr<f32>, (#\w+)>", line)}
    assert len(lines) == 16
    assert len(layouts) == 1


# ---- refused -------------------------------------------------------------------------------------


def tokens(d: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, 2, 3, 4, 1, d, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "reason"),
    [
        (tokens(), r"run on GPUs, and q is on cpu"),
        (tokens(dtype=torch.float64), r"and q is torch.float64"),
        (tokens(d=192), r"head dims up to 128, and q has 192"),
    ],
)
def test_asked_for_by_name_it_says_why_not(q: torch.Tensor, reason: str) -> None:
    if "on cpu" in reason:
        pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match=rf"'triton' cannot run here: .*{reason}"):
        deformable_attention(q, q, q, window=(1, 3, 3), backend="triton")


def test_without_triton_it_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"not installed; pip install 'megaslide\[gpu\]'"):
        deformable_attention(tokens(), tokens(), tokens(), window=(1, 3, 3), backend="triton")


def test_on_a_gpu_the_reason_for_the_reference_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OnGpu:
        device, dtype, shape = torch.device("cuda"), torch.float64, (1, 2, 3, 4, 1, 8)

    op._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert op._select(None, OnGpu()) is op.deformable_attention_reference  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    assert "q is torch.float64" in caplog.text
