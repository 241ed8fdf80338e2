"""The makespan model against hand-made tables and a simulation that goes from one finished unit to the next."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.dispatch.makespan import (
    Instance,
    Server,
    bound_seconds,
    fastest_first,
    fits,
    list_seconds,
    servers_of,
    unit_curve,
    unit_samples,
)

STEPS_S = (0.5, 1.0, 2.0, 4.0)
"""Powers of two: sums and products of whole lengths with them are exact, so ties are ties."""


def curve(*seconds: float) -> LatencyCurve:
    return LatencyCurve(tuple(range(1, len(seconds) + 1)), seconds)


def simulated(lengths: list[float], servers: list[Server]) -> float:
    """One finished unit after the other, no closed form."""
    left = [list(server.running) for server in servers]
    waiting, now_s = list(lengths), 0.0
    while True:
        while waiting:
            free = [
                (server.curve.at(len(left[i]) + 1), (len(left[i]) + 1) / server.capacity, i)
                for i, server in enumerate(servers)
                if len(left[i]) < server.capacity
            ]
            if not free:
                break
            left[min(free)[2]].append(waiting.pop(0))
        busy = [(min(units) * servers[i].curve.at(len(units)), i) for i, units in enumerate(left) if units]
        if not busy:
            return now_s
        step_s, first = min(busy)
        now_s += step_s
        for i, units in enumerate(left):
            if units:
                done = step_s / servers[i].curve.at(len(units))
                left[i] = [tokens - done for tokens in units]
        left[first].remove(min(left[first]))


@st.composite
def fleets(draw: st.DrawFn) -> list[Server]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        capacity = draw(st.integers(1, 4))
        seconds = sorted(draw(st.lists(st.sampled_from(STEPS_S), min_size=capacity, max_size=capacity)))
        running = draw(st.lists(st.integers(1, 40).map(float), max_size=capacity))
        found.append(Server(curve=curve(*seconds), capacity=capacity, running=tuple(running)))
    return found


@pytest.mark.parametrize(
    ("lengths", "capacity", "seconds"),
    [
        ([], 2, 0.0),
        ([10], 2, 10.0),  # alone: 10 at 1 s
        ([10, 4], 2, 4 * 2 + 6 * 1.0),  # four tokens together at 2 s, six alone
        ([10, 4, 4], 2, 8 * 2 + 2 * 1.0),  # the third takes the second's place
        ([4, 4, 10], 2, 4 * 2 + 10 * 1.0),  # a long one that begins last
        ([3, 3, 3], 1, 9.0),
    ],
)
def test_one_server(lengths, capacity, seconds):
    assert list_seconds(lengths, [Server(curve=curve(1.0, 2.0), capacity=capacity)]) == seconds


def test_the_faster_server_takes_the_first_and_the_rest_is_shared_by_speed():
    fast, slow = Server(curve=curve(1.0, 1.5), capacity=2), Server(curve=curve(2.0, 3.0), capacity=2)
    # 10 alone on fast at 1 s; 6 joins it at 1.5 s: faster than 2 s on slow; 5 goes to slow
    assert list_seconds([10, 6, 5], [slow, fast]) == max(6 * 1.5 + 4 * 1.0, 5 * 2.0)


@given(st.lists(st.integers(1, 40).map(float), max_size=12), fleets())
def test_the_closed_form_is_the_simulation(lengths, servers):
    assert list_seconds(lengths, servers) == pytest.approx(simulated(lengths, servers), rel=1e-9)


@given(st.lists(st.integers(0, 40).map(float), max_size=10), fleets(), st.integers(1, 3))
def test_nothing_is_faster_than_the_bound(lengths, servers, samples):
    instances = [
        Instance(generator_id=str(i), slots=server.capacity, curve=server.curve, running=server.running)
        for i, server in enumerate(servers)
    ]
    unit = unit_samples(instances, samples=samples)
    units = [tokens for tokens in lengths for _ in range(samples // unit)]
    seconds = list_seconds(units, servers_of(instances, unit=unit))
    # samples of a unit that run already count as long as the longest of it, so the model can only be slower
    assert bound_seconds(lengths, instances, samples=samples) <= seconds * (1 + 1e-9)


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=6, unique=True).map(sorted),
    st.data(),
    st.integers(1, 12),
    st.integers(1, 60),
)
def test_a_curve_by_units_has_the_same_times(batches, data, unit, units):
    seconds = sorted(data.draw(st.lists(st.floats(0.01, 10), min_size=len(batches), max_size=len(batches))))
    by_samples = LatencyCurve(tuple(batches), tuple(seconds))
    assert unit_curve(by_samples, unit=unit).at(units) == pytest.approx(by_samples.at(units * unit))


@pytest.mark.parametrize(("samples", "slots", "unit"), [(8, (64, 32), 8), (8, (12,), 4), (1, (64,), 1), (8, (3,), 1)])
def test_units_divide_groups_and_slots(samples, slots, unit):
    instances = [Instance(generator_id="a", slots=count, curve=curve(1.0)) for count in slots]
    assert unit_samples(instances, samples=samples) == unit


def test_what_runs_takes_places():
    instance = Instance(generator_id="a", slots=8, curve=curve(1.0, 2.0), running=(5, 9, 7, 1, 2))
    (server,) = servers_of([instance], unit=4)
    assert server.running == (9, 1)  # two units, each as long as its longest
    assert not fits(1, [server])


def test_fastest_first():
    slow, fast, wide = curve(2.0, 3.0), curve(1.0, 3.0), curve(1.0, 2.0)
    instances = [
        Instance(generator_id=name, slots=2, curve=found)
        for name, found in {"d": slow, "c": fast, "b": wide, "a": fast}.items()
    ]
    ordered = fastest_first(instances)
    assert [instance.generator_id for instance in ordered] == ["b", "a", "c", "d"]
    assert all(one.curve.at(1) <= other.curve.at(1) for one, other in pairwise(ordered))
