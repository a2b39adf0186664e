"""The whole evaluation: means that a still clip cannot win, reasons for every gap, bad input."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage
from typer.testing import CliRunner

pytest.importorskip("cv2")

from megaslide import cli
from megaslide.data.sprites import write_sprites
from megaslide.data.video import read_clip, write_video
from megaslide.errors import InputError
from megaslide.evaluation.definitions import DEFINITIONS, FLAGS
from megaslide.evaluation.page import write_html
from megaslide.evaluation.results import ClipResult, Missing, summarise, to_json
from megaslide.evaluation.run import CONSISTENCY, aggregates, evaluate


@pytest.fixture(autouse=True)
def _no_official_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VBENCH_PYTHON", raising=False)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    return write_sprites(folder, count=3, frames=10, size=(64, 64), seed=1, speed=(2, 4))


@pytest.fixture
def clips(originals: Path, tmp_path: Path) -> Path:
    """The originals, with a frozen and a blurred clip beside them."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for file in originals.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    frames = read_clip(folder / "sprite-00000.mp4")
    write_video(folder / "frozen.mp4", np.repeat(frames[:1], 10, axis=0), 8)
    soft = np.stack([ndimage.gaussian_filter(f, (4, 4, 0)) for f in frames])
    write_video(folder / "soft.mp4", soft, 8)
    return folder


def run(*arguments: str | Path, columns: int = 80):
    words = ["eval", *map(str, arguments)]
    return CliRunner().invoke(cli.app, words, env={"COLUMNS": str(columns)})


def test_still_and_blurred_clips_are_flagged_and_not_in_the_means(clips: Path) -> None:
    found = evaluate([clips])
    flags = {clip.path.name: clip.flags for clip in found.clips}
    assert flags == {
        "frozen.mp4": ["frozen", "static"],
        "soft.mp4": ["blurred"],
        **{f"sprite-0000{i}.mp4": [] for i in range(3)},
    }
    by_name = {clip.path.name: clip.figures for clip in found.clips}
    best = max(by_name, key=lambda name: by_name[name]["vbench.temporal_flickering"])
    assert best == "frozen.mp4"
    for name in ("vbench.temporal_flickering", "flow.warp_error"):
        mean = found.summary[name]
        honest = [by_name[f"sprite-0000{i}.mp4"][name] for i in range(3)]
        assert mean.clips == 3
        assert mean.value == pytest.approx(np.mean(honest))
        assert mean.all_clips == pytest.approx(np.mean([f[name] for f in by_name.values()]))
        assert mean.value != mean.all_clips
    moving = found.summary["proxy.dynamic_degree_dis"]
    assert (moving.clips, moving.value) == (5, moving.all_clips)


def test_a_folder_of_frozen_clips_gets_no_mean(clips: Path) -> None:
    found = evaluate([clips / "frozen.mp4"])
    mean = found.summary["vbench.temporal_flickering"]
    assert str(mean.value) == "not measured: every clip is flagged: frozen, static"
    assert mean.all_clips == pytest.approx(1, abs=1e-3)


def test_a_clip_half_as_sharp_as_its_reference_is_blurred(originals: Path, tmp_path: Path) -> None:
    name = "sprite-00001.mp4"
    softer = [ndimage.gaussian_filter(f, (0.9, 0.9, 0)) for f in read_clip(originals / name)]
    write_video(tmp_path / name, np.stack(softer), 8)
    assert evaluate([tmp_path]).clips[0].flags == []
    assert evaluate([tmp_path], reference=originals).clips[0].flags == ["blurred"]


def test_known_motion_is_measured_against_references(originals: Path, clips: Path) -> None:
    figures = {c.path.name: c.figures for c in evaluate([clips], reference=originals).clips}
    for index in range(3):
        own = figures[f"sprite-0000{index}.mp4"]
        assert own["motion.vel_rel"] < 0.1
        assert own["motion.pos_err"] < 0.3
        assert own["motion.ncc"] > 0.9
        assert own["motion.ident"] > 0.8
        assert own["motion.direction_agrees"] == 1
    assert str(figures["soft.mp4"]["motion.vel_rel"]) == "not measured: no reference of this name"
    without = evaluate([clips / "sprite-00000.mp4"]).summary["motion.pos_err"].value
    assert str(without) == "not measured: no --reference"


def test_references_that_do_not_fit_are_named(originals: Path, tmp_path: Path) -> None:
    name = "sprite-00000.mp4"
    frames = read_clip(originals / name)

    def why(clip: np.ndarray, prompt: str = "") -> str:
        write_video(tmp_path / name, clip, 8)
        (tmp_path / name).with_suffix(".txt").write_text(prompt)
        return str(evaluate([tmp_path], reference=originals).summary["motion.vel_rel"].value)

    assert "the clip has 6 frames, the reference 10" in why(frames[:6])
    assert "the clip is 48x64, the reference 64x64" in why(frames[:, :, :48])
    assert "the prompt is 'digit 0 moving up'" in why(frames, "digit 0 moving up")


