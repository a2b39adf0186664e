"""Paths with reflections: those that keep the law fit exactly, those that break it do not."""

import numpy as np
import pytest
from scipy import optimize

from megaslide.data.sprites import SPRITE_SHARE, sprite_clip
from megaslide.evaluation.paths import fit_path, fold

SIZE = (64, 96)
SIDE = SPRITE_SHARE * 64


def bounced(start: tuple[float, float], velocity: tuple[float, float], frames: int) -> np.ndarray:
    """Step by step, the sign of a component turned where the next step would leave the frame."""
    position, speed = np.asarray(start, float), np.asarray(velocity, float)
    low, high = np.full(2, SIDE / 2), np.asarray(SIZE) - SIDE / 2
    path = [position.copy()]
    for _ in range(frames - 1):
        position = position + speed
        for axis in range(2):
            if position[axis] > high[axis]:
                position[axis], speed[axis] = 2 * high[axis] - position[axis], -speed[axis]
            if position[axis] < low[axis]:
                position[axis], speed[axis] = 2 * low[axis] - position[axis], -speed[axis]
        path.append(position.copy())
    return np.stack(path)


@pytest.mark.parametrize("velocity", [(0, 3), (2.2, -3.1), (-4.7, 1.3), (5.5, 5.5), (0.4, -0.2)])
def test_a_path_that_keeps_the_law_fits_exactly(velocity: tuple[float, float]) -> None:
    path = fit_path(bounced((30, 40), velocity, 24), SIZE, SIDE)
    assert path.residual < 1e-2
    assert path.velocity == pytest.approx(velocity, abs=2e-2)
    assert path.speed == pytest.approx(np.hypot(*velocity), abs=2e-2)


def test_a_centre_of_mass_off_the_middle_changes_nothing() -> None:
    path = fit_path(bounced((30, 40), (3, -2), 24) + np.asarray([2.5, -4.0]), SIZE, SIDE)
    assert path.residual < 1e-2
    assert path.velocity == pytest.approx((3, -2), abs=2e-2)


def test_frames_in_which_nothing_was_tracked_are_left_out() -> None:
    positions = bounced((30, 40), (3, -2), 24)
    positions[[3, 4, 11]] = np.nan
    path = fit_path(positions, SIZE, SIDE)
    assert path.residual < 1e-2
    assert path.velocity == pytest.approx((3, -2), abs=2e-2)


def test_residual_is_the_least_that_global_search_finds() -> None:
    rng = np.random.default_rng(0)
    positions = bounced((30, 40), (2.5, 1.5), 16) + rng.normal(0, 1.0, (16, 2))
    times, squares = np.arange(16), 0.0
    for axis, length in enumerate(SIZE):
        room = length - SIDE

        def error(
            point: np.ndarray, along: np.ndarray = positions[:, axis], room: float = room
        ) -> float:
            speed, phase, offset = point
            wrapped = (phase + speed * times) % (2 * room)
            model = SIDE / 2 + offset + np.where(wrapped > room, 2 * room - wrapped, wrapped)
            return float(np.mean((along - model) ** 2))

        bounds = [(-6, 6), (0, 2 * room), (-SIDE / 4, SIDE / 4)]
        squares += optimize.differential_evolution(error, bounds, seed=1, tol=1e-8).fun
    assert fit_path(positions, SIZE, SIDE).residual == pytest.approx(np.sqrt(squares), rel=1e-3)


@pytest.mark.parametrize(
    "broken",
    [
        lambda path: path[np.random.default_rng(0).permutation(len(path))],
        lambda path: np.concatenate([path[:8], path[7::-1]]),  # turns round in mid-air
        lambda path: path[0] + (path - path[0]) ** 2 / 20,  # accelerates
    ],
    ids=["shuffled", "reversed half-way", "accelerating"],
)
def test_a_path_that_breaks_the_law_does_not_fit(broken) -> None:
    path = bounced((20, 20), (1.6, 2.4), 16)
    assert fit_path(path, SIZE, SIDE).residual < 1e-2
    assert fit_path(broken(path), SIZE, SIDE).residual > 0.7


def test_the_true_positions_of_the_generator_keep_it() -> None:
    for index in range(6):
        clip = sprite_clip(frames=16, size=(64, 64), seed=5, index=index, speed=(2, 5))
        path = fit_path(clip.positions, (64, 64), SIDE)
        assert path.residual < 1e-2
        assert path.velocity == pytest.approx(clip.velocity, abs=3e-2)


def test_a_start_at_the_wall_goes_where_the_first_step_goes() -> None:
    steps = np.repeat(np.arange(8), 2) * 4.0  # every position twice: half speed, stuttering
    positions = np.stack([np.full(16, 30.0), SIDE / 2 + steps], axis=1)
    assert fit_path(positions, SIZE, SIDE).velocity[1] > 1.5


def test_fold_reflects_at_both_walls() -> None:
    travelled = np.asarray([-1.0, 0.0, 3.0, 10.0, 12.0, 20.0, 21.0])
    assert fold(travelled, 10.0).tolist() == [1, 0, 3, 10, 8, 0, 1]


def test_too_few_positions_are_refused() -> None:
    positions = np.full((5, 2), np.nan)
    positions[:2] = 30
    with pytest.raises(ValueError, match="2 positions"):
        fit_path(positions, SIZE, SIDE)
