"""Writes docs/configuration.md from the configuration itself, so that the page cannot go stale.

Run by `make format`; a test fails when the page and the sections disagree.
"""

import types
import typing
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megaslide.config import Config, Triple

PAGE = Path(__file__).parent / "configuration.md"
INTRODUCTION = """# Configuration

<!-- Written by docs/generate.py from src/megaslide/config/. Do not edit: run `make format`. -->

One YAML file describes a run. Every key has a default, so a file only holds what differs, and
any value can be replaced on the command line:

```bash
megaslide train configs/tiny.yaml optim.learning_rate=1e-5 train.max_train_steps=200
```

An unknown key stops the run at once and names the nearest valid one. The resolved configuration is
saved as `config.yaml` in the run's folder. `megaslide info --schema` prints all this as a JSON
schema, which editors use to complete and check the file.
"""
NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Triple: "three integers",
    tuple[float, float, float]: "three numbers",
    tuple[str, ...]: "list of texts",
    tuple[int, ...]: "list of integers",
}
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def page() -> str:
    """The whole page as Markdown."""
    return INTRODUCTION + "".join(_sections("", Config))


def _sections(prefix: str, section: type[BaseModel]) -> list[str]:
    """This section's table, then those of the sections inside it."""
    plain = {n: f for n, f in section.model_fields.items() if not _is_section(f)}
    inner = {n: f for n, f in section.model_fields.items() if _is_section(f)}
    title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
    rows = [_row(name, field) for name, field in plain.items()]
    head = "| key | default | accepts | meaning |\n|---|---|---|---|\n"
    text = f"\n## {title}\n\n{section.__doc__}\n\n{head}{''.join(rows)}"
    nested = [_sections(f"{prefix}{name}.", field.annotation) for name, field in inner.items()]
    return [text, *(part for parts in nested for part in parts)]


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split())  # a row of a table is one line
    cells = (f"`{name}`", f"`{_value(field.default)}`", _accepts(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _value(value: Any) -> str:
    """A default as YAML would have it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value}" if value != "" else '""'


def _accepts(field: FieldInfo) -> str:
    kinds: list[Any] = [field.annotation]
    if typing.get_origin(field.annotation) in (types.UnionType, typing.Union):
        kinds = list(typing.get_args(field.annotation))
    optional = type(None) in kinds
    kinds = [kind for kind in kinds if kind is not type(None)]
    text = " or ".join(_kind(kind) for kind in kinds) + _bounds(field)
    return f"{text}, or null" if optional else text


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    return NAMES[kind]


def _bounds(field: FieldInfo) -> str:
    kinds = (annotated_types.Gt, annotated_types.Ge, annotated_types.Lt, annotated_types.Le)
    bounds = [item for item in field.metadata if isinstance(item, kinds)]
    parts = [(BOUNDS[n], getattr(b, n)) for b in bounds for n in BOUNDS if hasattr(b, n)]
    return " " + " and ".join(f"{sign} {value}" for sign, value in parts) if parts else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
