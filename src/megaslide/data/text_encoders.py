"""The text encoders of pretrained video models, called as each family's pipeline calls them.

A transformer was trained on exactly what its pipeline fed it: so many tokens, with or without a
mask in the encoder, with zeros or with the encoder's own output where a caption had ended. Those
differences are the table here; what they have in common is one class. Sources: diffusers 0.42,
`pipelines/<family>`, `_get_t5_prompt_embeds`; HunyuanVideo's `_get_llama_prompt_embeds` and
`_get_clip_prompt_embeds`; HunyuanVideo 1.5's `_get_mllm_prompt_embeds`.

Shapes: B captions, L tokens (max_length), D channels, P channels of a pooled embedding.
"""

import html
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaslide.config import TextConfig
from megaslide.data.components import (
    Component,
    find_components,
    load_component,
    pipeline_folder,
    transformer_config,
)
from megaslide.data.text import Place, whole
from megaslide.errors import InputError

VERSION = 1
"""Counts changes to what an encoder's embeddings are here."""
KEY = "data.text"
SUBFOLDERS = ("text_encoder", "tokenizer")
POOLED_SUBFOLDERS = ("text_encoder_2", "tokenizer_2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """How a family's pipeline makes embeddings of a prompt."""

    max_length: int
    """Tokens L, the end token included."""
    masked: bool = True
    """Whether the encoder is told which tokens are padding. Where it is not, its output at a
    caption's tokens depends on how many follow."""
    padding_counts: bool = False
    """Whether the transformer attends to what the encoder makes of padding."""
    length_key: str | None = None
    """Of the transformer's config.json, where the length may be another."""
    cleaned: bool = False
    """Whether broken encodings, HTML entities and runs of white space are mended first."""
    frame: Callable[[], tuple[str, int]] = lambda: ("{}", 0)
    """What a caption is set into, and tokens of its beginning that are not among the L."""
    chat: bool = False
    """Whether that is the message of a system to which the caption is a user's reply, both written
    as the tokenizer writes a conversation."""
    quotes: bool = True
    """Whether captions may have text in quotation marks. HunyuanVideo 1.5 reads that by ByT5 too,
    letter by letter, and is not given it here."""
    skipped_layers: int | None = None
    """The embedding is the output of the layer before so many last ones; None takes the encoder's
    own last output."""
    pooled: bool = False
    """Whether a second encoder gives one embedding of the whole caption."""


def _hunyuan_frame() -> tuple[str, int]:
    """The words around every caption that the model was trained with."""
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video

    template: dict[str, Any] = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE
    return template["template"], template["crop_start"]


def _hunyuan15_frame() -> tuple[str, int]:
    """The same for 1.5: defaults of its pipeline's method."""
    from diffusers import HunyuanVideo15Pipeline

    parameters = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    return parameters["system_message"].default, parameters["crop_start"].default


WAN = Convention(max_length=512, cleaned=True)
CONVENTIONS: dict[str, Convention] = {
    "WanTransformer3DModel": WAN,
    "SkyReelsV2Transformer3DModel": WAN,
    "CosmosTransformer3DModel": Convention(max_length=512),
    "LTXVideoTransformer3DModel": Convention(max_length=128, masked=False),
    "CogVideoXTransformer3DModel": Convention(
        max_length=226, masked=False, padding_counts=True, length_key="max_text_seq_length"
    ),
    "MochiTransformer3DModel": Convention(max_length=256, length_key="max_sequence_length"),
    "HunyuanVideoTransformer3DModel": Convention(
        max_length=256, frame=_hunyuan_frame, skipped_layers=2, pooled=True
    ),
    "HunyuanVideo15Transformer3DModel": Convention(
        max_length=1000, frame=_hunyuan15_frame, chat=True, quotes=False, skipped_layers=2
    ),
}
"""By the class of the pipeline's transformer."""
ENCODERS = {
    "T5EncoderModel": "d_model", "UMT5EncoderModel": "d_model", "LlamaModel": "hidden_size",
    "Qwen2_5_VLTextModel": "hidden_size",
}  # fmt: skip
"""Classes of transformers, and where their config.json has the channels D."""
POOLERS = {"CLIPTextModel": "hidden_size"}
"""Classes that give one embedding of a caption, and where their config.json has its channels P."""
POOLED_LENGTH = 77
"""Tokens of a caption that CLIP takes."""


class PooledEncoder:
    """Captions as one embedding each, by CLIP with its tokenizer; loaded at the first use.

    Args:
        encoder: folder of the weights.
        tokenizer: folder of the tokenizer.
        place: decides where the weights compute.

    Raises:
        InputError: an encoder of another kind.
    """

    def __init__(self, encoder: Component, tokenizer: Component, place: Place = whole) -> None:
        _require_known(encoder, POOLERS)
        self._encoder, self._tokenizer, self._place = encoder, tokenizer, place
        self.dim = int(encoder.config[POOLERS[encoder.class_name]])
        self._model: Any = None

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> Tensor:
        """[B, P] float32."""
        tokenizer = _load_tokenizer(self._tokenizer.folder)
        tokens = tokenizer(
            list(captions), padding="max_length", truncation=True, max_length=POOLED_LENGTH,
            return_tensors="pt",
        )  # fmt: skip
        if self._model is None:
            self._model = self._place(_load_encoder(self._encoder))
        pooled: Tensor = self._model(tokens.input_ids.to(self._model.device)).pooler_output
        return pooled.float().cpu()

    def settings(self) -> dict[str, Any]:
        files = {"files": self._encoder.fingerprint(), "tokenizer": self._tokenizer.fingerprint()}
        return {"class": self._encoder.class_name, "dim": self.dim, **files}

    def close(self) -> None:
        _close(self._model)
        self._model = None


class PretrainedTextEncoder:
    """A text encoder with its tokenizer; each is loaded at its first use.

    Args:
        encoder: folder of the weights; computes in the dtype they are stored in.
        tokenizer: folder of the tokenizer.
        convention: of the family.
        max_length: tokens L; None takes the family's.
        pooler: what gives the embedding of a whole caption, for families that take one.
        place: decides where the weights compute.

    Raises:
        InputError: an encoder of another kind, or more tokens than the family takes.
    """

    def __init__(
        self,
        encoder: Component,
        tokenizer: Component,
        convention: Convention,
        max_length: int | None = None,
        pooler: PooledEncoder | None = None,
        place: Place = whole,
    ) -> None:
        _require_known(encoder, ENCODERS)
        _require_length(max_length, convention)
        self._encoder, self._tokenizer, self._convention = encoder, tokenizer, convention
        self._template, self._crop = convention.frame()
        self._pooler, self._place = pooler, place
        self.dim = int(encoder.config[ENCODERS[encoder.class_name]])
        self.pooled_dim = None if pooler is None else pooler.dim
        self.max_length = max_length or convention.max_length
        self._loaded_tokenizer: Any = None
        self._model: Any = None

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        convention = self._convention
        tokens = self._tokenize(
            captions, padding="max_length", truncation=True,
            max_length=self.max_length + self._crop, return_tensors="pt",
        )  # fmt: skip
        ids, attended = tokens.input_ids, tokens.attention_mask  # [B, crop + L]
        model = self._load_model()
        given = {"attention_mask": attended.to(model.device)} if convention.masked else {}
        embeddings = _output(model, ids, given, convention.skipped_layers)[:, self._crop :]
        valid = torch.ones_like(attended) if convention.padding_counts else attended
        mask = valid.bool()[:, self._crop :]  # [B, L]
        return embeddings.masked_fill(~mask[..., None], 0), mask

    def pooled(self, captions: Sequence[str]) -> Tensor | None:
        return None if self._pooler is None else self._pooler.encode(captions)

    def count_tokens(self, caption: str) -> int:
        return len(self._tokenize([caption]).input_ids[0]) - self._crop

    def settings(self) -> dict[str, Any]:
        convention = self._convention
        framed: dict[str, Any] = {}
        if self._crop:
            framed = {"template": self._template, "crop": self._crop}
        if self._pooler is not None:
            framed["pooled"] = self._pooler.settings()
        return {
            "name": "encoder",
            "class": self._encoder.class_name,
            "files": self._encoder.fingerprint(),
            "tokenizer": self._tokenizer.fingerprint(),
            "dim": self.dim,
            "max_length": self.max_length,
            "masked": convention.masked,
            "padding_counts": convention.padding_counts,
            "cleaning": _cleaning() if convention.cleaned else "none",
            "version": VERSION,
            **framed,
        }

    def close(self) -> None:
        _close(self._model)
        self._model = None
        if self._pooler is not None:
            self._pooler.close()

    def _tokenize(self, captions: Sequence[str], **options: Any) -> Any:
        if self._loaded_tokenizer is None:
            self._loaded_tokenizer = _load_tokenizer(self._tokenizer.folder)
        prompts = [clean(c) for c in captions] if self._convention.cleaned else list(captions)
        if not self._convention.quotes:
            _require_no_quotes(prompts)
        return self._loaded_tokenizer(
            [self._framed(prompt) for prompt in prompts],
            add_special_tokens=not self._convention.chat, return_attention_mask=True, **options,
        )  # fmt: skip

    def _framed(self, prompt: str) -> str:
        if not self._convention.chat:
            return self._template.format(prompt)
        messages = [
            {"role": "system", "content": self._template},
            {"role": "user", "content": prompt or " "},
        ]
        framed: str = self._loaded_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return framed

    def _load_model(self) -> Any:
        if self._model is None:
            self._model = self._place(_load_encoder(self._encoder))
        return self._model


def find_text_encoder(config: TextConfig, place: Place = whole) -> PretrainedTextEncoder:
    """The encoder that `data.text` names; its weights are read at its first use.

    Raises:
        InputError: it is not there, or how its family uses it is not known here.
    """
    name, revision = config.pretrained_model_name_or_path, config.revision
    assert name is not None
    root = pipeline_folder(name, (*SUBFOLDERS, *POOLED_SUBFOLDERS), revision)
    encoder, tokenizer = find_components(str(root), SUBFOLDERS, key=KEY)
    convention, pooler = _convention(root), None
    if convention.pooled:
        second, its_tokenizer = find_components(str(root), POOLED_SUBFOLDERS, key=KEY)
        pooler = PooledEncoder(second, its_tokenizer, place)
    return PretrainedTextEncoder(encoder, tokenizer, convention, config.max_length, pooler, place)


def clean(caption: str) -> str:
    """A caption as Wan's pipeline cleans it; ftfy mends its encoding where that is installed."""
    if importlib.util.find_spec("ftfy") is not None:
        import ftfy

        caption = ftfy.fix_text(caption)
    caption = html.unescape(html.unescape(caption)).strip()
    return re.sub(r"\s+", " ", caption).strip()


def _cleaning() -> str:
    return "whitespace" if importlib.util.find_spec("ftfy") is None else "ftfy"


def _convention(root: Path) -> Convention:
    transformer: Mapping[str, Any] = transformer_config(root, KEY)
    name = str(transformer.get("_class_name"))
    if name not in CONVENTIONS:
        raise InputError(
            f"{root}: how the pipeline of {name} encodes text is not known here",
            f"known are {', '.join(sorted(CONVENTIONS))}",
        )
    found = CONVENTIONS[name]
    length = transformer.get(found.length_key) if found.length_key else None
    return found if length is None else replace(found, max_length=int(length))


def _require_known(encoder: Component, known: Mapping[str, str]) -> None:
    if encoder.class_name not in known:
        raise InputError(
            f"{encoder.config_file}: {encoder.class_name or 'no class'} is not a text encoder "
            "known here",
            f"known are {', '.join(known)}; encode captions of others in a loop of your own",
        )


def _require_length(max_length: int | None, convention: Convention) -> None:
    if max_length is None:
        return
    exact = not convention.masked
    if max_length > convention.max_length or (exact and max_length != convention.max_length):
        allowed = f"exactly {convention.max_length}" if exact else f"up to {convention.max_length}"
        raise InputError(
            f"{KEY}.max_length={max_length}: this family takes {allowed} tokens",
            f"leave {KEY}.max_length out",
        )


def _require_no_quotes(captions: Sequence[str]) -> None:
    from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5

    for caption in captions:
        if pipeline_hunyuan_video1_5.extract_glyph_texts(caption) is not None:
            raise InputError(
                f"caption {caption!r}: what stands in quotation marks goes through a second "
                "encoder in this model's pipeline (ByT5), which is not called here",
                "take the marks out of the caption",
            )


def _output(model: Any, ids: Tensor, given: Mapping[str, Tensor], skipped: int | None) -> Tensor:
    """[B, L, D] float32 of token ids [B, L]."""
    if skipped is None:
        output: Tensor = model(ids.to(model.device), **given).last_hidden_state
    else:
        states = model(
            ids.to(model.device), output_hidden_states=True, use_cache=False, **given
        ).hidden_states
        output = states[-(skipped + 1)]
    return output.float().cpu()


def _close(model: Any) -> None:
    """Give back what a placed encoder holds besides memory."""
    if close := getattr(model, "close", None):
        close()


def _load_tokenizer(folder: Path) -> Any:
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"{folder}: the tokenizer does not load: {error}", "copy the folder again, whole"
        ) from None


def _load_encoder(component: Component) -> Any:
    cls = getattr(_transformers(), component.class_name)
    return load_component(component, cls, dtype="auto")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "text encoders need transformers: pip install 'megaslide[pretrained]'"
        ) from error
    return transformers
