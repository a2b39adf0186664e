"""Hashed word embeddings: pinned values, geometry, and every kind of caption."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from megaslide.config import TextConfig
from megaslide.data.text import HashedNgramEncoder, build_text_encoder, split_words

ENCODER = HashedNgramEncoder(128, 32)


def token(word: str, position: int = 0) -> torch.Tensor:
    """The token of a word after `position` fillers, `[D]`."""
    embeddings, _ = ENCODER.encode([" ".join(["filler"] * position + [word])])
    return embeddings[0, position]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a, b, dim=0))


def test_one_token_per_word_padded_and_masked() -> None:
    embeddings, mask = ENCODER.encode(["digit 3 moving right", "a"])
    assert embeddings.shape == (2, 32, 128)
    assert embeddings.dtype == torch.float32
    assert mask.dtype == torch.bool
    assert mask.sum(1).tolist() == [4, 1]
    assert embeddings[~mask].abs().max() == 0
    torch.testing.assert_close(embeddings[mask].square().mean(1), torch.ones(5))


def test_values_are_the_same_on_every_machine_and_in_every_process() -> None:
    expected = [
        -2.1568777561187744, 0.5890989303588867, -1.094802737236023,
        -0.7289795875549316, 0.7566163539886475, -1.4480196237564087,
    ]  # fmt: skip
    np.testing.assert_array_equal(token("moving", 1)[:6].numpy(), np.float32(expected))
    code = (
        "from megaslide.data.text import HashedNgramEncoder as E;"
        "print(E(128, 32).encode(['filler moving'])[0][0, 1, :6].double().tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(np.float32(expected).astype(float).tolist())


def test_different_words_are_nearly_orthogonal() -> None:
    sentence = "digit zero red cyclist rabbit street left right up down 3 5 7 über 猫"
    words = sentence.split()
    similarity = [cosine(token(a), token(b)) for a in words for b in words if a < b]
    at_own_places, _ = ENCODER.encode([sentence])
    normed = at_own_places[0, : len(words)] / np.sqrt(128)
    apart = (normed @ normed.T)[~torch.eye(len(words), dtype=torch.bool)]
    assert apart.abs().max() < 0.4  # 105 pairs, standard deviation 1/sqrt(128) = 0.09
    assert apart.square().mean().sqrt() < 0.12
    assert abs(np.mean(similarity) - 0.2) < 0.06  # at one place they share the position vector


def test_related_words_and_places_are_similar() -> None:
    assert cosine(token("moving"), token("move")) > cosine(token("moving"), token("rabbit")) + 0.05
    same_word = cosine(token("left", 1), token("left", 4))
    assert 0.6 < same_word < 0.95
    a, _ = ENCODER.encode(["red left blue"])
    b, _ = ENCODER.encode(["blue left red"])
    assert not torch.equal(a, b)
    torch.testing.assert_close(a[0, 1], b[0, 1])


@pytest.mark.parametrize("blank", ["", "   ", "?!", "...\n"])
def test_empty_caption_is_one_fixed_token(blank: str) -> None:
    embeddings, mask = ENCODER.encode([blank, ""])
    assert mask.sum(1).tolist() == [1, 1]
    assert torch.equal(embeddings[0], embeddings[1])
    torch.testing.assert_close(embeddings[0, 0].square().mean(), torch.tensor(1.0))
    assert abs(cosine(embeddings[0, 0], token("empty"))) < 0.5


def test_splitting() -> None:
    assert split_words("A man, don't PANIC; über-cool (3x)!") == [
        "a", "man", "don't", "panic", "über", "cool", "3x",
    ]  # fmt: skip
    assert split_words("u\u0308ber") == ["über"]
    assert split_words("猫が走る now") == ["猫", "が", "走", "る", "now"]
    assert split_words("'quoted'") == ["quoted"]
    assert split_words("Straße STRASSE") == ["strasse", "strasse"]


def test_long_captions_are_cut() -> None:
    encoder = HashedNgramEncoder(16, 3)
    embeddings, mask = encoder.encode(["one two three four five"])
    assert mask.all()
    assert embeddings.shape == (1, 3, 16)
    assert encoder.count_tokens("one two three four five") == 5
    assert encoder.count_tokens("") == 1


@pytest.mark.parametrize("dim", [1, 3, 64, 4096])
def test_any_width(dim: int) -> None:
    embeddings, mask = HashedNgramEncoder(dim, 4).encode(["the quick fox", ""])
    assert torch.isfinite(embeddings).all()
    torch.testing.assert_close(embeddings[mask].square().mean(1), torch.ones(4))


def test_channels_have_about_unit_variance() -> None:
    captions = [f"word{i} moves{i} there{i}" for i in range(200)]
    embeddings, mask = ENCODER.encode(captions)
    std = embeddings[mask].std(0)
    assert float(std.min()) > 0.6
    assert float(std.max()) < 1.4


def test_build_text_encoder() -> None:
    encoder = build_text_encoder(TextConfig(dim=64, max_length=8))
    assert encoder.settings() == {
        "name": "hashed_ngram", "dim": 64, "max_length": 8, "version": 1,
    }  # fmt: skip
    assert build_text_encoder(TextConfig()).max_length == 32
    with pytest.raises(ValueError, match="dim=0"):
        HashedNgramEncoder(0, 4)
