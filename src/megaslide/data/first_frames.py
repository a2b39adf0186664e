"""What image-to-video models are given of a clip's first frame, besides its text.

Wan's take it through channels of their own: the latents of a clip whose other frames are grey (0
between -1 and 1), by the mode of the autoencoder; Wan 2.1 besides through the last but one layer of
a CLIP vision model. In training the frame is the clip's own first one, as it was cropped. Source:
diffusers 0.42, `pipelines/wan/pipeline_wan_i2v.py`, `prepare_latents` and `encode_image`.

Shapes: C t h w latents, T H W pixels, K tokens of D channels of an image.
"""

from typing import Any

import torch
from torch import Tensor

from megaslide.config import DataConfig, ImageConfig
from megaslide.data.codecs import Codec, build_codec
from megaslide.data.components import Component, find_components, load_component
from megaslide.errors import InputError

VERSION = 1
"""Counts changes to what is made of a frame here."""
KEY = "data.image"
SUBFOLDERS = ("image_encoder", "image_processor")
ENCODERS = ("CLIPVisionModel", "CLIPVisionModelWithProjection")
LATENTS, EMBEDDING = "image_latents", "encoder_hidden_states_image"
IMAGE_KEYS = {"none": (), "latents": (LATENTS,), "encoder": (LATENTS, EMBEDDING)}
"""Conditions by `data.image.name`."""


class ImageEncoder:
    """A CLIP vision model with its processor; loaded at the first use.

    Raises:
        InputError: an encoder of another kind.
    """

    def __init__(self, encoder: Component, processor: Component) -> None:
        if encoder.class_name not in ENCODERS:
            raise InputError(
                f"{encoder.config_file}: {encoder.class_name or 'no class'} is not an image "
                "encoder known here",
                f"known are {', '.join(ENCODERS)}",
            )
        self._encoder, self._processor = encoder, processor
        self.dim = int(encoder.config["hidden_size"])
        self._loaded: tuple[Any, Any] | None = None

    @torch.no_grad()
    def encode(self, frame: Tensor) -> Tensor:
        """[1, K, D] float32 of a frame [3, H, W] in [-1, 1]."""
        levels = ((frame + 1) * 127.5).round().clamp(0, 255).byte()
        model, processor = self._load()
        inputs = processor(images=levels.permute(1, 2, 0).cpu().numpy(), return_tensors="pt")
        states = model(**inputs, output_hidden_states=True).hidden_states
        embedding: Tensor = states[-2].float()
        return embedding

    def settings(self) -> dict[str, Any]:
        files = {"files": self._encoder.fingerprint(), "processor": self._processor.fingerprint()}
        return {"class": self._encoder.class_name, "dim": self.dim, **files}

    def close(self) -> None:
        self._loaded = None

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import transformers

            cls = getattr(transformers, self._encoder.class_name)
            folder = self._processor.folder
            try:
                processor = transformers.CLIPImageProcessor.from_pretrained(folder)
            except (OSError, ValueError) as error:
                raise InputError(
                    f"{folder}: the image processor does not load: {error}",
                    "copy the folder again, whole",
                ) from None
            self._loaded = load_component(self._encoder, cls, dtype=torch.float32), processor
        return self._loaded


class FirstFrames:
    """Conditions on the first frame of clips, as keyword arguments of the model.

    Args:
        codec: makes latents, by the mode of an autoencoder.
        encoder: for models that take an embedding too.
    """

    def __init__(self, codec: Codec, encoder: ImageEncoder | None = None) -> None:
        self._codec, self._encoder = codec, encoder
        self.dim = None if encoder is None else encoder.dim

    def encode(self, pixels: Tensor) -> dict[str, Tensor]:
        """Of a clip [1, 3, T, H, W] in [-1, 1], whose frames after the first do not matter.

        Returns:
            `image_latents` [1, C, t, h, w] float32, and with an encoder
            `encoder_hidden_states_image` [1, K, D] float32.
        """
        grey = torch.zeros_like(pixels)
        grey[:, :, 0] = pixels[:, :, 0]
        given = {LATENTS: self._codec.encode(grey)}
        if self._encoder is not None:
            given[EMBEDDING] = self._encoder.encode(pixels[0, :, 0])
        return given

    def settings(self) -> dict[str, Any]:
        """What the conditions depend on besides the codec, as JSON values."""
        encoder = {} if self._encoder is None else {"encoder": self._encoder.settings()}
        name = "latents" if self._encoder is None else "encoder"
        return {"name": name, "version": VERSION, **encoder}

    def close(self) -> None:
        """Give back memory that weights take; the next call loads them again."""
        self._codec.close()
        if self._encoder is not None:
            self._encoder.close()


def build_first_frames(config: DataConfig, codec: Codec) -> FirstFrames | None:
    """What `data.image` names; None where models are given nothing of a frame.

    Raises:
        InputError: an image encoder that is not there or not known.
    """
    if config.image.name == "none":
        return None
    if config.codec.posterior != "mode":  # of the clip; a condition is never a draw
        codec = build_codec(config.codec.model_copy(update={"posterior": "mode"}))
    encoder = find_image_encoder(config.image) if config.image.name == "encoder" else None
    return FirstFrames(codec, encoder)


def find_image_encoder(config: ImageConfig) -> ImageEncoder:
    """The encoder in the pipeline that `data.image` names; weights are read at its first use.

    Raises:
        InputError: it is not there, or not known here.
    """
    assert config.pretrained_model_name_or_path is not None
    encoder, processor = find_components(
        config.pretrained_model_name_or_path, SUBFOLDERS, key=KEY, revision=config.revision
    )
    return ImageEncoder(encoder, processor)
