"""The report from a plausible run: what it says, what it must not load, and its charts' geometry.

`example_run` is a schedule of six blocks with two slots, simulated in a few lines: forward,
backward, gradients leaving, then AdamW while the next forward streams in.
"""

import base64
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megaslide.config import Config
from megaslide.data.video import write_video
from megaslide.demo.report import summary_table, write_report
from megaslide.pages.charts import (
    Scale,
    device_parts,
    lanes_of,
    loss_chart,
    memory_bars,
    merge_tiny,
    overlap,
    smoothed,
    timeline,
    union_length,
)
from megaslide.pages.quantities import format_bytes, format_count, format_seconds, label_of, text_of
from megaslide.tracing import Span

L, BLOCK_BYTES = 6, 1_180_000


class Schedule:
    """Lanes that each do one thing at a time; `run` returns when the work ends."""

    def __init__(self, start: float) -> None:
        self.free = dict.fromkeys(("h2d", "compute", "d2h", "adamw"), start)
        self.spans: list[Span] = []

    def run(self, lane: str, name: str, seconds: float, *after: float, nbytes: int = 0) -> float:
        start = max(self.free[lane], *after, 0.0)
        self.free[lane] = end = start + seconds
        self.spans.append(Span(lane, name, start, end, nbytes))
        return end


def one_step(start: float = 8123.4) -> list[Span]:
    step = Schedule(start)
    names = [f"blocks.{i}" for i in range(L)]
    released, landed = [start, start], 0.0
    for i in range(40):
        step.run("h2d", f"resident.{i}", 2e-5, nbytes=4000)
    for name in names:
        updated = step.run("adamw", name, 0.021)
        loaded = step.run("h2d", name, 0.012, released[-2], updated, nbytes=BLOCK_BYTES)
        released.append(step.run("compute", f"forward {name}", 0.034, loaded))
    head = step.run("compute", "forward resident", 0.004)
    for back, name in enumerate(reversed(names)):
        loaded = (
            head if back < 2 else step.run("h2d", name, 0.012, released[-2], nbytes=BLOCK_BYTES)
        )
        released.append(step.run("compute", f"backward {name}", 0.083, loaded, head))
        landed = step.run("d2h", name, 0.009, released[-1], nbytes=BLOCK_BYTES)
    step.run("d2h", "resident", 0.003, landed, nbytes=160_000)
    return step.spans


