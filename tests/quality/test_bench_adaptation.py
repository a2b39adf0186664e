"""The adaptation of a dense model in small: its gate can fail, and all arms start alike."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bench_adaptation
from megaslide.models.attention import NeighborhoodAttention


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)


def test_gate_sees_an_attention_that_misses_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = NeighborhoodAttention.attend

    def without_the_last(self: NeighborhoodAttention, x: Tensor, *args: Tensor) -> Tensor:
        q, k, v, extra = args
        v = v.clone()
        v[:, -1, -1, -1] = 0
        return whole(self, x, q, k, v, extra)

    assert max(bench_adaptation.require_equal().values()) <= 1e-5
    monkeypatch.setattr(NeighborhoodAttention, "attend", without_the_last)
    with pytest.raises(RuntimeError, match="differs from the dense one"):
        bench_adaptation.require_equal()


def test_every_arm_starts_from_the_pretrained_weights(tmp_path: Path) -> None:
    sizes = ["--clips", "8", "--held-out", "4", "--pretraining-steps", "3", "--steps", "2"]
    bench_adaptation.main([*sizes, "--seeds", "2", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    dense = [row for row in found["rows"] if row["arm"] == "dense"]
    assert [row["losses"]["0"] for row in dense] == [row["pretrained_loss"] for row in dense]
    assert set(found["summary"]) == {"dense", "deformable", "neighborhood", "swin"}
    for seed in (0, 1):  # with zero offsets, deformable is neighbourhood attention
        first = {r["arm"]: r["losses"]["0"] for r in found["rows"] if r["seed"] == seed}
        assert first["deformable"] == pytest.approx(first["neighborhood"], rel=1e-5)
        assert len({first["dense"], first["neighborhood"], first["swin"]}) == 3
    assert found["summary"]["deformable"]["gap_to_dense"] == [
        end - control
        for end, control in zip(
            found["summary"]["deformable"]["at_the_end"],
            found["summary"]["dense"]["at_the_end"],
            strict=True,
        )
    ]


def test_real_clips_go_the_same_way_and_are_told(tmp_path: Path) -> None:
    sizes = ["--clips", "8", "--held-out", "4", "--pretraining-steps", "2", "--steps", "1"]
    found = {}
    for data in ("digits", "real"):
        file = tmp_path / f"{data}.json"
        bench_adaptation.main([*sizes, "--seeds", "1", "--data", data, "--json", str(file)])
        found[data] = json.loads(file.read_text())
    assert set(found["real"]) == {*found["digits"], "clips"}
    losses = [found[data]["rows"][0]["pretrained_loss"] for data in found]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    parts = found["real"]["clips"]["parts"]
    assert found["real"]["clips"]["size"] == [17, 64, 64]
    for held_out, count in ((False, 8), (True, 4)):
        assert sum(part["clips"] for part in parts if part["held_out"] == held_out) == count
    assert all(Path(part["file"]).name == part["file"] for part in parts)


@pytest.mark.parametrize(
    ("gaps", "told"),
    [([0.1], "no conclusion"), ([0.1, -0.1], "disagree"), ([-0.1, -0.2], "below dense in all 2")],
)
def test_verdict_needs_agreeing_seeds(gaps: list[float], told: str) -> None:
    assert told in bench_adaptation.verdict(gaps)
