"""The run configuration: one YAML file, checked before anything starts."""

from megaslide.config.data import CodecConfig, DataConfig, ImageConfig, TextConfig
from megaslide.config.files import load_config, save_config
from megaslide.config.section import Section, Triple, parse_triple
from megaslide.config.sections import (
    AttentionConfig,
    Config,
    LogConfig,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    SampleConfig,
    TrainConfig,
)

__all__ = [
    "AttentionConfig",
    "CodecConfig",
    "Config",
    "DataConfig",
    "ImageConfig",
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
