"""Blocks in chunks of rows: plain PyTorch's training, on a block that is no video model.

The input's gradient is written over the output's, so half of this is about who else may see it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
import toys
from torch import Tensor, nn

from megaslide.errors import InputError
from megaslide.streaming import TransferHooks, stream

pytestmark = pytest.mark.usefixtures("backend")

ADAMW = {"lr": 3e-3, "weight_decay": 0.1}
ROWS, STEPS = 7, 4


class Piece(NamedTuple):
    own: slice
    reach: slice
    arguments: dict[str, Any]


class Local(nn.Module):
    """Rows see `far` rows to the left and right, those beyond the ends being zero."""

    row_arguments = ("hidden", "table")

    def __init__(self, dim: int, far: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.far, self.dropout = far, nn.Dropout(dropout)
        self.mix, self.out = nn.Linear((2 * far + 1) * dim, dim), nn.Linear(dim, dim)
        self.register_buffer("seen", torch.zeros(()))

    def forward(
        self, hidden: Tensor, shift: Tensor, *, table: Tensor, own: slice | None = None
    ) -> Tensor:
        rows = hidden.shape[1]
        own = slice(0, rows) if own is None else own
        self.seen.add_(own.stop - own.start)
        padded = nn.functional.pad(torch.tanh(hidden + table), (0, 0, self.far, self.far))
        near = torch.cat([padded[:, i : i + rows] for i in range(2 * self.far + 1)], -1)[:, own]
        inner = torch.tanh(self.mix(near) + shift[:, None])
        return hidden[:, own] + self.out(self.dropout(inner))

    def why_whole(self) -> str | None:
        return None

    def chunks(self, frames: int, arguments: Mapping[str, Any]) -> list[Piece]:
        rows = arguments["hidden"].shape[1]
        pieces = []
        for first in range(0, rows, frames):
            stop = min(first + frames, rows)
            low, high = max(0, first - self.far), min(rows, stop + self.far)
            own = slice(first - low, stop - low)
            pieces.append(Piece(slice(first, stop), slice(low, high), {"own": own}))
        return pieces


def net(far: int = 1, depth: int = 3, block: type[Local] = Local, dropout: float = 0.0) -> toys.Net:
    model = toys.net(depth=0)
    torch.manual_seed(1)
    model.blocks = nn.ModuleList(block(16, far, dropout) for _ in range(depth)).to(toys.DEVICE)
    return model


def train(**options: Any) -> tuple[list[float], list[float], dict[str, Tensor]]:
    streamed = stream(net(**options.pop("net", {})), **options, **ADAMW)
    torch.manual_seed(3)
    losses, norms = toys.train_streamed(streamed, toys.batches(STEPS))
    weights = streamed.state_dict()
    streamed.close()
    return losses, norms, weights


@pytest.mark.parametrize("micro", [None, 1, 3])
@pytest.mark.parametrize(("frames", "far"), [(1, 1), (2, 1), (3, 2), (2, 4), (9, 1)])
def test_training_in_chunks_is_plain_training(frames: int, far: int, micro: int | None) -> None:
    plain = net(far)
    losses, norms = toys.train_plain(plain, toys.batches(STEPS), **ADAMW)
    found = train(net={"far": far}, frames_per_chunk=frames, micro_batch_size=micro)
    assert found[0] == pytest.approx(losses, rel=toys.within(1e-6, 1e-4))
    assert found[1] == pytest.approx(norms, rel=toys.within(2e-6, 1e-4))
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    assert toys.largest_relative(found[2], expected) < toys.within(5e-5, 1e-2)


def test_bit_equal_across_slots_timing_and_places() -> None:
    options = {"frames_per_chunk": 2, "micro_batch_size": 2, "net": {"dropout": 0.3}}
    expected = train(**options)
    for seed, (slots, where) in enumerate([(2, "device"), (3, "host"), (4, "disk")]):
        hooks = TransferHooks(max_delay_s=0.002, seed=seed, poison=True)
        found = train(**options, slots=slots, activations=where, hooks=hooks)
        assert found[:2] == expected[:2]
        assert all(torch.equal(found[2][name], expected[2][name]) for name in expected[2])


def test_dropout_and_buffers_are_those_of_the_forward() -> None:
    """A recompute that drew another mask would break the tie between loss and gradient."""
    torch.manual_seed(0)
    streamed = stream(net(dropout=0.5), frames_per_chunk=3)
    x, c, _ = toys.batches(1)[0]
    x.requires_grad_()
    state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if toys.DEVICE == "cuda" else None
    step = 1e-2 * torch.randn_like(x)

    def loss(at: Tensor) -> Tensor:
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
        return streamed(at, c).square().mean()

    loss(x).backward()
    assert x.grad is not None
    with torch.no_grad():
        rise = (loss(x + step) - loss(x - step)) / 2
    assert (x.grad * step).sum().item() == pytest.approx(rise.item(), rel=0.02)
    assert [block.seen.item() for block in streamed.module.blocks] == [3 * ROWS] * 3
    streamed.close()


# ---- who sees the gradient that is overwritten ---------------------------------------------------


class Watched(toys.Net):
    """Hands its hidden states out, and takes a skip over all blocks where told."""

    skip = False

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        hidden, shift = self.embed(x), self.condition(c)
        self.states = [hidden]
        for block in self.blocks:
            hidden = block(hidden, shift, table=self.table)
            self.states.append(hidden)
        return hidden + self.states[1] if self.skip else hidden


def watched(frames: int | None, skip: bool = False) -> Any:
    model = net()
    model.__class__ = Watched
    model.skip = skip
    return stream(model, frames_per_chunk=frames)


def passed_on(output: Tensor) -> Tensor:
    """A loss whose gradient of `output` is a fresh tensor that nobody keeps."""
    return output.square().sum()


Seen = list[Tensor]


def by_retain_grad(streamed: Any, output: Tensor) -> Seen:
    for state in streamed.module.states:
        state.retain_grad()
    passed_on(output).backward()
    return [state.grad for state in streamed.module.states]


def by_hook(streamed: Any, output: Tensor) -> Seen:
    seen: Seen = []
    for state in streamed.module.states:
        state.register_hook(seen.append)
    passed_on(output).backward()
    return seen


def by_hook_on_a_view(streamed: Any, output: Tensor) -> Seen:
    seen: Seen = []
    for state in streamed.module.states:
        state.register_hook(lambda grad: seen.append(grad[0]))
    passed_on(output).backward()
    return seen


def by_node_hooks(streamed: Any, output: Tensor) -> Seen:
    seen: Seen = []
    for state in streamed.module.states[1:]:
        state.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
        state.grad_fn.register_hook(lambda to, of: seen.extend([of[0], to[-3]]))
    passed_on(output).backward()
    return [grad for grad in seen if grad is not None]


def by_autograd_grad(streamed: Any, output: Tensor) -> Seen:
    return list(torch.autograd.grad(passed_on(output), streamed.module.states))


def by_the_callers_gradient(streamed: Any, output: Tensor) -> Seen:
    given = torch.ones_like(output)
    output.backward(given)
    return [given]


WAYS = [
    by_retain_grad, by_hook, by_hook_on_a_view, by_node_hooks, by_autograd_grad,
    by_the_callers_gradient,
]  # fmt: skip


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_others_see_stay_what_they_are(way: Any, skip: bool) -> None:
    x, c, _ = toys.batches(1)[0]
    results = []
    for frames in (None, 2):
        streamed = watched(frames, skip)
        at = x.clone().requires_grad_()
        seen = way(streamed, streamed(at, c))
        results.append([*seen, *([] if at.grad is None else [at.grad])])
        streamed.close()
    assert len(results[0]) == len(results[1]) > 0
    for ours, whole in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-5)


def test_one_buffer_holds_the_gradients_of_all_hidden_states() -> None:
    """Unless somebody looks: the address is noted, the tensor is not kept."""
    x, c, _ = toys.batches(1)[0]
    places: list[int] = []
    streamed = watched(2)
    output = streamed(x.requires_grad_(), c)
    for state in streamed.module.states:
        state.register_hook(lambda grad: places.append(grad.data_ptr()))
    passed_on(output).backward()
    assert len(places) == 4
    assert len(set(places)) == 1
    streamed.close()


# ---- contracts -----------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(InputError, match=r"frames_per_chunk: blocks.0 .* a Block does not offer"):
        stream(toys.net(), frames_per_chunk=2)

    class Global(Local):
        def why_whole(self) -> str | None:
            return "all rows see all"

    with pytest.raises(InputError, match=r"all rows see all\n  fix: leave frames_per_chunk out"):
        stream(net(block=Global), frames_per_chunk=2)
    for number in (0, -3):
        with pytest.raises(InputError, match=f"frames_per_chunk={number} is below 1"):
            stream(net(), frames_per_chunk=number)


@pytest.mark.parametrize("wrong", ["gap", "blind"])
def test_chunks_that_do_not_fit_together_are_an_error(wrong: str) -> None:
    class Wrong(Local):
        def chunks(self, frames: int, arguments: Mapping[str, Any]) -> list[Piece]:
            first, second, *rest = super().chunks(frames, arguments)
            if wrong == "gap":
                return [first, *rest]
            return [first, second._replace(reach=slice(second.own.start + 1, 6)), *rest]

    streamed = stream(net(block=Wrong), frames_per_chunk=2)
    x, c, _ = toys.batches(1)[0]
    with pytest.raises(ValueError, match="a chunk gives rows"):
        streamed(x, c)
    streamed.close()
