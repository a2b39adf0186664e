"""Text encoders: captions as token embeddings; weight-free here, pretrained in text_encoders.py.

`hashed_ngram` needs no download and no vocabulary. A word is the normalised sum of hashed vectors
of itself and of its character n-grams, so that different words are nearly orthogonal while
"moving" and "move" are related, plus a weaker hashed vector of its position, so that word order can
be told. All sums are of integers and all roundings are IEEE, so embeddings are identical on every
machine; nothing depends on Python's randomised `hash`.

Shapes: B captions, L tokens (max_length), D channels, P channels of a pooled embedding.
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from megaslide.config import TextConfig

Tensor = torch.Tensor
DEFAULT_LENGTH = 32
"""Tokens where a config does not say."""

# Words of letters and digits (with inner apostrophes); in scripts written without spaces,
# every ideograph or kana is a word of its own.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|(?:[^\W_\u3040-\u30ff\u3400-\u9fff]|['’])+")
_SIZES = (3, 4)
"""Lengths of the character n-grams."""
_WORD_WEIGHT, _GRAM_WEIGHT = 3, 2
"""Lengths of the whole word's vector and of the sum over its n-grams."""
_UNIT, _POSITION_SHARE = 4096, 0.5
"""Fixed-point scale, and length of the position vector relative to the word's."""


Place = Callable[[Any], Any]
"""From a loaded module to what is called in its place: with a `device` for its inputs, and perhaps
a `close`."""


def whole(module: Any) -> Any:
    """As it was loaded, on the CPU."""
    return module


class TextEncoder(Protocol):
    """Maps captions to token embeddings; valid tokens come first."""

    dim: int
    """Channels D."""
    max_length: int
    """Tokens L."""
    pooled_dim: int | None
    """Channels P of an embedding of the whole caption; None where there is none."""

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embeddings `[B, L, D]` float32, zero where masked, and mask `[B, L]` bool (True: valid).

        Every caption, the empty one too, has at least one valid token.
        """
        ...

    def pooled(self, captions: Sequence[str]) -> Tensor | None:
        """One embedding per caption, `[B, P]` float32, which some models take besides."""
        ...

    def count_tokens(self, caption: str) -> int:
        """Tokens the caption has before it is cut to L."""
        ...

    def settings(self) -> dict[str, Any]:
        """What embeddings depend on, as JSON values; part of the cache key."""
        ...

    def close(self) -> None:
        """Give back memory that weights take; the next call loads them again."""
        ...


class HashedNgramEncoder:
    """One token per word, made from hashes alone.

    Args:
        dim: channels D; each has mean square 1 over a token.
        max_length: tokens L; further words are cut.

    Raises:
        ValueError: dim or max_length below 1.
    """

    version = 1

    def __init__(self, dim: int, max_length: int) -> None:
        if dim < 1 or max_length < 1:
            raise ValueError(f"dim={dim}, max_length={max_length}: both must be 1 or more")
        self.dim, self.max_length = dim, max_length
        self.pooled_dim: int | None = None

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        embeddings = torch.zeros(len(captions), self.max_length, self.dim)
        mask = torch.zeros(len(captions), self.max_length, dtype=torch.bool)
        for row, caption in enumerate(captions):
            words = split_words(caption)[: self.max_length] or [""]
            tokens = [_token(word, position, self.dim) for position, word in enumerate(words)]
            embeddings[row, : len(words)] = torch.from_numpy(np.stack(tokens))
            mask[row, : len(words)] = True
        return embeddings, mask

    def pooled(self, captions: Sequence[str]) -> None:
        """There is none."""

    def count_tokens(self, caption: str) -> int:
        return max(1, len(split_words(caption)))

    def settings(self) -> dict[str, Any]:
        return {
            "name": "hashed_ngram",
            "dim": self.dim,
            "max_length": self.max_length,
            "version": self.version,
        }

    def close(self) -> None:
        """Nothing to give back."""


def build_text_encoder(config: TextConfig, place: Place = whole) -> TextEncoder:
    """The text encoder a config names.

    Args:
        config: the section `data.text`.
        place: decides where the weights of a pretrained one compute.

    Raises:
        InputError: a pretrained one that is not there or not known.
    """
    if config.name == "encoder":
        from megaslide.data.text_encoders import find_text_encoder

        return find_text_encoder(config, place)
    return HashedNgramEncoder(config.dim, config.max_length or DEFAULT_LENGTH)


def split_words(caption: str) -> list[str]:
    """Words in order, case folded and in Unicode normal form C; punctuation is dropped."""
    folded = unicodedata.normalize("NFC", caption).casefold()
    words = (word.strip("'’") for word in _WORD.findall(folded))
    return [word for word in words if word]


@lru_cache(maxsize=65536)
def _token(word: str, position: int, dim: int) -> np.ndarray:
    """float32 `[D]` of one word at one position, of length sqrt(D)."""
    place = np.rint(_fixed(_hashed(f"position:{position}", dim)) * _POSITION_SHARE)
    total = _fixed(_word_sum(word, dim)) + place.astype(np.int64)
    return (total * np.sqrt(dim / float(total @ total))).astype(np.float32)


def _word_sum(word: str, dim: int) -> np.ndarray:
    """int64 `[D]`: the whole word's vector and its n-grams', the latter divided by sqrt(count)."""
    marked = f"<{word}>"
    grams = {marked[i : i + n] for n in _SIZES for i in range(len(marked) - n + 1)} - {marked}
    whole = _hashed(f"word:{word}", dim) * _WORD_WEIGHT
    if not word or not grams:
        return whole
    total = np.sum([_hashed(f"gram:{gram}", dim) for gram in sorted(grams)], axis=0)
    return whole + np.rint(total * (_GRAM_WEIGHT / np.sqrt(len(grams)))).astype(np.int64)


def _fixed(vector: np.ndarray) -> np.ndarray:
    """The vector scaled to root mean square `_UNIT`, rounded to int64."""
    scale = _UNIT * np.sqrt(len(vector) / float(vector @ vector))
    return np.rint(vector * scale).astype(np.int64)


def _hashed(text: str, dim: int) -> np.ndarray:
    """int64 `[D]` of near-Gaussian values: sums of four hashed bytes, centred."""
    needed = 4 * dim
    blocks = [
        hashlib.blake2b(text.encode(), salt=counter.to_bytes(16, "little")).digest()
        for counter in range(-(-needed // 64))
    ]
    values = np.frombuffer(b"".join(blocks)[:needed], dtype=np.uint8).astype(np.int64)
    # An odd offset: no value is ever 0, so no vector is, whatever its length.
    return 2 * values.reshape(dim, 4).sum(axis=1) - 1019
