"""`stream` and `StreamedModel`: the user's view of the engine.

An ordinary PyTorch loop survives: call the model, `loss.backward()`, `step()`. The model's own
forward runs unmodified; only its blocks' weights come and go.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megaslide.ops.adamw import AdamWSettings
from megaslide.streaming import checkpoint
from megaslide.streaming.executor import Executor
from megaslide.streaming.gradients import GradientBuffers
from megaslide.streaming.lanes import Event
from megaslide.streaming.filling import Initialiser, fill_store
from megaslide.streaming.layout import Unit, find_blocks, plan_units
from megaslide.streaming.optimizer import StreamedAdamW
from megaslide.streaming.records import StateFormat
from megaslide.streaming.slots import SlotCache
from megaslide.streaming.store import Store, StoreSettings, Tier
from megaslide.streaming.transfer import CpuTransfer, Transfer, TransferHooks
from megaslide.tracing import Trace


class NonFiniteGradientError(RuntimeError):
    """The global gradient norm is NaN or infinite; nothing was updated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm of all gradients before clipping."""
    clip_coef: float
    """Factor every gradient was scaled by; 1 when the norm was within max_grad_norm."""


def stream(
    model: nn.Module,
    *,
    device: str | torch.device = "cpu",
    blocks: Sequence[str] | None = None,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    micro_batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    slots: int = 2,
    ema_decay: float | None = None,
    tier: Tier = "ram",
    state_format: StateFormat = "split",
    gradient_tier: Tier = "ram",
    disk_path: Path | str | None = None,
    init_weights: Initialiser | None = None,
    trace: Trace | None = None,
    hooks: TransferHooks | None = None,
) -> "StreamedModel":
    """Move a model's state into host memory and stream its blocks through `device`.

    The model's parameters leave the module (its blocks hold placeholders on the meta device), so
    keep using the returned object.

    Args:
        model: any module with repeated blocks; frozen parameters (`requires_grad=False`) stay so.
        device: where blocks compute.
        blocks: names of module lists (or single modules) to stream; None finds them.
        lr, betas, eps, weight_decay: AdamW, as in torch.optim.
        max_grad_norm: exact global-norm clipping, as clip_grad_norm_; None turns it off.
        micro_batch_size: samples per pass through a block; None takes the whole batch.
        dtype: compute dtype of trainable parameters, float32 or bfloat16; None keeps their own.
            Masters are fp32 either way, initialised from the given values exactly.
        slots: device-side buffers of one block each, 2 or more.
        ema_decay: keep an exponential moving average of the masters.
        tier, state_format, gradient_tier, disk_path: where the state lives and in which form; see
            `StoreSettings`.
        init_weights: how parameters on the meta device begin: called with every module that holds
            some, once they have memory, block by block; `reset_parameters` is one that most
            modules can do. None leaves them zero until `load`.
        trace: where spans and byte counters are recorded.
        hooks: fault injection for tests.

    Raises:
        ValueError: no blocks found, an unknown name, or an option out of range.
        InputError: RAM or disk is too small for the state.
        RuntimeError: the device has no transfer backend.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size} is below 1")
    transfer = _transfer(torch.device(device), trace or Trace(), hooks)
    settings = AdamWSettings(
        lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay
    )
    store_settings = StoreSettings(
        tier=tier, state_format=state_format, gradient_tier=gradient_tier,
        disk_path=None if disk_path is None else Path(disk_path), ema=ema_decay is not None,
    )  # fmt: skip
    resident, streamed = plan_units(model, find_blocks(model, blocks), dtype)
    units = [resident, *streamed]
    store = Store([u.layout for u in units], store_settings, transfer.trace)
    fill_store(store, units, init_weights)
    return StreamedModel(
        model, units, store, transfer, settings, max_grad_norm, micro_batch_size, slots, ema_decay
    )


