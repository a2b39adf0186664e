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
from megaslide.config import Config, Triple, save_config
from megaslide.data.codecs import build_codec
from megaslide.data.first_frames import build_first_frames
from megaslide.data.latents import Batch, BucketSampler, LatentDataset, collate
from megaslide.data.text import build_text_encoder
from megaslide.diffusion.objectives import Objective
from megaslide.diffusion.recipes import Recipe, expert_range
from megaslide.errors import InputError
from megaslide.evaluation.validation import (
    ValidationLoss,
    validation_batches,
    validation_loss,
)
from megaslide.models.network import Network
from megaslide.models.pretrained.source import SCHEDULER
from megaslide.planning.run import RunPlan
from megaslide.sampling import (
    family_pipeline,
    generate,
    sample_size,
    sampling_sigmas,
    save_samples,
)
from megaslide.streaming import NonFiniteGradientError, StreamedModel, stream
from megaslide.streaming.placement import chosen_device, encoder_placement
from megaslide.tracing import Trace, summarize
from megaslide.training.schedules import learning_rate

logger = logging.getLogger(__name__)

LINKS = ("h2d", "d2h")
LANES = ("compute", *LINKS, "adamw")


class NonFiniteLossError(RuntimeError):
    """Training diverged; names the step, the samples and the last good checkpoint."""


