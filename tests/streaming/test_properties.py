"""Whatever the sizes and the timing: bit-equal to the calm run, and equal to plain PyTorch.

`AXES` is the whole parametrisation; an engine option with an invariant result is one more line.
"""

import itertools
import tempfile
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import toys
from hypothesis import HealthCheck, given, settings

from megaslide.streaming import TransferHooks, stream

pytestmark = pytest.mark.usefixtures("backend")

STEPS, BATCH = 3, 4
AXES = {
    "slots": st.integers(2, 5),
    "activations": st.sampled_from(["device", "host", "disk"]),
    "places": st.sampled_from(["ram", "disk", "disk, gradients too"]),
}
BF16 = torch.bfloat16
FORMATS = st.sampled_from([
    (torch.float32, "split", 2e-6), (torch.float32, "split8", 1e-2),
    (BF16, "master", 3e-2), (BF16, "split", 3e-2), (BF16, "split8", 3e-2),
])  # fmt: skip
"""With the relative difference of losses from plain fp32 PyTorch: another order of sums, 8-bit
moments with stochastic rounding, weights and activations in bf16."""
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}
Result = tuple[list[float], list[float], dict[str, torch.Tensor]]


def train(streamed: Any, early: bool, dtype: torch.dtype) -> Result:
    losses, norms = [], []
    for item in toys.batches(STEPS, size=BATCH):
        loss = toys.loss_of(streamed, [x.to(dtype) for x in item]).float()
        if early:
            with streamed.final_backward():
                loss.backward()
        else:
            loss.backward()
        norms.append(streamed.step().grad_norm)
        losses.append(loss.item())
    weights = streamed.state_dict()
    streamed.close()
    return losses, norms, weights


def plain(depth: int, clip: float | None) -> Result:
    model = toys.net(depth=depth, dim=8)
    losses, norms = toys.train_plain(
        model, toys.batches(STEPS, size=BATCH), max_grad_norm=clip, **ADAMW
    )
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    depth=st.integers(1, 5),
    micro=st.integers(1, BATCH),
    clip=st.sampled_from([None, 0.1]),
    early=st.booleans(),
    seed=st.integers(0, 1000),
    kind=FORMATS,
    options=st.fixed_dictionaries(AXES),
)
def test_only_the_summation_order_of_micro_batches_shows(
    depth: int, micro: int, clip: float | None, early: bool, seed: int,
    kind: tuple[torch.dtype, Any, float], options: dict[str, Any],
) -> None:  # fmt: skip
    dtype, state_format, bound = kind

    def streamed(hooks: TransferHooks | None, places: str = "ram", **chosen: Any) -> Any:
        tier, gradients = ("disk" if word in places else "ram" for word in ("disk", "gradients"))
        return stream(
            toys.net(depth=depth, dim=8).to(dtype), micro_batch_size=micro, max_grad_norm=clip,
            hooks=hooks, state_format=state_format, tier=tier,
            gradient_tier=gradients, disk_path=tempfile.gettempdir(), **ADAMW, **chosen,
        )  # fmt: skip

    jittered = TransferHooks(max_delay_s=0.001, seed=seed, poison=True)
    losses, norms, weights = train(streamed(jittered, **options), early, dtype)
    calm = train(streamed(None), early=False, dtype=dtype)
    assert (losses, norms) == calm[:2]
    assert all(torch.equal(weights[k], v) for k, v in calm[2].items())
    expected = plain(depth, clip)
    assert losses == pytest.approx(expected[0], rel=toys.within(bound, 1e-4))
    if bound > 1e-5:
        return
    if micro == BATCH:
        assert (losses, norms) == toys.like(expected[:2])
    assert norms == pytest.approx(expected[1], rel=toys.within(1e-5, 1e-4))
    assert toys.largest_relative(weights, expected[2]) < toys.within(1e-5, 1e-2)


def test_spans_name_every_kind_of_work() -> None:
    streamed = stream(toys.net(), hooks=TransferHooks(max_delay_s=0.001), activations="host")
    toys.train_streamed(streamed, toys.batches(2))
    streamed.close()
    kinds = {(s.lane, s.name.split()[0]) for s in streamed.trace.spans if s.lane == "compute"}
    assert kinds == {("compute", k) for k in ("forward", "recompute", "backward", "clear", "round")}
    lanes = {s.lane for s in streamed.trace.spans}
    assert lanes == {"compute", "h2d", "d2h", "adamw", "wait"}
    compute = sorted((s.start, s.end) for s in streamed.trace.spans if s.lane == "compute")
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(compute))  # never nested
