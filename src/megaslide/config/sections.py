"""Every key of a run's configuration, with its type, its default and what it means.

Sections and names follow the diffusers training examples, so that a user who has fine-tuned
anything before recognises every key.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Triple = tuple[int, int, int]


class Section(BaseModel):
    """Base of all sections: keyword-only, immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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


class CodecConfig(Section):
    """How pixels become latents."""

    name: str = "dct"
    """`dct` (weight-free block DCT) or `pixel` (space to depth)."""
    block: str = "1x8x8"
    """Pixels per latent voxel, TxHxW: `1x8x8` or `4x8x8`."""
    channels: int = Field(48, gt=0)
    """Latent channels kept (dct only)."""

    @field_validator("block")
    @classmethod
    def _block_parses(cls, block: str) -> str:
        parse_triple(block)
        return block


class TextConfig(Section):
    """How captions become embeddings."""

    name: str = "hashed_ngram"
    """Text encoder; `hashed_ngram` needs no weights and is deterministic."""
    dim: int = Field(128, gt=0)
    """Channels of one text token."""
    max_length: int = Field(32, gt=0)
    """Text tokens kept; longer captions are cut, shorter ones masked."""


class DataConfig(Section):
    """Clips, captions, and the cache of their latents."""

    path: str = ""
    """Folder of clips with captions, or a metadata.jsonl / metadata.csv."""
    cache_dir: str = ""
    """Where latents and text embeddings are cached."""
    buckets: tuple[str, ...] = ("8x64x64",)
    """Sizes in pixels, FRAMESxHEIGHTxWIDTH; a clip goes to the best fitting one."""
    target_fps: float | None = Field(None, gt=0)
    """Resample clips to this frame rate; None keeps each clip's own."""
    frame_choice: Literal["head", "middle", "random", "uniform"] = "head"
    """Which frames of a longer clip: the first; the middle; random or evenly spread windows."""
    windows_per_clip: int = Field(1, gt=0)
    """Windows cut from each clip (random and uniform)."""
    missing_caption: Literal["error", "empty", "skip"] = "error"
    """What to do with a clip that has no caption."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of training captions replaced by the empty one, for classifier-free guidance."""
    validation_split: float = Field(0.05, ge=0, lt=1)
    """Share of clips held out for eval/loss, chosen by content hash."""
    codec: CodecConfig = CodecConfig()
    text: TextConfig = TextConfig()
    seed: int = 0
    """Seed of `frame_choice: random`."""

    @field_validator("buckets")
    @classmethod
    def _buckets_parse(cls, buckets: tuple[str, ...]) -> tuple[str, ...]:
        for bucket in buckets:
            parse_triple(bucket)
        if not buckets:
            raise ValueError("buckets is empty; give at least one FRAMESxHEIGHTxWIDTH")
        return buckets


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
    seed: int = 0
    """Seed of initial weights, data order, noise and timesteps."""
    shift: float | None = Field(None, gt=0)
    """Timestep shift s: sigma' = s*sigma / (1 + (s-1)*sigma). Null takes that of a pretrained
    model's scheduler, and 1 for a new model."""
    first_frame: Literal["noisy", "given"] = "noisy"
    """`given`: the first latent frame stays clean and out of the loss, as image-to-video models
    that take a timestep per frame are trained (Wan 2.2 TI2V-5B, Cosmos-Predict2 Video2World)."""
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
    slots: int = Field(2, ge=2)
    """Device-side buffers, one block each."""
    micro_batch_size: int | None = Field(None, gt=0)
    """Clips per pass through a block; null takes train.train_batch_size."""
    tier: Literal["ram", "disk"] = "ram"
    """Where weights, masters and moments live; `disk` for state that is larger than RAM."""
    state_format: Literal["master", "split", "split8"] = "split"
    """Bytes per bf16 parameter: `master` 14, `split` 12, `split8` 6 with 8-bit moments."""
    gradient_tier: Literal["ram", "disk"] = "ram"
    """Where gradients wait for the update; `disk` frees RAM and needs tier `disk`."""
    disk_path: str | None = None
    """Folder for tier `disk`, best on a local NVMe; null takes `state` in output_dir."""
    activations: Literal["auto", "device", "host", "disk"] = "auto"
    """Where the inputs of blocks wait for the backward pass; `auto` is the device."""
    activation_dir: str | None = None
    """Folder of the file of `activations: disk`; null takes the system's temporary folder."""
    device_budget_gb: float | None = Field(None, gt=0)
    """Memory that weights and gradients may take on the device, in 10⁹ bytes; more is refused."""
    link_gb_s: float | None = Field(None, gt=0)
    """Emulated bandwidth between host and device in each direction, in 10⁹ bytes per second."""

    @model_validator(mode="after")
    def _gradients_follow(self) -> "OffloadConfig":
        if self.gradient_tier == "disk" and self.tier == "ram":
            raise ValueError("gradient_tier: disk needs tier: disk")
        return self


class SampleConfig(Section):
    """Generation, in `megaslide sample` and during training."""

    prompts: tuple[str, ...] = ()
    """Captions sampled; during training every `every_steps`."""
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
    seed: int = 0
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

    @model_validator(mode="after")
    def _pretrained_models_have_their_own(self) -> "Config":
        attention = self.attention
        if self.model.pretrained_model_name_or_path is None:
            if attention.layers != "all":
                raise ValueError("attention.layers is for pretrained models; a VideoDiT has one")
            return self
        names = ("preset", "patch_size", "hidden_size", "num_layers", "num_attention_heads")
        if changed := _changed(self.model, names):
            what = f"model.{changed[0]}"
            raise ValueError(f"{what} is for a VideoDiT of ours; a pretrained model has its own")
        options = set(AttentionConfig.model_fields) - {"kind", "backend"}
        changed = _changed(attention, sorted(options))
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


def _changed(section: Section, names: Sequence[str]) -> list[str]:
    """Those of the keys that do not have their default."""
    default = type(section)()
    return [name for name in names if getattr(section, name) != getattr(default, name)]


def parse_triple(text: str) -> Triple:
    """`"8x64x96"` as (8, 64, 96); ValueError names what is accepted."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"{text!r} is not TxHxW, such as 8x64x96")
    t, h, w = (int(group) for group in match.groups())
    return t, h, w
