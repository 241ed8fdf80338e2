"""The makespan model against hand-made tables and a simulation that goes from one finished sample to the next."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve, replica_seconds
from streamrl_workers.scheduler.dispatch.makespan import (
    Instance,
    dealt,
    fastest_first,
    list_seconds,
    step_tables,
)

STEPS_S = (0.5, 1.0, 2.0, 4.0)
"""Powers of two: sums and products of whole lengths with them are exact, so ties are ties."""


def curve(*seconds: float) -> LatencyCurve:
    return LatencyCurve(tuple(range(1, len(seconds) + 1)), seconds)


def instance(found: LatencyCurve, slots: int, *, name: str = "g") -> Instance:
    return Instance(generator_id=name, slots=slots, curve=found)


def modelled(lengths: list[float], instances: list[Instance], *, together: int = 1, refilled: bool = False) -> float:
    places = dealt(len(lengths), instances, together=together)
    return list_seconds(lengths, step_tables(instances), places=places, refilled=refilled)


def simulated(lengths: list[float], instances: list[Instance], *, together: int = 1, following: int = 0) -> float:
    """One finished sample after the other, no closed form; a group's samples are issued together as far as slots reach.

    `following`: endless samples that take the slots that free behind these.
    """
    left: list[list[tuple[float, bool]]] = [[] for _ in instances]
    waiting = [(tokens, True) for tokens in lengths] + [(1e9, False)] * following
    now_s = 0.0
    while any(awaited for samples in left for _, awaited in samples) or any(awaited for _, awaited in waiting):
        while waiting:
            free = [
                (one.curve.at(len(left[i]) + 1), len(left[i]) / one.slots, i)
                for i, one in enumerate(instances)
                if len(left[i]) < one.slots
            ]
            if not free:
                break
            i = min(free)[2]
            group = (len(waiting) - following - 1) % together + 1
            for _ in range(min(instances[i].slots - len(left[i]), group)):
                left[i].append(waiting.pop(0))
        busy = [(min(samples)[0] * instances[i].curve.at(len(samples)), i) for i, samples in enumerate(left) if samples]
        step_s, first = min(busy)
        now_s += step_s
        for i, samples in enumerate(left):
            if samples:
                done = step_s / instances[i].curve.at(len(samples))
                left[i] = [(tokens - done, awaited) for tokens, awaited in samples]
        left[first].remove(min(left[first]))
    return now_s


@st.composite
def fleets(draw: st.DrawFn) -> list[Instance]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        slots = draw(st.integers(1, 4))
        seconds = sorted(draw(st.lists(st.sampled_from(STEPS_S), min_size=slots, max_size=slots)))
        found.append(instance(curve(*seconds), slots))
    return found


@pytest.mark.parametrize(
    ("lengths", "slots", "seconds"),
    [
        ([], 2, 0.0),
        ([10], 2, 10.0),  # alone: 10 at 1 s
        ([10, 4], 2, 4 * 2 + 6 * 1.0),  # four tokens together at 2 s, six alone
        ([10, 4, 4], 2, 8 * 2 + 2 * 1.0),  # the third takes the second's place
        ([4, 4, 10], 2, 4 * 2 + 10 * 1.0),  # a long one that begins last
        ([3, 3, 3], 1, 9.0),
    ],
)
def test_one_instance(lengths, slots, seconds):
    assert modelled(lengths, [instance(curve(1.0, 2.0), slots)]) == seconds


def test_the_faster_instance_takes_the_first_and_the_rest_is_shared_by_speed():
    fast, slow = instance(curve(1.0, 1.5), 2), instance(curve(2.0, 3.0), 2)
    # 10 alone on fast at 1 s; 6 joins it at 1.5 s: faster than 2 s on slow; 5 goes to slow
    assert modelled([10, 6, 5], [slow, fast]) == max(6 * 1.5 + 4 * 1.0, 5 * 2.0)


@given(st.integers(1, 4), st.integers(0, 4), st.data(), fleets())
def test_the_closed_form_is_the_simulation(together, groups, data, instances):
    count = together * groups
    lengths = data.draw(st.lists(st.integers(1, 40).map(float), min_size=count, max_size=count))
    expected = simulated(lengths, instances, together=together)
    assert modelled(lengths, instances, together=together) == pytest.approx(expected, rel=1e-9)


@given(st.data(), fleets(), st.integers(1, 12))
def test_followers_take_the_slots_that_free(data, instances, waiting):
    """They keep the last ones of the batch slow, and do not count themselves."""
    count = len(dealt(1000, instances)) + waiting
    lengths = data.draw(st.lists(st.integers(1, 40).map(float), min_size=count, max_size=count))
    expected = simulated(lengths, instances, following=count)
    assert modelled(lengths, instances, refilled=True) == pytest.approx(expected, rel=1e-9)
    assert expected >= modelled(lengths, instances) * (1 - 1e-9)


def test_a_group_stays_together_as_far_as_slots_reach():
    flat = curve(1.0)
    assert dealt(8, [instance(flat, 3), instance(flat, 8)], together=4) == [0, 0, 0, 1, 1, 1, 1, 1]


@given(st.lists(st.integers(1, 40).map(float), min_size=1, max_size=12), fleets())
def test_what_runs_at_once_takes_the_exact_replica_time(lengths, instances):
    places = dealt(len(lengths), instances)
    lengths = lengths[: len(places)]
    held: list[list[float]] = [[] for _ in instances]
    for place, tokens in zip(places, lengths, strict=True):
        held[place].append(tokens)
    expected = max(replica_seconds(one.curve, tokens) for one, tokens in zip(instances, held, strict=True))
    assert modelled(lengths, instances) == pytest.approx(expected, rel=1e-9)


def test_fastest_first():
    slow, fast, wide = curve(2.0, 3.0), curve(1.0, 3.0), curve(1.0, 2.0)
    instances = [instance(found, 2, name=name) for name, found in {"d": slow, "c": fast, "b": wide, "a": fast}.items()]
    ordered = fastest_first(instances)
    assert [instance.generator_id for instance in ordered] == ["b", "a", "c", "d"]
    assert all(one.curve.at(1) <= other.curve.at(1) for one, other in pairwise(ordered))
