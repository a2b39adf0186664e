"""`prepare`: a folder of clips in, a cache of latents and text embeddings out.

Everything slow about video happens here, once: decoding, resampling, cropping, encoding. A run may
be killed and continued; a clip is encoded again only when its content or a setting changes. Every
file that is left out is reported with its reason, and every change made to a clip is written down.

Shapes: T frames, H height, W width in pixels; C t h w of latents; L tokens of D channels.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megaslide.config import DataConfig, Triple
from megaslide.data.buckets import Bucket, fit_buckets
from megaslide.data.cache import LatentCache, preparing
from megaslide.data.clips import EVENTS, encode_clip
from megaslide.data.codecs import Codec, build_codec
from megaslide.data.first_frames import FirstFrames, build_first_frames
from megaslide.data.settings import cache_selection, cache_settings
from megaslide.data.sources import Skipped, Source, SourceList, find_sources
from megaslide.data.text import Place, TextEncoder, build_text_encoder, whole
from megaslide.data.video import UnreadableVideoError
from megaslide.errors import InputError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called after each clip with (clips done, clips in all, name of the clip)."""


@dataclass(slots=True, kw_only=True)
class PrepareReport:
    """What `prepare` made and what it left out."""

    cache_dir: Path
    clips: int
    """Source files in use."""
    reused: int
    """Of these, found in the cache."""
    train_samples: int
    validation_samples: int
    buckets: dict[str, int]
    """Samples per bucket `TxHxW`."""
    skipped: list[Skipped] = field(default_factory=list)
    """Every file left out, with its reason."""
    notes: list[str] = field(default_factory=list)
    """Everything else worth knowing, one sentence each."""


def prepare(
    config: DataConfig,
    *,
    patch_size: Triple = (1, 2, 2),
    place: Place = whole,
    progress: Progress | None = None,
) -> PrepareReport:
    """Bring the cache at `config.cache_dir` up to date with the clips at `config.path`.

    Args:
        config: the `data` section.
        patch_size: latent voxels per token (t, h, w) of the model to be trained; buckets are
            cropped down to whole patches.
        place: decides where the weights of a pretrained text encoder compute.
        progress: called after each clip.

    Raises:
        InputError: nothing usable, a missing caption under `missing_caption: error`, or a cache
            made with other settings.
        ImportError: PyAV or Pillow is missing.
    """
    path, cache_dir = _required(config.path, "path"), _required(config.cache_dir, "cache_dir")
    codec, encoder = build_codec(config.codec), build_text_encoder(config.text, place)
    buckets, bucket_notes = fit_buckets(config.buckets, codec, patch_size)
    found = find_sources(path, missing_caption=config.missing_caption, exclude=cache_dir)
    contents = _hash_all(found)
    settings = cache_settings(config) | {"patch_size": list(patch_size)}
    with preparing(cache_dir):
        cache = LatentCache(cache_dir, settings, list(dict.fromkeys(contents.values())))
        known = set(cache.clips)
        images = build_first_frames(config, codec)
        for number, source in enumerate(list(found.sources), 1):
            if contents[source] not in cache.clips:
                _add_clip(source, contents[source], config, codec, buckets, images, cache, found)
            if progress is not None:
                progress(number, len(contents), source.clip_id)
        if images is not None:
            images.close()
        codec.close()  # before the text encoder loads: either may be all that memory holds
        usable = [source for source in found.sources if contents[source] in cache.clips]
        if not usable:
            raise _nothing_left(path, found)
        split = split_contents([contents[source] for source in usable], config.validation_split)
        captions = [source.caption for source in usable]
        tokens, rows = _encode_text(encoder, captions, cache.captions())
        encoder.close()
        cache.pack()
        samples = [
            sample
            for source in usable
            for sample in _samples(source, contents[source], rows[source.caption], split, cache)
        ]
        found.notes += bucket_notes + _notes(usable, contents, config, encoder, buckets, cache)
        derived = cache_selection(config) | {
            "samples": samples,
            "skipped": [{"path": s.path, "reason": s.reason} for s in found.skipped],
            "notes": found.notes,
        }
        cache.finish(derived, tokens)
    return _report(cache_dir, usable, contents, known, samples, found)


def split_contents(contents: Sequence[str], validation_split: float) -> dict[str, str]:
    """`train` or `validation` for each content hash, so that copies never straddle the split.

    The hash decides alone, so adding clips moves none of the old ones; except that two or more
    clips always give at least one to either side when validation_split is above 0.
    """
    ordered = sorted(set(contents))  # by hash, which is uniform
    held_out = [c for c in ordered if int(c[:13], 16) / 16**13 < validation_split]
    if validation_split > 0 and len(ordered) > 1:
        held_out = (held_out or ordered[:1])[: len(ordered) - 1]
    return dict.fromkeys(ordered, "train") | dict.fromkeys(held_out, "validation")


def _required(value: str, key: str) -> Path:
    if not value:
        raise InputError(f"data.{key} is empty", f"set data.{key}")
    return Path(value)


def _hash_all(found: SourceList) -> dict[Source, str]:
    """sha256 of each source's file; unreadable files move to `found.skipped`."""
    contents: dict[Source, str] = {}
    for source in found.sources:
        try:
            with open(source.path, "rb") as file:
                contents[source] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            found.skipped.append(Skipped(source.clip_id, f"cannot be read ({error.strerror})"))
    found.sources = list(contents)
    return contents


