"""What a streamed model can be told, in one documented place.

`megaslide.stream(model, lr=1e-5, slots=3)` takes these fields as keywords.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megaslide.errors import InputError
from megaslide.ops.adamw import AdamWSettings
from megaslide.streaming.filling import Initialiser
from megaslide.streaming.records import StateFormat
from megaslide.streaming.store import StoreSettings, Tier
from megaslide.streaming.transfer import TransferHooks
from megaslide.tracing import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """Options of `megaslide.stream`; ValueError where one is out of range."""

    device: str | torch.device = "cpu"
    """Where blocks compute."""
    blocks: Sequence[str] | None = None
    """Names of module lists (or single modules) to stream; None finds them."""
    lr: float = 1e-4
    """Learning rate; this and the next three as in torch.optim.AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    """Exact global-norm clipping, as clip_grad_norm_; None turns it off."""
    micro_batch_size: int | None = None
    """Samples per pass through a block; None takes the whole batch."""
    frames_per_chunk: int | None = None
    """Frames of tokens that a block computes at once, for blocks that offer it (`chunks`), such as
    a VideoDiT's with local attention; None takes all. Less memory, and results but for rounding
    the same; frames near a border between chunks are computed twice."""
    shared_inputs: Sequence[str] = ()
    """Arguments of the blocks' forward that never have a batch dimension, by name. Needed only
    where the first dimension of a table can have the size of the batch by chance."""
    dtype: torch.dtype | None = None
    """Compute dtype of trainable parameters, float32 or bfloat16; None keeps their own.
    Masters are fp32 either way, initialised from the given values exactly."""
    slots: int = 2
    """Device-side buffers of one block each, 2 or more."""
    activations: str = "device"
    """Where the inputs of blocks wait for the backward pass: device, host or disk."""
    activation_dir: Path | str | None = None
    """Folder of the file of `activations="disk"`; None takes the system's temporary folder."""
    device_budget: int | None = None
    """Bytes that weights and gradients may take on the device; more is refused at once."""
    link_gb_s: float | None = None
    """Emulated bandwidth of each direction, in 1e9 bytes per second (CPU only)."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the masters."""
    tier: Tier = "ram"
    """Where the state lives: `ram`, or `disk` for a state that is larger."""
    state_format: StateFormat = "split"
    """Bytes per bf16 parameter: `master` 14, `split` 12, `split8` 6 with 8-bit moments."""
    gradient_tier: Tier = "ram"
    """Where gradients wait for the update; `disk` only with tier `disk`."""
    disk_path: Path | str | None = None
    """Folder of the disk tier; its file has no name and goes with the process."""
    disk_gb_s: float | None = None
    """Emulated bandwidth of the disk tier, both directions together, in 1e9 bytes per second."""
    init_weights: Initialiser | None = None
    """How parameters on the meta device begin: called with every module that holds some, once
    they have memory, block by block, so that the model is never whole in RAM. `reset_parameters`
    of `streaming` suits torch's own modules. None leaves them zero until `load`."""
    trace: Trace | None = None
    """Where spans and byte counters are recorded."""
    hooks: TransferHooks | None = None
    """Fault injection for tests."""

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={self.micro_batch_size} is below 1")
        if self.frames_per_chunk is not None and self.frames_per_chunk < 1:
            raise InputError(
                f"frames_per_chunk={self.frames_per_chunk} is below 1", "give 1 or more, or None"
            )
        if self.slots < 2:
            raise ValueError(
                f"slots={self.slots}; two are needed, one to compute on and one to fill"
            )

    @property
    def memory_advice(self) -> str:
        """What to change where the device's memory is too small."""
        ways = []
        if self.micro_batch_size != 1:
            now = "the whole batch" if self.micro_batch_size is None else self.micro_batch_size
            ways.append(f"a smaller micro_batch_size (now {now})")
        if self.frames_per_chunk is not None and self.frames_per_chunk > 1:
            ways.append(f"a smaller frames_per_chunk (now {self.frames_per_chunk})")
        if self.activations == "device":
            ways.append("activations='host' (now on the device)")
        if self.slots > 2:
            ways.append(f"slots=2 (now {self.slots})")
        return f"take {' or '.join(ways) or 'shorter or smaller clips'}"

    @property
    def store(self) -> StoreSettings:
        return StoreSettings(
            tier=self.tier, state_format=self.state_format, gradient_tier=self.gradient_tier,
            disk_path=None if self.disk_path is None else Path(self.disk_path),
            disk_gb_s=self.disk_gb_s, ema=self.ema_decay is not None,
        )  # fmt: skip

    @property
    def adamw(self) -> AdamWSettings:
        beta1, beta2 = self.betas
        return AdamWSettings(
            lr=self.lr, beta1=beta1, beta2=beta2, eps=self.eps, weight_decay=self.weight_decay
        )
