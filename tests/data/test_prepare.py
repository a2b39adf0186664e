"""From clips to cache: every bad input, every setting, and runs that are killed and continued."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from synthetic_clips import counting, drifting, indices_of, truncate, write_audio, write_raw

from megaslide.config import CodecConfig, DataConfig, ImageConfig, TextConfig
from megaslide.data import cache, text
from megaslide.data.cache import preparing
from megaslide.data.codecs import build_codec
from megaslide.data.latents import LatentDataset
from megaslide.data.prepare import PrepareReport, prepare, split_contents
from megaslide.data.text import HashedNgramEncoder
from megaslide.errors import InputError

EXACT = CodecConfig(name="pixel", block="1x8x8")


def config(folder: Path, **changes: object) -> DataConfig:
    values = {
        "path": str(folder / "clips"),
        "cache_dir": str(folder / "cache"),
        "buckets": ("8x32x32",),
        "codec": EXACT,
        "text": TextConfig(dim=16, max_length=6),
        "validation_split": 0.0,
    }
    return DataConfig(**(values | changes))  # type: ignore[arg-type]


def add_clip(folder: Path, name: str, frames: np.ndarray, caption: str = "", **how: object) -> Path:
    path = write_raw(folder / "clips" / name, frames, **how)  # type: ignore[arg-type]
    path.with_suffix(".txt").write_text(caption or f"clip {name}", encoding="utf-8")
    return path


def index_of(folder: Path) -> dict:
    return json.loads((folder / "cache" / "index.json").read_text(encoding="utf-8"))


def frames_of(folder: Path, number: int = 0) -> np.ndarray:
    """A sample's pixels again, uint8 `[T, H, W, 3]`."""
    sample = LatentDataset(folder / "cache")[number]
    pixels = build_codec(EXACT).decode(sample.latents[None])[0]
    return ((pixels + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in (folder / "cache").rglob("*") if path.is_file())
    return {str(path.relative_to(folder / "cache")): path.read_bytes() for path in files}


def test_folder_to_samples(tmp_path: Path) -> None:
    add_clip(tmp_path, "a.mp4", counting(8), "alpha")
    add_clip(tmp_path, "Ünï 猫.MP4", counting(20), "beta gamma")
    add_clip(tmp_path, "sub/c.webm", counting(9), codec="libvpx-vp9")
    calls: list[tuple[int, int, str]] = []
    report = prepare(config(tmp_path), progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(1, 3), (2, 3), (3, 3)]
    assert {call[2] for call in calls} == {"a.mp4", "Ünï 猫.MP4", "sub/c.webm"}
    assert (report.clips, report.reused, report.train_samples) == (3, 0, 3)
    assert report.buckets == {"8x32x32": 3}
    assert report.skipped == []
    dataset = LatentDataset(tmp_path / "cache")
    by_id = {sample.clip_id: sample for sample in (dataset[i] for i in range(3))}
    assert by_id["Ünï 猫.MP4"].caption == "beta gamma"
    assert by_id["a.mp4"].latents.shape == (192, 8, 4, 4)
    assert indices_of(frames_of(tmp_path)) == list(range(8))
    entry = index_of(tmp_path)["samples"][0]
    assert entry["bucket"] == "8x32x32"
    assert entry["latent_shape"] == [192, 8, 4, 4]
    assert entry["split"] == "train"
    assert "8 frames of 32x32 at 24 fps decode" in entry["done"]
    shard = load_file(tmp_path / "cache" / entry["shard"])
    torch.testing.assert_close(shard[entry["content"]][0], by_id["a.mp4"].latents)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_metadata_files(tmp_path: Path, name: str) -> None:
    write_raw(tmp_path / "clips/videos/a.mp4", counting(8))
    write_raw(tmp_path / "clips/videos/b.mp4", counting(9))
    rows = [("videos/b.mp4", "the second, first"), ("videos/a.mp4", "the first")]
    lines = [json.dumps({"video": video, "prompt": prompt}) for video, prompt in rows]
    if name.endswith("csv"):
        lines = ["file_path,text", *(f'{video},"{prompt}"' for video, prompt in rows)]
    (tmp_path / "clips" / name).write_text("\n".join(lines))
    for path in (tmp_path / "clips", tmp_path / "clips" / name):
        report = prepare(config(tmp_path, path=str(path)))
        assert report.clips == 2
        samples = index_of(tmp_path)["samples"]
        assert [(s["clip_id"], s["caption"]) for s in samples] == rows


def test_every_bad_file_is_reported_and_the_good_one_used(tmp_path: Path) -> None:
    add_clip(tmp_path, "good.mp4", drifting(12, 40, 48))
    add_clip(tmp_path, "short.mp4", counting(7))
    clips = tmp_path / "clips"
    truncate(clips / "good.mp4", clips / "cut.mp4", 0.5)
    write_audio(clips / "sound.mp4")
    (clips / "zero.mp4").touch()
    (clips / "words.mp4").write_text("no video at all " * 100)
    for name in ("cut", "sound", "zero", "words"):
        (clips / f"{name}.txt").write_text("a caption")
    (clips / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    (clips / "lonely.txt").write_text("no clip")
    report = prepare(config(tmp_path))
    reasons = {skip.path: skip.reason for skip in report.skipped}
    assert report.clips == 1
    expected = {
        "cut.mp4": "is not a readable video",
        "sound.mp4": "has no video stream (only: audio)",
        "zero.mp4": "the file is empty (0 bytes)",
        "words.mp4": "is not a readable video",
        "short.mp4": "too short: 7 frames decode; the shortest bucket needs 8",
        "photo.jpg": "not a clip: extension .jpg",
        "lonely.txt": "caption without a clip",
    }
    assert reasons.keys() == expected.keys()
    for path, reason in expected.items():
        assert reason in reasons[path]
    assert {s["path"] for s in index_of(tmp_path)["skipped"]} == expected.keys()


def test_nothing_usable_is_an_input_error_with_counts(tmp_path: Path) -> None:
    for number in range(7):
        add_clip(tmp_path, f"{number}.mp4", counting(3 + number % 4))
    with pytest.raises(InputError, match="no usable clip; 7 files skipped") as caught:
        prepare(config(tmp_path))
    assert "0.mp4: too short: 3 frames decode" in str(caught.value)
    assert "and 2 more" in str(caught.value)
    with pytest.raises(InputError, match="unfinished"):
        LatentDataset(tmp_path / "cache")


def test_missing_settings_and_places(tmp_path: Path) -> None:
    for changes, match in [
        ({"path": ""}, "data.path is empty"),
        ({"cache_dir": ""}, "data.cache_dir is empty"),
        ({}, "clips does not exist"),
    ]:
        with pytest.raises(InputError, match=match):
            prepare(config(tmp_path, **changes))
    assert not (tmp_path / "cache").exists()
    add_clip(tmp_path, "a.mp4", counting(8))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.doc").touch()
    with pytest.raises(InputError, match=r"holds files but no index\.json"):
        prepare(config(tmp_path))


def test_missing_caption_policies(tmp_path: Path) -> None:
    add_clip(tmp_path, "a.mp4", counting(8))
    write_raw(tmp_path / "clips/b.mp4", counting(9))
    with pytest.raises(InputError, match="1 of 2 clips have no caption"):
        prepare(config(tmp_path))
    assert prepare(config(tmp_path, missing_caption="skip")).clips == 1
    report = prepare(config(tmp_path, missing_caption="empty"))
    assert (report.clips, report.reused) == (2, 1)
    dataset = LatentDataset(tmp_path / "cache")
    text, mask = dataset.empty_text().values()
    assert torch.equal(dataset[1].text, text)
    assert torch.equal(dataset[1].mask, mask)


def test_resampling_says_rates_and_counts(tmp_path: Path) -> None:
    add_clip(tmp_path, "a.mp4", counting(32), rate=24)
    add_clip(tmp_path, "b.mp4", counting(10), rate=24)
    report = prepare(config(tmp_path, target_fps=12))
    assert indices_of(frames_of(tmp_path)) == list(range(0, 16, 2))
    assert "1 of 1 clips resampled" in report.notes[0]
    assert "32 frames at 24 fps -> 16 at 12" in report.notes[0]
    assert report.skipped[0].reason == (
        "too short: 10 frames decode, 5 after resampling from 24 to 12 fps; "
        "the shortest bucket needs 8"
    )


def test_variable_frame_rate(tmp_path: Path) -> None:
    ticks = [0, 100, 200, 300, 900, 1000, 1100, 1200]
    add_clip(tmp_path, "a.mp4", counting(8), ticks=ticks)
    report = prepare(config(tmp_path))
    assert "variable frame rate" in report.notes[0]
    assert indices_of(frames_of(tmp_path)) == list(range(8))
    shutil.rmtree(tmp_path / "cache")
    prepare(config(tmp_path, target_fps=10))
    assert indices_of(frames_of(tmp_path)) == [0, 1, 2, 3, 3, 3, 3, 3]


def test_rotated_clips_come_out_upright(tmp_path: Path) -> None:
    upright = drifting(8, 32, 64)
    add_clip(tmp_path, "a.mp4", np.stack([np.rot90(f, -1) for f in upright]), rotation=90)
    report = prepare(config(tmp_path, buckets=("8x32x64", "8x64x32")))
    assert report.buckets == {"8x32x64": 1}
    assert np.abs(frames_of(tmp_path).astype(int) - upright).mean() < 4
    assert any("turned 90 degrees" in note for note in report.notes)


def test_crop_and_enlargement_are_said(tmp_path: Path) -> None:
    add_clip(tmp_path, "wide.mp4", drifting(8, 64, 128))
    add_clip(tmp_path, "small.mp4", drifting(8, 16, 16, seed=1))
    report = prepare(config(tmp_path, buckets=("8x65x64", "8x32x32")))
    assert "bucket 8x65x64 -> 8x64x64" in " ".join(report.notes)
    done = {s["clip_id"]: s["done"] for s in index_of(tmp_path)["samples"]}
    assert "centre 64x64 of 128x64 scaled to 64x64" in done["wide.mp4"]
    assert "16x16 enlarged 2 times to 32x32" in done["small.mp4"]
    assert any("1 of 2 clips enlarged" in note for note in report.notes)
    assert any("1 of 2 clips lose part of the picture" in note for note in report.notes)


def test_4n_plus_1_frames(tmp_path: Path) -> None:
    add_clip(tmp_path, "a.mp4", counting(8))
    changes = {"codec": CodecConfig(name="pixel", block="4x8x8"), "buckets": ("8x32x32",)}
    report = prepare(config(tmp_path, **changes))
    assert report.buckets == {"5x32x32": 1}
    assert "bucket 8x32x32 -> 5x32x32" in report.notes[0]
    sample = LatentDataset(tmp_path / "cache")[0]
    assert sample.latents.shape == (768, 2, 4, 4)
    pixels = build_codec(changes["codec"]).decode(sample.latents[None], 5)[0]  # type: ignore[arg-type]
    frames = ((pixels + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
    assert indices_of(frames) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("choice", "windows", "starts"),
    [("head", 1, [0]), ("middle", 1, [6]), ("uniform", 3, [0, 6, 12]), ("random", 20, None)],
)
def test_windows(tmp_path: Path, choice: str, windows: int, starts: list[int] | None) -> None:
    add_clip(tmp_path, "a.mp4", counting(20))
    report = prepare(config(tmp_path, frame_choice=choice, windows_per_clip=windows))
    starts = list(range(13)) if starts is None else starts
    assert [s["start"] for s in index_of(tmp_path)["samples"]] == starts
    assert report.train_samples == len(starts)
    for number, start in enumerate(starts):
        assert indices_of(frames_of(tmp_path, number)) == list(range(start, start + 8))
    assert any("13 windows of 20" in note for note in report.notes) == (choice == "random")


def test_ineffective_and_extreme_settings_are_said(tmp_path: Path) -> None:
    add_clip(tmp_path, "a.mp4", counting(8), "one two three four five six seven eight")
    shutil.copy(tmp_path / "clips/a.mp4", tmp_path / "clips/copy.mp4")
    (tmp_path / "clips/copy.txt").write_text("copy")
    changes = {"windows_per_clip": 3, "buckets": ("8x32x32", "16x32x32"), "validation_split": 0.5}
    notes = " | ".join(prepare(config(tmp_path, **changes)).notes)
    assert "windows_per_clip has no effect with frame_choice=head" in notes
    assert "bucket 16x32x32 has no clips" in notes
    assert "1 captions are cut to text.max_length=6" in notes
    assert "a.mp4, has 8" in notes
    assert "1 clips are copies" in notes
    assert "cannot be split" in notes


def test_header_that_lies_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No muxer at hand writes a wrong count, so the count read from the header is altered."""
    from megaslide.data import clips

    add_clip(tmp_path, "a.mp4", counting(12))
    real = clips.probe

    def lying(path: Path) -> object:
        info = real(path)
        object.__setattr__(info, "header_frames", 40)
        return info

    monkeypatch.setattr(clips, "probe", lying)
    report = prepare(config(tmp_path))
    assert "header announces 40 frames, 12 decode" in report.notes[0]


def make_many(folder: Path, count: int = 6) -> None:
    for number in range(count):
        add_clip(folder, f"{number}.mp4", drifting(8 + number, 32, 32, seed=number))


def stop_after(number: int) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, name: str) -> None:
        if done == number:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("shard_bytes", [2**28, 400_000])
@pytest.mark.parametrize("stop", [1, 4])
def test_killed_and_continued_equals_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int, stop: int
) -> None:
    monkeypatch.setattr(cache, "SHARD_BYTES", shard_bytes)
    make_many(tmp_path)
    prepare(config(tmp_path))
    whole = snapshot(tmp_path)
    assert sum(name.startswith("shard-") for name in whole) == (1 if shard_bytes == 2**28 else 2)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        prepare(config(tmp_path), progress=stop_after(stop))
    with pytest.raises(InputError, match="unfinished"):
        LatentDataset(tmp_path / "cache")
    (tmp_path / "cache/pending/half.safetensors.tmp").write_bytes(b"half")
    report = prepare(config(tmp_path))
    assert report.reused == stop
    assert snapshot(tmp_path) == whole


def test_kill_between_packing_and_cleaning_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_many(tmp_path, 3)
    prepare(config(tmp_path))
    whole = snapshot(tmp_path)
    shutil.rmtree(tmp_path / "cache")

    def killed(path: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(tmp_path))
    assert len(list((tmp_path / "cache/pending").iterdir())) == 3
    assert prepare(config(tmp_path)).reused == 3
    assert snapshot(tmp_path) == whole


def test_finished_clips_are_not_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_many(tmp_path, 3)
    prepare(config(tmp_path))
    whole = snapshot(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("decoded a finished clip")

    monkeypatch.setattr(av, "open", refuse)
    assert prepare(config(tmp_path)).reused == 3
    assert snapshot(tmp_path) == whole
    (tmp_path / "clips/1.mp4").rename(tmp_path / "clips/renamed.mp4")
    (tmp_path / "clips/1.txt").rename(tmp_path / "clips/renamed.txt")
    (tmp_path / "clips/0.txt").write_text("another caption")
    assert prepare(config(tmp_path)).reused == 3
    captions = {s["clip_id"]: s["caption"] for s in index_of(tmp_path)["samples"]}
    assert captions["0.mp4"] == "another caption"
    assert captions["renamed.mp4"] == "clip 1.mp4"
    assert LatentDataset(tmp_path / "cache")[0].mask.sum() == 2


def test_captions_of_the_last_run_are_not_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(HashedNgramEncoder):
        seen: ClassVar[list[str]] = []

        def encode(self, captions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
            self.seen.extend(captions)
            return super().encode(captions)

        def pooled(self, captions: Sequence[str]) -> torch.Tensor:  # type: ignore[override]
            return torch.tensor([[float(len(caption))] for caption in captions])

    monkeypatch.setattr(text, "HashedNgramEncoder", Counting)
    make_many(tmp_path, 3)
    prepare(config(tmp_path))
    assert Counting.seen == ["", "clip 0.mp4", "clip 1.mp4", "clip 2.mp4"]
    Counting.seen.clear()
    (tmp_path / "clips/0.txt").write_text("clip 2.mp4")
    (tmp_path / "clips/1.txt").write_text("of five words that are new")
    prepare(config(tmp_path))
    assert Counting.seen == ["of five words that are new"]
    again = snapshot(tmp_path)
    shutil.rmtree(tmp_path / "cache")
    prepare(config(tmp_path))
    assert snapshot(tmp_path) == again


def test_a_cache_is_prepared_by_one_process_at_a_time(tmp_path: Path) -> None:
    make_many(tmp_path, 1)
    with preparing(tmp_path / "cache"), pytest.raises(InputError, match="by another process"):
        prepare(config(tmp_path))
    assert prepare(config(tmp_path)).clips == 1


def test_a_cache_with_first_frames_is_not_continued_without(tmp_path: Path) -> None:
    make_many(tmp_path, 1)
    images = {"image": ImageConfig(name="latents")}
    prepare(config(tmp_path, **images))
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=r"made with data\.image\.name=latents"):
        prepare(config(tmp_path))
    assert snapshot(tmp_path) == before
    assert len(LatentDataset(tmp_path / "cache", expect=config(tmp_path))) == 1


def test_clips_may_be_added_removed_and_changed(tmp_path: Path) -> None:
    make_many(tmp_path, 3)
    prepare(config(tmp_path))
    (tmp_path / "clips/0.mp4").unlink()
    (tmp_path / "clips/0.txt").unlink()
    add_clip(tmp_path, "1.mp4", drifting(10, 32, 32, seed=77))
    add_clip(tmp_path, "new.mp4", drifting(10, 32, 32, seed=78))
    report = prepare(config(tmp_path))
    assert (report.clips, report.reused) == (3, 1)
    dataset = LatentDataset(tmp_path / "cache")
    assert [s["clip_id"] for s in dataset.samples] == ["1.mp4", "2.mp4", "new.mp4"]
    assert np.abs(frames_of(tmp_path, 0).astype(int) - drifting(8, 32, 32, seed=77)).mean() < 4


CHANGED = [
    ({"codec": CodecConfig(name="pixel", block="1x4x4")}, "codec.block is '1x8x8' there, '1x4x4'"),
    ({"codec": CodecConfig(name="dct", channels=192)}, "codec.name is 'pixel' there, 'dct' now"),
    ({"text": TextConfig(dim=32, max_length=6)}, "text.dim is 16 there, 32 now"),
    ({"buckets": ("8x32x64",)}, "buckets is"),
    ({"target_fps": 12.0}, "target_fps is None there, 12.0 now"),
    ({"frame_choice": "middle"}, "frame_choice is 'head' there, 'middle' now"),
    ({"frame_choice": "random", "seed": 3}, "seed is None there, 3 now"),
]


@pytest.mark.parametrize(("changes", "match"), CHANGED)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    make_many(tmp_path, 1)
    prepare(config(tmp_path))
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="made with other settings") as caught:
        prepare(config(tmp_path, **changes))
    assert match in str(caught.value)
    assert "data.cache_dir" in str(caught.value)
    with pytest.raises(InputError, match="made with other settings"):
        LatentDataset(tmp_path / "cache", expect=config(tmp_path, **changes))
    assert snapshot(tmp_path) == before


def test_other_patch_size_is_refused(tmp_path: Path) -> None:
    make_many(tmp_path, 1)
    prepare(config(tmp_path), patch_size=(1, 1, 1))
    with pytest.raises(InputError, match=r"patch_size is \[1, 1, 1\] there, \[1, 2, 2\] now"):
        prepare(config(tmp_path))
    with pytest.raises(InputError, match="patch_size"):
        LatentDataset(tmp_path / "cache", patch_size=(1, 2, 2))
    assert len(LatentDataset(tmp_path / "cache", patch_size=(1, 1, 1))) == 1


def test_harmless_settings_keep_the_cache(tmp_path: Path) -> None:
    make_many(tmp_path, 2)
    prepare(config(tmp_path))
    changes = {"seed": 9, "windows_per_clip": 4, "caption_dropout": 0.9, "validation_split": 0.4}
    assert prepare(config(tmp_path, **changes)).reused == 2


def test_split_is_by_content_and_never_through_a_clip(tmp_path: Path) -> None:
    make_many(tmp_path, 6)
    shutil.copy(tmp_path / "clips/0.mp4", tmp_path / "clips/twin.mp4")
    (tmp_path / "clips/twin.txt").write_text("twin")
    changes = {"frame_choice": "uniform", "windows_per_clip": 2, "validation_split": 0.3}
    report: PrepareReport = prepare(config(tmp_path, **changes))
    samples = index_of(tmp_path)["samples"]
    splits = {s["content"]: {t["split"] for t in samples if t["content"] == s["content"]}
              for s in samples}  # fmt: skip
    assert all(len(sides) == 1 for sides in splits.values())
    assert report.validation_samples > 0
    assert report.train_samples + report.validation_samples == len(samples)
    assert len(LatentDataset(tmp_path / "cache", "validation")) == report.validation_samples


def test_split_contents() -> None:
    contents = [f"{number:064x}" for number in np.random.default_rng(0).integers(2**62, size=40)]
    contents = [c[-15:] + c for c in contents]
    split = split_contents(contents, 0.25)
    held_out = {c for c, side in split.items() if side == "validation"}
    assert 3 <= len(held_out) <= 18
    more = split_contents([*contents, "f" * 64, "0" * 64], 0.25)
    assert {c for c in contents if more[c] == "validation"} == held_out
    assert set(split_contents(contents, 0).values()) == {"train"}
    assert set(split_contents(["a" * 64], 0.5).values()) == {"train"}
    for share in (1e-9, 0.999999):
        sides = list(split_contents(["0" * 63 + "1", "e" * 64, "f" * 64], share).values())
        assert set(sides) == {"train", "validation"}
    assert list(split_contents(["e" * 64, "f" * 64], 0.01).values()).count("validation") == 1


def test_damaged_cache_says_so(tmp_path: Path) -> None:
    make_many(tmp_path, 1)
    prepare(config(tmp_path))
    shard = tmp_path / "cache/shard-00000.safetensors"
    truncate(shard, shard, 0.5)
    with pytest.raises(InputError, match=r"shard-00000\.safetensors"):
        LatentDataset(tmp_path / "cache")[0]
    with pytest.raises(InputError, match=r"shard-00000\.safetensors"):
        prepare(config(tmp_path))
    (tmp_path / "cache/index.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        prepare(config(tmp_path))
    (tmp_path / "cache/index.json").write_text('{"format": 0}')
    with pytest.raises(InputError, match="format 0, this version reads 1"):
        LatentDataset(tmp_path / "cache")
