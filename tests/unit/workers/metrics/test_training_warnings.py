"""What a person is to look at: generators that compute another policy, a clip that leaves nearly everything out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from streamrl.spec.training import LogprobDiffBound
from streamrl_workers.metrics.logprob_diff import (
    ANSWERS_TRUNCATED,
    CLIPPED,
    DIFF_HIGH,
    MEAN,
    OTHER,
    SEQUENCES_CLIPPED,
    PoolLag,
    key,
    new_warnings,
    pool_lag,
    read,
    steps_above,
    warnings,
)

BOUND = LogprobDiffBound()


def diffs(**by_pool: float) -> dict[str, float]:
    """Metrics of a step with these means at lag 0."""
    return {key(MEAN, PoolLag(pool, "0")): mean for pool, mean in by_pool.items()}


def clipped(share: float) -> dict[str, float]:
    return {"forward_tokens": 9.0, CLIPPED: share}


def lines(steps: Sequence[Mapping[str, float]], *, truncated: Sequence[float] = ()) -> Iterator[dict[str, Any]]:
    """As the scheduler writes them; `truncated`: the share of each step."""
    above: dict[str, int] = {}
    for step, metrics in enumerate(steps):
        share = truncated[step] if truncated else 0.0
        above = steps_above(metrics, truncated=share, bound=BOUND, before=above)
        yield {"step": step, "trainer": metrics, "above_bound": above}


def said(steps: Sequence[Mapping[str, float]]) -> list[list[str]]:
    return [[one.type for one in new_warnings(line, bound=BOUND)] for line in lines(steps)]


@pytest.mark.parametrize(
    ("generator_id", "lag", "at"),
    [
        ("generator-math-0", 0, PoolLag("math", "0")),
        ("generator-math-1-12", 1, PoolLag("math-1", "1")),
        ("generator-math-1", 64, PoolLag("math", "4+")),
        ("generator-gone-0", 3, PoolLag(OTHER, "3")),
        ("math", 0, PoolLag(OTHER, "0")),
        ("", 0, PoolLag(OTHER, "0")),
    ],
)
def test_labels_are_bounded(generator_id: str, lag: int, at: PoolLag) -> None:
    assert pool_lag(generator_id, lag=lag, pools=["math", "math-1"]) == at


def test_what_is_no_measure_of_a_pool_is_passed_over() -> None:
    metrics = {MEAN: 1.0, f"{MEAN}/a": 1.0, f"{MEAN}/a/0": 0.5, f"{MEAN}/a/0/b": 1.0, f"{MEAN}/b/0": None, "x/a/0": 1.0}
    assert read(metrics, measure=MEAN) == {PoolLag("a", "0"): 0.5}


def test_a_difference_above_the_bound_is_told_once_it_lasts() -> None:
    high, low = diffs(a=0.01, b=0.2), diffs(a=0.01, b=0.04)
    assert said([high] * 4 + [low] + [high] * 7) == [[]] * 9 + [[DIFF_HIGH]] + [[]] * 2


def test_a_step_without_tokens_of_the_newest_weights_says_nothing() -> None:
    stale = {key(MEAN, PoolLag("a", "1")): 3.0}
    assert said([diffs(a=0.2)] * 4 + [stale] * 3 + [diffs(a=0.2)]) == [[]] * 7 + [[DIFF_HIGH]]


def test_a_difference_that_is_no_number_is_above_every_bound() -> None:
    assert said([diffs(a=float("nan"))] * 5)[-1] == [DIFF_HIGH]


def test_a_warning_names_the_worst_pool_the_bound_and_what_to_do() -> None:
    *_, last = lines([diffs(a=0.1, b=0.234)] * 5)
    (warning,) = warnings(last, bound=BOUND)
    for words in ("pool b: 0.234", "trainer.trainInferLogprobDiff.maxMean 0.05", "5 steps", "truncatedImportance"):
        assert words in warning.message
    assert len(warning.message) < 1024, "a condition's message"


def test_a_clip_that_leaves_nearly_everything_out_is_told_once_it_lasts() -> None:
    most, half, empty = clipped(0.95), clipped(0.5), {"forward_tokens": 0.0, CLIPPED: 0.0}
    steps = [most] * 4 + [half] + [most] * 2 + [empty] * 2 + [most] * 4
    assert said(steps) == [[]] * 11 + [[SEQUENCES_CLIPPED]] + [[]]


@pytest.mark.parametrize(
    ("shares", "told_at", "holds_at"),
    [
        ([0.95, 1.0, 0.95], [0], [0, 1, 2]),
        ([1.0, 0.5, 1.0], [0, 2], [0, 2]),
        ([0.5, 1.0, 1.0], [1], [1, 2]),
        ([0.9, 0.9, 0.9], [], []),
    ],
)
def test_answers_that_end_at_a_limit_are_told_when_that_begins(
    shares: list[float], told_at: list[int], holds_at: list[int]
) -> None:
    steps = list(lines([{}] * 3, truncated=shares))
    assert [at for at, line in enumerate(steps) if new_warnings(line, bound=BOUND)] == told_at
    assert [at for at, line in enumerate(steps) if list(warnings(line, bound=BOUND))] == holds_at


def test_the_warning_of_truncated_answers_says_where_to_look() -> None:
    (line,) = lines([{}], truncated=[1.0])
    (warning,) = warnings(line, bound=BOUND)
    assert warning.type == ANSWERS_TRUNCATED
    for words in ("streamrl samples", "sampling.maxTokens", "generation_config.json", "sampling.stop"):
        assert words in warning.message
    assert len(warning.message) < 1024


def test_a_line_of_an_earlier_release_has_no_warning() -> None:
    assert list(warnings({"step": 3, "trainer": {}}, bound=BOUND)) == []
