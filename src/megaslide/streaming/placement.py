"""Where the parts of a pipeline compute: on the device if they fit there, streamed if not.

The text encoder of a video model may be larger than the transformer (UMT5-XXL has 11 GB in bf16).
It only ever runs forward, so its blocks stream through the device like the transformer's, and its
other weights stay there while captions are encoded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megaslide.config import OffloadConfig
from megaslide.errors import InputError
from megaslide.streaming.model import StreamedModel, stream


def chosen_device(offload: OffloadConfig) -> str:
    """`cpu` or `cuda`.

    Raises:
        InputError: `cuda` where torch finds none.
    """
    there = torch.cuda.is_available()
    if offload.device == "auto":
        return "cuda" if there else "cpu"
    if offload.device == "cuda" and not there:
        raise InputError(
            f"offload.device=cuda: torch {torch.__version__} finds no CUDA device",
            "set offload.device=auto, or install a torch build and a driver for it",
        )
    return offload.device


def device_budget(offload: OffloadConfig) -> int | None:
    """Bytes that weights may take on the device; None where there is no limit but RAM."""
    if offload.device_budget_gb is not None:
        return int(offload.device_budget_gb * 1e9)
    if chosen_device(offload) == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return None


def encoder_placement(offload: OffloadConfig) -> Callable[[nn.Module], Any]:
    """How text encoders are placed in a run of these settings: what is called in their place."""
    device = chosen_device(offload)

    def place(model: nn.Module) -> Any:
        nbytes, budget = sum(p.nbytes for p in model.parameters()), device_budget(offload)
        if budget is None or nbytes <= budget:
            return model.to(device)
        blocks = largest_list(model)
        frozen = model.requires_grad_(False)
        streamed = stream(frozen, device=device, blocks=[blocks], device_budget=budget)
        return StreamedEncoder(streamed, torch.device(device))

    return place


class StreamedEncoder:
    """A streamed module where an encoder is expected."""

    def __init__(self, model: StreamedModel, device: torch.device) -> None:
        self.model, self.device = model, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def close(self) -> None:
        self.model.close()


def largest_list(model: nn.Module) -> str:
    """Name of the module list with the most parameters: a transformer's blocks, however deep.

    Raises:
        ValueError: the model has no module list.
    """
    lists = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks that could stream")
    return max(lists, key=lambda name: lists[name])
