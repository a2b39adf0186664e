"""Reading the cache: samples from mapped shards, batches of one bucket, an order that resumes.

A training run must be able to stop anywhere and continue with the very next batch it would have
drawn. The order of an epoch is therefore a pure function of (seed, epoch) through a hash, the same
in every version of every library, and the sampler's whole state is two numbers.

Shapes: B batch, C t h w of latents, L tokens of D channels, P channels of a pooled embedding.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from megaslide.config import DataConfig, Triple
from megaslide.data.cache import check_settings, open_tensors, read_index, tensor_name
from megaslide.data.first_frames import IMAGE_KEYS
from megaslide.data.settings import cache_selection, cache_settings
from megaslide.errors import InputError

Tensor = torch.Tensor
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One window of one clip."""

    latents: Tensor
    """`[C, t, h, w]` float32."""
    text: Tensor
    """`[L, D]` float32, zero where masked."""
    mask: Tensor
    """`[L]` bool, True for valid tokens."""
    pooled: Tensor | None
    """`[P]` float32, of the whole caption, for models that take that besides."""
    caption: str
    clip_id: str
    bucket: str
    """`TxHxW` in pixels."""
    image: Mapping[str, Tensor] = field(default_factory=dict)
    """Conditions on its first frame, as keyword arguments of a model, without the batch axis."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples of one bucket, stacked."""

    latents: Tensor
    """`[B, C, t, h, w]` float32."""
    text: Tensor
    """`[B, L, D]` float32."""
    mask: Tensor
    """`[B, L]` bool."""
    pooled: Tensor | None
    """`[B, P]` float32."""
    clip_ids: tuple[str, ...]
    image: Mapping[str, Tensor] = field(default_factory=dict)
    """Conditions on first frames, as keyword arguments of a model."""

    def conditioning(self) -> dict[str, Tensor]:
        """Its text and first frames as keyword arguments of a model.

        `encoder_hidden_states` [B, L, D], `encoder_attention_mask` [B, L], and those that are there
        of `pooled_projections` [B, P], `image_latents` [B, C, t, h, w] and
        `encoder_hidden_states_image` [B, K, D].
        """
        return _conditioning(self.text, self.mask, self.pooled) | dict(self.image)


class LatentDataset(torch.utils.data.Dataset[Sample]):
    """The samples of one split of a prepared cache.

    Args:
        cache_dir: what `prepare` was given as data.cache_dir.
        split: a cache without held-out clips has an empty validation split.
        expect: the present `data` section; a cache that does not match it is refused.
        patch_size: where given, the patch size buckets must have been cropped for.

    Raises:
        InputError: no cache there, an unfinished one, one that does not match `expect`, or a
            damaged shard.
    """

    def __init__(
        self,
        cache_dir: str | Path,
        split: Literal["train", "validation"] = "train",
        expect: DataConfig | None = None,
        *,
        patch_size: Triple | None = None,
    ) -> None:
        if split not in ("train", "validation"):
            raise ValueError(f"split={split!r}; need train or validation")
        self.cache_dir, self.split = Path(cache_dir), split
        index = read_index(self.cache_dir)
        if not index.get("complete"):
            raise InputError(
                f"{self.cache_dir}: the cache is unfinished", "run `megaslide prepare` to the end"
            )
        if expect is not None:
            _check_expected(self.cache_dir, index, expect)
        if patch_size is not None:
            check_settings(self.cache_dir, index["settings"], {"patch_size": list(patch_size)})
        self.settings: dict[str, Any] = index["settings"]
        self.samples: list[dict[str, Any]] = [s for s in index["samples"] if s["split"] == split]
        made = self.settings.get("image", {}).get("name", "none")
        self._images = IMAGE_KEYS[made if expect is None else expect.image.name]
        self._text_file: str = index["text"]
        self._open: dict[str, Any] = {}

    @property
    def channels(self) -> int:
        """Latent channels C."""
        return int(self.settings["codec"]["channels"])

    @property
    def text_dim(self) -> int:
        """Text channels D."""
        return int(self.settings["text"]["dim"])

    @property
    def buckets(self) -> dict[str, list[int]]:
        """Indices of the samples of each bucket, in index order."""
        indices: dict[str, list[int]] = {}
        for number, sample in enumerate(self.samples):
            indices.setdefault(sample["bucket"], []).append(number)
        return indices

    @property
    def fingerprint(self) -> str:
        """Digest of which windows of which clips are there, in order."""
        names = [f"{s['content']}/{s['window']}/{s['caption']}" for s in self.samples]
        return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        entry = self.samples[index]
        latents, *images = (
            self._file(entry["shard"]).get_slice(tensor_name(entry["content"], key))[
                entry["window"]
            ]
            for key in ("latents", *self._images)
        )
        named = entry["caption"], entry["clip_id"], entry["bucket"]
        image = dict(zip(self._images, images, strict=True))
        return Sample(latents, *self._text(entry["text"]), *named, image)

    def empty_text(self) -> dict[str, Tensor]:
        """The empty caption's `Batch.conditioning` without the batch axis, for caption dropout."""
        return _conditioning(*self._text(0))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # every worker process maps the files itself

    def _text(self, row: int) -> tuple[Tensor, Tensor, Tensor | None]:
        file = self._file(self._text_file)
        first, last = file.get_slice("offsets")[row : row + 2].tolist()
        length = int(self.settings["text"]["max_length"])
        text = torch.zeros(length, self.text_dim)
        text[: last - first] = file.get_slice("tokens")[first:last]
        pooled = file.get_slice("pooled")[row] if "pooled" in file.keys() else None  # noqa: SIM118
        return text, torch.arange(length) < last - first, pooled

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = open_tensors(self.cache_dir / name)
        return self._open[name]


