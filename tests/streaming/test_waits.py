"""Every wait of the engine is there for a reason: without it, two lanes touch the same memory.

Each wait has a name. They are left out one by one, in fact and in the clocks of `ordering`, and
every time the run must show unordered accesses, fail, or give other numbers. Conversely, with all
waits in place nothing is unordered, and a wait with a new name fails the test until it is listed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from ordering import ordered

from megaslide.streaming import TransferHooks, stream

pytestmark = pytest.mark.usefixtures("backend")

WAITS = (
    "slot loaded",
    "slot free",
    "weights updated",
    "prefetch before the weights change",
    "gradient computed",
    "gradient buffer landed",
    "gradients landed",
    "gradient landed",
    "resident gradient landed",
    "resident loaded",
    "resident free",
    "resident updated",
    "resident before the weights change",
    "updates finished",
    "activation computed",
    "activation left",
    "activation memory free",
    "activation returned",
)


def train(streamed: Any, data: list[Any]) -> list[float]:
    losses = []
    for number, (x, c, y) in enumerate(data):
        loss = (streamed(x, c) - y).square().mean()
        with streamed.final_backward():
            loss.backward()
        if number == 0 and not streamed._early:  # leaves prefetched weights behind
            with torch.no_grad():
                streamed(x, c)
        streamed.step()
        losses.append(loss.item())
    return losses


def scenario(folder: Path) -> list[Any]:
    """Everything that makes a lane wait: training, clipped or not, averages, files."""
    seen: list[Any] = []
    hooks = TransferHooks(max_delay_s=0.0005, poison=True)
    data = toys.batches(2)
    for clip, slots in ((0.1, 2), (None, 3)):
        model = toys.net(dim=8, depth=3)
        streamed = stream(
            model, lr=1e-2, max_grad_norm=clip, activations="host", ema_decay=0.5,
            micro_batch_size=2, slots=slots, hooks=hooks,
        )  # fmt: skip
        seen.append(train(streamed, data))
        x, c, _ = data[0]
        with torch.no_grad(), streamed.use_ema():
            seen.append(streamed(x, c).tolist())
        train(streamed, data[:1])
        streamed.save_pretrained(folder)
        seen.append({k: v.tolist() for k, v in streamed.state_dict().items()})
        with streamed.use_ema():
            pass
        streamed.load(folder)
        seen.append(train(streamed, data[1:]))
        streamed.close()
    return seen


_expected: dict[str, list[Any]] = {}
"""By device: all backends of one have the same bits."""


@pytest.fixture
def expected(backend: str, tmp_path: Path) -> list[Any]:
    if toys.DEVICE not in _expected:
        _expected[toys.DEVICE] = scenario(tmp_path)
    return _expected[toys.DEVICE]


def test_nothing_is_unordered_and_every_wait_is_listed(
    expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ordered(monkeypatch) as log:
        assert scenario(tmp_path) == expected
    assert log.races() == []
    assert log.reasons == set(WAITS)


@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_missed(
    wait: str, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ordered(monkeypatch, skip=wait) as log:
        try:
            result = scenario(tmp_path)
        except Exception:
            return
    assert log.races() or result != expected
