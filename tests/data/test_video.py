"""Decoding and writing: counts, times, rotation and colours against files made independently."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from synthetic_clips import counting, drifting, indices_of, truncate, write_audio, write_raw

from megaslide.data.video import (
    UnreadableVideoError,
    iterate_frames,
    probe,
    read_clip,
    read_windows,
    resample,
    write_video,
)

FLAT_COLOURS = np.array(
    [
        [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0], [0, 255, 255], [255, 0, 255],
        [0, 0, 0], [255, 255, 255], [128, 128, 128], [200, 55, 10], [10, 120, 240], [90, 160, 60],
    ],
    dtype=np.uint8,
)  # fmt: skip


def flat_clip(height: int, width: int) -> np.ndarray:
    return np.broadcast_to(FLAT_COLOURS[:, None, None], (12, height, width, 3)).copy()


@pytest.mark.parametrize("size", [(64, 64), (33, 35), (64, 35), (720, 64)])
def test_flat_colours_survive_writing(tmp_path: Path, size: tuple[int, int]) -> None:
    frames = flat_clip(*size)
    path = write_video(tmp_path / "a.mp4", frames, fps=8)
    assert np.abs(read_clip(path).astype(int) - frames).max() <= 3
    with av.open(str(path)) as container:  # as any other program would decode it
        plain = np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
    assert plain.shape == frames.shape
    assert np.abs(plain.astype(int) - frames).max() <= 3


def test_written_planes_follow_the_bt709_formula(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", flat_clip(64, 64), fps=8, crf=1)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.pix_fmt == "yuv420p"
        frames = list(container.decode(stream))
    assert {(f.colorspace, f.color_range) for f in frames} == {(1, 1)}
    luma = [float(f.to_ndarray()[:64].mean()) for f in frames]
    expected = 16 + 219 * (FLAT_COLOURS / 255) @ np.array([0.2126, 0.7152, 0.0722])
    np.testing.assert_allclose(luma, expected, atol=1.5)


@pytest.mark.parametrize(("height", "matrix"), [(96, "601"), (720, "709")])
def test_untagged_files_decode_as_browsers_do(tmp_path: Path, height: int, matrix: str) -> None:
    from av.video.reformatter import Colorspace

    space = {"601": Colorspace.ITU601, "709": Colorspace.ITU709}[matrix]
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, height, "yuv420p"
        for array in flat_clip(height, 64):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=space)))
        container.mux(stream.encode(None))
    frames = read_clip(path)
    assert np.abs(frames[:, 8:-8, 8:-8].astype(int) - FLAT_COLOURS[:, None, None]).max() <= 3


@pytest.mark.parametrize(("width", "limit"), [(64, 4.0), (63, 2.5)])  # 4:2:0 and 4:4:4 colour
def test_detail_survives_writing(tmp_path: Path, width: int, limit: float) -> None:
    frames = drifting(9, 48, width)
    back = read_clip(write_video(tmp_path / "a.mkv", frames, fps=8))
    assert np.sqrt(((back.astype(float) - frames) ** 2).mean()) < limit


@pytest.mark.parametrize("fps", [8, 12.5, 23.976, 30])
def test_probe_counts_and_times(tmp_path: Path, fps: float) -> None:
    path = write_video(tmp_path / "a.mp4", counting(13), fps=fps)
    info = probe(path)
    assert (info.frames, info.header_frames, info.height, info.width) == (13, 13, 32, 32)
    assert info.fps == pytest.approx(fps, rel=1e-3)
    assert not info.variable_rate
    assert info.pixel_aspect == 1


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        (np.zeros((2, 8, 8, 3)), "float64"),
        (np.zeros((8, 8, 3), np.uint8), "shape"),
        (np.zeros((0, 8, 8, 3), np.uint8), "shape"),
    ],
)
def test_write_refuses_what_is_not_frames(tmp_path: Path, frames: np.ndarray, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        write_video(tmp_path / "a.mp4", frames, fps=8)
    with pytest.raises(ValueError, match="fps=0"):
        write_video(tmp_path / "a.mp4", counting(2), fps=0)


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_rotation_is_applied(tmp_path: Path, rotation: int) -> None:
    upright = drifting(3, 48, 64)
    upright[:, :12, :20] = 255  # a bright corner tells every turn and flip apart
    stored = np.stack([np.rot90(frame, -rotation // 90) for frame in upright])
    path = write_raw(tmp_path / "a.mp4", stored, rotation=rotation)
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
    assert (frame.height, frame.width) == stored.shape[1:3]
    assert frame.rotation % 360 == rotation
    info, frames = probe(path), read_clip(path)
    assert (info.height, info.width, info.rotation) == (48, 64, rotation)
    assert np.abs(frames.astype(int) - upright).mean() < 4


def test_pixel_aspect_turns_with_the_picture(tmp_path: Path) -> None:
    frames = drifting(3, 48, 64)
    path = write_raw(tmp_path / "a.mp4", frames, aspect=Fraction(4, 3))
    assert probe(path).pixel_aspect == pytest.approx(4 / 3)
    path = write_raw(tmp_path / "b.mp4", frames, aspect=Fraction(4, 3), rotation=90)
    assert probe(path).pixel_aspect == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("source", "target"), [(24, 24), (24, 12), (24, 48), (25, 16), (30, 24), (24, 16), (8, 24)]
)
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_resample_takes_the_frame_shown_at_each_instant(
    tmp_path: Path, source: int, target: int, suffix: str
) -> None:
    total = 26
    path = write_raw(tmp_path / f"a{suffix}", counting(total), rate=source)
    picked = resample(probe(path), target)
    instants = np.arange(len(picked)) / target
    expected = np.floor(instants * source + 1e-6).astype(int)
    if suffix == ".mp4":  # .mkv rounds timestamps to milliseconds
        np.testing.assert_array_equal(picked, expected)
    assert np.abs(picked - expected).max() <= 1
    if target >= source:
        assert set(picked) == set(range(total))
    exact = total * target / source
    assert exact <= len(picked) < exact + 1


def test_same_rate_in_milliseconds_keeps_every_frame(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.webm", counting(24), rate=24, codec="libvpx-vp9")
    np.testing.assert_array_equal(resample(probe(path), 24), np.arange(24))


def test_variable_frame_rate_follows_timestamps(tmp_path: Path) -> None:
    ticks = [0, 100, 200, 300, 1300, 1400, 1500, 2500]  # two frames are held for a second
    path = write_raw(tmp_path / "a.mp4", counting(8), ticks=ticks)
    info = probe(path)
    assert info.variable_rate
    np.testing.assert_allclose(info.times, np.array(ticks) / 1000)
    picked = resample(info, 5)
    expected = [sum(t <= 200 * k for t in ticks) - 1 for k in range(len(picked))]
    assert picked.tolist() == expected
    assert picked.tolist().count(3) == 5
    assert len(picked) == 13  # 2.5 s, and a tenth for the last frame


def test_resample_of_a_single_frame_and_bad_rate(tmp_path: Path) -> None:
    info = probe(write_raw(tmp_path / "a.mp4", counting(1)))
    assert (info.frames, info.fps) == (1, 0)
    assert resample(info, 8).tolist() == [0]
    with pytest.raises(ValueError, match="target_fps=-1"):
        resample(info, -1)


def test_read_clip_ranges(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.mp4", counting(20))
    assert indices_of(read_clip(path)) == list(range(20))
    assert indices_of(read_clip(path, start=5, frames=4)) == [5, 6, 7, 8]
    assert indices_of(read_clip(path, start=18)) == [18, 19]
    with pytest.raises(UnreadableVideoError, match="ends before frame 20"):
        read_clip(path, start=18, frames=3)
    with pytest.raises(ValueError, match="frames=0"):
        read_clip(path, frames=0)


def test_windows_stream_in_one_pass_and_hold_little(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.mp4", counting(40))
    alive: list[int] = []
    windows = [np.array([0, 0, 2, 4]), np.array([3, 4, 5, 5]), np.array([30, 31, 32, 33])]
    seen = []

    def transform(frame: np.ndarray) -> np.ndarray:
        alive.extend(indices_of(frame[None]))
        return frame[:2, :2]

    for window, frames in zip(windows, read_windows(path, windows, transform), strict=True):
        assert frames.shape == (4, 2, 2, 3)
        assert indices_of(frames) == window.tolist()
        seen.append(list(alive))
    assert seen[0] == [0, 2, 3, 4]  # only what is needed, and no further than needed
    assert seen[-1] == [0, 2, 3, 4, 5, 30, 31, 32, 33]


@pytest.mark.parametrize("suffix", [".mp4", ".MOV", ".mkv", ".webm", ".avi", ".m4v"])
def test_every_accepted_container(tmp_path: Path, suffix: str) -> None:
    codec = {".webm": "libvpx-vp9", ".avi": "mpeg4"}.get(suffix, "libx264")
    path = write_raw(tmp_path / f"a{suffix}", counting(12), codec=codec)
    assert indices_of(read_clip(path)) == list(range(12))
    assert probe(path).frames == 12


def test_unreadable_files_say_why(tmp_path: Path) -> None:
    whole = write_raw(tmp_path / "whole.mp4", drifting(48, 64, 64))
    (tmp_path / "text.mp4").write_text("this is not a video\n" * 50)
    (tmp_path / "empty.mp4").touch()
    cases = {
        truncate(whole, tmp_path / "cut.mp4", 0.6): "not a readable video",
        tmp_path / "text.mp4": "not a readable video",
        tmp_path / "empty.mp4": "0 bytes",
        write_audio(tmp_path / "sound.mp4"): "no video stream .only: audio",
        tmp_path / "absent.mp4": "No such file",
    }
    for path, reason in cases.items():
        with pytest.raises(UnreadableVideoError, match=reason) as caught:
            probe(path)
        assert str(path) in str(caught.value)
        assert str(path) not in caught.value.reason
        with pytest.raises(UnreadableVideoError, match=reason):
            list(iterate_frames(path))


def test_a_change_of_size_is_refused(tmp_path: Path) -> None:
    parts = [write_raw(tmp_path / f"{w}.ts", drifting(6, 48, w)) for w in (64, 96)]
    path = tmp_path / "joined.mp4"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    for read in (probe, read_clip):
        with pytest.raises(UnreadableVideoError, match="frame 6 is 96x48, not 64x48 as the first"):
            read(path)


def test_damage_in_the_middle_names_the_frame(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 64, 3), dtype=np.uint8)
    whole = write_raw(tmp_path / "whole.mp4", noise, options={"movflags": "faststart"})
    cut = truncate(whole, tmp_path / "cut.mp4", 0.6)
    with pytest.raises(UnreadableVideoError, match=r"decoding fails after \d+ frames"):
        probe(cut)
    assert len(read_clip(cut, frames=4)) == 4
