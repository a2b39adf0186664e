"""Text encoders that are larger than the device give through it what they give whole.

The oracle is the same encoder, whole, in RAM.
"""

import threading
from pathlib import Path

import pytest
import tiny_pipelines
import torch

from megaslide.config import OffloadConfig, TextConfig
from megaslide.data.text import TextEncoder, build_text_encoder
from megaslide.data.text_encoders import PretrainedTextEncoder
from megaslide.errors import InputError
from megaslide.streaming.placement import StreamedEncoder, encoder_placement, largest_list

BUDGET_GB = 0.5e-3
CAPTIONS = ["a red kite over the sea", "", "digit 3 moves left"]


def write(root: Path, transformer: str) -> None:
    (root / "transformer").mkdir()
    (root / "transformer" / "config.json").write_text(f'{{"_class_name": "{transformer}"}}')
    sizes = {"inner": 1024, "layers": 8}  # so that two blocks are less than all
    if transformer == "HunyuanVideoTransformer3DModel":
        tiny_pipelines.write_hunyuan_text(root, **sizes)
    else:
        kind = "UMT5" if "Wan" in transformer else "T5"
        tiny_pipelines.write_text(root, kind=kind, **sizes)


def encoder_of(root: Path, budget: float | None) -> TextEncoder:
    config = TextConfig(name="encoder", pretrained_model_name_or_path=str(root))
    return build_text_encoder(config, encoder_placement(OffloadConfig(device_budget_gb=budget)))


@pytest.mark.parametrize(
    "transformer",
    ["WanTransformer3DModel", "LTXVideoTransformer3DModel", "HunyuanVideoTransformer3DModel"],
)
def test_a_streamed_encoder_gives_what_it_gives_whole(transformer: str, tmp_path: Path) -> None:
    write(tmp_path, transformer)
    whole, small = encoder_of(tmp_path, None), encoder_of(tmp_path, BUDGET_GB)
    assert isinstance(small, PretrainedTextEncoder)
    threads = threading.active_count()
    (text, mask), (expected, expected_mask) = (e.encode(CAPTIONS) for e in (small, whole))
    assert isinstance(small._model, StreamedEncoder)
    assert torch.equal(mask, expected_mask)
    torch.testing.assert_close(text, expected, rtol=1e-6, atol=1e-6)
    assert expected.abs().max() > 0.1
    pooled, expected_pooled = (e.pooled(CAPTIONS) for e in (small, whole))
    if expected_pooled is not None:
        assert isinstance(small._pooler._model, StreamedEncoder)
        torch.testing.assert_close(pooled, expected_pooled, rtol=1e-6, atol=1e-6)
    device = small._model.model.device_bytes
    assert device["slots"] + device["resident"] <= BUDGET_GB * 1e9
    small.close()
    assert threading.active_count() == threads
    assert torch.equal(small.encode(CAPTIONS)[0], text), "and it loads again"
    small.close()


def test_an_encoder_that_fits_is_not_streamed(tmp_path: Path) -> None:
    write(tmp_path, "WanTransformer3DModel")
    encoder = encoder_of(tmp_path, 1.0)
    encoder.encode(CAPTIONS)
    assert isinstance(encoder, PretrainedTextEncoder)
    assert isinstance(encoder._model, torch.nn.Module)


def test_a_device_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "WanTransformer3DModel")
    with pytest.raises(InputError, match="device"):
        encoder_of(tmp_path, 1e-6).encode(CAPTIONS)


def test_the_blocks_are_the_largest_list() -> None:
    lists = {"small": 1, "large": 3}
    model = torch.nn.Module()
    model.inner = torch.nn.Module()
    for name, count in lists.items():
        setattr(model.inner, name, torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(count)))
    assert largest_list(model) == "inner.large"
    with pytest.raises(ValueError, match="Linear has no list of blocks"):
        largest_list(torch.nn.Linear(1, 1))
