"""What blocks may be and do: each case against the same model in plain PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from plain_adamw import PlainAdamW
from threaded_runtime import FREE_BYTES
from torch import nn

from megaslide.errors import InputError
from megaslide.streaming import NonFiniteGradientError, StreamOptions, TransferHooks, stream

pytestmark = pytest.mark.usefixtures("backend")

ADAMW = {"lr": 3e-3, "weight_decay": 0.1}
HOOKS = TransferHooks(max_delay_s=0.001, poison=True)
DIM = 6
Tensor = torch.Tensor


def check(
    build: Callable[[], nn.Module], *, steps: int = 4, exact: bool = True, **options: Any
) -> Any:
    """Train streamed and plain from equal starts; the streamed model is returned."""
    torch.manual_seed(3)
    plain = build()
    streamed = stream(copy.deepcopy(plain), hooks=HOOKS, **ADAMW, **options)
    data = toys.batches(steps)
    torch.manual_seed(11)
    losses, norms = toys.train_plain(plain, data, **ADAMW)
    torch.manual_seed(11)
    got_losses, got_norms = toys.train_streamed(streamed, data)
    if exact:
        assert (got_losses, got_norms) == toys.like((losses, norms))
    assert got_losses == pytest.approx(losses, rel=toys.within(1e-6, 1e-4))
    assert got_norms == pytest.approx(norms, rel=toys.within(1e-5, 1e-4))
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    assert toys.largest_relative(streamed.state_dict(), weights) < toys.within(3e-6, 1e-2)
    for (name, ours), (_, theirs) in zip(
        streamed.module.named_buffers(), plain.named_buffers(), strict=True
    ):
        assert toys.same(ours, theirs), name
    return streamed


def stack(make: Callable[[], nn.Module], call: Any, depth: int = 3) -> Callable[[], nn.Module]:
    return lambda: toys.Stack([make() for _ in range(depth)], call, DIM)


class Norm(nn.Module):
    """Running statistics, and a counter that replaces its buffer instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(7), nn.Linear(DIM, DIM)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.linear(self.norm(hidden)) * (1 + self.calls / 100) + shift[:, None]


@pytest.mark.parametrize("micro", [None, 4])
def test_buffers_change_once_per_forward(micro: int | None) -> None:
    streamed = check(
        stack(Norm, lambda b, h, s: b(h, s)), blocks=["blocks"], micro_batch_size=micro
    )
    assert streamed.module.blocks[0].calls == 4


def test_buffers_see_every_micro_batch_in_turn() -> None:
    def build() -> nn.Module:
        return stack(Norm, lambda b, h, s: b(h, s))()

    torch.manual_seed(3)
    plain = build()
    streamed = stream(copy.deepcopy(plain), blocks=["blocks"], micro_batch_size=2, hooks=HOOKS)
    plain.to(toys.DEVICE)
    item = toys.batches(1)[0]
    toys.loss_of(streamed, item).backward()
    hidden, shift = plain.embed(item[0]), plain.condition(item[1])
    for block in plain.blocks:
        hidden = torch.cat([block(hidden[i : i + 2], shift[i : i + 2]) for i in (0, 2)])
    for (name, ours), (_, theirs) in zip(
        streamed.module.named_buffers(), plain.named_buffers(), strict=True
    ):
        assert toys.same(ours, theirs), name
    (plain.head(hidden) - item[2]).square().mean().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert streamed.step().grad_norm == pytest.approx(expected.item(), rel=toys.within(1e-5, 1e-4))


