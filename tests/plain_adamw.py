"""torch.optim.AdamW with exact square roots, the oracle of everything that trains.

Torch's square root depends on library and processor; megaslide's does not (ops/adamw/reference.py).
With the nearest float in its place, torch's bits are comparable on any machine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def nearest_root(x: Tensor) -> Tensor:
    """The nearest float to the root of a float32, by way of doubles; doubles as torch has them."""
    return x.double().sqrt().float() if x.dtype == torch.float32 else x.sqrt()


class ExactRoots(TorchDispatchMode):
    """Every torch.sqrt inside is `nearest_root`."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert "foreach" not in str(func), "roots of a list are not covered: use foreach=False"
        if func is torch.ops.aten.sqrt.default:
            return nearest_root(*args)
        return func(*args, **kwargs or {})


class PlainAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, single-tensor form, with exact roots."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, foreach=False, **options)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with ExactRoots():
            super().step(closure)
