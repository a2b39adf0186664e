"""The run configuration: one YAML file, checked before anything starts."""

from megaslide.config.files import load_config, save_config
from megaslide.config.sections import (
    AttentionConfig,
    CodecConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    SampleConfig,
    Section,
    TextConfig,
    TrainConfig,
    Triple,
    parse_triple,
)

__all__ = [
    "AttentionConfig",
    "CodecConfig",
    "Config",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimConfig",
    "SampleConfig",
    "Section",
    "TextConfig",
    "TrainConfig",
    "Triple",
    "load_config",
    "parse_triple",
    "save_config",
]
