"""Every key of a run's configuration, with its type, its default and what it means.

Sections and names follow the diffusers training examples, so that a user who has fine-tuned
anything before recognises every key.
"""

import re
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from megaslide.config.data import DataConfig
from megaslide.config.section import Section, Triple, changed_keys, parse_triple


class ModelConfig(Section):
    """Which transformer is trained: a new VideoDiT of ours, or a pretrained one."""

    pretrained_model_name_or_path: str | None = None
    """Folder of a diffusers pipeline, or its id on the hub; null trains a VideoDiT of ours."""
    subfolder: str = "transformer"
    """Where in the pipeline the transformer is; `transformer_2` is the second of two experts."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    guidance: float = Field(6.0, gt=0)
    """Guidance scale told to pretrained models that take it as an input (HunyuanVideo)."""
    preset: str = "tiny"
    """Size of our own VideoDiT; `megaslide info --presets` lists them."""
    patch_size: Triple | None = None
    """Latent voxels per token (t, h, w); None keeps the preset's."""
    hidden_size: int | None = Field(None, gt=0)
    """Channels of a token; None keeps the preset's."""
    num_layers: int | None = Field(None, gt=0)
    """Number of blocks; None keeps the preset's."""
    num_attention_heads: int | None = Field(None, gt=0)
    """Attention heads; must divide hidden_size. None keeps the preset's."""


class AttentionConfig(Section):
    """Self-attention over video tokens: of our VideoDiT, or in place of a pretrained model's."""

    kind: Literal["auto", "deformable", "neighborhood", "swin", "dense"] = "auto"
    """Deformable is 3D-DSA; the others are its baselines behind the same interface. `auto` is
    deformable in our VideoDiT, and leaves a pretrained model what it has."""
    window: Triple = (3, 3, 3)
    """Taps per axis (t, h, w) in tokens; cut to the axis where longer."""
    layers: str | tuple[int, ...] = "all"
    """Blocks of a pretrained model that are converted: `all`, a list of indices from 0, or
    `every-k` for blocks 0, k, 2k, ..."""
    offset_kind: Literal["shift", "affine", "tap"] = "affine"
    """How a window deforms: slides; slides, stretches and shears; every tap on its own."""
    offset_range: tuple[float, float, float] = (1.0, 3.0, 3.0)
    """No tap is displaced by more than this many voxels per axis (t, h, w)."""
    offset_groups: int = Field(1, gt=0)
    """Sets of offsets; must divide the number of heads."""
    conv_branch: bool = False
    """Adds a zero-initialised depthwise 3D convolution beside the attention."""
    num_register_tokens: int = Field(0, ge=0)
    """Learned global tokens that every query also attends to: as extra keys; in a pretrained model
    beside the window's softmax, behind a gate that starts at zero."""
    backend: Literal["auto", "reference", "native", "triton"] = "auto"
    """Implementation of the operator; `auto` takes the fastest that can run."""

    @field_validator("window")
    @classmethod
    def _window_is_positive(cls, window: Triple) -> Triple:
        if min(window) < 1:
            raise ValueError(
                f"window {window} has an axis below 1; every axis needs 1 or more taps"
            )
        return window

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_are_known(cls, layers: Any) -> Any:
        named = isinstance(layers, str) and re.fullmatch(r"all|every-[1-9]\d*", layers)
        listed = isinstance(layers, list | tuple) and layers and all(type(n) is int for n in layers)
        if not named and not listed:
            raise ValueError("layers are `all`, `every-k` such as every-2, or a list of indices")
        return layers


class OptimConfig(Section):
    """AdamW and its schedule, named as in the diffusers examples."""

    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = (
        "constant_with_warmup"
    )
    """Shape of the learning rate over the run."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from zero."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of the gradients."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of their squares."""
    adam_weight_decay: float = Field(0.01, ge=0)
    """Decoupled from the gradient, as in AdamW."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the mean square, so that it never divides by zero."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Global norm to which gradients are clipped, exactly; null turns clipping off."""


