"""Whole training steps of VideoDiT: bf16, state in RAM, flow matching on random latents and text.

Shapes: latents [B, 16, T, 2H, 2W] for a grid of T x H x W tokens, text [B, L, text_dim]; B
micro-batches of one sample.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_check.session import Row, Session
from megaslide.diffusion.objectives import FlowMatching
from megaslide.models.dit import VideoDiT
from megaslide.models.presets import VideoDiTConfig
from megaslide.planning.costs import ModelCosts, model_costs
from megaslide.streaming import StreamedModel, TransferHooks, stream
from megaslide.streaming.budget import available_ram
from megaslide.streaming.layout import find_blocks, plan_units
from megaslide.streaming.records import StateFormat
from megaslide.streaming.store import StoreSettings, plan_store
from megaslide.tracing import Trace, TraceSummary, summarize

HEAD_DIM, CHANNELS = 128, 16
SPARE_BYTES = 9 * 10**9
"""RAM left beside the state: Python, the device's driver, one block while it is initialised."""
TIMED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model."""

    hidden_size: int
    num_layers: int
    attention: str = "deformable"
    text: tuple[int, int] = (256, 4096)

    def config(self) -> VideoDiTConfig:
        return VideoDiTConfig(
            in_channels=CHANNELS, text_dim=self.text[1], hidden_size=self.hidden_size,
            num_layers=self.num_layers, num_attention_heads=max(1, self.hidden_size // HEAD_DIM),
            attention_kind=self.attention,
        )  # fmt: skip

    def on_meta(self) -> VideoDiT:
        with torch.device("meta"):
            return VideoDiT(self.config())


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one step trains on."""

    micro_batches: int
    grid: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        return self.micro_batches * math.prod(self.grid)


SIZES = {
    "1b": Size(hidden_size=1536, num_layers=26),
    "4b": Size(hidden_size=3072, num_layers=26),
}
WIDEST = 4096
LOADS = (
    Load(micro_batches=1, grid=(4, 32, 32)), Load(micro_batches=1, grid=(16, 32, 32)),
    Load(micro_batches=4, grid=(16, 32, 32)),
)  # fmt: skip
TOY = Size(hidden_size=32, num_layers=2, text=(3, 8))
TOY_LOADS = (Load(micro_batches=2, grid=(2, 2, 2)),)


