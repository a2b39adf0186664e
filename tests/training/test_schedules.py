"""The learning rate against diffusers' schedulers, step by step."""

import pytest
import torch
from diffusers.optimization import get_scheduler

from megaslide.config import OptimConfig
from megaslide.training.schedules import learning_rate


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_equals_diffusers(name: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=5, num_training_steps=30)
    config = OptimConfig(learning_rate=0.3, lr_scheduler=name, lr_warmup_steps=5)  # type: ignore[arg-type]
    for step in range(30):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(config, step, 30) == pytest.approx(expected, abs=1e-12)
        scheduler.step()
