"""Which scored groups are dropped because their rewards are equal, and when that ends."""

import pytest

from streamrl_workers.scheduler.extensions.dynamic_sampling import ZeroVarianceFilter, all_equal

EQUAL, UNEQUAL = (1.0, 1.0), (0.0, 1.0)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([1.0, 1.0, 1.0], True),
        ([0.0, 0.0], True),
        ([0.0, 1.0], False),
        ([0.25, None, 0.25], True),
        ([0.25, None, 0.5], False),
        ([-0.0, 0.0], True),
        ([1e-12, 0.0], False),
        ([1.0, None], True),
    ],
)
def test_rewards_are_equal_among_the_samples_that_have_one(rewards, equal):
    assert all_equal(rewards) is equal


@pytest.mark.parametrize(
    ("draws", "batch", "most"),
    [(1, 4, 0), (2, 4, 4), (4, 4, 12), (3, 1, 2)],
)
def test_equal_groups_are_dropped_until_the_draws_are_used_up(draws, batch, most):
    sampling = ZeroVarianceFilter(draws_per_step=draws, batch_groups=batch)
    answers = [sampling.drops(EQUAL, step=0) for _ in range(most + 5)]
    assert answers == [True] * most + [False] * 5


def test_groups_that_differ_use_no_draws_and_every_step_has_its_own():
    sampling = ZeroVarianceFilter(draws_per_step=2, batch_groups=2)
    told = [
        (EQUAL, 0),
        (UNEQUAL, 0),
        (EQUAL, 0),
        (EQUAL, 0),
        (UNEQUAL, 1),
        (EQUAL, 1),
        (EQUAL, 1),
        (EQUAL, 1),
        (EQUAL, 3),
    ]
    answers = [sampling.drops(rewards, step=step) for rewards, step in told]
    assert answers == [True, False, True, False, False, True, True, False, True]
