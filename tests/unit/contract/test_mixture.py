"""Which task a prompt is of: exact shares, from the index alone."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.mixture import Mixture

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=16)


@pytest.mark.parametrize(
    ("weights", "tasks"),
    [
        ([1], "aaaa"),
        ([1, 1], "abab"),
        ([2, 1], "aabaab"),
        ([3, 2, 1], "ababac"),
        ([1, 3], "bbab"),
        ([5, 5], "ababababab"),
    ],
)
def test_the_order_of_a_period(weights: list[int], tasks: str) -> None:
    mixture = Mixture(weights)
    assert "".join("abc"[mixture.task_of(index)] for index in range(len(tasks))) == tasks


@given(WEIGHTS)
def test_shares_are_exact_and_never_a_whole_prompt_off(weights: Sequence[int]) -> None:
    mixture = Mixture(weights)
    period = mixture.period
    assert period == sum(weights)
    counts = [0] * len(weights)
    for index in range(2 * period):
        task, own = mixture.place(index)
        assert task == mixture.task_of(index)
        assert own == counts[task], "each task sees its prompts in order, none twice"
        counts[task] += 1
        off = [count * period - (index + 1) * weight for count, weight in zip(counts, weights, strict=True)]
        assert all(-period < one < period for one in off)
        if (index + 1) % period == 0:
            assert counts == [weight * (index + 1) // period for weight in weights]


@given(WEIGHTS, st.data())
def test_it_ends_where_the_first_task_has_no_more(weights: Sequence[int], data: st.DataObject) -> None:
    mixture = Mixture(weights)
    sizes = [data.draw(st.one_of(st.none(), st.integers(0, 90))) for _ in weights]
    size = mixture.size(sizes)
    over = (index for index in itertools.count() if _is_over(*mixture.place(index), sizes))
    assert size == (None if all(one is None for one in sizes) else next(over))


def _is_over(task: int, own: int, sizes: Sequence[int | None]) -> bool:
    size = sizes[task]
    return size is not None and own >= size
