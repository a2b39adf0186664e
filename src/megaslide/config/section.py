"""What all sections of a configuration share: their base, and how sizes are written."""

import re
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

Triple = tuple[int, int, int]


class Section(BaseModel):
    """Base of all sections: keyword-only, immutable, finite numbers, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def changed_keys(section: Section, names: Iterable[str]) -> list[str]:
    """Those of the keys that a section has and that do not have their default."""
    fields = type(section).model_fields
    known = [name for name in names if name in fields]
    return [name for name in known if getattr(section, name) != fields[name].default]


def parse_triple(text: str) -> Triple:
    """`"8x64x96"` as (8, 64, 96); ValueError names what is accepted."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"{text!r} is not TxHxW, such as 8x64x96")
    t, h, w = (int(group) for group in match.groups())
    return t, h, w
