"""What a block in chunks holds: two activations, and what does not grow with the clip."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import long_block
from benchmarks.gpu_check.session import Chip, Session

CLIP = long_block.Clip(hidden_size=32, grid=(32, 3, 4), window=(3, 3, 3), text=4)


def excess(clip: long_block.Clip, frames: int | None, dtype: torch.dtype) -> float:
    """Bytes at the peak beside arenas, rotary tables and two activations.

    In bytes of one frame's activation.
    """
    model = long_block.streamed_block(clip, "cpu", dtype, frames)
    text = long_block.text_of(clip, "cpu", dtype)
    rope = 2 * 4 * clip.tokens * (clip.hidden_size // 2)
    with model.observing_memory():
        model(text).backward()
    peak = model.device_bytes["activations"]
    model.close()
    activation = clip.tokens * clip.hidden_size * dtype.itemsize
    return (peak - rope - 2 * activation) / (activation / clip.grid[0])


@pytest.mark.parametrize(("dtype", "frames"), [(torch.float32, 8), (torch.bfloat16, 16)])
def test_memory_beside_two_activations_does_not_grow_with_the_clip(
    dtype: torch.dtype, frames: int
) -> None:
    short, long = (
        excess(replace(CLIP, grid=(t, 3, 4)), long_block.FRAMES, dtype)
        for t in (frames, 2 * frames)
    )
    assert long == pytest.approx(short, rel=0.005)  # of a third activation: 5 percent and more
    assert short < excess(CLIP, None, dtype) / 5


def test_the_long_block_is_skipped_where_time_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(chip=Chip("cpu"), smoke=True, out=tmp_path, part="long-block", budget_s=60)
    monkeypatch.setattr(Session, "left_s", 1e-6)
    assert "s expected" in long_block.long_block(session, long_block.TOY)["skipped"]


def test_the_long_clip_is_two_million_tokens() -> None:
    assert long_block.LONG.tokens == 2_088_960
    assert 2 * long_block.LONG.tokens * long_block.LONG.hidden_size == 34_225_520_640
