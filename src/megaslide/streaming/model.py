"""`stream` and `StreamedModel`: the user's view of the engine.

An ordinary PyTorch loop survives: call the model, `loss.backward()`, `step()`. The model's own
forward runs unmodified; only its blocks' weights come and go.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megaslide.streaming import checkpoint
from megaslide.streaming.accelerator import open_transfer
from megaslide.streaming.activations import Activations
from megaslide.streaming.chunks import require_cuttable
from megaslide.streaming.executor import Executor
from megaslide.streaming.filling import fill_store
from megaslide.streaming.gradients import GradientBuffers
from megaslide.streaming.lanes import Event
from megaslide.streaming.layout import Unit, find_blocks, plan_units
from megaslide.streaming.memory import require_budget
from megaslide.streaming.optimizer import StreamedAdamW
from megaslide.streaming.options import StreamOptions
from megaslide.streaming.slots import SlotCache
from megaslide.streaming.store import Store
from megaslide.streaming.transfer import Transfer


class NonFiniteGradientError(RuntimeError):
    """The global gradient norm is NaN or infinite; nothing was updated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm of all gradients before clipping."""
    clip_coef: float
    """Factor every gradient was scaled by; 1 when the norm was within max_grad_norm."""


def stream(model: nn.Module, **options: Any) -> "StreamedModel":
    """Move a model's state into host memory and stream its blocks through a device.

    The model's parameters leave the module (its blocks hold placeholders on the meta device), so
    keep using the returned object.

    Args:
        model: any module with repeated blocks; frozen parameters (`requires_grad=False`) stay so.
        options: the fields of `StreamOptions`, such as device, lr, max_grad_norm,
            micro_batch_size, dtype, slots, activations.

    Raises:
        ValueError: no blocks found, an unknown name, or an option out of range.
        InputError: the device budget is too small for one block, or RAM or disk for the state; or
            blocks cannot be computed in the chunks of `frames_per_chunk`.
        RuntimeError: torch finds no such device.
    """
    chosen = StreamOptions(**options)
    return build(model, chosen, open_transfer(chosen))


def build(model: nn.Module, chosen: StreamOptions, transfer: Transfer) -> "StreamedModel":
    """`stream` on a given device."""
    resident, streamed = plan_units(model, find_blocks(model, chosen.blocks), chosen.dtype)
    units = [resident, *streamed]
    if chosen.frames_per_chunk is not None:
        require_cuttable({unit.layout.name: unit.module for unit in streamed})
    if chosen.device_budget is not None:
        require_budget([u.layout for u in units], chosen.slots, chosen.device_budget)
    store = Store([u.layout for u in units], chosen.store, transfer.lanes)
    fill_store(store, units, chosen.init_weights)
    transfer.memory.advice = chosen.memory_advice
    with transfer.memory.explained():
        return StreamedModel(model, units, store, transfer, chosen)


class StreamedModel:
    """A model whose blocks stream; call it like the model it wraps."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        store: Store,
        transfer: Transfer,
        options: StreamOptions,
    ) -> None:
        self.module = model
        self.trace = transfer.trace
        self._units, self._transfer = units, transfer
        self._settings, self._max_grad_norm = options.adamw, options.max_grad_norm
        self._parameter_order = [name for name, _ in model.named_parameters()]
        self._early: set[int] = set()
        """Units whose update of this step was launched before `step`."""
        self._torn = False
        self.store = store
        for buffer in store.crossing:
            transfer.adopt(buffer)
        self._optimizer = StreamedAdamW(self.store, transfer.lanes, options.ema_decay)
        blocks = list(range(1, len(units)))
        updated = self._optimizer.updated
        self._slots = SlotCache(transfer, self.store, blocks, options.slots, updated)
        self._gradients = GradientBuffers(transfer, self.store, units)
        folder = None if options.activation_dir is None else Path(options.activation_dir)
        activations = Activations(transfer, options.activations, folder)
        self._executor = Executor(
            transfer, units, self._slots, self._gradients, activations,
            options.micro_batch_size, options.shared_inputs, options.frames_per_chunk,
        )  # fmt: skip
        self._place_resident()

    # The training loop ------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; differentiable when grad is enabled.

        Raises:
            InputError: the device is out of memory, here or in backward; says what to lower.
        """
        self._require_whole()
        if self._early:
            raise RuntimeError("updates have begun in final_backward(): call step() first")
        self._transfer.wait(self._resident_ready, "resident loaded")
        with self._transfer.memory.explained(), self._executor.forward_pass():
            return self.module(*args, **kwargs)

    @contextmanager
    def final_backward(self) -> Iterator[None]:
        """Declares that the backward within is the last one before `step`.

        Without clipping, every block's update then starts as its gradient lands instead of in
        `step`; the result is the same. With clipping nothing changes, because the first update
        needs the norm of all gradients.

        A gradient that is not finite stops the update of its own block only; `step` then raises,
        and the state, some of it a step ahead of the rest, can be used again only after `load`.
        """
        if self._max_grad_norm is not None:
            yield
            return
        self._gradients.on_complete = self._update_early
        try:
            yield
            self._gradients.send_resident()
        finally:
            self._gradients.on_complete = None

    def step(self) -> StepResult:
        """Clip by the exact global norm and start AdamW; returns before the update has finished.

        Whatever reads weights afterwards (the next call, saving, EMA) waits for the update.

        Raises:
            NonFiniteGradientError: the norm is not finite. Nothing has changed (but see
                `final_backward`); `zero_grad` clears.
        """
        self._require_whole()
        self._gradients.send_resident()
        self._gradients.finish()
        norm, coef = self._clip()
        order = dict.fromkeys([0, *self._executor.order, *range(len(self._units))])
        self._slots.invalidate()
        landed = self._gradients.landed
        left = [unit for unit in order if unit not in self._early and landed[unit].norms]
        for unit, following in zip(left, [*left[1:], None], strict=False):
            self._optimizer.launch(unit, landed[unit], self._settings, coef, following=following)
        self._early.clear()
        self._gradients.clear()
        self._refresh_resident()
        self._slots.prefetch(self._executor.order)
        return StepResult(grad_norm=norm, clip_coef=coef)

    def zero_grad(self) -> None:
        """Forget the gradients of this step.

        Raises:
            RuntimeError: some are applied already, in `final_backward`.
        """
        if self._early and not self._torn:
            raise RuntimeError("updates have begun in final_backward(): call step()")
        self._gradients.clear()

    def _update_early(self, unit: int, landed: Event) -> None:
        if unit in self._early:
            raise RuntimeError(
                f"{self._units[unit].layout.name} had a gradient after its last one: backward "
                f"ran twice in final_backward(), or through a graph of an earlier step"
            )
        self._early.add(unit)
        after = {"gradient landed": landed}
        self._optimizer.launch(unit, self._gradients.landed[unit], self._settings, 1.0, after)

    def _require_whole(self) -> None:
        if self._torn:
            raise RuntimeError(
                "a gradient that was not finite stopped a step whose updates had begun: "
                "load a checkpoint before anything else"
            )

    def _clip(self) -> tuple[float, float]:
        landed = {n: norm for unit in self._gradients.landed for n, norm in unit.norms.items()}
        norms = [landed[name] for name in self._parameter_order if name in landed]
        if not norms:
            return 0.0, 1.0
        # The same operations in the same order as torch.nn.utils.clip_grad_norm_.
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if not torch.isfinite(norm):
            self._torn = bool(self._early)
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
        """Wait until the store holds the finished step.

        Raises:
            RuntimeError: there is none, after a gradient that was not finite.
        """
        self._require_whole()
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

    def load(
        self,
        weights: Path | str,
        optimizer: Path | str | None = None,
        *,
        keep: Collection[str] = (),
    ) -> None:
        """Restore the weights, and with `optimizer` the whole state bit-exactly.

        Args:
            weights: folder in the diffusers layout.
            optimizer: folder that `save_optimizer` wrote.
            keep: names of parameters that the weights do not have; they stay what they are.

        Raises:
            InputError: the files are incomplete or of another model.
        """
        self._torn = False
        self._early.clear()
        self._quiesce()
        self._gradients.clear()
        checkpoint.load_weights(self.store, Path(weights), keep)
        if optimizer is not None:
            checkpoint.load_optimizer(self.store, Path(optimizer))
        self._refresh_resident()

    @contextmanager
    def use_ema(self) -> Iterator[None]:
        """Compute with the moving average within; the weights come back unchanged after."""
        self._quiesce()
        try:
            with self.store.serving_ema():
                self._refresh_resident()
                try:
                    yield
                finally:
                    self._quiesce()
        finally:  # the device's copy of what is outside the blocks is the average's still
            self._refresh_resident()

    def close(self) -> None:
        """Stop the worker threads and give the disk back; state in RAM stays readable.

        Memory is free again with the last reference to this, whoever keeps the module.
        """
        self._gradients.finish()
        self._optimizer.finish()
        self._optimizer.close()
        self._transfer.close()
        self.store.close()
        self._executor.close()

    def _quiesce(self) -> None:
        """Finish all that reads or writes the store's weights, and forget what is on the device."""
        self.finish()
        self._slots.invalidate()
        self._transfer.join(self._resident_ready, "resident before the weights change")

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
        after = {
            "resident free": self._transfer.record(),
            "resident updated": self._optimizer.updated(0),
        }
        self._resident_ready: Event = self._transfer.h2d(
            self._resident, lambda: self.store.weights(0), after, "resident"
        )
