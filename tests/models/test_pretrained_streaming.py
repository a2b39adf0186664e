"""Every video transformer of diffusers streams: losses and gradients are those of plain PyTorch.

The oracle is autograd on the resident model. With the whole batch in one micro-batch the operations
are the same in the same order; micro-batches only change the order of sums.
"""

from pathlib import Path

import pytest
import tiny_diffusers as tiny
import torch
from safetensors.torch import load_file

from megaslide.streaming import StreamedModel, TransferHooks, stream
from megaslide.streaming.layout import find_blocks

# Mochi asks for fp32 in autocast, which torch's CPU cannot turn off in a better way than saying so.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")

Gradients = dict[str, torch.Tensor]
SPLITTING = [name for name, model in tiny.MODELS.items() if model.splits]
HOOKS = TransferHooks(max_delay_s=0.0005, seed=3, poison=True)


@pytest.fixture(autouse=True)
def _resize() -> None:
    tiny.install_resize()


def resident(name: str) -> tuple[float, Gradients]:
    model = tiny.build(name)
    loss = tiny.loss(model, tiny.MODELS[name].inputs())
    loss.backward()
    found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


def streamed(name: str, folder: Path, micro_batch_size: int | None) -> tuple[float, Gradients]:
    """Loss and gradients; with beta1 = 0 and no clipping, exp_avg is the gradient."""
    blocks = None if tiny.MODELS[name].found else tiny.MODELS[name].blocks
    model = stream(
        tiny.build(name), betas=(0.0, 0.9), max_grad_norm=None, hooks=HOOKS, blocks=blocks,
        micro_batch_size=micro_batch_size,
    )  # fmt: skip
    loss = tiny.loss(model, tiny.MODELS[name].inputs())
    loss.backward()
    model.step()
    return loss.item(), gradients(model, folder)


def gradients(model: StreamedModel, folder: Path) -> Gradients:
    model.save_optimizer(folder)
    model.close()
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    prefix = "exp_avg."
    return {
        key.removeprefix(prefix): tensor
        for file in files
        for key, tensor in file.items()
        if key.startswith(prefix)
    }


def assert_same(got: Gradients, want: Gradients, tolerance: float, floor: float) -> None:
    """Relative to the largest entry of each gradient, or to `floor` times the largest of all.

    Some gradients are zero but for rounding: a bias of the keys moves all scores of a query alike.
    A parameter without a gradient has zeros in the store.
    """
    assert want.keys() <= got.keys()
    floor *= max(g.abs().max().item() for g in want.values())
    for name, gradient in got.items():
        expected = want.get(name, torch.zeros_like(gradient))
        error = (gradient - expected).abs().max() / expected.abs().max().clamp_min(floor)
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", tiny.MODELS)
def test_loss_and_gradients_are_those_of_the_resident_model(name: str, tmp_path: Path) -> None:
    loss, expected = resident(name)
    streamed_loss, found = streamed(name, tmp_path, None)
    assert streamed_loss == loss
    assert_same(found, expected, 1e-5, floor=1e-6)


@pytest.mark.parametrize("name", SPLITTING)
def test_micro_batches_change_the_order_of_sums_only(name: str, tmp_path: Path) -> None:
    loss, expected = resident(name)
    streamed_loss, found = streamed(name, tmp_path, 1)
    assert streamed_loss == pytest.approx(loss, rel=2e-6)
    assert_same(found, expected, 1e-4, floor=1e-3)


@pytest.mark.parametrize("name", [n for n, model in tiny.MODELS.items() if model.found])
def test_the_blocks_are_found(name: str) -> None:
    model = tiny.build(name)
    found = {block.rpartition(".")[0] for block in find_blocks(model)}
    assert found == set(tiny.MODELS[name].blocks)
