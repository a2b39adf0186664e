"""The section `data`: clips, the codec of their pixels, the encoders of captions and images."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megaslide.config.section import Section, changed_keys, parse_triple

_SIZES = ("block", "channels")
_PRETRAINED = ("pretrained_model_name_or_path", "subfolder", "revision", "posterior")


def _require_defaults(section: Section, names: Iterable[str], where: str, name: str) -> None:
    """ValueError for a key that is set and would do nothing."""
    if changed := changed_keys(section, names):
        raise ValueError(f"{where}.{changed[0]} has no effect with {where}.name={name}")


class CodecConfig(Section):
    """How pixels become latents."""

    name: Literal["dct", "pixel", "vae"] = "dct"
    """`dct` (weight-free block DCT), `pixel` (space to depth), or `vae`: the autoencoder of a
    pretrained model, whose block and channels are its own."""
    block: str = "1x8x8"
    """Pixels per latent voxel, TxHxW: `1x8x8` or `4x8x8` (not vae)."""
    channels: int = Field(48, gt=0)
    """Latent channels kept (dct only)."""
    pretrained_model_name_or_path: str | None = None
    """Pipeline's folder or hub id with the autoencoder (vae only); null takes the model's."""
    subfolder: str = "vae"
    """Where in the pipeline the autoencoder is (vae only)."""
    revision: str | None = None
    """Branch, tag or commit on the hub (vae only); null takes the model's, with its path."""
    posterior: Literal["mode", "sample"] = "mode"
    """What of the distribution that the autoencoder gives (vae only): its mean, or one draw."""

    @field_validator("block")
    @classmethod
    def _block_parses(cls, block: str) -> str:
        parse_triple(block)
        return block

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> "CodecConfig":
        is_vae = self.name == "vae"
        _require_defaults(self, _SIZES if is_vae else _PRETRAINED, "data.codec", self.name)
        return self


class TextConfig(Section):
    """How captions become embeddings."""

    name: Literal["hashed_ngram", "encoder"] = "hashed_ngram"
    """`hashed_ngram` needs no weights and is deterministic; `encoder` is the text encoder of a
    pretrained model, as its pipeline calls it."""
    dim: int = Field(128, gt=0)
    """Channels of one text token (hashed_ngram only)."""
    max_length: int | None = Field(None, gt=0)
    """Text tokens kept; longer captions are cut, shorter ones masked. Null is 32, and for `encoder`
    what the model's pipeline takes."""
    pretrained_model_name_or_path: str | None = None
    """Pipeline's folder or hub id with text encoder and tokenizer (encoder only); null takes the
    model's."""
    revision: str | None = None
    """Branch, tag or commit on the hub (encoder only); null takes the model's, with its path."""

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> "TextConfig":
        unused = ("dim",) if self.name == "encoder" else _PRETRAINED
        _require_defaults(self, unused, "data.text", self.name)
        return self


class ImageConfig(Section):
    """What of a clip's first frame is given to models that take it as a condition."""

    name: Literal["none", "latents", "encoder"] = "none"
    """`latents`: what data.codec makes of the first frame and grey ones after it (Wan 2.2 I2V-
    A14B); `encoder`: that, and what the pipeline's image encoder makes of it (Wan 2.1 I2V)."""
    pretrained_model_name_or_path: str | None = None
    """Pipeline's folder or hub id with image encoder and processor (encoder only); null takes the
    model's."""
    revision: str | None = None
    """Branch, tag or commit on the hub (encoder only); null takes the model's, with its path."""

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> "ImageConfig":
        unused = () if self.name == "encoder" else _PRETRAINED
        _require_defaults(self, unused, "data.image", self.name)
        return self


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
    image: ImageConfig = ImageConfig()
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of `frame_choice: random`."""

    @field_validator("buckets")
    @classmethod
    def _buckets_parse(cls, buckets: tuple[str, ...]) -> tuple[str, ...]:
        for bucket in buckets:
            parse_triple(bucket)
        if not buckets:
            raise ValueError("buckets is empty; give at least one FRAMESxHEIGHTxWIDTH")
        return buckets