def bouncing_square(colour: int, seed: int, noise: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    clip = np.full((8, 64, 64, 3), 16, np.uint8)
    x, y, dx, dy = *rng.integers(4, 40, 2), *rng.integers(-5, 6, 2)
    for t in range(8):
        left, top = abs(x + t * dx) % 44, abs(y + t * dy) % 44
        clip[t, top : top + 18, left : left + 18, colour] = 230
    return np.clip(clip + noise * rng.standard_normal(clip.shape), 0, 255).astype(np.uint8)


def example_run(folder: Path, count: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    steps = np.arange(1, 401)
    train = 0.28 + 1.5 * np.exp(-steps / 60) + 0.09 * rng.standard_normal(400)
    names = ["a red digit 7 moves right", "a green digit 2 bounces off the left edge",
             "a blue digit 4 moves up", "two digits, 3 & <8>, cross"]  # fmt: skip
    clips: dict[str, list[tuple[str, Path]]] = {"samples": [], "training_examples": []}
    for kind, noise in (("training_examples", 0.0), ("samples", 14.0)):
        for i, caption in enumerate(names[:count]):
            path = folder / f"{kind}-{i}.mp4"
            clips[kind].append((caption, write_video(path, bouncing_square(i % 3, i, noise), 8.0)))
    parameters, peak = 7_344_384, 9_250_000
    return {
        "summary": {
            "params": parameters, "steps": 400, "clips": 512, "tokens": 2048, "train_s": 311.4,
            "step_s": 0.7785, "wall_s": 402.0, "val_loss_first": 1.7312,
            "val_loss": 0.30518, "val_loss_zero": 1.8944, "state_bytes": 12 * parameters,
            "device_peak_bytes": peak, "wait_share": 0.031, "device": "cpu",
        },
        "losses": {
            "train": [(int(s), float(v)) for s, v in zip(steps, train, strict=True)],
            "eval": [(s, 0.30 + 1.43 * math.exp(-s / 70)) for s in range(0, 401, 50)],
        },
        **clips,
        "memory": {
            "state": 12 * parameters, "device_peak": peak, "slots": 2_400_000,
            "gradient_buffers": 2_360_000, "resident": 1_150_000, "activations": 3_340_000,
        },
        "spans": one_step(),
        "config": Config(),
        "machine": {"CPU": "Example 2 cores at 2.4 GHz", "memory": "7.8 GB", "PyTorch": "2.13.0",
                    "megaslide": "0.1.0"},
    }  # fmt: skip


class Page(HTMLParser):
    """Tags with their attributes, the visible text, and a check that tags nest."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text, self.open = "", []
        self.feed(text)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + " "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return example_run(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def html(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "new" / "report.html"
    assert write_report(path, **run) == path
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


# --- the page ---------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere(html: str) -> None:
    page = Page(html)
    assert page.open == []
    urls = [
        value for _, attrs in page.tags for name, value in attrs.items()
        if name in ("src", "href", "srcset", "poster", "data", "action", "xlink:href")
    ]  # fmt: skip
    assert len(urls) == 8
    assert all(url.startswith("data:video/mp4;base64,") for url in urls)
    assert not re.search(r"https?://|url\(|@import|fetch\(|\bimport\b", html)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object", "embed", "img"})
    policy = [
        a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy[0].startswith("default-src 'none'")


def test_videos_are_inside_and_play_by_themselves(html: str, run: dict[str, Any]) -> None:
    videos = [attrs for tag, attrs in Page(html).tags if tag == "video"]
    paths = [path for _, path in run["training_examples"] + run["samples"]]
    for attrs, path in zip(videos, paths, strict=True):
        assert {"autoplay", "loop", "muted", "playsinline"} <= attrs.keys()
        assert base64.b64decode(attrs["src"].partition(",")[2]) == path.read_bytes()


def test_the_figures_are_those_of_the_arguments(html: str) -> None:
    text = Page(html).text
    for expected in (
        "7.34 million", "88.1 MB", "9.25 MB", "9.53×", "1.73 → 0.305", "1.894 if zero",
        "5 min 11 s", "400 steps, 778 ms each", "512 captioned clips", "wait", "3 %",
        "Example 2 cores at 2.4 GHz", "learning_rate: 0.0001",
    ):  # fmt: skip
        assert expected in text, expected


def test_the_hidden_share_of_copies_is_that_of_the_spans(html: str, run: dict[str, Any]) -> None:
    start = min(s.start for s in run["spans"])
    grid = np.arange(start, max(s.end for s in run["spans"]), 2e-5)

    def busy(*lanes: str) -> np.ndarray:
        own = [(grid >= s.start) & (grid < s.end) for s in run["spans"] if s.lane in lanes]
        return np.any(own, axis=0)

    copies = busy("h2d", "d2h")
    share = (copies & busy("compute", "adamw")).sum() / copies.sum()
    assert f"During {100 * share:.0f} % of the time" in Page(html).text


def test_captions_and_names_are_escaped(html: str, run: dict[str, Any], tmp_path: Path) -> None:
    assert "two digits, 3 &amp; &lt;8&gt;, cross" in html
    hostile = "<script>alert(1)</script>'\" $title"
    changed = {
        **run,
        "samples": [(hostile, run["samples"][0][1])],
        "spans": [Span(hostile, hostile, 0.0, 1.0)],
        "machine": {hostile: hostile},
        "summary": {hostile: hostile},
        "title": hostile,
    }
    page = Page(write_report(tmp_path / "r.html", **changed).read_text())
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert page.open == []
    assert [a["aria-label"] for t, a in page.tags if t == "video"][-1] == hostile


def test_what_was_not_measured_is_left_out(run: dict[str, Any], tmp_path: Path) -> None:
    path = write_report(
        tmp_path / "r.html", {}, {}, [], [], {"state": 1000, "slots": 200, "activations": 300}, []
    )
    text = Page(path.read_text()).text
    assert "megaslide trained all parameters of a video diffusion transformer. Its" in text
    assert "No losses were recorded" in text
    assert "No spans were recorded" in text
    assert "2.00×" in text
    assert "500 B" in text
    assert "eval/loss of" not in text
    assert not any(word in text for word in ("nan", "None", "$", "{", "The device of this run"))
    with pytest.raises(FileNotFoundError):
        write_report(
            tmp_path / "s.html", {}, {}, [("x", tmp_path / "no.mp4")], [], run["memory"], []
        )
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_a_peak_above_the_state_is_said_plainly(run: dict[str, Any], tmp_path: Path) -> None:
    memory = {"state": 1000, "slots": 200, "activations": 9000}
    text = Page(write_report(tmp_path / "r.html", **{**run, "memory": memory}).read_text()).text
    assert "device's peak is larger than the state" in text
    assert "0.11×" in text


def test_the_summary_table_fits_80_columns(run: dict[str, Any]) -> None:
    out = io.StringIO()
    summary = {**run["summary"], "a_rather_long_key_nobody_knows_of_bytes": 5e9, "note": "x" * 90}
    summary["files"] = ["0.mp4", "1.mp4"]
    Console(file=out, width=80).print(summary_table(summary))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "7.34 million" in lines[0]
    assert [line.split()[-1] for line in lines[-2:]] == ["0.mp4", "1.mp4"]
    assert any("a rather long key nobody knows of" in line and "5.00 GB" in line for line in lines)


# --- charts -----------------------------------------------------------------------------------


def test_ticks_are_round_and_inside() -> None:
    assert Scale(0, 400).ticks() == [0, 100, 200, 300, 400]
    assert Scale(0.27, 1.94).ticks() == pytest.approx([0.5, 1.0, 1.5])
    assert Scale(0.02, 3.0, log=True).ticks() == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2])
    assert Scale(1e-3, 10, log=True).fraction(0.1) == pytest.approx(0.5)
    for low in np.random.default_rng(0).uniform(-5, 5, 200):
        for width in (1e-3, 0.7, 9.0, 12345.0):
            assert 2 <= len(Scale(low, low + width).ticks()) <= 6


def polyline(html: str, name: str) -> np.ndarray:
    points = re.search(rf"<polyline points='([^']*)' class='{name}'", html)
    assert points is not None
    return np.array([[float(v) for v in pair.split(",")] for pair in points[1].split()])


def test_the_loss_curve_has_its_points_where_the_axes_say() -> None:
    curve = polyline(loss_chart({"train": [(0, 1.0), (50, 0.5), (100, 0.75)]}), "train")
    np.testing.assert_allclose(curve[:, 0], [0, 500, 1000])
    falls = curve[1, 1] - curve[0, 1]
    assert falls > 0
    assert curve[2, 1] - curve[0, 1] == pytest.approx(falls / 2, abs=0.2)


def test_losses_over_decades_are_drawn_logarithmically_and_gaps_left_out() -> None:
    html = loss_chart({"train": [(0, 10.0), (1, 1.0), (2, 0.1), (3, math.nan), (4, math.inf)]})
    assert "logarithmic" in html
    curve = polyline(html, "train")
    assert len(curve) == 3
    assert curve[1, 1] - curve[0, 1] == pytest.approx(curve[2, 1] - curve[1, 1], abs=0.2)
    assert "linear" in loss_chart({"eval": [(5, 0.3)]}, baseline=1.9)
    assert "predicting zero: 1.900" in loss_chart({"eval": [(5, 0.3)]}, baseline=1.9)


def test_smoothing_is_a_centred_mean() -> None:
    line = [(i, 3.0 * i) for i in range(300)]
    means, window = smoothed(line)
    assert window == 11
    np.testing.assert_allclose(means, line, atol=1e-9)
    noisy = [(i, float(v)) for i, v in enumerate(np.random.default_rng(0).standard_normal(300))]
    expected = np.convolve([v for _, v in noisy], np.ones(11) / 11, "valid")
    np.testing.assert_allclose([v for _, v in smoothed(noisy)[0][5:-5]], expected, atol=1e-9)
    assert smoothed(line[:20]) == ([], 1)


def test_a_long_run_is_thinned() -> None:
    html = loss_chart({"train": [(i, 1.0 + 1 / (i + 1)) for i in range(100_000)]})
    assert len(html) < 100_000
    assert polyline(html, "train raw")[-1, 0] == 1000


def rectangles(html: str) -> list[tuple[float, float, str]]:
    found = re.findall(r"<rect x='([\d.]+)%' width='([\d.]+)%'[^>]*><title>(.*?)</title>", html)
    return [(float(x), float(w), title) for x, w, title in found]


def test_memory_bars_are_to_scale_and_add_up() -> None:
    memory = {"state": 1000.0, "device_peak": 250.0, "slots": 100.0, "activations": 50.0}
    assert device_parts(memory) == (
        [("slots", 100.0), ("activations", 50.0), ("other", 100.0)],
        250,
    )
    boxes = rectangles(memory_bars(memory))
    assert [(x, w) for x, w, _ in boxes] == [
        (0, 100), (0, 10), (10, 5), (15, 10), (0, 40), (40, 20), (60, 40),
    ]  # fmt: skip
    assert len(rectangles(memory_bars({"state": 100.0, "slots": 80.0}))) == 2


def test_the_timeline_shows_every_lane_in_time() -> None:
    spans = one_step()
    html = timeline(spans)
    assert lanes_of(spans) == ["h2d", "compute", "d2h", "adamw"]
    boxes = rectangles(html)
    assert min(x for x, _, _ in boxes) == 0
    assert max(x + w for x, w, _ in boxes) == pytest.approx(100, abs=0.1)
    [forward] = [b for b in boxes if b[2].startswith("forward blocks.0")]
    first, last = min(s.start for s in spans), max(s.end for s in spans)
    span = next(s for s in spans if s.name == "forward blocks.0")
    assert forward[0] == pytest.approx(100 * (span.start - first) / (last - first), abs=1e-2)
    assert forward[1] == pytest.approx(100 * (span.end - span.start) / (last - first), abs=1e-2)
    assert "34.0 ms" in forward[2]
    merged = [title for _, _, title in boxes if title.startswith("40 spans")]
    assert merged == ["40 spans, resident.0 and on: 800 µs, 160 kB at 200 MB/s"]


def test_only_tiny_neighbours_merge() -> None:
    def span(start: float, end: float) -> Span:
        return Span("h2d", "x", start, end)

    spans = [
        span(0, 1e-4),
        span(1.5e-4, 2e-4),
        span(2e-4, 0.5),
        span(0.5, 0.5001),
        span(0.9, 0.9001),
    ]
    assert [len(group) for group in merge_tiny(spans, 1.0)] == [2, 1, 1, 1]


def test_busy_time_counts_overlaps_once() -> None:
    assert union_length([(0, 2), (1, 3), (5, 6), (5.2, 5.5)]) == 4
    spans = [Span("h2d", "", 0, 4), Span("compute", "", 3, 6), Span("adamw", "", 3.5, 3.75)]
    assert overlap(spans, ["h2d"], ["compute", "adamw"]) == pytest.approx(0.25)
    assert overlap(spans, ["d2h"], ["compute"]) is None
    grid = np.arange(0, 1, 1e-4)
    rng = np.random.default_rng(1)
    starts = rng.uniform(0, 0.9, 40)
    pieces = [(s, s + rng.uniform(0, 0.02)) for s in starts]
    covered = np.any([(grid >= a) & (grid < b) for a, b in pieces], axis=0).mean()
    assert union_length(pieces) == pytest.approx(covered, abs=5e-3)


# --- quantities -------------------------------------------------------------------------------


def test_quantities_read_well() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 999_499, 999_600, 1.47e12, 3e15)] == [
        "0 B", "999 B", "1.00 kB", "999 kB", "1.00 MB", "1.47 TB", "3,000 TB",
    ]  # fmt: skip
    times = (0, 3.4e-4, 0.0123, 0.9996, 4.56, 99.4, 200, 3599.6, 7512)
    assert [format_seconds(s) for s in times] == [
        "0 s", "340 µs", "12.3 ms", "1.00 s", "4.56 s", "99.4 s", "3 min 20 s", "60 min 00 s",
        "2 h 05 min",
    ]  # fmt: skip
    assert [format_count(n) for n in (12, 5412, 999_500, 23.4e6, 105e9)] == [
        "12", "5,412", "1.00 million", "23.4 million", "105 billion",
    ]  # fmt: skip
    assert (label_of("steps"), label_of("host_rss_bytes")) == ("optimizer steps", "host rss")
    figures = [("loss", 0.30518), ("x", 2e-7), ("ok", True), ("x", "a")]
    assert [text_of(*figure) for figure in figures] == ["0.3052", "2e-07", "True", "a"]
