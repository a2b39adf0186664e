"""The command: builds what is missing, runs the parts, keeps what they found, prints it last."""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GRACE_S = 10.0
"""By how much a part ends its own measuring before it would be killed."""


@dataclass(frozen=True)
class Part:
    """A name, the function `module.function(session)`, and the seconds it may take."""

    name: str
    function: str
    budget_s: float


PARTS = (
    Part("parity", "kernels.parity", 85),
    Part("engine", "engine.run", 60),
    Part("link", "copies.link", 25),
    Part("attention", "kernels.attention", 75),
    Part("adamw", "copies.optimizer", 20),
    Part("steps-1b", "steps.small", 45),
    Part("steps-4b", "steps.middle", 75),
    Part("steps-largest", "steps.largest", 65),
    Part("long-block", "long_block.run", 0),
    Part("steps-largest8", "steps.largest8", 0),
)
"""The last two have what the others left over."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if a check failed or a part broke."""
    options = _parser().parse_args(arguments)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    if options.part:
        _run_here(options, _named(options.part))
        return 0
    started = time.monotonic()
    out = options.out or _default_folder(options)
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"parts": {}}
    report["native"] = _attempt(_native)
    report["machine"] = _attempt(_machine)
    chosen = [part for part in PARTS if part.name in options.parts]
    for index, part in enumerate(chosen):
        left = options.budget_s - (time.monotonic() - started)
        limit = allowed_s(left, chosen[index:])
        print(f"{part.name}: at most {limit:.0f} s", flush=True)
        report["parts"][part.name] = run_part(options, part, limit, out)
        report["seconds"] = time.monotonic() - started
        (out / "gpu-check.json").write_text(json.dumps(report, indent=1))
    print(table(report))
    return int(failed(report))


def allowed_s(left: float, parts: Sequence[Part]) -> float:
    """Seconds for the first of the parts: what those behind it do not need, and its own at least.

    Nothing beyond what is left.
    """
    later = sum(part.budget_s for part in parts[1:])
    return max(0.0, min(left, max(parts[0].budget_s, left - later)))


def run_part(options: argparse.Namespace, part: Part, limit: float, out: Path) -> dict[str, Any]:
    """The part's rows, whatever became of it, and how it ended."""
    if limit < 1:
        return {"ended": "skipped: the budget is used up", "rows": []}
    command = [
        sys.executable, "-m", "benchmarks.gpu_check", "--part", part.name, "--out", str(out),
        "--device", options.device, "--budget-s", str(max(1.0, limit - GRACE_S)),
        *(["--smoke"] if options.smoke else []),
    ]  # fmt: skip
    if options.in_process:
        _run_here(options, part, out)
        ended = "done"
    else:
        ended = run_child(command, limit, out / f"part-{part.name}.log")
    found = []
    for rows in sorted(out.glob(f"part-{part.name}*.json")):
        if rows.stem == f"part-{part.name}" or "-shard" in rows.stem:
            found += json.loads(rows.read_text())
            rows.unlink()
    return {"ended": ended, "rows": found}


def run_child(command: Sequence[str], limit: float, log: Path) -> str:
    """`done`, or how it ended otherwise; then what it said last is kept in the log."""
    with log.open("w") as said:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(timeout=limit)
            ended = "done" if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"killed after {limit:.0f} s"
        finally:
            _end(child)
    if ended == "done":
        log.unlink()
    else:
        ended += f": {log.read_text(errors='replace')[-1500:]}"
    return ended


def _end(child: "subprocess.Popen[bytes]") -> None:
    """The child and those that it started, which are in a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 9)
    child.wait()


def _run_here(options: argparse.Namespace, part: Part, out: Path | None = None) -> None:
    from benchmarks.gpu_check.session import Chip, Session

    module, function = part.function.split(".")
    run: Callable[[Session], None] = getattr(
        import_module(f"benchmarks.gpu_check.{module}"), function
    )
    session = Session(
        chip=Chip(options.device), smoke=options.smoke, out=out or options.out, part=part.name,
        budget_s=options.budget_s, shard=options.shard,
    )  # fmt: skip
    run(session)


# ---- the report ----------------------------------------------------------------------------------

SHOWN = (
    "ms", "tflop_s", "limit_fraction", "peak_bytes", "gb_s", "of_bare", "step_s", "tokens_s", "mfu",
    "overlap", "peak_device_bytes", "ns_per_parameter", "kernel_ns_per_parameter", "parameters",
    "worst", "passed", "tests", "copy_bytes_s", "gemm_flop_s",
)  # fmt: skip
"""Figures of a row that the table has room for, in order."""


def table(report: dict[str, Any]) -> str:
    """A line per row; of the parity rows only those that failed, and how many there were."""
    lines = []
    for name, part in report["parts"].items():
        rows = part["rows"]
        if part["ended"] != "done" or not rows:
            lines.append(f"{name:15} {part['ended'].splitlines()[0]}")
        if name == "parity":
            good = [row for row in rows if "worst" in row]
            lines.append(f"{name:15} {len(good)} of {len(rows)} cases within their bounds")
            rows = [row for row in rows if row not in good]
        lines += [f"{name:15} {row['name']:34} {_figures(row)}" for row in rows]
    lines.append(f"{report['seconds']:.0f} s in all; native kernels: {report['native']}")
    return "\n".join(lines)


def failed(report: dict[str, Any]) -> bool:
    """Whether any check failed or part broke; what was skipped for time or memory is no failure."""
    parts = report["parts"].values()
    broken = any(part["ended"].startswith(("failed", "killed")) for part in parts)
    return broken or any("error" in row for part in parts for row in part["rows"])


def _figures(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"FAILED {row['error'][:120]}"
    if "skipped" in row:
        return f"skipped: {row['skipped'][:80]}"
    known = ((key, row[key]) for key in SHOWN if row.get(key) is not None)
    return "  ".join(f"{key} {_short(value)}" for key, value in known)


def _short(value: float) -> str:
    return f"{value / 1e9:.4g}G" if value >= 1e9 else f"{value:.4g}"


# ---- the machine ---------------------------------------------------------------------------------


def _attempt(work: Callable[[], Any]) -> Any:
    """What is asked, or why there is no answer; the parts run all the same."""
    try:
        return work()
    except Exception as error:
        return f"failed: {error}"[:2000]


def _native() -> str:
    sys.path[:0] = [str(ROOT / "src")]
    from benchmarks.gpu_check import native

    return native.ensure(next((c for c in ("g++", "clang++") if shutil.which(c)), "g++"))


def _machine() -> dict[str, Any]:
    from megaslide.planning.hardware import package_version, probe

    versions = {name: package_version(name) for name in ("torch", "triton")}
    return {**probe().provenance(), "versions": versions}


def _default_folder(options: argparse.Namespace) -> Path:
    """`$OUT`, else a folder of the results that is named after the device."""
    if given := os.environ.get("OUT"):
        return Path(given)
    from benchmarks.gpu_check.session import Chip

    words = Chip(options.device).name.lower().split()
    return RESULTS / (words[-1] if options.device != "cpu" else "cpu")


def _named(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_check", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget-s", type=float, default=460.0, help="seconds in all")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, help="default: $OUT, or a folder of the results")
    parser.add_argument("--smoke", action="store_true", help="toy sizes; nothing is measured")
    parser.add_argument("--in-process", action="store_true", help="all parts in this process")
    parser.add_argument("--part", choices=names, help="run one part only, here, into --out")
    parser.add_argument("--shard", type=int, help="which of the processes of a split part")
    return parser


if __name__ == "__main__":
    sys.exit(main())