class RandomWeights:
    """Sets a module's own parameters: matrices normal, of deviation 0.02, norms one, biases zero.

    Copies of one pool, since drawing billions of numbers would take longer than all that is
    measured; and no branch is shut, as it would be in a model that is really about to be trained.
    """

    def __init__(self, pool: int = 2**22) -> None:
        self._pool = 0.02 * torch.randn(pool, generator=torch.Generator().manual_seed(0))

    def __call__(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            flat = parameter.data.view(-1)
            if parameter.ndim == 1:
                flat.fill_(1.0 if name == "weight" else 0.0)
                continue
            for start in range(0, flat.numel(), self._pool.numel()):
                piece = flat[start : start + self._pool.numel()]
                piece.copy_(self._pool[: piece.numel()])


# ---- parts ---------------------------------------------------------------------------------------


def small(session: Session) -> None:
    """1 B: overlapped, and with every copy waited for."""
    if not _gated(session):
        return
    size = TOY if session.smoke else SIZES["1b"]
    _all_loads(session, size, "split")
    _all_loads(session, size, "split", synchronous=True)


def middle(session: Session) -> None:
    """4 B, with a trace; then with dense attention, which parts the engine from the kernels."""
    if not _gated(session):
        return
    size = TOY if session.smoke else SIZES["4b"]
    _all_loads(session, size, "split", trace=session.out / "trace-4b.json")
    dense = Size(hidden_size=size.hidden_size, num_layers=size.num_layers, text=size.text,
                 attention="dense")  # fmt: skip
    _all_loads(session, dense, "split", only=-2)


def largest(session: Session) -> None:
    """As many blocks as the RAM has room for."""
    if _gated(session):
        _all_loads(session, _largest(session, "split"), "split")


def largest8(session: Session) -> None:
    """The same with 8-bit moments: almost twice the model."""
    if _gated(session):
        _all_loads(session, _largest(session, "split8"), "split8")


def _largest(session: Session, state_format: StateFormat) -> Size:
    if session.smoke:
        return TOY
    return largest_size(state_format, available_ram() - SPARE_BYTES)


def largest_size(state_format: StateFormat, room: int, hidden_size: int = WIDEST) -> Size:
    """The model with the most blocks whose state and gradients take at most `room` bytes."""
    one, two = (
        _state_bytes(Size(hidden_size=hidden_size, num_layers=n), state_format) for n in (1, 2)
    )
    layers = 1 + (room - one) // (two - one)
    if layers < 1:
        raise RuntimeError(f"{room} bytes of RAM: not enough for one block of {hidden_size}")
    return Size(hidden_size=hidden_size, num_layers=int(layers))


def _state_bytes(size: Size, state_format: StateFormat) -> int:
    model = size.on_meta()
    resident, blocks = plan_units(model, find_blocks(model, None), torch.bfloat16)
    layouts = [unit.layout for unit in (resident, *blocks)]
    return plan_store(layouts, StoreSettings(state_format=state_format)).ram_bytes


# ---- the gate ------------------------------------------------------------------------------------


def _gated(session: Session) -> bool:
    return session.passes("gate", lambda: _parity(session))


def _parity(session: Session) -> Row:
    """Three fp32 steps of a toy, streamed and in plain PyTorch on the same device."""
    device, size = session.chip.device, Size(hidden_size=64, num_layers=2, text=(3, 8))
    load = Load(micro_batches=2, grid=(2, 4, 4))
    torch.manual_seed(0)
    plain = VideoDiT(size.config())
    plain.apply(RandomWeights())
    copy = VideoDiT(size.config())
    copy.load_state_dict(plain.state_dict())
    plain.to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    streamed = stream(copy, device=device, lr=1e-3, micro_batch_size=1)
    batch, losses = _batch(size, load, device, torch.float32), []
    for _ in range(3):
        loss = _loss(plain, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found = _loss(streamed, batch)
        found.backward()
        streamed.step()
        losses.append((found.item(), loss.item()))
    streamed.close()
    worst = max(abs(a - b) / abs(b) for a, b in losses)
    if not worst <= 1e-4:
        raise RuntimeError(f"streamed losses are not those of plain PyTorch: {losses}")
    return {"worst": worst, "bound": 1e-4}


# ---- one model -----------------------------------------------------------------------------------


def _all_loads(
    session: Session, size: Size, state_format: StateFormat, *, synchronous: bool = False,
    trace: Path | None = None, only: int | None = None,
) -> None:  # fmt: skip
    """Build the model once and measure it at every number of tokens, or at the one of `only`."""
    label = f"{size.attention} {state_format} {'sync' if synchronous else 'async'}"
    built: dict[str, StreamedModel] = {}

    def build() -> Row:
        hooks = TransferHooks(synchronous=True) if synchronous else None
        built["model"] = stream(
            size.on_meta(), device=session.chip.device, lr=1e-5, max_grad_norm=1.0,
            micro_batch_size=1, dtype=torch.bfloat16, state_format=state_format,
            init_weights=RandomWeights(), hooks=hooks, trace=Trace(),
        )  # fmt: skip
        model = built["model"]
        return {
            "parameters": model.num_parameters, "state_bytes": model.state_bytes,
            "hidden_size": size.hidden_size, "num_layers": size.num_layers,
        }  # fmt: skip

    session.row(f"{label} build", build)
    if "model" not in built:
        return
    model = built["model"]
    loads = TOY_LOADS if session.smoke else LOADS
    chosen = loads if only is None else loads[max(only, -len(loads)) :][:1]
    peak = session.chip.peak_flop_s or session.ceilings()["gemm_flop_s"]
    for load in chosen:
        final = trace if load is chosen[-1] else None
        session.row(
            f"{label} {load.tokens} tokens",
            lambda load=load, final=final: measure(session, model, size, load, peak, final),
        )
    model.close()


def measure(
    session: Session, model: StreamedModel, size: Size, load: Load, peak: float,
    trace: Path | None,
) -> Row:  # fmt: skip
    """Steady state: every step's AdamW runs under the next step's forward."""
    batch = _batch(size, load, session.chip.device, torch.bfloat16)
    costs = _costs(size, load)
    useful = (costs.forward_flop + costs.backward_flop) * load.micro_batches

    def step() -> float:
        loss = _loss(model, batch)
        loss.backward()
        model.step()
        return loss.item()

    losses = [step()]  # allocates, compiles, fills the slots
    before, start = model.trace.snapshot(), time.perf_counter()
    with model.observing_memory():
        for _ in range(TIMED_STEPS):
            losses.append(step())
    session.chip.synchronize()
    step_s = (time.perf_counter() - start) / TIMED_STEPS
    lanes = summarize(before, model.trace.snapshot())
    if trace is not None:
        _one_step(model.trace, start + (TIMED_STEPS - 1) * step_s).save_chrome(trace)
    if not all(math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"losses {losses} are not finite")
    return {
        "step_s": step_s, "tokens_s": load.tokens / step_s, "mfu": useful / step_s / peak,
        "overlap": lanes.overlap, "peak_device_bytes": model.device_peak_bytes,
        "tflop_s": useful / step_s / 1e12, "peak_flop_s": peak, "flop": useful,
        "tokens": load.tokens, "micro_batches": load.micro_batches, "losses": losses,
        "parameters": model.num_parameters, **_lanes(lanes),
    }  # fmt: skip


def _lanes(lanes: TraceSummary) -> Row:
    busy = {f"{lane}_share": s / lanes.seconds for lane, s in lanes.busy_s.items()}
    rates = {f"{lane}_gb_s": n / lanes.busy_s[lane] / 1e9 for lane, n in lanes.nbytes.items() if n}
    return {**busy, **rates, "wait_share": lanes.wait_s / lanes.seconds}


def _one_step(trace: Trace, start: float) -> Trace:
    """The spans since then alone."""
    part = Trace()
    for span in trace.between(start, time.perf_counter()):
        part.add(span.lane, span.name, span.start, span.end, span.nbytes)
    return part


def _costs(size: Size, load: Load) -> ModelCosts:
    """Of one micro-batch."""
    one = _batch(size, Load(micro_batches=1, grid=load.grid), torch.device("meta"), torch.bfloat16)
    inputs = {
        "hidden_states": one["latents"].float(), "timestep": one["sigmas"],
        "encoder_hidden_states": one["text"],
    }  # fmt: skip
    return model_costs(size.on_meta(), inputs, dtype=torch.bfloat16)


def _batch(size: Size, load: Load, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    B, (T, H, W) = load.micro_batches, load.grid
    shape = (B, CHANNELS, T, 2 * H, 2 * W)
    latents, noise = (torch.randn(shape, device=device) for _ in range(2))
    text = torch.randn(B, *size.text, device=device).to(dtype)
    sigmas = torch.linspace(0.2, 0.8, B, device=device)
    return {"latents": latents, "noise": noise, "sigmas": sigmas, "text": text}


def _loss(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    loss, _ = FlowMatching().loss(
        model, batch["latents"], batch["noise"], batch["sigmas"],
        encoder_hidden_states=batch["text"],
    )  # fmt: skip
    return loss