def _add_clip(
    source: Source,
    content: str,
    config: DataConfig,
    codec: Codec,
    buckets: Sequence[Bucket],
    images: FirstFrames | None,
    cache: LatentCache,
    found: SourceList,
) -> None:
    """Encode one clip into the cache, or say in `found.skipped` why not."""
    try:
        record, tensors = encode_clip(source.path, content, config, codec, buckets, images)
    except UnreadableVideoError as error:
        found.skipped.append(Skipped(source.clip_id, error.reason))
        logger.warning("skipped %s: %s", source.clip_id, error.reason)
    else:
        cache.add(content, record, tensors)


def _nothing_left(path: Path, found: SourceList) -> InputError:
    shown = "\n".join(f"  {skip.path}: {skip.reason}" for skip in found.skipped[:5])
    more = f"\n  and {len(found.skipped) - 5} more" if len(found.skipped) > 5 else ""
    return InputError(
        f"{path}: no usable clip; {len(found.skipped)} files skipped:\n{shown}{more}",
        "see each reason; for clips that are too short set a bucket with fewer frames",
    )


def _encode_text(
    encoder: TextEncoder, captions: Sequence[str], known: Mapping[str, dict[str, torch.Tensor]]
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Valid tokens of all distinct captions, end to end, and each caption's row; row 0 is "".

    Pooled embeddings are `[rows, P]`. The `known` captions are taken as they are.
    """
    distinct = list(dict.fromkeys(["", *captions]))
    rows = [known.get(caption) or _encode_caption(encoder, caption) for caption in distinct]
    tokens = [row["tokens"] for row in rows]
    offsets = torch.tensor([0, *map(len, tokens)]).cumsum(0)
    tensors = {"tokens": torch.cat(tokens), "offsets": offsets}
    if "pooled" in rows[0]:
        tensors["pooled"] = torch.cat([row["pooled"] for row in rows])
    return tensors, {caption: row for row, caption in enumerate(distinct)}


def _encode_caption(encoder: TextEncoder, caption: str) -> dict[str, torch.Tensor]:
    """`tokens` [L, D], only the valid ones, so a long maximum costs nothing; `pooled` [1, P]."""
    embeddings, mask = encoder.encode([caption])
    pooled = encoder.pooled([caption])
    return {"tokens": embeddings[0, mask[0]]} | ({} if pooled is None else {"pooled": pooled})


def _samples(
    source: Source, content: str, text_row: int, split: dict[str, str], cache: LatentCache
) -> list[dict[str, Any]]:
    """Index entries of one clip, one per window."""
    record = cache.clips[content]
    return [
        {
            "clip_id": source.clip_id,
            "caption": source.caption,
            "split": split[content],
            "bucket": record.bucket,
            "latent_shape": record.latent_shape,
            "start": start,
            "done": record.done,
            "shard": cache.shard_of[content],
            "content": content,
            "window": window,
            "text": text_row,
        }
        for window, start in enumerate(record.starts)
    ]


def _notes(
    usable: Sequence[Source],
    contents: dict[Source, str],
    config: DataConfig,
    encoder: TextEncoder,
    buckets: Sequence[Bucket],
    cache: LatentCache,
) -> list[str]:
    notes = _event_notes(usable, contents, cache)
    filled = {cache.clips[contents[source]].bucket for source in usable}
    notes += [f"bucket {b.name} has no clips" for b in buckets if b.name not in filled]
    longest = max(usable, key=lambda source: encoder.count_tokens(source.caption))
    cut = sum(encoder.count_tokens(s.caption) > encoder.max_length for s in usable)
    if cut:
        words = encoder.count_tokens(longest.caption)
        notes.append(
            f"{cut} captions are cut to text.max_length={encoder.max_length} tokens; the longest, "
            f"of {longest.clip_id}, has {words}"
        )
    distinct = len({contents[source] for source in usable})
    if distinct < len(usable):
        notes.append(f"{len(usable) - distinct} clips are copies of another, content for content")
    if config.windows_per_clip > 1 and config.frame_choice in ("head", "middle"):
        notes.append(f"data.windows_per_clip has no effect with frame_choice={config.frame_choice}")
    if config.validation_split > 0 and distinct == 1:
        notes.append("a single clip cannot be split, so nothing is held out for validation")
    return notes


def _event_notes(
    usable: Sequence[Source], contents: dict[Source, str], cache: LatentCache
) -> list[str]:
    """One sentence per kind of event, with its count and an example."""
    notes = []
    for kind, words in EVENTS.items():
        events = [(s.clip_id, cache.clips[contents[s]].events.get(kind)) for s in usable]
        examples = [(clip_id, event) for clip_id, event in events if event]
        if examples:
            clip_id, event = examples[0]
            notes.append(f"{len(examples)} of {len(usable)} clips {words}; {clip_id}: {event}")
    return notes


def _report(
    cache_dir: Path,
    usable: Sequence[Source],
    contents: dict[Source, str],
    known: set[str],
    samples: Sequence[dict[str, Any]],
    found: SourceList,
) -> PrepareReport:
    split = Counter(sample["split"] for sample in samples)
    return PrepareReport(
        cache_dir=cache_dir,
        clips=len(usable),
        reused=sum(contents[source] in known for source in usable),
        train_samples=split["train"],
        validation_samples=split["validation"],
        buckets=dict(Counter(sample["bucket"] for sample in samples)),
        skipped=found.skipped,
        notes=found.notes,
    )
