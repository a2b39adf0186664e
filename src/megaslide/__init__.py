"""megaslide: train all parameters of video diffusion transformers that do not fit the GPU.

`megaslide.stream` and the others are loaded at their first use, because `import megaslide` also
happens when the command line only has to print its help, and torch alone would take seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaslide.models.network import load
    from megaslide.streaming import StreamedModel, stream

__all__ = ["StreamedModel", "load", "stream"]
_HOMES = {"load": "megaslide.models.network"}
"""Modules of those that are not in `megaslide.streaming`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'megaslide' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "megaslide.streaming")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