class Trainer:
    """One run: model, data, objective and their state."""

    def __init__(self, planned: RunPlan) -> None:
        self.planned, self.config = planned, planned.config
        config = self.config
        self.run = Path(config.output_dir)
        self.codec = build_codec(config.data.codec)
        self.text_encoder = build_text_encoder(config.data.text, encoder_placement(config.offload))
        self.network = planned.network
        self.recipe = recipe_of(config, self.network)
        self.dataset = LatentDataset(config.data.cache_dir, split="train", expect=config.data)
        self.validation = validation_batches(config)
        batch_size = config.train.train_batch_size * config.train.gradient_accumulation_steps
        self.sampler = BucketSampler(self.dataset, batch_size, seed=config.train.seed)
        self._indices = iter(self.sampler)
        train = config.train
        self.trace = Trace()
        self.dtype = torch.bfloat16 if train.mixed_precision == "bf16" else torch.float32
        self.model = self._build_model()
        self.denoiser = self.network.denoiser(self.model, self.dtype)
        self.pipeline = family_pipeline(
            self.network, self.recipe, self.codec, self.model, self.dtype
        )
        self.device = torch.device(chosen_device(config.offload))
        self.generator = torch.Generator().manual_seed(train.seed)
        if config.sample.prompts and (config.sample.every_steps or math.inf) <= self.max_steps:
            self._sampling()  # what cannot be sampled is refused before training
        self.step = 0
        self._last_step = (0.0, 0.0)

    # One step ---------------------------------------------------------------------------------

    def train_step(self) -> dict[str, float]:
        """One optimizer step on the next batch; returns what the log reports of it."""
        start, before = time.perf_counter(), self.trace.snapshot()
        batch = self._next_batch()
        latents = batch.latents.to(self.device)  # [B, C, T, H, W]
        noise = torch.randn(latents.shape, generator=self.generator).to(self.device)
        objective = self.objective(latents)
        sigmas = objective.sample_sigmas(len(latents), self.generator).to(self.device)  # [B]
        self.model.lr = learning_rate(self.config.optim, self.step, self.max_steps)

        loss, per_sample = objective.loss(
            self.denoiser, latents, noise, sigmas, **self._conditioning(batch)
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

    def objective(self, latents: torch.Tensor) -> Objective:
        """What a batch of latents [B, C, T, H, W] is trained on."""
        return self.recipe.objective(self._tokens(latents) // len(latents))

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
        empty, dropout = self.dataset.empty_text(), self.config.data.caption_dropout
        drop = torch.rand(len(batch.text), generator=self.generator) < dropout
        given = {key: value.clone() for key, value in batch.conditioning().items()}
        for key, value in empty.items():
            given[key][drop] = value
        return {key: value.to(self.device) for key, value in given.items()}

    def _tokens(self, latents: torch.Tensor) -> int:
        return len(latents) * latents[0, 0].numel() // math.prod(self.network.patch_size)

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
            return validation_loss(self.denoiser, self.objective, self.validation, self.device)

    def sample(self, folder: Path, prompts: tuple[str, ...] | None = None) -> list[Path]:
        """Write clips for the prompts (the config's by default) and a contact sheet."""
        settings = self.config.sample
        prompts = prompts or settings.prompts
        bucket, sigmas = self._sampling()
        with self.sampled_weights():
            frames = generate(
                self.denoiser, self.codec, self.text_encoder, prompts,
                bucket=bucket, settings=settings, sigmas=sigmas, device=self.device,
                pipeline=self.pipeline, images=build_first_frames(self.config.data, self.codec),
            )  # fmt: skip
        return save_samples(frames, prompts, folder, settings.fps, settings)

    def _sampling(self) -> tuple[Triple, torch.Tensor]:
        """Size of samples in pixels, and their noise levels."""
        settings = self.config.sample
        size = sample_size(settings, self.config, self.codec, self.network.patch_size)
        return size, sampling_sigmas(self.recipe, self.codec, self.network, size, settings)

    def sampled_weights(self) -> Any:
        """Context in which the model computes in eval mode, with its EMA if there is one."""
        return _SampledWeights(self.model, ema=self.config.train.use_ema)

    # Checkpoints ------------------------------------------------------------------------------

    def save(self) -> Path:
        """Publish `checkpoint-{step}` with everything that resuming needs."""
        state = {
            "global_step": self.step,
            "sampler": self.sampler.state_dict(),
            "generator": _encode(self.generator.get_state()),
            "torch_rng": _encode(torch.get_rng_state()),
            "sigma_range": self.recipe.sigma_range,
            "config": self.config.model_dump(mode="json"),
        }

        def write(folder: Path) -> None:
            self.model.save_pretrained(folder / "transformer")
            self.model.save_optimizer(folder / "optimizer")
            if self.config.train.use_ema:
                self.model.save_ema(folder / "ema")
            if self.recipe.scheduler is not None:  # says how to sample, as in a pipeline
                (folder / SCHEDULER).parent.mkdir()
                (folder / SCHEDULER).write_text(json.dumps(self.recipe.scheduler, indent=2))
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
            InputError: another model, data setting or precision; names the first that differs.
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
        model = stream(
            self.network.build(self.dtype),
            device=chosen_device(config.offload),
            lr=optim.learning_rate,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_epsilon,
            weight_decay=optim.adam_weight_decay,
            max_grad_norm=optim.max_grad_norm,
            micro_batch_size=config.offload.micro_batch_size or config.train.train_batch_size,
            frames_per_chunk=config.offload.frames_per_chunk,
            dtype=self.network.stream_dtype(self.dtype),
            **self.planned.engine_options,
            disk_path=config.offload.disk_path or self.run / "state",
            disk_gb_s=config.offload.disk_gb_s,
            activation_dir=config.offload.activation_dir,
            device_budget=_bytes(config.offload.device_budget_gb),
            link_gb_s=config.offload.link_gb_s,
            ema_decay=config.train.ema_decay if config.train.use_ema else None,
            trace=self.trace,
        )
        if self.network.weights is not None:
            module = model.module
            model.load(self.network.weights, keep=self.network.unsaved_parameters(module))
        return model


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


def recipe_of(config: Config, network: Network) -> Recipe:
    """How the network is to be trained on.

    Raises:
        InputError: a pretrained model without its scheduler, or an option it cannot follow.
    """
    if config.train.first_frame == "given" and not network.takes_first_frame:
        raise InputError(
            f"train.first_frame=given: {network.name} has one timestep for all frames",
            "set train.first_frame=noisy",
        )
    source = network.source
    if source is None:
        return Recipe(train=config.train)
    if source.scheduler is None:
        raise InputError(
            f"{source.folder.parent / SCHEDULER}: no such file; it says how the model is trained",
            "copy the folder `scheduler` of the model's pipeline there",
        )
    levels = expert_range(source.pipeline, source.folder.name)
    return Recipe(train=config.train, scheduler=source.scheduler, sigma_range=levels)


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _require_same(checkpoint: Path, saved: Config, current: Config) -> None:
    """What changes the weights' meaning or the order of data must not change on resume.

    Nor the precision: the weights of a bf16 run are not its masters.
    """
    for section in ("model", "attention", "data", "train"):
        old, new = getattr(saved, section), getattr(current, section)
        for key in ("mixed_precision",) if section == "train" else type(old).model_fields:
            if key in ("backend", "path", "cache_dir"):
                continue
            if getattr(old, key) != getattr(new, key):
                raise InputError(
                    f"{checkpoint}: saved with {section}.{key}={getattr(old, key)!r}, "
                    f"this run has {getattr(new, key)!r}",
                    "resume with the same value, or start a new run in another output_dir",
                )