class Twice(nn.Module):
    """The same tensor twice in its result, an integer, and a shared input handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, hidden: Tensor, *rest: Any, **more: Any) -> Any:
        out = torch.tanh(self.linear(hidden)) + more["given"][0]["shift"][:, None] + rest[1]
        return {"both": (out, out), "argmax": out.argmax(-1), "table": rest[1], "kind": "x"}


@pytest.mark.parametrize("micro", [None, 1, 3])
def test_pytrees_variadic_arguments_and_outputs_of_every_kind(micro: int | None) -> None:
    table = torch.linspace(-1, 1, 7 * DIM, device=toys.DEVICE).view(1, 7, DIM)

    def call(block: Any, hidden: Tensor, shift: Tensor) -> Tensor:
        out = block(hidden, None, table, given=[{"shift": shift}], unused=3)
        assert out["kind"] == "x"
        assert out["table"].shape == table.shape
        assert out["argmax"].dtype == torch.int64
        assert not out["argmax"].requires_grad
        return out["both"][0] + 0.5 * out["both"][1] + 0.1 * out["table"]

    check(stack(Twice, call), blocks=["blocks"], micro_batch_size=micro, exact=micro is None)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM).bfloat16()

    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:
        return hidden + self.linear(self.norm(hidden).bfloat16()).float() + shift[:, None]


def test_parameters_of_mixed_dtypes_in_a_block() -> None:
    torch.manual_seed(3)
    plain = stack(Mixed, lambda b, h, s: b(h, s))()
    streamed = stream(copy.deepcopy(plain), blocks=["blocks"], hooks=HOOKS, **ADAMW)
    plain.to(toys.DEVICE)
    item = toys.batches(1)[0]
    losses = []
    for model in (plain, streamed):
        loss = toys.loss_of(model, item)
        loss.backward()
        losses.append(loss.item())
    assert losses[1:] == toys.like(losses[:1])
    gradients = [p.grad for p in plain.parameters()]
    assert {g.dtype for g in gradients} == {torch.float32, torch.bfloat16}
    norm = torch.nn.utils.get_total_norm([g.float() for g in gradients])
    assert streamed.step().grad_norm == pytest.approx(norm.item(), rel=toys.within(1e-6, 1e-4))
    assert streamed.state_dict()["blocks.1.linear.weight"].dtype == torch.bfloat16


def test_autocast_of_the_caller_holds_in_recompute() -> None:
    item = toys.batches(1)[0]
    plain, streamed = toys.net(), stream(toys.net(), hooks=HOOKS, **ADAMW)
    losses = []
    for model in (plain, streamed):
        with torch.autocast(toys.DEVICE, torch.bfloat16):
            loss = toys.loss_of(model, item)
        loss.backward()
        losses.append(loss.item())
    assert losses[1:] == toys.like(losses[:1])
    streamed._gradients.send_resident()
    streamed.finish()
    for index, unit in enumerate(streamed.store.units):
        for p in unit.trainable:
            want = plain.get_parameter(p.name).grad.cpu()
            got = p.weight(streamed.store.gradient(index))
            bound = toys.within(1e-6, 1e-2)  # on a GPU, sums in bf16 of another order
            torch.testing.assert_close(got, want, rtol=bound, atol=bound * float(want.abs().max()))


def test_eval_without_grad_is_plain_and_leaves_dropout_off() -> None:
    x, c, _ = toys.batches(1)[0]
    plain, streamed = toys.net(dropout=0.5).eval(), stream(toys.net(dropout=0.5)).eval()
    with torch.no_grad():
        assert toys.same(streamed(x, c), plain(x, c))
    assert not streamed(x, c)[0].isnan().any()


def test_two_forwards_then_two_backwards_in_either_order() -> None:
    first, second = toys.batches(2)
    for reverse in (False, True):
        plain, streamed = toys.net(), stream(toys.net(), hooks=HOOKS, activations="host", **ADAMW)
        optimizer = PlainAdamW(plain.parameters(), **ADAMW)
        for model in (plain, streamed):
            losses = [toys.loss_of(model, first), toys.loss_of(model, second)]
            for loss in losses[::-1] if reverse else losses:
                loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        streamed.step()
        weights = {name: p.detach() for name, p in plain.named_parameters()}
        assert toys.largest_relative(streamed.state_dict(), weights) < toys.within(1e-6, 1e-2)


def test_many_bf16_backwards_add_up_in_fp32() -> None:
    """A bf16 sum of equal small terms stalls: 256 + 1 = 256. The host's sum must not."""
    streamed = stream(toys.net(), dtype=torch.bfloat16, max_grad_norm=None, hooks=HOOKS, **ADAMW)
    streamed.module.table = streamed.module.table.bfloat16()
    x, c, y = (t.bfloat16() for t in toys.batches(1)[0])
    norms = []
    for count in (1, 600):
        for _ in range(count):
            toys.loss_of(streamed, (x, c, y)).backward()
        streamed._gradients.send_resident()
        streamed.finish()
        norms.append({
            name: norm.item()
            for landed in streamed._gradients.landed[1:]
            for name, norm in landed.norms.items()
        })  # fmt: skip
        streamed.zero_grad()
    for name, once in norms[0].items():
        assert norms[1][name] == pytest.approx(600 * once, rel=1e-4), name


