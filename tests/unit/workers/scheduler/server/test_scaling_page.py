"""Rates over heartbeats and steps, and what is said while nothing is known."""

import math
import weakref

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.server.rates import Beat, BeatWindow, StepClock, mean_shares, tokens_per_s
from streamrl_workers.scheduler.server.status_endpoint import scaling
from support.core_world import World, settings


class Parts(dict[str, float]):
    """Whose life can be watched."""


class Entry:
    """A connection as the page reads it."""

    def __init__(self, *beats: Beat, pool: str = "p") -> None:
        self.hello = pb.GeneratorHello(pool=pool)
        self.beats = BeatWindow(30.0)
        for beat in beats:
            self.beats.add(beat)


def beat(wall_s: float, *, tokens: int = 0, **parts: float) -> Beat:
    return Beat(wall_s=wall_s, parts=parts, tokens=tokens)


def page(*generators: Entry, trainer: Entry | None = None, steps_s: tuple[float, ...] = ()) -> dict:
    clock = StepClock(now_s=0.0)
    for end_s in steps_s:
        clock.recorded(now_s=end_s)
    world = World(settings(evaluation_prompts=0, reference_pool="f"))
    for number, generator in enumerate(generators):
        world.join_generator(f"g{number}", pool=generator.hello.pool)
    return scaling(world.core.view(), generators=generators, frozen_pool="f", trainer=trainer, clock=clock, now_s=20.0)


def test_shares_are_of_the_window_alone_and_add_up():
    window = BeatWindow(30.0)
    window.add(beat(100.0, busy=90.0, weights=10.0, tokens=5000))
    assert (window.shares(), window.tokens_per_s()) == (None, None)
    window.add(beat(110.0, busy=95.0, skew=1.0, pipeline_staleness=4.0, weights=10.0, tokens=5600))
    shares = window.shares()
    assert (shares["busy"], shares["skew"], shares["pipeline_staleness"], shares["weights"]) == (0.5, 0.1, 0.4, 0.0)
    assert sum(shares.values()) == pytest.approx(1)
    assert window.tokens_per_s() == 60.0


def test_old_heartbeats_leave_the_window():
    often, seldom = BeatWindow(30.0), BeatWindow(30.0)
    for second in range(0, 100):
        for window, apart_s in ((often, 1), (seldom, 40)):
            if second % apart_s == 0:
                window.add(beat(float(second), tokens=max(0, second - 39) * 7))
    assert (often.wall_s, often.tokens_per_s()) == (30.0, 7.0)
    assert seldom.wall_s == 40.0, "two at least: a rate needs them"


@pytest.mark.parametrize("apart_s", [1e-3, 1.0, 0.0, math.nan])
def test_a_window_holds_few_heartbeats_however_often_they_come(apart_s):
    window, refs = BeatWindow(7200.0), []
    for number in range(2_000):
        parts = Parts()
        window.add(Beat(wall_s=number * apart_s, parts=parts))
        refs.append(weakref.ref(parts))
        del parts
    assert sum(ref() is not None for ref in refs) <= 12


def test_means_and_sums_are_over_those_of_which_something_is_known():
    known = Entry(beat(0.0), beat(10.0, busy=4.0, pipeline_no_prompts=6.0, tokens=50)).beats
    other = Entry(beat(0.0), beat(5.0, busy=4.0, skew=1.0, tokens=50)).beats
    assert mean_shares([known, other, BeatWindow(30.0)])["busy"] == pytest.approx(0.6)
    assert tokens_per_s([known, other, BeatWindow(30.0)]) == 15.0
    assert mean_shares([]) is None
    assert tokens_per_s([BeatWindow(30.0)]) is None


def test_the_pool_of_the_frozen_model_is_in_its_own_numbers_alone():
    beats = beat(0.0), beat(10.0, busy=4.0, tokens=50)
    generating, frozen = Entry(*beats), Entry(beat(0.0), beat(10.0, busy=9.0, tokens=500), pool="f")
    alone, both = (page(*some, steps_s=(4.0, 8.0)) for some in ((generating,), (generating, frozen)))
    assert both["pools"]["f"]["tokens_per_s"] == 50.0
    both["pools"].pop("f")
    assert both == alone


def test_the_steps_of_one_clock():
    clock = StepClock(now_s=5.0)
    assert (clock.step_s, clock.since_s(now_s=7.0)) == (None, 2.0)
    for end_s in (6.0, 8.0, 12.0):
        clock.recorded(now_s=end_s)
    assert (clock.step_s, clock.since_s(now_s=13.0)) == (3.0, 1.0)


def test_nothing_is_known_before_two_heartbeats_and_two_steps():
    found = page(Entry(beat(1.0, busy=1.0)), trainer=Entry(), steps_s=(3.0,))
    for name in ("step_s", "steps_per_s", "generation_s", "generator_seconds", "training_s", "trainer"):
        assert found[name] is None, name
    assert (found["all"]["tokens_per_s"], found["all"]["parts"]) == (None, None)
    assert found["pools"] == {"p": found["all"]}


def test_times_are_shares_of_a_step():
    generators = [
        Entry(beat(0.0), beat(10.0, busy=5.0, skew=1.0, pipeline_staleness=4.0, tokens=100)),
        Entry(beat(0.0), beat(10.0, busy=2.0, pipeline_staleness=8.0, tokens=50)),
    ]
    trainer = Entry(beat(0.0), beat(8.0, busy=2.0, pipeline_no_samples=6.0))
    found = page(*generators, trainer=trainer, steps_s=(10.0, 12.0, 14.0))
    assert (found["step_s"], found["steps_per_s"], found["since_step_s"]) == (2.0, 0.5, 6.0)
    assert found["generation_s"] == pytest.approx(0.8)
    assert found["generator_seconds"] == pytest.approx(1.6)
    assert found["training_s"] == pytest.approx(0.5)
    assert found["all"]["tokens_per_s"] == 15.0
    assert found["all"]["parts"]["pipeline_staleness"] == pytest.approx(0.6)
    assert found["trainer"]["pipeline_no_samples"] == 0.75
    assert (found["free_slots"], found["all"]["slots"], found["all"]["idle"]["no_weights"]) == (5, 5, 2)


def test_without_a_generator_there_is_no_pool():
    found = page()
    assert (found["pools"], found["all"]["generators"], found["all"]["parts"]) == ({}, 0, None)
