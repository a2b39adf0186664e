"""Transformers that others have trained: found, built as their own class, called as one family.

`find_source` locates one, `build_on_meta` builds it for `megaslide.stream`, whose `load` then reads
the weights straight into the store; a `Family` knows how it wants to be called. `convert` makes
its attention local.
"""

from megaslide.models.pretrained.conversion import (
    CONVERTIBLE,
    added_parameters,
    convert,
    converted_config,
)
from megaslide.models.pretrained.families import FAMILIES, family_of
from megaslide.models.pretrained.family import Family
from megaslide.models.pretrained.loading import build_on_meta
from megaslide.models.pretrained.source import Source, find_source

__all__ = [
    "CONVERTIBLE",
    "FAMILIES",
    "Family",
    "Source",
    "added_parameters",
    "build_on_meta",
    "convert",
    "converted_config",
    "family_of",
    "find_source",
]
