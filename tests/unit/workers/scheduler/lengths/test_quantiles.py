"""From a number to its place and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.scheduler.lengths.quantiles import SlidingQuantiles

numbers = st.integers(0, 20).map(float)


@pytest.mark.parametrize(
    ("values", "asked", "place"),
    [
        ([], 5.0, 0.5),
        ([3.0], 3.0, 0.5),
        ([3.0], 2.0, 0.0),
        ([3.0], 4.0, 1.0),
        ([1.0, 2.0, 3.0, 4.0], 2.0, 0.375),
        ([1.0, 2.0, 2.0, 2.0], 2.0, 0.625),
    ],
)
def test_places(values: list[float], asked: float, place: float) -> None:
    assert SlidingQuantiles(values, window=8).place(asked) == place


@pytest.mark.parametrize(
    ("values", "place", "value"),
    [
        ([], 0.9, 0.0),
        ([7.0], 0.1, 7.0),
        ([10.0, 20.0, 30.0, 40.0], 0.5, 25.0),
        ([10.0, 20.0, 30.0, 40.0], 0.875, 40.0),
        ([10.0, 20.0, 30.0, 40.0], 0.75, 35.0),
        ([10.0, 20.0, 30.0, 40.0], 0.0, 10.0),
        ([10.0, 20.0, 30.0, 40.0], 1.0, 40.0),
    ],
)
def test_values_at_places(values: list[float], place: float, value: float) -> None:
    assert SlidingQuantiles(values, window=8).at(place) == pytest.approx(value)


@given(values=st.lists(numbers, min_size=1, max_size=60), window=st.integers(1, 20))
def test_only_the_newest_count(values: list[float], window: int) -> None:
    slid, fresh = SlidingQuantiles(values, window=window), SlidingQuantiles(values[-window:], window=window)
    assert len(slid) == len(fresh) == min(window, len(values))
    assert [slid.at(share / 10) for share in range(11)] == [fresh.at(share / 10) for share in range(11)]
    assert [slid.place(value) for value in range(21)] == [fresh.place(value) for value in range(21)]


@given(values=st.lists(numbers, min_size=1, max_size=30, unique=True))
def test_a_value_comes_back_from_its_place(values: list[float]) -> None:
    quantiles = SlidingQuantiles(values, window=30)
    assert [quantiles.at(quantiles.place(value)) for value in values] == pytest.approx(values)


@given(values=st.lists(numbers, min_size=1, max_size=30), one=numbers, other=numbers)
def test_places_rise_with_the_value(values: list[float], one: float, other: float) -> None:
    quantiles = SlidingQuantiles(values, window=30)
    assert quantiles.place(min(one, other)) <= quantiles.place(max(one, other))
