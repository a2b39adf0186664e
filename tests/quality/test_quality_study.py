"""The ablation in small: it resumes where it was stopped, compares like with like, and reports."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality import study, worlds
from benchmarks.quality.__main__ import main
from benchmarks.quality.arms import arm, arms
from benchmarks.quality.plan import PARTS, SMOKE_SETTINGS, runs_of
from benchmarks.quality.report import losses_table
from benchmarks.quality.study import losses
from benchmarks.quality.tables import Result, Row, against, against_longer
from benchmarks.quality.worlds import WORLDS, draw
from megaslide.models.dit import VideoDiT, count_parameters


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def smoke(folder: Path, *more: str) -> int:
    return main(["--smoke", "--out", str(folder), *more])


def stop_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*arguments: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise KeyboardInterrupt
        return function(*arguments)

    return stopping


def test_stopped_study_goes_on_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A run draws held-out clips, a batch to count bytes, a batch a step, and two other worlds.
    in_second_run = 4 + SMOKE_SETTINGS.steps + 4
    with monkeypatch.context() as patch:
        patch.setattr(study, "draw", stop_after(in_second_run, study.draw))
        with pytest.raises(KeyboardInterrupt):
            smoke(tmp_path)
    (finished,) = tmp_path.iterdir()
    assert finished.suffix == ".json"
    stamp = finished.stat().st_mtime_ns

    assert smoke(tmp_path) == 0
    assert finished.stat().st_mtime_ns == stamp, "a finished run was repeated"
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(r["arm"] for r in results) == ["affine", "fixed"]
    page = (tmp_path / "report.html").read_text()
    for result in results:
        assert f"{result['loss']:.4f}" in page
        assert f"{result['loss']:.4f}" in (tmp_path / "summary.md").read_text()
    assert page.count("data:image/png") == len(list((tmp_path / "figures").glob("*.png"))) >= 5


def test_repeated_run_gives_the_same_result(tmp_path: Path) -> None:
    run = study.Run("affine", "base", 1)
    first, second = (study.carry_out(run, SMOKE_SETTINGS) for _ in range(2))
    for figure in ("loss", "loss_by_level", "sampled", "offsets", "saved_bytes"):
        assert first[figure] == second[figure]


def test_damaged_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study.Run("fixed", "base", 0).path(tmp_path, SMOKE_SETTINGS)
    path.write_text("{")
    assert smoke(tmp_path, "--report-only") == 2
    assert path.name in capsys.readouterr().err


def test_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke(tmp_path, "--report-only") == 2
    assert "make ablation" in capsys.readouterr().err


def test_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--parts", "moon"]) == 2
    assert "first-look" in capsys.readouterr().err


def test_every_planned_run_can_be_built_and_has_a_file_of_its_own(tmp_path: Path) -> None:
    runs = runs_of(PARTS, range(2))
    assert len({run.path(tmp_path, SMOKE_SETTINGS) for run in runs}) == len(runs)
    assert {run.arm for run in runs} <= set(arms())
    assert {name for run in runs for name in (run.world, *run.also)} <= set(WORLDS)


@pytest.mark.parametrize("kind", ["affine", "tap"])
def test_matched_arm_has_as_many_parameters(kind: str) -> None:
    wanted, matched = (count_parameters(arm(name)) for name in (kind, f"fixed-as-{kind}"))
    assert abs(wanted - matched) <= 4 * (2 * 64 + 1) / 2  # half a hidden unit of each block
    assert count_parameters(arm("fixed")) < matched


def test_held_offsets_are_the_fixed_window() -> None:
    held, fixed = VideoDiT(arm("affine-held")), VideoDiT(arm("fixed"))
    for parameter in held.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    left = fixed.load_state_dict(held.state_dict(), strict=False)
    assert not left.missing_keys
    assert all("offset_net" in key for key in left.unexpected_keys)
    latents = torch.randn(1, 8, 4, 6, 6)
    with torch.no_grad():
        outputs = [m(latents, torch.tensor(500.0), torch.zeros(1, 1, 8)) for m in (held, fixed)]
    torch.testing.assert_close(*outputs)


def test_loss_of_a_fresh_model_is_that_of_predicting_zero() -> None:
    clips = draw(WORLDS["base"], 8, torch.Generator().manual_seed(0))
    measured = losses(VideoDiT(arm("fixed")), clips)
    predicting_zero = 1 + clips.latents.square().mean().item()
    assert measured.mean == pytest.approx(predicting_zero, rel=0.02)
    of_sprite = 1 + clips.latents.square().mean(1)[clips.mask > 0.5].mean().item()
    assert sum(measured.of_sprite.values()) / 5 == pytest.approx(of_sprite, rel=0.02)
    assert of_sprite > 1.1 * predicting_zero


def row(arm: str, losses: list[float]) -> Row:
    seeds = list(range(len(losses)))
    return Row(arm, seeds, losses, losses, 1, 1, [1.0] * len(losses))


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([0.1, 0.2], "lower in all 2 seeds"),
        ([0.4, 0.5], "higher in all 2 seeds"),
        ([0.1, 0.5], "seeds disagree"),
        ([0.1], "no conclusion"),
    ],
)
def test_verdict_needs_agreeing_seeds(losses: list[float], verdict: str) -> None:
    assert verdict in against(row("affine", losses), row("fixed", [0.3, 0.4]))


def test_time_is_compared_with_a_baseline_that_had_no_less() -> None:
    longer = dataclasses.replace(row("fixed-longer", [0.3, 0.4]), train_cpu_s=[1.5, 1.5])
    assert against_longer(row("affine", [0.1, 0.2]), longer) == "lower in all 2 seeds"
    slow = dataclasses.replace(row("tap", [0.1, 0.2]), train_cpu_s=[1.4, 1.7])
    assert against_longer(slow, longer) == "took longer"
    assert against_longer(longer, longer) == ""


def test_models_of_different_size_are_not_compared() -> None:
    def result(arm: str, seed: int, loss: float) -> Result:
        same = {"world": "base", "parameters": 1, "saved_bytes": 1, "train_cpu_s": 1.0}
        return same | {"arm": arm, "seed": seed, "loss": loss, "sprite_loss_by_level": {"": loss}}

    losses = {"fixed": 0.3, "affine": 0.2, "fixed-large": 0.1, "affine-large": 0.15}
    results = [result(arm, seed, loss) for arm, loss in losses.items() for seed in (0, 1)]
    small, large = (losses_table(results, "base", large=size) for size in (False, True))
    assert "-large" not in small
    assert "lower in all 2 seeds" in small
    assert "higher in all 2 seeds" in large
    assert "lower" not in large


def test_longer_arm_trains_longer_and_ends_at_a_rate_of_zero() -> None:
    settings = study.Settings()
    longer = settings.of("fixed-longer")
    assert longer.steps > settings.steps == settings.of("fixed").steps
    for each in (settings, longer):
        rates = [each.rate(step) for step in range(1, each.steps + 1)]
        assert max(rates) == pytest.approx(each.learning_rate, rel=0.1)
        assert rates[0] < 0.1 * each.learning_rate
        assert 0 < rates[-1] < 0.01 * each.learning_rate


def test_settings_keep_results_apart(tmp_path: Path) -> None:
    other = dataclasses.replace(SMOKE_SETTINGS, batch=3)
    for seed, settings in enumerate((SMOKE_SETTINGS, other)):
        study.run_study([study.Run("fixed", "base", seed)], tmp_path, settings)
    kept, left_out = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json")))
    assert smoke(tmp_path, "--report-only") == 0
    page = (tmp_path / "report.html").read_text()
    assert "1 runs of other settings, worlds or models are left out" in page
    assert f"{kept['loss']:.4f}" in page
    assert f"{left_out['loss']:.4f}" not in page


def test_change_of_a_world_makes_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = study.Run("fixed", "base", 0, also=("long",))
    study.run_study([run], tmp_path, SMOKE_SETTINGS)
    (before,) = tmp_path.glob("*.json")
    for changed in ("base", "long"):
        with monkeypatch.context() as patch:
            patch.setitem(WORLDS, changed, dataclasses.replace(WORLDS[changed], background=0.1))
            assert run.path(tmp_path, SMOKE_SETTINGS) != before
            assert smoke(tmp_path, "--report-only") == 2
    monkeypatch.setattr(worlds, "CONTRAST", worlds.CONTRAST + 1)
    assert not study.is_current(json.loads(before.read_text()), SMOKE_SETTINGS)
    assert "holds no result" in capsys.readouterr().err
