"""The native kernels on a machine where the package is not installed: built beside it.

CMake is not needed: the sources, instruction sets and flags are read out of CMakeLists.txt, so that
there is one list of them.
"""

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megaslide.ops.library import PATH_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu-check"
COMMON = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
"""What CMake makes of the target's properties (Release)."""
X86 = ("x86_64", "amd64")


def is_loadable() -> bool:
    """Whether a fresh process finds the library; asked there, because the answer is kept."""
    code = "import sys; from megaslide.ops.library import why_absent; sys.exit(bool(why_absent()))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def ensure(compiler: str = "g++") -> str:
    """Make the library loadable for this process's children; says how.

    Raises:
        RuntimeError: it cannot be compiled, with what the compiler said.
    """
    if is_loadable():
        return "as installed"
    library = build(compiler)
    os.environ[PATH_VARIABLE] = str(library)
    if not is_loadable():
        raise RuntimeError(f"{library} was built and cannot be loaded")
    return f"built by {compiler}"


def build(compiler: str, folder: Path = BUILD) -> Path:
    """Compile csrc into a shared library in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = units((ROOT / "CMakeLists.txt").read_text(), _knows_amx(compiler))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: _compile(compiler, folder, *job), jobs.items()))
    library = folder / "libmegaslide_native.so"
    _run([compiler, "-shared", "-fopenmp", "-pthread", *objects, "-o", str(library)])
    return library


def units(cmake: str, amx: bool) -> dict[str, tuple[str, list[str]]]:
    """Source and flags by name of the object, as CMakeLists.txt has them.

    Raises:
        RuntimeError: it no longer reads as expected here.
    """
    on_x86 = platform.machine().lower() in X86
    options = _match(cmake, r"target_compile_options\(\$\{target\} PRIVATE ([^$]+?)\s+\$<")
    v4 = _match(cmake, r"set\(v4_options ([^)]+)\)")
    bf16 = [*v4, *_match(cmake, r"set\(bf16_options \$\{v4_options\} ([^)]+)\)")]
    tiles = [*bf16, *_match(cmake, r"set\(amx_options \$\{bf16_options\} ([^)]+)\)")]
    flags = [*COMMON, *options, "-fopenmp", "-pthread"]
    flags += ["-DMEGASLIDE_X86_KERNELS"] if on_x86 else []
    flags += ["-DMEGASLIDE_AMX_KERNELS"] if amx and on_x86 else []
    usual = {"x86_64_v3": ["-march=x86-64-v3"], "x86_64_v4": v4}
    flags_of = {"baseline": [], "x86_64_v4_bf16": bf16} | usual
    sources = _match(cmake, r"add_library\(megaslide_native SHARED([^)]+)\)")
    found = {Path(source).stem: (source, flags) for source in sources}
    kernels = re.findall(r"^megaslide_add_kernels\((\w+) (\w+)([\w ]*)\)", cmake, re.M)
    for name, contract, more in kernels:
        for isa in ["baseline", *([*usual, *more.split()] if on_x86 else [])]:
            own = [f"-DMEGASLIDE_ISA={isa}", f"-ffp-contract={contract}", *flags_of[isa]]
            found[f"{name}_{isa}"] = (f"csrc/src/{name}_kernels.cpp", flags + own)
    if amx and on_x86:
        source = "csrc/src/deformable_attention_tiles.cpp"
        found["tiles"] = (source, [*flags, "-ffp-contract=fast", *tiles])
    return found


def _match(text: str, pattern: str) -> list[str]:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"CMakeLists.txt has nothing like {pattern!r}; mend {__file__}")
    return found[1].split()


def _knows_amx(compiler: str) -> bool:
    command = [compiler, "-mamx-tile", "-mamx-bf16", "-mavx512bf16", "-E", "-x", "c++", "-"]
    try:
        return subprocess.run(command, input=b"", capture_output=True).returncode == 0
    except FileNotFoundError:  # building says so
        return False


def _compile(compiler: str, folder: Path, name: str, what: tuple[str, list[str]]) -> str:
    source, flags = what
    target = str(folder / f"{name}.o")
    include = ["-Icsrc/include", "-Icsrc/src"]
    _run([compiler, *flags, *include, "-c", source, "-o", target])
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"no compiler {command[0]!r} here") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
