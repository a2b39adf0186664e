"""Transformers that others have trained: found, built as their own class, called as one family.

`find_source` locates one, `build_on_meta` builds it for `megaslide.stream`, whose `load` then reads
the weights straight into the store; a `Family` knows how it wants to be called.
"""

from megaslide.models.pretrained.families import FAMILIES, Family, family_of
from megaslide.models.pretrained.loading import build_on_meta
from megaslide.models.pretrained.source import Source, find_source

__all__ = ["FAMILIES", "Family", "Source", "build_on_meta", "family_of", "find_source"]
