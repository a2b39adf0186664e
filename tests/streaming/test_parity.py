"""Streamed training is plain PyTorch training: same losses, norms and weights.

The oracle is torch.optim.AdamW with clip_grad_norm_ on the resident model. With the whole batch in
one micro-batch the operations are the same in the same order, so equality is exact.
"""

import pytest
import torch
import toys
from plain_adamw import PlainAdamW
from torch import nn

from megaslide.streaming import NonFiniteGradientError, TransferHooks, stream

pytestmark = pytest.mark.usefixtures("backend")

ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-7}
JITTER = [TransferHooks(max_delay_s=0.002, seed=seed, poison=True) for seed in range(3)]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in b:
        assert toys.same(a[name], b[name]), name


@pytest.mark.parametrize("max_grad_norm", [0.1, None])
@pytest.mark.parametrize("slots", [2, 3, 9])
def test_twenty_steps_equal_plain_pytorch_bit_for_bit(
    slots: int, max_grad_norm: float | None
) -> None:
    data = toys.batches(20)
    plain = toys.net()
    expected = toys.train_plain(plain, data, max_grad_norm=max_grad_norm, **ADAMW)
    streamed = stream(
        toys.net(), slots=slots, max_grad_norm=max_grad_norm, hooks=JITTER[0], **ADAMW
    )
    assert toys.train_streamed(streamed, data) == toys.like(expected)
    assert_same(streamed.state_dict(), weights(plain))
    streamed.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_differ_only_by_summation_order(size: int) -> None:
    data = toys.batches(20)
    plain = toys.net()
    losses, _ = toys.train_plain(plain, data, **ADAMW)
    results = []
    for hooks in JITTER:
        streamed = stream(toys.net(), micro_batch_size=size, hooks=hooks, **ADAMW)
        results.append((toys.train_streamed(streamed, data), streamed.state_dict()))
        streamed.close()
    assert results[0][0][0] == pytest.approx(losses, rel=toys.within(1e-6, 1e-4))
    assert toys.largest_relative(results[0][1], weights(plain)) < toys.within(3e-6, 1e-2)
    for result in results[1:]:  # whatever the timing of the copies
        assert result[0] == results[0][0]
        assert_same(result[1], results[0][1])


def test_first_gradient_within_1e6_for_any_micro_batch() -> None:
    (x, c, y), *_ = toys.batches(1)
    plain = toys.net()
    (plain(x, c) - y).square().mean().backward()
    for size in (1, 2, 3, 4):
        streamed = stream(toys.net(), micro_batch_size=size)
        (streamed(x, c) - y).square().mean().backward()
        streamed._gradients.send_resident()
        streamed.finish()
        for index, unit in enumerate(streamed.store.units):
            for p in unit.trainable:
                got = p.weight(streamed.store.gradient(index))
                want = plain.get_parameter(p.name).grad
                assert want is not None
                want, bound = want.cpu(), toys.within(1e-6, 1e-5)
                torch.testing.assert_close(got, want, rtol=bound, atol=bound * want.abs().max())
        streamed.close()


def test_dropout_recomputes_with_the_same_mask() -> None:
    data = toys.batches(5)
    plain = toys.net(dropout=0.5)
    torch.manual_seed(7)
    expected = toys.train_plain(plain, data, **ADAMW)
    streamed = stream(toys.net(dropout=0.5), hooks=JITTER[1], **ADAMW)
    torch.manual_seed(7)
    assert toys.train_streamed(streamed, data) == toys.like(expected)
    assert_same(streamed.state_dict(), weights(plain))


def test_frozen_parameters_neither_move_nor_hold_state() -> None:
    def build() -> toys.Net:
        model = toys.net(dim=64)
        for name, p in model.named_parameters():
            p.requires_grad_("up" not in name and "embed" not in name)
        return model

    data = toys.batches(5)
    plain = build()
    expected = toys.train_plain(plain, data, **ADAMW)
    streamed = stream(build(), hooks=JITTER[0], **ADAMW)
    assert toys.train_streamed(streamed, data) == toys.like(expected)
    assert_same(streamed.state_dict(), weights(plain))
    whole = stream(toys.net(dim=64))
    assert streamed.state_bytes < whole.state_bytes
    assert all("up" not in name for unit in streamed.store.steps for name in unit)


def test_all_frozen_but_one_block_whose_inputs_need_no_gradient() -> None:
    def build() -> toys.Net:
        model = toys.net()
        for name, p in model.named_parameters():
            p.requires_grad_("blocks.0" in name)
        return model

    data = toys.batches(4)
    plain = build()
    expected = toys.train_plain(plain, data, **ADAMW)
    streamed = stream(build(), hooks=TransferHooks(max_delay_s=0.01, poison=True), **ADAMW)
    assert toys.train_streamed(streamed, data) == toys.like(expected)
    assert_same(streamed.state_dict(), weights(plain))


