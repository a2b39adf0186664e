"""The transformer, its attention kinds, and its files on disk.

Import from here what a caller needs: building a model, its configuration, and the presets.
"""

from megaslide.models.dit import VideoDiT, VideoDiTConfig, build_model, count_parameters
from megaslide.models.presets import PRESETS, Preset, resolve_config

__all__ = [
    "PRESETS",
    "Preset",
    "VideoDiT",
    "VideoDiTConfig",
    "build_model",
    "count_parameters",
    "resolve_config",
]
