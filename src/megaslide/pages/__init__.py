"""The look of every page that megaslide writes: one shell, and the pieces that pages share.

A page can be mailed and opened offline: it loads nothing (a content security policy forbids it),
and the videos are inside as data.
"""

import base64
import os
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

Clips = Sequence[tuple[str, Path]]
"""(caption, path of an mp4)."""

_SHELL = Template(resources.files("megaslide.pages").joinpath("shell.html").read_text("utf-8"))


def write_page(path: Path, *, title: str, body: str, footer: str) -> Path:
    """Write a page; it appears under `path` only when complete.

    Args:
        path: where the page goes; parent folders are created.
        title: heading, as text.
        body: HTML below the heading.
        footer: HTML.

    Raises:
        OSError: the page cannot be written.
    """
    text = _SHELL.substitute(title=escape(title), body=body, footer=footer)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".partial-{path.name}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
    return path


def clip_gallery(heading: str, clips: Clips) -> str:
    """Playing clips with their captions; nothing where there are none."""
    if not clips:
        return ""
    figures = (
        f"<figure><video autoplay loop muted playsinline src='{_data_uri(path)}' "
        f"aria-label='{escape(caption)}'></video>"
        f"<figcaption>{escape(caption) or '<i>no caption</i>'}</figcaption></figure>"
        for caption, path in clips
    )
    return f"<h3>{heading}</h3><div class='clips'>{''.join(figures)}</div>"


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Table rows; names are text, values are HTML."""
    return "".join(f"<tr><td>{escape(name)}</td><td>{value}</td></tr>" for name, value in pairs)


def _data_uri(path: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
