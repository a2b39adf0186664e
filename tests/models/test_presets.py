"""Presets keep the promise of their names; combinations that cannot be built say why."""

from typing import Any

import pytest
import torch

from megaslide.config import AttentionConfig, ModelConfig
from megaslide.errors import InputError
from megaslide.models import PRESETS, VideoDiTConfig, build_model, count_parameters, resolve_config


def resolve(model: dict[str, Any], **attention: Any) -> VideoDiTConfig:
    return resolve_config(
        ModelConfig(**model), AttentionConfig(**attention), in_channels=16, text_dim=4096
    )


def formula(config: VideoDiTConfig) -> int:
    """Parameters by hand, for the default attention."""
    d, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    patch, inner = config.in_channels * 4, round(config.mlp_ratio * d)
    attention = 2 * (4 * (d * d + d) + 2 * head)
    offsets = 27 * d + d + 12 * d + 12
    mlp = 2 * d * inner + inner + d
    embeds = (patch * d + d) + (256 * d + d) + (d * d + d) + (4096 * d + d) + (d * d + d)
    gain = config.in_channels * d + config.in_channels
    heads = (6 * d * d + 6 * d) + (2 * d * d + 2 * d) + (d * patch + patch) + gain
    positions = 3 * 64 * d
    return config.num_layers * (6 * d + attention + offsets + mlp) + embeds + positions + heads


@pytest.mark.parametrize("name", PRESETS)
def test_counts_on_meta_equal_the_formula_and_the_name(name: str) -> None:
    config = resolve({"preset": name})
    count = count_parameters(config)
    assert count == formula(config)
    if name.endswith("b"):
        assert count == pytest.approx(float(name[:-1]) * 1e9, rel=0.05)


def test_the_largest_is_within_a_percent_of_105_billion() -> None:
    assert count_parameters(resolve({"preset": "105b"})) == pytest.approx(105e9, rel=0.01)


def test_tiny_is_tiny() -> None:
    assert 1e6 < count_parameters(resolve({"preset": "tiny"})) < 4e6


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", ["deformable", "neighborhood", "swin", "dense"])
def test_every_preset_builds_on_meta_with_every_kind(name: str, kind: str) -> None:
    attention = AttentionConfig(kind=kind, offset_groups=2, num_register_tokens=4)
    with torch.device("meta"):
        model = build_model(ModelConfig(preset=name), attention, in_channels=48, text_dim=128)
    assert len(model.blocks) == PRESETS[name].num_layers
    assert all(parameter.is_meta for parameter in model.parameters())


def test_overrides_and_attention_reach_the_model() -> None:
    model = build_model(
        ModelConfig(hidden_size=48, num_layers=3, num_attention_heads=2, patch_size=(2, 1, 1)),
        AttentionConfig(kind="deformable", window=(1, 5, 5), offset_kind="tap", offset_groups=2),
        in_channels=4,
        text_dim=7,
    )
    config = model.config
    assert (config.hidden_size, config.num_layers, config.num_attention_heads) == (48, 3, 2)
    assert (config.patch_size, config.window, config.offset_kind) == ((2, 1, 1), (1, 5, 5), "tap")
    assert model.blocks[0].attn1.offset_net.proj.out_features == 2 * 3 * 25
    assert model(torch.randn(1, 4, 2, 6, 6), torch.ones(1), torch.randn(1, 2, 7)).shape[2] == 2


@pytest.mark.parametrize(
    ("model", "attention", "parts"),
    [
        ({"preset": "7b"}, {}, ["model.preset='7b'", "did you mean", "5b"]),
        ({"preset": "Tiny"}, {}, ["'Tiny'", "did you mean 'tiny'"]),
        ({"hidden_size": 100, "num_attention_heads": 3}, {}, ["hidden_size=100", "=3", "102"]),
        ({"hidden_size": 20, "num_attention_heads": 4}, {}, ["hidden_size=20", "head dim 5"]),
        ({"hidden_size": 16, "num_attention_heads": 4}, {}, ["head dim 4", "6 or more"]),
        ({}, {"offset_groups": 3}, ["offset_groups=3", "num_attention_heads=4", "[1, 2, 4]"]),
        ({"patch_size": (1, 0, 2)}, {}, ["patch_size=(1, 0, 2)"]),
        ({}, {"offset_range": (1, -1, 3)}, ["offset_range=(1.0, -1.0, 3.0)"]),
    ],
)
def test_impossible_combinations_name_key_number_and_fix(
    model: dict[str, Any], attention: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        resolve(model, **attention)
    assert caught.value.fix
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "field",
    [
        {"attention_kind": "sparse"},
        {"offset_kind": "bend"},
        {"freq_dim": 33},
        {"num_register_tokens": -1},
        {"num_layers": 0},
        {"window": (3, 3)},
    ],
)
def test_direct_configs_are_checked_too(field: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(field))):
        VideoDiTConfig(**{"in_channels": 4, "text_dim": 8, **field})


def test_config_survives_json_types() -> None:
    config = VideoDiTConfig(in_channels=4, text_dim=8, window=(1, 3, 5), offset_range=(1, 2, 3))
    assert VideoDiTConfig.from_dict({"_class_name": "VideoDiT", **config.to_dict()}) == config
    assert config.to_dict()["window"] == [1, 3, 5]
    with pytest.raises(InputError, match="unknown keys \\['heads'\\]"):
        VideoDiTConfig.from_dict({**config.to_dict(), "heads": 2})
    with pytest.raises(InputError, match="missing keys \\['in_channels', 'text_dim'\\]"):
        VideoDiTConfig.from_dict({})