class TrainConfig(Section):
    """Length, batch, precision, objective, checkpoints."""

    max_train_steps: int = Field(1000, gt=0)
    """Optimizer steps of the whole run, those before a resume included."""
    train_batch_size: int = Field(1, gt=0)
    """Clips per micro-batch."""
    gradient_accumulation_steps: int = Field(1, gt=0)
    """Micro-batches per step; weights still cross the link only twice per step."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """Compute dtype of weights and activations; the master weights are fp32 either way."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of initial weights, data order, noise and timesteps."""
    shift: float | None = Field(None, gt=0)
    """Timestep shift s: sigma' = s*sigma / (1 + (s-1)*sigma). Null takes that of a pretrained
    model's scheduler, and 1 for a new model."""
    first_frame: Literal["noisy", "given"] = "noisy"
    """`given`: the first latent frame stays clean and out of the loss, as image-to-video models
    that take a timestep per frame are trained (Wan 2.2 TI2V-5B, LTX, Cosmos-Predict2
    Video2World)."""
    weighting_scheme: Literal["none", "logit_normal", "sigma_sqrt", "cosmap"] = "logit_normal"
    """Density or weighting of timesteps, as diffusers' training examples name them."""
    logit_mean: float = 0.0
    """Mean of the logit of sigma (logit_normal only); above 0 favours noisier timesteps."""
    logit_std: float = Field(1.0, gt=0)
    """Its standard deviation."""
    checkpointing_steps: int = Field(500, gt=0)
    """Steps between checkpoints; one is also saved at the end and on Ctrl-C."""
    checkpoints_total_limit: int | None = Field(None, gt=0)
    """Oldest checkpoints beyond this number are deleted."""
    resume_from_checkpoint: str | None = None
    """`latest` or the path of a checkpoint folder."""
    validation_steps: int = Field(100, gt=0)
    """Steps between evaluations of eval/loss."""
    validation_batches: int = Field(4, gt=0)
    """Batches per evaluation; noise and timesteps are the same each time."""
    use_ema: bool = False
    """Keep an exponential moving average of the weights, for sampling."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Share of the average kept at each step."""

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _no_is_a_word(cls, value: Any) -> Any:
        return "no" if value is False else value  # YAML 1.1 reads an unquoted `no` as false


class OffloadConfig(Section):
    """Where state lives and how it streams."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where blocks compute; `auto` is cuda where there is one."""
    slots: Literal["auto"] | int = "auto"
    """Device-side buffers of one block each, 2 or more; `auto` is as many as shorten the step."""
    micro_batch_size: int | None = Field(None, gt=0)
    """Clips per pass through a block; null takes train.train_batch_size."""
    frames_per_chunk: int | None = Field(None, gt=0)
    """Frames of tokens that a block of our VideoDiT computes at once, with attention of kind
    deformable or neighborhood: what a long clip's block works on then fits. Null takes all."""
    tier: Literal["auto", "ram", "disk"] = "ram"
    """Where weights, masters and moments live; `auto` is the disk where RAM is too small."""
    state_format: Literal["auto", "master", "split", "split8"] = "split"
    """Bytes per bf16 parameter: `master` 14, `split` 12, `split8` 6 with 8-bit moments; `auto` is
    `split8` where `split` does not fit."""
    gradient_tier: Literal["auto", "ram", "disk"] = "ram"
    """Where gradients wait for the update; `disk` frees RAM and needs tier `disk`."""
    disk_path: str | None = None
    """Folder for tier `disk`, best on a local NVMe; null takes `state` in output_dir."""
    activations: Literal["auto", "device", "host", "disk"] = "auto"
    """Where the inputs of blocks wait for the backward pass; `auto` is the device where they fit
    there, else the host."""
    activation_dir: str | None = None
    """Folder of the file of `activations: disk`; null takes the system's temporary folder."""
    device_budget_gb: float | None = Field(None, gt=0)
    """Memory that the run may take on the device, in 10⁹ bytes; more is refused."""
    link_gb_s: float | None = Field(None, gt=0)
    """Emulated bandwidth between host and device in each direction, in 10⁹ bytes per second."""
    disk_gb_s: float | None = Field(None, gt=0)
    """Emulated bandwidth of the disk of tier `disk`, both directions together, likewise."""
    rates: str | None = None
    """File of `megaslide info --probe --json FILE`, from which a plan takes what this machine does
    per second; null measures briefly when a run begins."""

    @field_validator("slots", mode="before")
    @classmethod
    def _slots_are_enough(cls, slots: Any) -> Any:
        if slots != "auto" and (type(slots) is not int or slots < 2):
            raise ValueError(
                "slots are `auto`, or greater than or equal to 2: one to compute on, one to fill"
            )
        return slots

    @model_validator(mode="after")
    def _gradients_follow(self) -> "OffloadConfig":
        if self.gradient_tier == "disk" and self.tier != "disk":
            raise ValueError("gradient_tier: disk needs tier: disk")
        return self