def test_unreadable_and_single_frame_clips_are_named_and_skipped(clips: Path) -> None:
    (clips / "bad.mp4").write_bytes(b"nonsense")
    (clips / "empty.mp4").touch()
    write_video(clips / "one.mp4", read_clip(clips / "soft.mp4")[:1], 8)
    found = evaluate([clips])
    assert len(found.clips) == 5
    reasons = {Path(path).name: reason for path, reason in found.skipped.items()}
    assert "not a readable video" in reasons["bad.mp4"]
    assert "empty" in reasons["empty.mp4"]
    assert "1 frame" in reasons["one.mp4"]
    with pytest.raises(InputError, match=r"no clip can be measured.*bad.mp4.*and 1 more"):
        evaluate([clips / "bad.mp4", clips / "empty.mp4"])


def test_a_clip_whose_frames_change_size_is_named_and_skipped(tmp_path: Path) -> None:
    streams = []
    for width in (64, 96):  # a transport stream may go on with another size
        file = tmp_path / f"{width}.ts"
        frames = np.random.default_rng(0).integers(0, 256, (4, 48, width, 3)).astype(np.uint8)
        write_video(file, frames, 8)
        streams.append(file.read_bytes())
    (tmp_path / "joined.mp4").write_bytes(b"".join(streams))
    with pytest.raises(InputError, match=r"changes its size: frame 4 is 96x48, not 64x48"):
        evaluate([tmp_path])


def test_mixed_sizes_and_missing_prompts_are_noted(clips: Path) -> None:
    write_video(clips / "wide.mp4", np.zeros((4, 32, 64, 3), np.uint8), 8)
    notes = evaluate([clips]).notes
    assert any("mixed sizes (5 of 10x64x64, 1 of 4x32x64)" in note for note in notes)
    assert any(
        "3 of 6 clips have no prompt: frozen.mp4, soft.mp4, wide.mp4" in note for note in notes
    )


def test_tiny_frames_have_no_flow_but_have_the_rest(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3)).astype(np.uint8)
    write_video(tmp_path / "tiny.mp4", frames, 8)
    figures = evaluate([tmp_path]).clips[0].figures
    assert "frames of 8x8" in str(figures["flow.magnitude"])
    assert 0 < figures["vbench.temporal_flickering"] < 1


