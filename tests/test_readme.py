"""What a stranger meets first must work: snippets run, commands exist, links lead somewhere."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megaslide.cli import app
from megaslide.config import load_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def snippets(language: str) -> list[tuple[str, str]]:
    """Each fenced block of a language as (page:number, text)."""
    pairs = []
    for page in PAGES:
        found = [m[3] for m in FENCE.finditer(page.read_text()) if m[2] == language]
        pairs += [(f"{page.name}:{i}", text) for i, text in enumerate(found)]
    return pairs


def commands(program: str) -> list[str]:
    """Lines of the shell snippets that call a program, each once."""
    lines = {line.strip() for _, text in snippets("bash") for line in text.splitlines()}
    return sorted(line for line in lines if line.split(" ")[0] == program)


def ids(pair: tuple[str, str]) -> str:
    return pair[0]


@pytest.mark.parametrize("snippet", snippets("python"), ids=ids)
def test_python_snippet_runs(
    snippet: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, text = snippet
    exec(compile(text, name, "exec"), {"__name__": "snippet"})


def test_readme_shows_streaming_in_a_few_lines() -> None:
    example = next(text for name, text in snippets("python") if name == "README.md:0")
    assert "megaslide.stream(" in example
    assert len([line for line in example.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=ids)
def test_yaml_snippet_is_a_configuration(snippet: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "snippet.yaml"
    path.write_text(snippet[1])
    assert isinstance(yaml.safe_load(snippet[1]), dict)
    load_config(path)


@pytest.mark.parametrize("command", commands("megaslide"))
def test_command_of_the_docs_exists(command: str) -> None:
    _, verb, *rest = command.split()
    usage = CliRunner().invoke(app, [verb, "--help"])
    assert usage.exit_code == 0, verb
    for option in (word for word in rest if word.startswith("--")):
        assert option in usage.stdout, option
    configs = [word for word in rest if word.endswith(".yaml")]
    for config in configs:
        load_config(ROOT / config, [word for word in rest if re.match(r"[a-z_.]+=", word)])


@pytest.mark.parametrize("command", commands("make"))
def test_make_target_of_the_docs_exists(command: str) -> None:
    target = command.partition("#")[0].split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [t for t in targets if "://" not in t]
    assert not [t for t in local if not (page.parent / t).exists()]


def test_every_page_can_be_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert not [p.name for p in (ROOT / "docs").glob("*.md") if f"docs/{p.name}" not in readme]


def test_file_tree_of_the_readme_is_the_real_one() -> None:
    tree = next(text for name, text in snippets("text") if name == "README.md:0")
    listed = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ")}
    package = ROOT / "src" / "megaslide"
    real = {p.name for p in package.iterdir() if not p.name.startswith("__")}
    assert listed >= real - {"errors.py", "tracing.py"}, "README lacks these"
    assert listed <= real, "README names what is not there"


def generator(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_page_is_what_the_configuration_says() -> None:
    generate = generator("generate")
    assert generate.PAGE.read_text() == generate.page(), "run `make format`"


@pytest.mark.slow
def test_planning_page_is_what_the_planner_says() -> None:
    generate = generator("generate_planning")
    assert generate.PAGE.read_text() == generate.page(), "run docs/generate_planning.py"


def test_tables_of_the_evidence_are_those_of_the_results() -> None:
    for page, text in generator("generate_evidence").pages().items():
        assert page.read_text() == text, "run python -m docs.generate_evidence"


def test_ci_does_what_a_contributor_types() -> None:
    script = ROOT / ".ci" / "run"
    steps = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert steps[0] == "set -euo pipefail"
    typed = [line for line in steps if "make" in line]
    assert typed == ["make check", "make native-test", "make sanitize"]
    told = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(line in told for line in typed)
    assert script.stat().st_mode & 0o111


def test_makefile_lists_its_targets() -> None:
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True
    ).stdout
    for target in ("demo", "test", "check", "bench", "format", "clean", "test-slow"):
        assert f"make {target} " in shown


def test_files_that_packaging_names_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (ROOT / project["readme"]).exists()
    assert (ROOT / project["license-files"][0]).read_text().strip().startswith("Apache License")
