"""`megaslide info PATH`: what a model's folder holds, and what training it would need."""

from pathlib import Path
from typing import TYPE_CHECKING

from megaslide.cli.display import console, count, grid, print_json, size, status

if TYPE_CHECKING:
    from megaslide.planning.description import Description


def describe_folder(folder: Path, as_json: bool) -> None:
    """Print a model's description."""
    with status("reading the model"):
        from megaslide.planning.description import describe

        found = describe(str(folder))
    if as_json:
        print_json(found.to_dict())
    else:
        console().print(grid(_rows(found)))


def _rows(found: "Description") -> dict[str, str]:
    lists = ", ".join(f"{n} in {name}" for name, n in found.blocks.items())
    formats = ", ".join(f"{size(n)} ({name})" for name, n in found.state_bytes.items())
    return {
        "model": found.class_name,
        "family": _family(found),
        "parameters": count(found.parameters),
        "blocks": lists,
        "largest": f"{found.largest_block}, {size(found.largest_block_bytes)} in bf16",
        "attention": _attention(found),
        "state": formats,
        "device": f"{size(found.device_bytes)} besides activations, with two slots",
    }


def _family(found: "Description") -> str:
    if found.family is None:
        return "not known here: trains in a loop of your own, with megaslide.stream"
    return found.family if found.refused is None else f"{found.family}, but: {found.refused}"


def _attention(found: "Description") -> str:
    kind = str(found.attention.get("kind"))
    if found.convertible:
        return f"{kind}; `megaslide convert` makes {found.convertible} modules local"
    if kind == "dense":
        return "dense; cannot be converted"
    return f"{kind}, window {found.attention.get('window')}"
