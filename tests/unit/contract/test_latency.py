"""The model of an engine's speed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve, replica_seconds, rounds_seconds

H800 = LatencyCurve.of_milliseconds(
    [(1, 8.3), (2, 8.7), (4, 8.9), (8, 9.0), (16, 9.4), (32, 10.2), (64, 11.7), (128, 15.2), (256, 21.7), (512, 36.9)]
)
"""7B on one H800, as the paper's figure has it."""

curves = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6).map(
    lambda steps: LatencyCurve(
        tuple(4**place for place in range(len(steps))), tuple(sum(steps[: place + 1]) for place in range(len(steps)))
    )
)
lengths = st.lists(st.floats(0.0, 1e4), max_size=30)


@pytest.mark.parametrize(
    ("batch", "milliseconds"),
    [(0, 0.0), (0.5, 8.3), (1, 8.3), (3, 8.8), (64, 11.7), (96, 13.45), (512, 36.9), (768, 52.1)],
)
def test_linear_between_points_and_beyond_the_last(batch: float, milliseconds: float) -> None:
    assert H800.at(batch) * 1e3 == pytest.approx(milliseconds)


def test_one_point_is_constant_and_a_falling_end_does_not_make_more_work_cheaper() -> None:
    assert LatencyCurve((4,), (0.01,)).at(400) == 0.01
    assert LatencyCurve((1, 2), (0.02, 0.01)).at(100) == 0.01


@pytest.mark.parametrize(
    ("batches", "seconds", "rule"),
    [((), (), "at least one"), ((1, 2), (1.0,), "as many"), ((2, 1), (1.0, 1.0), "rise"), ((1,), (0.0,), "positive")],
)
def test_what_is_no_curve(batches: tuple[int, ...], seconds: tuple[float, ...], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        LatencyCurve(batches, seconds)


def test_the_papers_equations() -> None:
    assert 1000 * H800.at(64) == pytest.approx(11.7)
    assert rounds_seconds(H800, batch=64, samples=129, mean_tokens=1000) == pytest.approx(3 * 11.7)
    assert rounds_seconds(H800, batch=64, samples=2, mean_tokens=1000) == pytest.approx(8.7)


@given(curve=curves, tokens=lengths)
def test_the_exact_time_is_that_of_stepping_through_the_batch(curve: LatencyCurve, tokens: list[float]) -> None:
    left, clock_s = sorted(tokens), 0.0
    while left:
        step = left[0]
        clock_s += curve.at(len(left)) * step
        left = [length - step for length in left[1:]]
    assert replica_seconds(curve, tokens) == pytest.approx(clock_s, abs=1e-9)


@given(curve=curves, tokens=lengths, longer=st.floats(0.0, 1e4))
def test_one_more_sample_behind_longer_ones_costs_the_growth_of_the_step(
    curve: LatencyCurve, tokens: list[float], longer: float
) -> None:
    kept = [length for length in tokens if length >= longer]
    cost_s = longer * (curve.at(len(kept) + 1) - curve.at(len(kept)))
    assert replica_seconds(curve, [*kept, longer]) - replica_seconds(curve, kept) == pytest.approx(cost_s, abs=1e-6)
