"""Numbers of a step that need no model."""

import pytest

from streamrl_workers.stream.packing import count_32
from streamrl_workers.stream.segments import completion_tokens
from streamrl_workers.trainer.engines.step_metrics import StepMetrics
from support.trainer_groups import branched, make_group


def test_counts_masked_samples_variance_and_staleness():
    groups = [
        make_group(1, step=2, rewards=[0.0, 1.0, None, 1.0]),
        make_group(2, step=0, rewards=[1.0, 1.0, 1.0]),
        make_group(3, step=4, rewards=[None, None]),  # of an attempt that was rolled back: counts as fresh
    ]
    tally = StepMetrics(step=2)
    for group in groups:
        tally.add(group)
    trained = [t for group in groups for t in group.samples if t.HasField("reward")]
    tokens = sum(count_32(t.tokens) for t in trained)
    stale = sum(count_32(t.tokens) for t in groups[1].samples)
    metrics = tally.metrics()
    assert (metrics["groups"], metrics["zero_variance_groups"]) == (3, 2)
    assert (metrics["samples"], metrics["masked_samples"], metrics["tokens"]) == (9, 3, tokens)
    assert metrics["reward_mean"] == pytest.approx(5 / 6)
    assert metrics["reward_std"] == pytest.approx((5 / 36) ** 0.5)
    assert metrics["staleness_mean"] == pytest.approx(2 * stale / tokens)
    assert metrics["staleness_max"] == 2


def test_an_empty_step_has_the_same_keys():
    tally = StepMetrics(step=0)
    empty = tally.metrics()
    tally.add(make_group(1))
    assert empty.keys() == tally.metrics().keys()
    assert set(empty.values()) == {0.0}


def test_observations_are_not_counted():
    group = make_group(1, step=0, rewards=[1.0, 1.0])
    whole = sum(count_32(t.tokens) for t in group.samples)
    for trajectory in group.samples:
        total = count_32(trajectory.tokens)
        trajectory.segments.add(tokens=total - 1, observation=True)
        trajectory.segments.add(tokens=1)
        del trajectory.spans[:]
        trajectory.spans.add(tokens=total - 1, step=0, attempt=1)
        trajectory.spans.add(tokens=1, step=2, attempt=1)
    tally = StepMetrics(step=2)
    tally.add(group)
    assert whole > tally.tokens == 2
    assert tally.metrics()["staleness_mean"] == 0  # the trained tokens are of the newest version


def test_a_sample_of_observations_alone_is_masked():
    group = make_group(1, rewards=[1.0])
    group.samples[0].segments.add(tokens=count_32(group.samples[0].tokens), observation=True)
    tally = StepMetrics(step=0)
    tally.add(group)
    assert (tally.sequences, tally.masked_samples, tally.tokens) == (0, 1, 0)


def test_a_sample_of_several_contexts_is_one_sample():
    group = branched(1, [1.0, 1.0, 1.0])
    tally = StepMetrics(step=1)
    tally.add(group)
    drawn = sum(segment.tokens for t in group.samples for segment in t.segments if not segment.observation)
    assert (tally.samples, tally.sequences, tally.tokens) == (3, 3, drawn)
    assert tally.metrics()["contexts"] == 0 + 1 + 2
    read = sum(segment.tokens for t in group.samples for segment in t.segments if segment.context)
    assert sum(map(completion_tokens, group.samples)) + read == sum(count_32(t.tokens) for t in group.samples)
    assert read