def test_without_opencv_its_figures_say_how_to_get_it(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    figures = evaluate([clips / "sprite-00000.mp4"], reference=clips).clips[0].figures
    for name in ("flow.warp_error", "motion.vel_rel"):
        assert "pip install 'megaslide[eval]'" in str(figures[name])
    assert isinstance(figures["vbench.temporal_flickering"], float)
    assert isinstance(figures["motion.path_residual"], float)


# --- aggregates -------------------------------------------------------------------------------


def test_aggregates_are_absent_when_a_part_is() -> None:
    figures = dict(zip(CONSISTENCY, (0.9, 0.8, 1.0, 0.7), strict=True))
    figures["vbench.overall_consistency"] = 0.25
    assert aggregates(figures)["temporal_consistency"] == pytest.approx(0.85)
    assert aggregates(figures)["text_video_alignment"] == 0.25
    for name in CONSISTENCY:
        absent = aggregates(figures | {name: Missing("weights missing at /w")})
        assert str(absent["temporal_consistency"]) == (
            f"not measured: needs {name}: weights missing at /w"
        )
    several = dict.fromkeys(CONSISTENCY, Missing("no")) | {
        "vbench.overall_consistency": Missing("no prompt")
    }
    assert "and 3 more parts" in str(aggregates(several)["temporal_consistency"])
    assert str(aggregates(several)["text_video_alignment"]) == "not measured: no prompt"


def test_official_scores_replace_means_over_all_clips_only() -> None:
    name = "vbench.subject_consistency"
    pair = [
        ClipResult(path=Path(p), frames=2, height=8, width=8, fps=8, figures={name: v}, flags=f)
        for p, v, f in (("a", 0.5, []), ("b", 1.0, ["frozen"]))
    ]
    mean = summarise(pair, {name: 0.7})[name]
    assert (mean.value, mean.clips, mean.all_clips) == (0.5, 1, 0.7)
    pair[1].flags = []
    mean = summarise(pair, {name: 0.7})[name]
    assert (mean.value, mean.clips, mean.all_clips) == (0.7, 2, 0.7)


def test_official_dimensions_reach_the_report(clips: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "asked = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "videos, d = asked['--videos'], asked['--dimension']\n"
        "value = {'subject_consistency': .9, 'background_consistency': .8,\n"
        "         'motion_smoothness': .7}.get(d, .3)\n"
        "rows = [{'video_path': f'{videos}/{n}', 'video_results': value}\n"
        "        for n in os.listdir(videos)]\n"
        "os.makedirs(asked['--out'])\n"
        "out = asked['--out'] + '/megaslide_eval_results.json'\n"
        "json.dump({d: [value, rows]}, open(out, 'w'))\n"
    )
    python.chmod(0o755)
    environment = {"VBENCH_PYTHON": str(python), "VBENCH_CACHE_DIR": str(tmp_path / "c")}
    environment["TORCH_HOME"] = str(tmp_path / "t")
    from megaslide.evaluation.vbench import WEIGHTS, weight_files

    for dimension in WEIGHTS:
        for file in weight_files(dimension, environment):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    found = evaluate([clips / f"sprite-0000{i}.mp4" for i in range(3)], environment=environment)
    flickering = found.summary["vbench.temporal_flickering"].value
    consistency = found.summary["temporal_consistency"].value
    assert consistency == pytest.approx((0.9 + 0.8 + 0.7 + flickering) / 4)
    assert found.summary["text_video_alignment"].value == pytest.approx(0.3)
    assert found.clips[0].figures["vbench.dynamic_degree"] == pytest.approx(0.3)
    raft = tmp_path / "c" / "amt_model" / "amt-s.pth"
    raft.unlink()
    found = evaluate([clips / "sprite-00000.mp4"], environment=environment)
    absent = str(found.summary["temporal_consistency"].value)
    assert f"needs vbench.motion_smoothness: weights missing at {raft}" in absent


# --- what a person sees -----------------------------------------------------------------------


def test_the_terminal_has_every_figure_its_definition_and_every_gap(clips: Path) -> None:
    result = run(clips)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    text = " ".join(result.stdout.split())
    measured = {n for n, m in evaluate([clips]).summary.items() if isinstance(m.all_clips, float)}
    assert {"vbench.temporal_flickering", "flow.warp_error", "motion.ident"} <= measured
    missing = text.partition(" missing ")[2]
    for name, what in DEFINITIONS.items():
        if name in measured:
            assert f"{name}: {what.text} [{what.source}; " in text
        else:
            assert name in missing, name
    assert "not measured: VBENCH_PYTHON is not set" in text
    assert "needs vbench.subject_consistency and 2 more parts" in text
    for flag in ("frozen", "static", "blurred"):
        assert f"{flag}: {FLAGS[flag]}" in text
    row = next(line for line in lines if line.startswith("vbench.temporal_flickering "))
    assert row.split()[2] == "3/5"


def test_json_and_page_hold_the_same_figures(clips: Path, tmp_path: Path) -> None:
    result = run(clips, "--json", tmp_path / "o" / "e.json", "--html", tmp_path / "o" / "e.html")
    assert result.exit_code == 0, result.output
    read = json.loads((tmp_path / "o" / "e.json").read_text())
    assert set(read["summary"]) == set(DEFINITIONS)
    assert set(read["clips"][0]["figures"]) == set(DEFINITIONS)
    for name, mean in read["summary"].items():
        assert mean["definition"] == DEFINITIONS[name].text
        assert mean["source"] == DEFINITIONS[name].source
        value = mean["value"]
        assert value["not_measured"] if isinstance(value, dict) else math.isfinite(value)
    page = (tmp_path / "o" / "e.html").read_text()
    assert "default-src 'none'" in page
    for name in DEFINITIONS:
        assert f"<td class='name'>{name}<small>" in page
    shown = f"{read['summary']['vbench.temporal_flickering']['value']:.7f}"
    assert f"<td>{shown}</td>" in page
    assert page.count("<video ") == 5
    assert "not measured: no --reference" in page


def test_page_shows_names_and_prompts_as_text(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
    write_video(tmp_path / "<b>a.mp4", frames, 8)
    (tmp_path / "<b>a.txt").write_text("<script>alert(1)</script>")
    page = write_html(tmp_path / "e.html", evaluate([tmp_path])).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<b>a.mp4" not in page
    assert "&lt;b&gt;a.mp4" in page


def test_json_has_no_value_that_is_not_json(clips: Path) -> None:
    json.loads(
        json.dumps(to_json(evaluate([clips])), allow_nan=False),
        parse_constant=lambda name: pytest.fail(name),
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no PATH and no --checkpoint"),
        (["--checkpoint", "empty", "--prompts", "other.json"], "--prompts other.json without PATH"),
        (["--checkpoint", "empty", "--reference", "wrong"], "--reference wrong without PATH"),
        (["--checkpoint", "nothing"], "no such folder"),
        (["nothing"], "nothing does not exist"),
        (["empty"], "no videos in this folder"),
        (["clips", "--prompts", "nothing.json"], "nothing.json is not a file"),
        (["clips", "--prompts", "other.json"], "names none of the 5 clips"),
        (["clips", "--reference", "empty"], "no videos in this folder"),
        (["clips", "--reference", "wrong"], "has none of the 5 clips' names"),
        (["bad.mp4"], "no clip can be measured"),
        (["clips/sprite-00000.mp4", "--json", "bad.mp4/e.json"], "bad.mp4"),
    ],
)
def test_bad_input_ends_with_code_two_and_one_message(
    arguments: list[str], words: str, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"z.mp4": "x"}')
    (tmp_path / "bad.mp4").write_bytes(b"nonsense")
    write_video(tmp_path / "wrong" / "z.mp4", np.zeros((2, 32, 32, 3), np.uint8), 8)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "fix:" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_interpreter_that_is_none_is_refused(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VBENCH_PYTHON", "/nowhere/python")
    result = run(clips / "soft.mp4")
    assert result.exit_code == 2
    assert "VBENCH_PYTHON=/nowhere/python: not a program" in result.stderr