class BucketSampler:
    """Endless batches of sample indices, each batch from one bucket.

    An epoch visits every sample of every bucket in a shuffled order. A bucket's last batch is
    filled up with samples from the start of the same epoch's order, so every batch has
    `batch_size` samples and no clip is ever dropped; a bucket smaller than a batch repeats its
    samples, with a warning.

    Args:
        dataset: whose samples.
        batch_size: samples per batch.
        seed: of the order.

    Raises:
        InputError: the data set is empty.
        ValueError: batch_size below 1.
    """

    def __init__(self, dataset: LatentDataset, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is below 1")
        self._buckets = dataset.buckets
        if not self._buckets:
            raise InputError(
                f"{dataset.cache_dir}: no {dataset.split} samples", "prepare more clips"
            )
        self._batch_size, self._seed = batch_size, seed
        self._fingerprint = dataset.fingerprint
        self._epoch, self._position = 0, 0
        self._batches = self._order(0)
        for bucket, indices in self._buckets.items():
            if len(indices) < batch_size:
                logger.warning(
                    "bucket %s has %d samples, fewer than a batch of %d: they repeat within it",
                    bucket, len(indices), batch_size,
                )  # fmt: skip

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        batch = self._batches[self._position]
        self._position += 1
        if self._position == len(self._batches):
            self._epoch, self._position = self._epoch + 1, 0
            self._batches = self._order(self._epoch)
        return list(batch)

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which `load_state_dict` continues with the next batch."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            InputError: taken with another seed, batch size or set of samples, so that the order
                cannot continue.
        """
        differing = [
            f"{key} was {state.get(key)!r}, is {value!r}"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if differing:
            raise InputError(
                f"the data order cannot continue: {'; '.join(differing)}",
                "resume with the data and batch size of the checkpoint",
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._batches = self._order(self._epoch)

    def _identity(self) -> dict[str, Any]:
        sizes = {bucket: len(indices) for bucket, indices in self._buckets.items()}
        return {
            "seed": self._seed,
            "batch_size": self._batch_size,
            "samples": sizes,
            "fingerprint": self._fingerprint,
        }

    def _order(self, epoch: int) -> list[list[int]]:
        batches = []
        for bucket, indices in self._buckets.items():
            shuffled = sorted(indices, key=lambda index: self._rank(epoch, "sample", str(index)))
            count = -(-len(shuffled) // self._batch_size)
            filled = [shuffled[i % len(shuffled)] for i in range(count * self._batch_size)]
            batches += [
                (self._rank(epoch, bucket, str(start)), filled[start : start + self._batch_size])
                for start in range(0, len(filled), self._batch_size)
            ]
        return [batch for _, batch in sorted(batches)]

    def _rank(self, epoch: int, *names: str) -> bytes:
        text = "/".join([str(self._seed), str(epoch), *names])
        return hashlib.blake2b(text.encode(), digest_size=12).digest()


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples of one bucket.

    Raises:
        ValueError: no samples, or latents of different shapes.
    """
    shapes = {tuple(sample.latents.shape) for sample in samples}
    if len(shapes) != 1:
        raise ValueError(f"latents of shapes {sorted(shapes)} in one batch; need one shape")
    return Batch(
        latents=torch.stack([sample.latents for sample in samples]),
        text=torch.stack([sample.text for sample in samples]),
        mask=torch.stack([sample.mask for sample in samples]),
        pooled=_stacked([sample.pooled for sample in samples]),
        clip_ids=tuple(sample.clip_id for sample in samples),
        image={key: torch.stack([s.image[key] for s in samples]) for key in samples[0].image},
    )


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    present = [row for row in rows if row is not None]
    return torch.stack(present) if present else None


def _conditioning(text: Tensor, mask: Tensor, pooled: Tensor | None) -> dict[str, Tensor]:
    named = {"encoder_hidden_states": text, "encoder_attention_mask": mask}
    return named if pooled is None else {**named, "pooled_projections": pooled}


def _check_expected(folder: Path, index: dict[str, Any], config: DataConfig) -> None:
    """Refuse a cache whose latents, or whose choice of samples, are not the config's."""
    check_settings(folder, index["settings"], cache_settings(config))
    wanted = cache_selection(config)
    if not Path(config.path).exists():
        wanted.pop("path")  # the cache was copied to where its clips are not
    differing = [
        f"data.{key} was {index.get(key)!r}, is {value!r}"
        for key, value in wanted.items()
        if index.get(key) != value
    ]
    if differing:
        raise InputError(
            f"cache {folder} was prepared differently: {'; '.join(differing)}",
            "run `megaslide prepare` again (encoded clips are kept)",
        )