def test_sum_of_bf16_gradients_is_what_adamw_gets() -> None:
    items = [tuple(t.bfloat16() for t in item) for item in toys.batches(3)]
    states = []
    for size in (1, 3):  # one backward of the sum, or three backwards
        streamed = stream(toys.net(), dtype=torch.bfloat16, max_grad_norm=None, hooks=HOOKS)
        streamed.module.table = streamed.module.table.bfloat16()
        losses = [toys.loss_of(streamed, item) for item in items]
        for loss in [sum(losses)] if size == 1 else losses:
            loss.backward()
        streamed.step()
        streamed.finish()
        moments = []
        for unit in range(1, 5):
            with streamed.store.unit(unit, ("exp_avg",)) as state:
                moments.append(state.memory["exp_avg"].view(torch.float32).clone())
        states.append(torch.cat(moments))
    torch.testing.assert_close(*states, rtol=0.02, atol=1e-2 * float(states[0].abs().max()))


def test_tied_parameters_with_the_first_dimension_of_the_batch_are_not_split() -> None:
    def build() -> nn.Module:
        model = toys.Stack([nn.Linear(4, 4) for _ in range(3)], lambda b, h, s: b(h), 4)
        model.blocks[2].weight = model.blocks[0].weight  # [4, 4]; the batch is 4 too
        return model

    check(build, blocks=["blocks"], micro_batch_size=1, exact=False)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, hidden: Tensor, shift: Tensor, table: Tensor) -> Tensor:
        return hidden + self.linear(hidden) * (table.sum(0) + table[2]) + shift[:, None]


def test_table_as_long_as_the_batch_can_be_named() -> None:
    table = torch.linspace(-1, 1, 4 * DIM, device=toys.DEVICE).view(
        4, DIM
    )  # 4 is the batch's size too
    make = stack(Table, lambda b, h, s: b(h, s, table=table))
    check(make, blocks=["blocks"], micro_batch_size=1, shared_inputs=["table"], exact=False)
    streamed = stream(make(), blocks=["blocks"], micro_batch_size=1)
    with pytest.raises(IndexError):  # split where it is not named
        toys.loss_of(streamed, toys.batches(1)[0])
    with pytest.raises(ValueError, match=r"shared_inputs=\['tables'\].*accepted.*'table'"):
        stream(make(), blocks=["blocks"], shared_inputs=["tables"])


def test_argument_that_was_shared_and_now_looks_split_is_refused() -> None:
    table = torch.linspace(-1, 1, 4 * DIM, device=toys.DEVICE).view(4, DIM)
    make = stack(Table, lambda b, h, s: b(h, s, table))
    streamed = stream(make(), blocks=["blocks"], micro_batch_size=2)
    toys.loss_of(streamed, toys.batches(1, size=6)[0]).backward()
    with pytest.raises(ValueError, match=r"Table: argument 'table' of shape \(4, 6\) looks like"):
        toys.loss_of(streamed, toys.batches(1, size=4)[0])
    streamed.zero_grad()
    toys.loss_of(streamed, toys.batches(1, size=6)[0]).backward()


class WithPenalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(hidden), hidden.square().mean()


