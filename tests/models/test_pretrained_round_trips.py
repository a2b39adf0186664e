"""Every video transformer of diffusers, from its files through three steps of training to files.

The oracle is diffusers' own loader with plain PyTorch: the model that `from_pretrained` gives,
resident, with torch's clipping and AdamW. Which arguments a class takes, and what is trained on
what it returns, is a loop of one's own; that is how classes train whose family is not known here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_diffusers as tiny
import torch
from plain_adamw import PlainAdamW
from torch import Tensor, nn

from megaslide.models.pretrained import build_on_meta, find_source
from megaslide.streaming import StreamedModel, stream

# Mochi asks for fp32 in autocast, which torch's CPU cannot turn off in a better way than saying so.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
STEPS, RELATIVE = 3, 1e-6
# A large eps, as otherwise Adam turns gradients that are zero but for rounding into full steps.
ADAMW = {"lr": 1e-3, "eps": 1e-2}


@pytest.fixture(autouse=True)
def _resize() -> None:
    tiny.install_resize()


def stock(folder: Path, name: str) -> nn.Module:
    """As a user of diffusers loads it."""
    import diffusers

    loader = getattr(diffusers, tiny.MODELS[name].class_name)
    model: nn.Module = loader.from_pretrained(folder, subfolder="transformer")
    return model


def streamed_from(folder: Path, name: str) -> StreamedModel:
    """Read straight into the store, as `megaslide train` does."""
    source = find_source(str(folder))
    blocks = None if tiny.MODELS[name].found else tiny.MODELS[name].blocks
    model = stream(build_on_meta(source, torch.float32), blocks=blocks, **ADAMW)
    model.load(source.folder)
    return model


def train_both(streamed: StreamedModel, resident: nn.Module, name: str) -> None:
    """Losses and norms must be the same at each of the steps."""
    optimizer = PlainAdamW(resident.parameters(), **ADAMW)
    for _ in range(STEPS):
        inputs = tiny.MODELS[name].inputs()
        expected, loss = tiny.loss(resident, inputs), tiny.loss(streamed, inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=RELATIVE)
        expected.backward()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(resident.parameters(), 1.0)
        assert streamed.step().grad_norm == pytest.approx(norm.item(), rel=RELATIVE)
        optimizer.step()
        optimizer.zero_grad()


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Relative to the largest entry."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def predictions(model: Callable[..., Any], name: str) -> list[Tensor]:
    return tiny.outputs(model(**tiny.MODELS[name].inputs(), return_dict=False))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_training_from_files_to_files_is_that_of_the_stock_model(name: str, tmp_path: Path) -> None:
    tiny.write_pipeline(tmp_path / "before", name, shard_size="20KB")
    resident = stock(tmp_path / "before", name).train()
    start = {key: weight.clone() for key, weight in resident.state_dict().items()}
    streamed = streamed_from(tmp_path / "before", name)
    train_both(streamed, resident, name)
    streamed.save_pretrained(tmp_path / "after" / "transformer")

    again, weights = stock(tmp_path / "after", name), resident.state_dict()
    found, held = again.state_dict(), streamed.state_dict()
    assert found.keys() == weights.keys() == held.keys()
    for key, expected in weights.items():
        assert torch.equal(found[key], held[key]), key
        assert relative_error(found[key], expected) <= RELATIVE, key
    moved = max((found[key] - weight).abs().max().item() for key, weight in start.items())
    assert moved > ADAMW["lr"] / 10, "equal because nothing was trained would prove nothing"
    ours, theirs = predictions(streamed.eval(), name), predictions(again.eval(), name)
    assert len(ours) == len(theirs) > 0
    for got, expected in zip(ours, theirs, strict=True):
        assert relative_error(got, expected) <= RELATIVE
    streamed.close()
