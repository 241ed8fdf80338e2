"""Steps by batch: what counts as a step's time and what does not."""

from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.metrics.step_times import StepCounts, StepTimes, bucket_of


def test_a_step_lasts_from_the_one_before_it() -> None:
    times = StepTimes()
    times.enter(generating=True, now_s=10.0)
    times.stepped([1, 1], now_s=10.5)
    times.enter(generating=True, now_s=10.7)  # new samples in between are part of the next step
    times.stepped([1, 1], now_s=11.0)
    assert times.counts() == {bucket_of(2): StepCounts(2, 4, 1.0)}


def test_waiting_is_no_part_of_a_step() -> None:
    times = StepTimes()
    times.enter(generating=True, now_s=0.0)
    times.stepped([1], now_s=1.0)
    times.enter(generating=False, now_s=1.5)
    times.enter(generating=True, now_s=9.0)
    times.stepped([1], now_s=9.25)
    assert times.counts() == {bucket_of(1): StepCounts(2, 2, 1.25)}


def test_a_call_that_gives_nothing_leaves_its_time_to_the_next() -> None:
    times = StepTimes()
    times.stepped([1], now_s=1.0)  # nobody has said that it generates
    times.enter(generating=True, now_s=1.0)
    times.stepped([], now_s=2.0)
    times.stepped([0], now_s=3.0)  # a sample that fails gains nothing
    times.stepped([1, 0, 1], now_s=4.0)
    assert times.counts() == {bucket_of(2): StepCounts(1, 2, 3.0)}


def test_several_steps_at_once_count_with_their_mean_batch() -> None:
    times = StepTimes()
    times.enter(generating=True, now_s=0.0)
    times.stepped([10, 10, 4], now_s=1.0)
    assert times.counts() == {bucket_of(2.4): StepCounts(10, 24, 1.0)}


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 10.0)), max_size=40))
def test_all_that_is_made_is_counted_once(made: list[tuple[int, float]]) -> None:
    times, now_s = StepTimes(), 0.0
    times.enter(generating=True, now_s=now_s)
    for batch, seconds in made:
        now_s += seconds
        times.stepped([1] * batch, now_s=now_s)
    counts = times.counts()
    assert sum(of.steps for of in counts.values()) == len(made)
    assert sum(of.tokens for of in counts.values()) == sum(batch for batch, _ in made)
    assert abs(sum(of.seconds for of in counts.values()) - now_s) < 1e-6
    for bucket, of in counts.items():
        assert abs(bucket_of(of.tokens / of.steps) - bucket) <= 1