class StreamedModel:
    """A model whose blocks stream; call it like the model it wraps."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        store: Store,
        transfer: Transfer,
        settings: AdamWSettings,
        max_grad_norm: float | None,
        micro_batch_size: int | None,
        slots: int,
        ema_decay: float | None,
    ) -> None:
        self.module = model
        self.trace = transfer.trace
        self._units, self._transfer = units, transfer
        self._settings, self._max_grad_norm = settings, max_grad_norm
        self._parameter_order = [name for name, _ in model.named_parameters()]
        self.store = store
        for buffer in store.buffers:
            transfer.memory.exclude(buffer)
        self._optimizer = StreamedAdamW(self.store, self.trace, ema_decay)
        blocks = list(range(1, len(units)))
        self._slots = SlotCache(transfer, self.store, blocks, slots, self._optimizer.updated)
        self._gradients = GradientBuffers(transfer, self.store, units)
        self._executor = Executor(
            units, self._slots, self._gradients, micro_batch_size, transfer.device.type
        )
        for unit in blocks:
            self._executor.wrap(unit)
        self._place_resident()

    # The training loop ------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; differentiable when grad is enabled."""
        self._transfer.wait(self._resident_ready)
        with self._executor.forward_pass():
            return self.module(*args, **kwargs)

    def step(self) -> StepResult:
        """Clip by the exact global norm and start AdamW; returns before the update has finished.

        Whatever reads weights afterwards (the next call, saving, EMA) waits for the update.

        Raises:
            NonFiniteGradientError: the norm is not finite. Nothing has changed; `zero_grad` clears.
        """
        self._gradients.send_resident()
        self._gradients.finish()
        norm, coef = self._clip()
        present = [set(norms) for norms in self._gradients.landed]
        order = list(dict.fromkeys([0, *self._executor.order, *range(len(self._units))]))
        self._slots.invalidate()
        self._optimizer.launch(order, present, self._settings, coef)
        self._gradients.clear()
        self._refresh_resident()
        self._slots.prefetch(self._executor.order)
        return StepResult(grad_norm=norm, clip_coef=coef)

    def zero_grad(self) -> None:
        """Forget the gradients of this step."""
        self._gradients.clear()

    def _clip(self) -> tuple[float, float]:
        landed = {name: norm for unit in self._gradients.landed for name, norm in unit.items()}
        norms = [landed[name] for name in self._parameter_order if name in landed]
        if not norms:
            return 0.0, 1.0
        # The same operations in the same order as torch.nn.utils.clip_grad_norm_.
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if not torch.isfinite(norm):
            bad = [name for name, value in landed.items() if not torch.isfinite(value)]
            raise NonFiniteGradientError(f"gradient norm is {norm.item()}; first in {bad[:3]}")
        if self._max_grad_norm is None:
            return norm.item(), 1.0
        coef = torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
        return norm.item(), coef.item()

    # Settings and accounting ------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Learning rate of the next step; assign to change it."""
        return self._settings.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._settings = replace(self._settings, lr=value)

    def train(self, mode: bool = True) -> "StreamedModel":
        self.module.train(mode)
        return self

    def eval(self) -> "StreamedModel":
        return self.train(False)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, padding not counted, tied ones once."""
        return sum(p.numel for u in self._units for p in u.layout.parameters)

    @property
    def state_bytes(self) -> int:
        """Bytes of persistent state in the store: weights, masters, moments, EMA."""
        return self.store.state_bytes

    @property
    def device_bytes(self) -> dict[str, int]:
        """Device bytes by kind: arenas exactly, activations at their observed peak."""
        memory = self._transfer.memory
        return {**memory.arenas, "activations": memory.peak_activations}

    @property
    def device_peak_bytes(self) -> int:
        """Largest number of bytes held on the device; see `observing_memory`."""
        return self._transfer.memory.peak_bytes

    @contextmanager
    def observing_memory(self) -> Iterator[None]:
        """Follow activation memory within (on the CPU this slows Python down a little)."""
        with self._transfer.memory.observing():
            yield

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every parameter by name, in its compute dtype, copied from the finished step."""
        self.finish()
        return {name: weight.clone() for name, weight in self.store.named_weights()}

    def finish(self) -> None:
        """Wait until the store holds the finished step."""
        self._gradients.finish()
        self._optimizer.finish()

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights in the diffusers layout: config.json and (sharded) safetensors."""
        self.finish()
        checkpoint.save_weights(self.module, self.store, Path(folder))

    def save_ema(self, folder: Path | str) -> None:
        """The moving average, in the same layout as `save_pretrained`."""
        self.finish()
        with self.store.serving_ema():
            checkpoint.save_weights(self.module, self.store, Path(folder))

    def save_optimizer(self, folder: Path | str) -> None:
        """Residuals, moments, EMA and step counts: with the weights, everything to resume."""
        self.finish()
        checkpoint.save_optimizer(self.store, Path(folder))

    def load(self, weights: Path | str, optimizer: Path | str | None = None) -> None:
        """Restore the weights, and with `optimizer` the whole state bit-exactly.

        Raises:
            InputError: the files are incomplete or of another model.
        """
        self.finish()
        self._gradients.clear()
        self._slots.invalidate()
        checkpoint.load_weights(self.store, Path(weights))
        if optimizer is not None:
            checkpoint.load_optimizer(self.store, Path(optimizer))
        self._refresh_resident()

    @contextmanager
    def use_ema(self) -> Iterator[None]:
        """Compute with the moving average within; the weights come back unchanged after."""
        self.finish()
        with self.store.serving_ema():
            self._reload()
            yield
        self._reload()

    def close(self) -> None:
        """Stop the worker threads and give the disk back; state in RAM stays readable."""
        self.finish()
        self._optimizer.close()
        self._transfer.close()
        self.store.close()

    def _reload(self) -> None:
        self._slots.invalidate()
        self._refresh_resident()
        self._transfer.wait(self._resident_ready)

    # The resident unit ------------------------------------------------------------------------

    def _place_resident(self) -> None:
        unit, layout = self._units[0], self._units[0].layout
        self._resident = self._transfer.allocate(layout.weight_nbytes, "resident")
        parameters = {
            p.name: nn.Parameter(p.weight(self._resident), requires_grad=p.trainable)
            for p in layout.parameters
        }
        for use, piece in unit.uses:
            use.owner._parameters[use.key] = parameters[piece.name]
        for module in self.module.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(self._transfer.device)
        self._gradients.watch_resident([parameters[p.name] for p in layout.parameters])
        self._refresh_resident()

    def _refresh_resident(self) -> None:
        self._resident_ready: Event = self._transfer.h2d(
            self._resident, lambda: self.store.weights(0), [self._optimizer.updated(0)], "resident"
        )


def _transfer(device: torch.device, trace: Trace, hooks: TransferHooks | None) -> Transfer:
    if device.type != "cpu":
        raise RuntimeError(f"device {str(device)!r} has no transfer backend yet; use device='cpu'")
    return CpuTransfer(trace, hooks)