class TwoLists(nn.Module):
    """Two kinds of blocks, tuple results, a pass-through output, an unused branch, shared use."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Double() for _ in range(2))
        self.single = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 6)
        if tie:
            self.head.weight = self.single[1].weight
            self.pairs[1].a.weight = self.pairs[0].a.weight

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        pair = (x[..., :3], x[..., 2:])
        for block in self.pairs:
            pair = block({"pair": pair, "scale": 2.0})["pair"]
        y = torch.cat(pair, -1)
        for block in [*self.single, self.single[0]]:
            y = torch.tanh(block(y))
        return self.head(y)[..., :2] + c.sum()


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs: dict) -> dict:
        left, right = inputs["pair"]
        return {"pair": (self.a(left) * inputs["scale"] + right, self.b(right)), "note": None}


@pytest.mark.parametrize("tie", [False, True])
def test_two_lists_tuples_none_gradients_tied_and_reused_blocks(tie: bool) -> None:
    data = toys.batches(8)
    torch.manual_seed(3)
    plain = TwoLists(tie)
    torch.manual_seed(3)
    streamed = stream(TwoLists(tie), blocks=["pairs", "single"], hooks=JITTER[2], **ADAMW)
    losses, norms = toys.train_plain(plain, data, **ADAMW)
    got_losses, got_norms = toys.train_streamed(streamed, data)
    assert got_losses == pytest.approx(losses, rel=toys.within(1e-6, 1e-4))
    assert got_norms == pytest.approx(norms, rel=toys.within(1e-6, 1e-4))
    assert toys.largest_relative(streamed.state_dict(), weights(plain)) < toys.within(1e-6, 1e-2)
    assert streamed.num_parameters == sum(p.numel() for p in plain.parameters())


def test_validation_in_the_middle_of_accumulation_changes_nothing() -> None:
    (x, c, y), (x2, c2, _) = toys.batches(2)
    runs = []
    for interrupt in (False, True):
        streamed = stream(toys.net(), hooks=JITTER[0], **ADAMW)
        loss = (streamed(x, c) - y).square().mean()
        if interrupt:
            with torch.no_grad():
                streamed(x2, c2)
        loss.backward()
        if interrupt:
            with torch.no_grad():
                streamed(x2, c2)
        streamed.step()
        runs.append(streamed.state_dict())
    assert_same(*runs)


def test_two_backwards_before_a_step_add_up() -> None:
    (x, c, y), (x2, c2, y2) = toys.batches(2)
    plain = toys.net()
    optimizer = PlainAdamW(plain.parameters(), **ADAMW)
    streamed = stream(toys.net(), max_grad_norm=None, hooks=JITTER[1], **ADAMW)
    for model in (plain, streamed):
        (model(x, c) - y).square().mean().backward()
        (model(x2, c2) - y2).square().mean().backward()
    optimizer.step()
    streamed.step()
    assert toys.largest_relative(streamed.state_dict(), weights(plain)) < toys.within(1e-6, 1e-2)


def test_non_finite_gradient_is_refused_and_nothing_moves() -> None:
    (x, c, y), *rest = toys.batches(3)
    streamed = stream(toys.net(), **ADAMW)
    before = streamed.state_dict()
    ((streamed(x, c) - y).square().mean() * float("inf")).backward()
    with pytest.raises(NonFiniteGradientError, match="gradient norm is"):
        streamed.step()
    assert_same(streamed.state_dict(), before)
    streamed.zero_grad()
    plain = toys.net()
    expected = toys.train_plain(plain, rest, **ADAMW)
    assert toys.train_streamed(streamed, rest) == toys.like(expected)


def test_exception_in_a_block_leaves_the_engine_usable() -> None:
    data = toys.batches(3)
    model = toys.net()
    streamed = stream(model, **ADAMW)
    x, *_ = data[0]
    with pytest.raises(RuntimeError, match="must match the size"):
        streamed(x, torch.randn(8, 3, device=x.device))
    plain = toys.net()
    expected = toys.train_plain(plain, data, **ADAMW)
    assert toys.train_streamed(streamed, data) == toys.like(expected)


def test_bf16_follows_an_fp32_master() -> None:
    """Updates far below a bf16 ulp accumulate in the master and finally move the weight."""
    (x, c, y), *_ = toys.batches(1)
    streamed = stream(
        toys.net(), dtype=torch.bfloat16, lr=1e-5, weight_decay=0.0, max_grad_norm=None
    )
    masters = toys.net().state_dict()
    for index, unit in enumerate(streamed.store.units):
        with streamed.store.unit(index) as state:
            for p in unit.trainable:  # initialised from fp32 without loss
                assert torch.equal(state.read_master(p), masters[p.name].cpu())
    before = streamed.state_dict()
    x, c, y = x.bfloat16(), c.bfloat16(), y.bfloat16()
    streamed.module.table = streamed.module.table.bfloat16()
    for _ in range(50):
        (streamed(x, c) - y).float().square().mean().backward()
        streamed.step()
    after = streamed.state_dict()
    assert after["head.weight"].dtype == torch.bfloat16
    moved = (after["head.weight"] != before["head.weight"]).float().mean()
    one = torch.tensor(0.2).bfloat16()
    assert one + 1e-5 == one  # a single update is invisible in bf16
    assert moved > 0.2
