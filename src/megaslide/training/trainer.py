"""The trainer: what one step is, and everything that must continue when a run does.

`train_step` is the paper's loop in plain PyTorch; streaming hides behind `model(...)`,
`backward()` and `model.step()`. All randomness of training comes from one generator and from the
sampler's position, both of which a checkpoint holds.
"""

import base64
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from megaslide import runs
from megaslide.config import Config, save_config
from megaslide.data.codecs import build_codec
from megaslide.data.latents import Batch, BucketSampler, LatentDataset, collate
from megaslide.data.text import build_text_encoder
from megaslide.diffusion.objectives import FlowMatching
from megaslide.errors import InputError
from megaslide.evaluation.validation import ValidationLoss, validation_loss
from megaslide.models.dit import build_model
from megaslide.sampling import generate, sample_size, save_samples
from megaslide.streaming import NonFiniteGradientError, StreamedModel, stream
from megaslide.tracing import Trace, summarize
from megaslide.training.schedules import learning_rate

logger = logging.getLogger(__name__)

LINKS = ("h2d", "d2h")
LANES = ("compute", *LINKS, "adamw")


class NonFiniteLossError(RuntimeError):
    """Training diverged; names the step, the samples and the last good checkpoint."""


class Trainer:
    """One run: model, data, objective and their state."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run = Path(config.output_dir)
        self.codec = build_codec(config.data.codec)
        self.text_encoder = build_text_encoder(config.data.text)
        cache = Path(config.data.cache_dir)
        self.dataset = LatentDataset(cache, split="train", expect=config.data)
        self.validation = self._validation_batches(cache)
        batch_size = config.train.train_batch_size * config.train.gradient_accumulation_steps
        self.sampler = BucketSampler(self.dataset, batch_size, seed=config.train.seed)
        self._indices = iter(self.sampler)
        train = config.train
        self.objective = FlowMatching(
            shift=train.shift, weighting_scheme=train.weighting_scheme,
            logit_mean=train.logit_mean, logit_std=train.logit_std,
        )  # fmt: skip
        self.trace = Trace()
        self.model = self._build_model()
        self.device = torch.device(_device(config))
        self.generator = torch.Generator().manual_seed(train.seed)
        self.step = 0
        self._last_step = (0.0, 0.0)

    # One step ---------------------------------------------------------------------------------

    def train_step(self) -> dict[str, float]:
        """One optimizer step on the next batch; returns what the log reports of it."""
        start, before = time.perf_counter(), self.trace.snapshot()
        batch = self._next_batch()
        latents = batch.latents.to(self.device)  # [B, C, T, H, W]
        noise = torch.randn(latents.shape, generator=self.generator).to(self.device)
        sigmas = self.objective.sample_sigmas(len(latents), self.generator).to(self.device)  # [B]
        self.model.lr = learning_rate(self.config.optim, self.step, self.max_steps)

        loss, per_sample = self.objective.loss(
            self.model, latents, noise, sigmas, **self._conditioning(batch)
        )
        self._require_finite(per_sample, batch)
        with self.model.final_backward():
            loss.backward()
        try:
            result = self.model.step()
        except NonFiniteGradientError as error:
            raise self._diverged(str(error), batch) from error

        self.step += 1
        self._last_step = (start, time.perf_counter())
        seconds = self._last_step[1] - start
        return {
            "train/loss": loss.item(),
            "train/grad_norm": result.grad_norm,
            "train/lr": self.model.lr,
            "perf/step_time_s": seconds,
            "perf/tokens_per_s": self._tokens(latents) / seconds,
            **self._resources(before),
        }

    @property
    def max_steps(self) -> int:
        return self.config.train.max_train_steps

    def last_step(self) -> dict[str, Any]:
        """Spans of the last step and the bytes it moved."""
        spans = [s for s in self.trace.between(*self._last_step) if s.lane != "wait"]
        moved = {lane: sum(s.nbytes for s in spans if s.lane == lane) for lane in ("h2d", "d2h")}
        return {
            "last_step_spans": spans,
            "h2d_bytes": moved["h2d"],
            "d2h_bytes": moved["d2h"],
        }

    def _next_batch(self) -> Batch:
        return collate([self.dataset[i] for i in next(self._indices)])

    def _conditioning(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Text of the batch, some of it replaced by the empty caption for guidance."""
        text, mask = batch.text.clone(), batch.mask.clone()
        empty_text, empty_mask = self.dataset.empty_text()
        drop = torch.rand(len(text), generator=self.generator) < self.config.data.caption_dropout
        text[drop], mask[drop] = empty_text, empty_mask
        return {
            "encoder_hidden_states": text.to(self.device),
            "encoder_attention_mask": mask.to(self.device),
        }

    def _tokens(self, latents: torch.Tensor) -> int:
        return len(latents) * latents[0, 0].numel() // math.prod(self._patch_size)

    def _resources(self, before: dict[str, float]) -> dict[str, float]:
        traced = summarize(before, self.trace.snapshot())
        lanes = {f"offload/{lane}_s": traced.busy_s.get(lane, 0.0) for lane in LANES}
        moved = {f"offload/{link}_gb": traced.nbytes.get(link, 0) / 1e9 for link in LINKS}
        return {
            "mem/device_peak_gb": self.model.device_peak_bytes / 1e9,
            "mem/host_rss_gb": psutil.Process().memory_info().rss / 1e9,
            **moved,
            "offload/wait_s": traced.wait_s,
            **lanes,
            "offload/overlap": traced.overlap,
        }

    def _require_finite(self, per_sample: torch.Tensor, batch: Batch) -> None:
        bad = (~torch.isfinite(per_sample)).nonzero().flatten().tolist()
        if bad:
            clips = [batch.clip_ids[i] for i in bad]
            raise self._diverged(f"loss of {', '.join(clips)} is not finite", batch)

    def _diverged(self, what: str, batch: Batch) -> NonFiniteLossError:
        kept = runs.checkpoints(self.run)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint was saved yet"
        return NonFiniteLossError(
            f"step {self.step + 1}: {what} (batch: {', '.join(batch.clip_ids)}); {last}.\n"
            "  fix: lower optim.learning_rate, or look at the named clips, and resume from it"
        )

    # Validation and samples -------------------------------------------------------------------

    def validate(self) -> ValidationLoss | None:
        """eval/loss of the weights that would be sampled; None without held-out clips."""
        if not self.validation:
            return None
        with self.sampled_weights():
            return validation_loss(self.model, self.objective, self.validation, self.device)

    def sample(self, folder: Path, prompts: tuple[str, ...] | None = None) -> list[Path]:
        """Write clips for the prompts (the config's by default) and a contact sheet."""
        settings = self.config.sample
        prompts = prompts or settings.prompts
        with self.sampled_weights():
            frames = generate(
                self.model, self.codec, self.text_encoder, prompts,
                bucket=sample_size(settings, self.config, self.codec, self._patch_size),
                settings=settings, shift=self.config.train.shift, device=self.device,
            )  # fmt: skip
        return save_samples(frames, prompts, folder, settings.fps, settings)

    def sampled_weights(self) -> Any:
        """Context in which the model computes in eval mode, with its EMA if there is one."""
        return _SampledWeights(self.model, ema=self.config.train.use_ema)

    def _validation_batches(self, cache: Path) -> list[Batch]:
        held_out = LatentDataset(cache, split="validation", expect=self.config.data)
        if not len(held_out):
            return []
        size, count = self.config.train.train_batch_size, self.config.train.validation_batches
        sampler = iter(BucketSampler(held_out, min(size, len(held_out)), seed=0))
        count = min(count, -(-len(held_out) // size))
        return [collate([held_out[i] for i in next(sampler)]) for _ in range(count)]

    # Checkpoints ------------------------------------------------------------------------------

    def save(self) -> Path:
        """Publish `checkpoint-{step}` with everything that resuming needs."""
        state = {
            "global_step": self.step,
            "sampler": self.sampler.state_dict(),
            "generator": _encode(self.generator.get_state()),
            "torch_rng": _encode(torch.get_rng_state()),
            "config": self.config.model_dump(mode="json"),
        }

        def write(folder: Path) -> None:
            self.model.save_pretrained(folder / "transformer")
            self.model.save_optimizer(folder / "optimizer")
            if self.config.train.use_ema:
                self.model.save_ema(folder / "ema")
            (folder / runs.STATE).write_text(json.dumps(state, indent=2))
            save_config(self.config, folder / runs.CONFIG)

        return runs.publish(
            self.run, self.step, write,
            needed_bytes=self.checkpoint_bytes, limit=self.config.train.checkpoints_total_limit,
        )  # fmt: skip

    @property
    def checkpoint_bytes(self) -> int:
        """Upper estimate of one checkpoint's size."""
        extra = self.model.store.nbytes["weights"] if self.config.train.use_ema else 0
        return self.model.state_bytes + extra + 1_000_000

    def resume(self, checkpoint: Path) -> None:
        """Continue bit-exactly from a checkpoint of this configuration.

        Raises:
            InputError: another model or data setting; names the first that differs.
        """
        state = runs.read_state(checkpoint)
        _require_same(checkpoint, Config.model_validate(state["config"]), self.config)
        self.model.load(checkpoint / "transformer", checkpoint / "optimizer")
        self.sampler.load_state_dict(state["sampler"])
        self._indices = iter(self.sampler)
        self.generator.set_state(_decode(state["generator"]))
        torch.set_rng_state(_decode(state["torch_rng"]))
        self.step = state["global_step"]

    def close(self) -> None:
        self.model.close()

    def _build_model(self) -> StreamedModel:
        config, optim = self.config, self.config.optim
        torch.manual_seed(config.train.seed)
        model = build_model(
            config.model, config.attention,
            in_channels=self.codec.channels, text_dim=self.text_encoder.dim,
        )  # fmt: skip
        self._patch_size = model.config.patch_size
        return stream(
            model,
            device=_device(config),
            lr=optim.learning_rate,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_epsilon,
            weight_decay=optim.adam_weight_decay,
            max_grad_norm=optim.max_grad_norm,
            micro_batch_size=config.offload.micro_batch_size or config.train.train_batch_size,
            dtype=torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32,
            slots=config.offload.slots,
            tier=config.offload.tier,
            state_format=config.offload.state_format,
            gradient_tier=config.offload.gradient_tier,
            disk_path=config.offload.disk_path or self.run / "state",
            activations=config.offload.activations,
            activation_dir=config.offload.activation_dir,
            device_budget=_bytes(config.offload.device_budget_gb),
            link_gb_s=config.offload.link_gb_s,
            ema_decay=config.train.ema_decay if config.train.use_ema else None,
            trace=self.trace,
        )


class _SampledWeights:
    def __init__(self, model: StreamedModel, *, ema: bool) -> None:
        self._model = model
        self._ema = model.use_ema() if ema else None

    def __enter__(self) -> None:
        self._model.eval()
        if self._ema:
            self._ema.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._ema:
            self._ema.__exit__(*exception)
        self._model.train()


def _device(config: Config) -> str:
    if config.offload.device != "auto":
        return config.offload.device
    return "cpu"  # the only transfer backend so far


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _require_same(checkpoint: Path, saved: Config, current: Config) -> None:
    """What changes the weights' meaning or the order of data must not change on resume."""
    for section in ("model", "attention", "data"):
        old, new = getattr(saved, section), getattr(current, section)
        for key in type(old).model_fields:
            if key in ("backend", "path", "cache_dir"):
                continue
            if getattr(old, key) != getattr(new, key):
                raise InputError(
                    f"{checkpoint}: saved with {section}.{key}={getattr(old, key)!r}, "
                    f"this run has {getattr(new, key)!r}",
                    "resume with the same value, or start a new run in another output_dir",
                )