def test_output_that_no_value_stands_for_is_refused() -> None:
    make = stack(WithPenalty, lambda b, h, s: sum(b(h)))
    with pytest.raises(ValueError, match=r"blocks\.0: output 1 of shape \(\).*differs between"):
        toys.loss_of(stream(make(), blocks=["blocks"], micro_batch_size=2), toys.batches(1)[0])
    check(make, blocks=["blocks"])


class Faulty(nn.Module):
    fail_at: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == Faulty.fail_at:
            raise ArithmeticError("block failed")
        return torch.tanh(self.linear(hidden))


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
@pytest.mark.parametrize("activations", ["device", "host"])
def test_exception_in_forward_or_recompute_leaves_the_engine_usable(
    fail_at: int, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two micro-batches, calls 1 and 2 are the forward, 3 and 4 the recompute."""
    torch.manual_seed(3)
    plain = stack(Faulty, lambda b, h, s: b(h) + s[:, None])()
    streamed = stream(
        copy.deepcopy(plain), blocks=["blocks"], micro_batch_size=2, activations=activations,
        hooks=HOOKS, **ADAMW,
    )  # fmt: skip
    data = toys.batches(3)
    monkeypatch.setattr(Faulty, "fail_at", fail_at)
    with pytest.raises(ArithmeticError, match="block failed"):
        toys.loss_of(streamed, data[0]).backward()
    monkeypatch.setattr(Faulty, "fail_at", None)
    streamed.zero_grad()
    losses, norms = toys.train_streamed(streamed, data)
    expected_losses, expected_norms = toys.train_plain(plain, data, **ADAMW)
    assert losses == pytest.approx(expected_losses, rel=toys.within(1e-6, 1e-4))
    assert norms == pytest.approx(expected_norms, rel=toys.within(1e-5, 1e-4))


@pytest.mark.parametrize("fail_at", [1, 3])
def test_out_of_device_memory_says_what_holds_it_and_what_to_lower(
    fail_at: int, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    room = False

    def full(self: Faulty, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == fail_at and not room:
            raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB.")
        return torch.tanh(self.linear(hidden))

    monkeypatch.setattr(Faulty, "forward", full)
    make = stack(Faulty, lambda b, h, s: b(h) + s[:, None])
    streamed = stream(make(), blocks=["blocks"], micro_batch_size=2, slots=3)
    data = toys.batches(1)
    with pytest.raises(InputError) as raised:
        toys.loss_of(streamed, data[0]).backward()
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    text, held = str(raised.value), streamed.device_bytes
    for kind in ("slots", "gradients", "resident"):
        assert f"{kind} {held[kind]}" in text
    free = {"cpu": "free: unknown", "streams": f"free: {FREE_BYTES} bytes"}
    assert free.get(backend, "free: ") in text
    assert "Tried to allocate 3.00 GiB" in text
    assert "a smaller micro_batch_size (now 2) or activations='host'" in text
    assert "slots=2 (now 3)" in text
    room = True
    streamed.zero_grad()
    toys.train_streamed(streamed, data)  # usable


def test_advice_names_only_what_can_still_be_lowered() -> None:
    least = StreamOptions(micro_batch_size=1, activations="disk", slots=2)
    assert least.memory_advice == "take shorter or smaller clips"
    assert "(now the whole batch)" in StreamOptions().memory_advice


# Updates that start as gradients land ----------------------------------------------------------


def train_early(streamed: Any, data: list[Any]) -> list[float]:
    losses = []
    for item in data:
        loss = toys.loss_of(streamed, item)
        with streamed.final_backward():
            loss.backward()
        streamed.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [None, 0.1])
def test_final_backward_changes_nothing_but_the_time(clip: float | None) -> None:
    data = toys.batches(5)
    plain = toys.net()
    losses, _ = toys.train_plain(plain, data, max_grad_norm=clip, **ADAMW)
    streamed = stream(toys.net(), max_grad_norm=clip, hooks=HOOKS, **ADAMW)
    assert train_early(streamed, data) == toys.like(losses)
    for name, weight in streamed.state_dict().items():
        assert toys.same(weight, plain.get_parameter(name)), name


def test_updates_end_before_the_backward_pass_does() -> None:
    streamed = stream(toys.net(depth=6), max_grad_norm=None)
    before = streamed.state_dict()
    seen: list[bool] = []

    def in_backward_of_the_embedding(*_: Any) -> None:
        streamed._optimizer.updated(6).wait("test")
        now = dict(streamed.store.named_weights())["blocks.5.up.weight"]
        seen.append(not torch.equal(now, before["blocks.5.up.weight"]))

    streamed.module.embed.register_forward_hook(
        lambda module, inputs, output: output.register_hook(in_backward_of_the_embedding) and None
    )
    loss = toys.loss_of(streamed, toys.batches(1)[0])
    with streamed.final_backward():
        loss.backward()
    streamed.step()
    assert seen == [True]


def test_block_used_twice_is_updated_once_after_its_last_gradient() -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return toys.Stack(
            [nn.Linear(DIM, DIM) for _ in range(2)], lambda b, h, s: b(torch.tanh(b(h))), DIM
        )

    data = toys.batches(4)
    plain = build()
    losses, _ = toys.train_plain(plain, data, max_grad_norm=None, **ADAMW)
    streamed = stream(build(), blocks=["blocks"], max_grad_norm=None, hooks=HOOKS, **ADAMW)
    assert train_early(streamed, data) == pytest.approx(losses, rel=toys.within(1e-6, 1e-4))


def test_accumulation_ends_in_the_final_backward() -> None:
    first, second = toys.batches(2)
    states = []
    for early in (False, True):
        streamed = stream(toys.net(), max_grad_norm=None, hooks=HOOKS, **ADAMW)
        toys.loss_of(streamed, first).backward()
        if early:
            train_early(streamed, [second])
        else:
            toys.train_streamed(streamed, [second])
        states.append(streamed.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_between_final_backward_and_step_there_is_only_step() -> None:
    item = toys.batches(1)[0]
    streamed = stream(toys.net(), max_grad_norm=None)
    with streamed.final_backward():
        toys.loss_of(streamed, item).backward()
    with pytest.raises(RuntimeError, match="call step"):
        streamed(*item[:2])
    with pytest.raises(RuntimeError, match="call step"):
        streamed.zero_grad()
    streamed.step()
    streamed(*item[:2])


def test_nan_stops_its_own_block_and_the_model_until_a_load(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = toys.Stack([nn.Linear(DIM, DIM) for _ in range(3)], lambda b, h, s: b(h) + s[:, None])
    streamed = stream(model, blocks=["blocks"], max_grad_norm=None, hooks=HOOKS, **ADAMW)
    streamed.save_pretrained(tmp_path / "w")
    streamed.save_optimizer(tmp_path / "o")
    before = streamed.state_dict()
    item = toys.batches(1)[0]
    out = streamed.module.blocks[1].forward

    def infinite(hidden: Tensor) -> Tensor:
        result = out(hidden)
        result.register_hook(lambda grad: grad * float("inf"))
        return result

    streamed.module.blocks[1].forward = infinite
    loss = toys.loss_of(streamed, item)
    with streamed.final_backward():
        loss.backward()
    with pytest.raises(NonFiniteGradientError, match="gradient norm is nan"):
        streamed.step()
    streamed.module.blocks[1].forward = out
    streamed._optimizer.finish()
    now = dict(streamed.store.named_weights())
    assert [not torch.equal(now[k], before[k]) for k in now if k.endswith("s.2.bias")] == [True]
    assert all(w.isfinite().all() for w in now.values())
    assert torch.equal(now["blocks.0.weight"], before["blocks.0.weight"])
    for refused in (streamed.step, streamed.state_dict, lambda: streamed(*item[:2])):
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            refused()
    streamed.load(tmp_path / "w", tmp_path / "o")
    assert all(torch.equal(v, before[k]) for k, v in streamed.state_dict().items())
    assert train_early(streamed, [item])
