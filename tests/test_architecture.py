"""The layout's rules, held by a test: imports point downwards, files and functions stay small.

Levels are those of docs/architecture.md. From sampling upwards every part has a level of its own
(training uses sampling, the demo uses both), because a trainer that samples through an injected
callback reads worse than one that imports the sampler. Planning stands on streaming, whose own
arithmetic of bytes it uses.
"""

import ast
import statistics
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "megaslide"
LEVELS = {
    "errors": 0, "tracing": 0,
    "config": 1, "locks": 1,
    "hub": 2, "ops": 2, "pages": 2, "runs": 2, "weights": 2,
    "models": 3, "streaming": 3, "diffusion": 3, "data": 3,
    "sampling": 4, "exporting": 4, "planning": 4,
    "evaluation": 5,
    "training": 6,
    "demo": 7,
    "cli": 8, "__init__": 8,
    "__main__": 9,
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION, MEDIAN_FUNCTION = 400, 60, 12


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names.add(node.module or "")
            if node.module == "megaslide":
                names |= {f"megaslide.{alias.name}" for alias in node.names}
    return {n.split(".")[1] for n in names if n.startswith("megaslide.")}


def functions(path: Path) -> list[tuple[str, int]]:
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.name, (n.end_lineno or 0) - n.lineno + 1) for n in nodes if isinstance(n, kinds)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_file_keeps_the_rules(path: Path) -> None:
    own = part_of(path)
    upward = {p for p in imported_parts(path) if p != own and LEVELS[p] >= LEVELS[own]}
    assert not upward, f"{path} (level {LEVELS[own]}) imports {upward}: not below it"
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_FILE, f"{path}: {len(lines)} lines, at most {MAX_FILE}"
    long = [(name, n) for name, n in functions(path) if n > MAX_FUNCTION]
    assert not long, f"{path}: functions over {MAX_FUNCTION} lines: {long}"
    has_code = any(line.strip() for line in lines)
    assert not has_code or ast.get_docstring(ast.parse(path.read_text())), f"{path}: no docstring"


def test_median_function_is_short() -> None:
    sizes = [n for path in FILES for _, n in functions(path)]
    assert statistics.median(sizes) <= MEDIAN_FUNCTION


def test_print_only_in_cli() -> None:
    for path in FILES:
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        prints = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        assert not prints or part_of(path) == "cli", f"{path}: print at lines {prints}"
