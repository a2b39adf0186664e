"""What tests of whole runs share."""

import numpy as np
import pytest


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Frames of the samples, before they are compressed."""
    frames_written: list[np.ndarray] = []
    monkeypatch.setattr(
        "megaslide.data.samples.write_video", lambda path, frames, fps: (
            frames_written.append(frames), path.write_bytes(b"video"))
    )  # fmt: skip
    return frames_written
