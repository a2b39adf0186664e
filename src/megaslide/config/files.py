"""A configuration from its YAML file and the command line, checked before anything starts.

An unknown key is an error that names the nearest valid one, because a misspelt key that is silently
ignored costs a night of training. Dotted overrides (`optim.learning_rate=1e-5`) come from the
command line and are parsed as YAML.
"""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megaslide.config.sections import Config
from megaslide.errors import InputError


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (None: all defaults) and apply `section.key=value` overrides.

    Raises:
        InputError: unreadable file, malformed override, unknown key, or a value out of range.
    """
    values = {} if path is None else _read_yaml(path)
    for override in overrides:
        _apply_override(values, override)
    source = "command line" if path is None else str(path)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{source}: {_describe(error)}") from None


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML that `load_config` reads back unchanged."""
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give the path of a YAML config") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file", "give the path of a YAML config") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values or {}, dict):
        raise InputError(f"{path}: the top level is a {type(values).__name__}, not sections")
    return values or {}


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise InputError(f"override {override!r} has no '='", "write section.key=value")
    *sections, leaf = key.strip().split(".")
    node = values
    for section in sections:
        child = node.setdefault(section, {})
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            raise InputError(f"override {override!r}: {section} is a value, not a section")
        node = child
    try:
        node[leaf] = _scalar(text)
    except yaml.YAMLError as error:
        raise InputError(f"override {override!r}: the value is not valid YAML: {error}") from None


def _scalar(text: str) -> Any:
    """YAML value; also reads `1e-5`, which YAML 1.1 takes for a string."""
    value = yaml.safe_load(text)
    if isinstance(value, str) and value == text.strip():  # a quoted number stays text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _describe(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {where!r}; {_nearest(item['loc'])}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{where or 'config'}: {message} (got {_short(item['input'])})")
    return "\n  ".join(lines)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(location: tuple[int | str, ...]) -> str:
    section: type[BaseModel] = Config
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation  # type: ignore[assignment]
    valid = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), valid, n=1, cutoff=0.5)
    if close:
        return f"did you mean {'.'.join([*map(str, location[:-1]), close[0]])!r}?"
    return f"valid keys here: {', '.join(valid)}"