class SampleConfig(Section):
    """Generation, in `megaslide sample` and during training."""

    prompts: tuple[str, ...] = ()
    """Captions sampled; during training every `every_steps`."""
    images: tuple[str, ...] = ()
    """First frames of the clips, one for all prompts or one for each, for image-to-video models and
    those that are trained with `first_frame: given`."""
    every_steps: int | None = Field(None, gt=0)
    """Sample during training this often; null only samples on request."""
    bucket: str | None = None
    """FRAMESxHEIGHTxWIDTH in pixels; null takes the first training bucket."""
    num_inference_steps: int = Field(30, gt=0)
    """Denoising steps."""
    guidance_scale: float = Field(3.0, ge=0)
    """1 turns classifier-free guidance off."""
    fps: float = Field(8.0, gt=0)
    """Frame rate of the written clips."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the initial noise."""

    @field_validator("bucket")
    @classmethod
    def _bucket_parses(cls, bucket: str | None) -> str | None:
        if bucket is not None:
            parse_triple(bucket)
        return bucket


class LogConfig(Section):
    """What is reported, and where."""

    report_to: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """JSONL (`log.jsonl`) is always written besides."""
    log_every: int = Field(10, gt=0)
    """Steps between log lines."""


_PRETRAINED_DATA = {"codec": "vae", "text": "encoder", "image": "encoder"}
"""Sections of `data`, and the name by which each takes a part of a pretrained pipeline."""


class Config(Section):
    """Everything one run needs; saved as `config.yaml` in its output folder."""

    output_dir: str = "runs/megaslide"
    """Where checkpoints, samples, the log and the resolved config go."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    attention: AttentionConfig = AttentionConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    offload: OffloadConfig = OffloadConfig()
    sample: SampleConfig = SampleConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="before")
    @classmethod
    def _data_follows_the_model(cls, values: Any) -> Any:
        """A VAE or encoder that names no pipeline is that of the model."""
        plain = _plain(values)
        model, data = plain.get("model"), plain.get("data")
        if not isinstance(model, dict) or not isinstance(data, dict):
            return values
        source = {key: model.get(key) for key in ("pretrained_model_name_or_path", "revision")}
        for section, name in _PRETRAINED_DATA.items():
            chosen = data.get(section)
            if not isinstance(chosen, dict) or chosen.get("name") != name:
                continue
            if chosen.get("pretrained_model_name_or_path") is None:
                data[section] = chosen | source
        return plain

    @model_validator(mode="after")
    def _pretrained_data_has_a_source(self) -> "Config":
        for section, name in _PRETRAINED_DATA.items():
            part = getattr(self.data, section)
            if part.name == name and part.pretrained_model_name_or_path is None:
                raise ValueError(
                    f"data.{section}.name={part.name} needs a pretrained model: set "
                    f"data.{section}.pretrained_model_name_or_path, or the model's"
                )
        return self

    @model_validator(mode="after")
    def _pretrained_models_have_their_own(self) -> "Config":
        attention = self.attention
        if self.model.pretrained_model_name_or_path is None:
            if attention.layers != "all":
                raise ValueError("attention.layers is for pretrained models; a VideoDiT has one")
            return self
        names = ("preset", "patch_size", "hidden_size", "num_layers", "num_attention_heads")
        if changed := changed_keys(self.model, names):
            what = f"model.{changed[0]}"
            raise ValueError(f"{what} is for a VideoDiT of ours; a pretrained model has its own")
        options = set(AttentionConfig.model_fields) - {"kind", "backend"}
        changed = changed_keys(attention, sorted(options))
        if attention.kind in ("auto", "dense") and changed:
            raise ValueError(
                f"attention.{changed[0]} without attention.kind: a pretrained model keeps its "
                "attention; set attention.kind to replace it"
            )
        return self

    @model_validator(mode="after")
    def _groups_divide_heads(self) -> "Config":
        heads, groups = self.model.num_attention_heads, self.attention.offset_groups
        if heads is not None and heads % groups:
            raise ValueError(
                f"attention.offset_groups={groups} does not divide "
                f"model.num_attention_heads={heads}"
            )
        return self


def _plain(values: Any) -> Any:
    """Sections as dictionaries, all the way down, in a copy."""
    if isinstance(values, BaseModel):
        return _plain(values.model_dump())
    if isinstance(values, dict):
        return {key: _plain(value) for key, value in values.items()}
    return values
