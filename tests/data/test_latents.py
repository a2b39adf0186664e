"""Reading a cache: samples, batches, and an order that continues exactly."""

import itertools
import json
import logging
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
from synthetic_clips import drifting, write_raw

from megaslide.config import DataConfig, TextConfig
from megaslide.data.latents import Batch, BucketSampler, LatentDataset, collate
from megaslide.data.prepare import prepare
from megaslide.data.text import HashedNgramEncoder
from megaslide.errors import InputError

SQUARE, WIDE = "8x32x32", "8x32x64"


def config(folder: Path, **changes: object) -> DataConfig:
    values = {
        "path": str(folder / "clips"),
        "cache_dir": str(folder / "cache"),
        "buckets": (SQUARE, WIDE),
        "text": TextConfig(dim=16, max_length=6),
        "validation_split": 0.2,
    }
    return DataConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven square clips and four wide ones, some of them held out."""
    folder = tmp_path_factory.mktemp("prepared")
    for number in range(11):
        frames = drifting(8, 32, 32 if number < 7 else 64, seed=number)
        path = write_raw(folder / "clips" / f"{number:02d}.mp4", frames)
        path.with_suffix(".txt").write_text(f"clip {number}")
    prepare(config(folder))
    return folder


@pytest.fixture
def dataset(prepared: Path) -> LatentDataset:
    return LatentDataset(prepared / "cache")


class Listed:
    """As much of a data set as the sampler needs, of any composition."""

    def __init__(self, **buckets: int) -> None:
        self.split, self.cache_dir = "train", Path("cache")
        names = [bucket for bucket, count in buckets.items() for _ in range(count)]
        self.buckets = {
            bucket: [i for i, name in enumerate(names) if name == bucket] for bucket in buckets
        }
        self.buckets = {bucket: indices for bucket, indices in self.buckets.items() if indices}
        self.fingerprint = "-".join(names)


def sampler(batch_size: int = 4, seed: int = 0, **buckets: int) -> BucketSampler:
    return BucketSampler(Listed(**buckets), batch_size, seed)  # type: ignore[arg-type]


def take(batches: BucketSampler, count: int) -> list[list[int]]:
    return [next(batches) for _ in range(count)]


def test_samples(prepared: Path, dataset: LatentDataset) -> None:
    held_out = LatentDataset(prepared / "cache", split="validation", expect=config(prepared))
    assert len(dataset) + len(held_out) == 11
    assert len(held_out) >= 1
    assert not {s["content"] for s in dataset.samples} & {s["content"] for s in held_out.samples}
    sample = dataset[0]
    assert sample.latents.dtype == torch.float32
    assert sample.latents.shape == (48, 8, 4, 4 if sample.bucket == SQUARE else 8)
    text, mask = HashedNgramEncoder(16, 6).encode([sample.caption])
    assert torch.equal(sample.text, text[0])
    assert torch.equal(sample.mask, mask[0])
    empty, empty_mask = dataset.empty_text().values()
    expected, expected_mask = HashedNgramEncoder(16, 6).encode([""])
    assert torch.equal(empty, expected[0])
    assert torch.equal(empty_mask, expected_mask[0])
    assert (dataset.channels, dataset.text_dim) == (48, 16)
    with pytest.raises(ValueError, match="split='test'"):
        LatentDataset(prepared / "cache", split="test")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no index\.json"):
        LatentDataset(prepared / "clips")


def test_workers_get_their_own_files(dataset: LatentDataset) -> None:
    first = dataset[0].latents
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy[0].latents, first)


def test_collate(dataset: LatentDataset) -> None:
    indices = dataset.buckets[SQUARE][:3]
    batch = collate([dataset[i] for i in indices])
    assert isinstance(batch, Batch)
    assert batch.latents.shape == (3, 48, 8, 4, 4)
    assert batch.text.shape == (3, 6, 16)
    assert batch.mask.shape == (3, 6)
    assert batch.clip_ids == tuple(dataset[i].clip_id for i in indices)
    mixed = [dataset[dataset.buckets[SQUARE][0]], dataset[dataset.buckets[WIDE][0]]]
    for samples in (mixed, []):
        with pytest.raises(ValueError, match="need one shape"):
            collate(samples)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 8])
def test_every_epoch_visits_every_sample_in_batches_of_one_bucket(batch_size: int) -> None:
    batches = sampler(batch_size, a=7, b=8, c=1)
    orders = []
    for epoch in range(3):
        assert batches.epoch == epoch
        order = take(batches, batches.batches_per_epoch)
        orders.append(order)
        assert all(len(batch) == batch_size for batch in order)
        seen = Counter(index for batch in order for index in batch)
        assert seen.keys() == set(range(16))
        for start, stop in [(0, 7), (7, 15), (15, 16)]:
            inside = [b for b in order if any(start <= i < stop for i in b)]
            assert all(start <= i < stop for b in inside for i in b)
            counts = [seen[i] for i in range(start, stop)]
            assert max(counts) - min(counts) <= 1  # nothing repeats twice before all did once
    assert orders[0] != orders[1] != orders[2]


def test_buckets_are_mixed() -> None:
    order = [batch[0] < 20 for batch in take(sampler(1, 0, a=20, b=20), 40)]
    assert 10 <= sum(a != b for a, b in itertools.pairwise(order)) <= 30


def test_order_is_pinned_and_depends_on_the_seed() -> None:
    assert take(sampler(2, 0, a=6), 3) == [[4, 3], [1, 0], [2, 5]]
    assert take(sampler(2, 1, a=6), 3) != take(sampler(2, 0, a=6), 3)


@pytest.mark.parametrize("done", [0, 1, 5, 6, 17, 40])
def test_resume_continues_with_the_very_next_batch(done: int) -> None:
    whole = take(sampler(3, 5, a=7, b=8), 60)
    first = sampler(3, 5, a=7, b=8)
    assert take(first, done) == whole[:done]
    state = json.loads(json.dumps(first.state_dict()))
    second = sampler(3, 5, a=7, b=8)
    take(second, 4)
    second.load_state_dict(state)
    assert take(second, 60 - done) == whole[done:]


def test_resume_refuses_another_order(dataset: LatentDataset) -> None:
    state = sampler(3, 5, a=7).state_dict()
    for other, match in [
        (sampler(2, 5, a=7), "batch_size was 3, is 2"),
        (sampler(3, 4, a=7), "seed was 5, is 4"),
        (sampler(3, 5, a=8), "samples was {'a': 7}, is {'a': 8}"),
        (sampler(3, 5, b=7), "fingerprint"),
    ]:
        with pytest.raises(InputError, match="cannot continue") as caught:
            other.load_state_dict(state)
        assert match in str(caught.value)
    real = BucketSampler(dataset, 2, seed=0)
    real.load_state_dict(BucketSampler(dataset, 2, seed=0).state_dict())


def test_small_and_empty_buckets(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        batches = sampler(4, 0, a=3, b=5)
    assert [r.message for r in caplog.records] == [
        "bucket a has 3 samples, fewer than a batch of 4: they repeat within it"
    ]
    small = next(batch for batch in take(batches, 3) if batch[0] < 3)
    assert sorted(Counter(small).values()) == [1, 1, 2]
    with pytest.raises(InputError, match="no train samples"):
        sampler(4)
    with pytest.raises(ValueError, match="batch_size=0"):
        sampler(0, a=1)


def test_a_cache_is_refused_when_the_choice_of_samples_changed(prepared: Path) -> None:
    cache = prepared / "cache"
    LatentDataset(cache, expect=config(prepared))
    LatentDataset(cache, expect=config(prepared, path="/where/the/clips/are/not"))
    for changes, match in [
        ({"validation_split": 0.3}, "data.validation_split was 0.2, is 0.3"),
        ({"missing_caption": "skip"}, "data.missing_caption was 'error', is 'skip'"),
        ({"path": str(prepared)}, "data.path was"),
    ]:
        with pytest.raises(InputError, match="run `megaslide prepare` again") as caught:
            LatentDataset(cache, expect=config(prepared, **changes))
        assert match in str(caught.value)
