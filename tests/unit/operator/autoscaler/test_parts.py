"""The single rules: pace, growth, shrinking, and what is read of the scheduler's page."""

from dataclasses import replace
from typing import Any

import pytest

from streamrl.latency import LatencyCurve
from streamrl_operator.autoscaler import balance
from streamrl_operator.autoscaler.pace import measure
from streamrl_operator.autoscaler.values import (
    ConnectedReplica,
    PoolObservation,
    ProcessTimes,
    StagePace,
    observe,
)


@pytest.mark.parametrize(
    ("replicas", "t_gen_s", "t_train_s", "grows", "shrinks"),
    [
        (1, 10.0, 5.0, True, False),  # Δ 5 = Δ' 5: with the second, T_gen equals T_train
        (1, 10.0, 5.1, False, False),
        (1, 1.0, 10.0, False, False),  # the last one stays
        (3, 10.0, 7.5, True, False),
        (3, 10.0, 7.6, False, False),
        (3, 6.0, 10.0, False, True),  # 9 s with two, of 9 s that are allowed
        (3, 6.1, 10.0, False, False),
        (2, 0.0, 0.0, False, True),  # nothing to do at all
    ],
)
def test_growth_and_shrinking_leave_a_dead_band(
    *, replicas: int, t_gen_s: float, t_train_s: float, grows: bool, shrinks: bool
) -> None:
    pace = StagePace(replicas=replicas, interval_s=10.0, t_gen_s=t_gen_s, t_train_s=t_train_s)
    assert balance.by_pace(pace)[0] is grows
    assert balance.has_slack(pace)[0] is shrinks


def seen(
    at_s: float,
    *,
    step: int,
    idle_s: float = 0.0,
    trainer_idle_s: float = 0.0,
    lag_s: float = 0.0,
    waiting: int = 0,
    active: int = 4,
) -> PoolObservation:
    """One replica and a trainer whose clocks began with the world; `lag_s`: since the last heartbeat."""
    clock = ProcessTimes(wall_s=at_s - lag_s, idle_s=idle_s)
    return PoolObservation(
        at_s=at_s,
        attempt=1,
        step=step,
        waiting=waiting,
        replicas=(ConnectedReplica(name="g-0", slots=4, active=active, clock=clock),),
        trainer=ProcessTimes(wall_s=at_s - lag_s, idle_s=trainer_idle_s),
    )


@pytest.mark.parametrize(
    ("now", "pace"),
    [
        (seen(30, step=4, idle_s=5, trainer_idle_s=15), (5.0 * 0.75, 5.0 * 0.25)),
        (seen(30, step=4, idle_s=3, trainer_idle_s=10, lag_s=2), (5.0 * 15 / 18, 5.0 * 8 / 18)),  # late heartbeats
        (seen(30, step=0), None),  # no whole step
        (seen(30, step=4, lag_s=2.1), None),  # too much of the window is not told yet
        (seen(30, step=4, lag_s=25), None),  # a clock that went back
    ],
)
def test_the_pace_is_the_interval_without_the_idle_time(now: PoolObservation, pace: tuple[float, float] | None) -> None:
    measured = measure(seen(10, step=0), now)
    got = None if measured is None else (measured.t_gen_s, measured.t_train_s)
    assert got == (None if pace is None else pytest.approx(pace))


LATENCY = LatencyCurve.of_milliseconds([(1, 8.0), (16, 9.0), (64, 12.0), (256, 24.0)])


@pytest.mark.parametrize(
    ("replicas", "waits", "batch", "latency", "share", "worth"),
    [
        (1, 1.0, 64.0, LATENCY, 0.5, True),  # samples wait all the time: work splits evenly
        (1, 0.0, 64.0, None, 0.5, True),  # nothing is known
        (1, 0.0, 256.0, LATENCY, 16.0 / 24.0, True),  # a large batch gets faster where it is halved
        (4, 0.0, 256.0, LATENCY, 20.8 / 24.0, True),
        (1, 0.0, 20.0, LATENCY, 8.6 / 9.25, False),  # a small one does not
        (1, 0.5, 20.0, LATENCY, 0.25 + 0.5 * 8.6 / 9.25, True),
        (16, 0.1, 20.0, LATENCY, 0.1 * 16 / 17 + 0.9 * 9.1765 / 9.25, False),
    ],
)
def test_what_is_seen_of_the_slots_tells_what_another_replica_brings(
    *, replicas: int, waits: float, batch: float, latency: LatencyCurve | None, share: float, worth: bool
) -> None:
    pace = StagePace(
        replicas=replicas,
        interval_s=10.0,
        t_gen_s=10.0,
        t_train_s=1.0,
        waits=waits,
        batch=batch,
        latency=latency,
    )
    assert balance.predicted_s(pace, replicas=replicas + 1) == pytest.approx(10.0 * share, rel=1e-3)
    assert (balance.too_little(pace) == "") is worth


@pytest.mark.parametrize(
    ("looks", "busy_s", "skew_s", "waits", "batch"),
    [(1.0, 20.0, 0.0, 1.0, 4.0), (0.2, 5.0, 15.0, 0.2, 0.25), (0.0, 5.0, 15.0, 0.0, 1.0), (0.5, 5.0, 15.0, 0.25, 0.0)],
)
def test_slots_in_use_are_those_of_waiting_and_a_batch_of_the_rest(
    *, looks: float, busy_s: float, skew_s: float, waits: float, batch: float
) -> None:
    now = seen(30, step=4)
    (replica,) = now.replicas
    worked = replace(now, replicas=(replace(replica, busy_s=busy_s, skew_s=skew_s),))
    pace = measure(seen(10, step=0), worked, waits=looks)
    assert pace is not None
    assert (pace.waits, pace.batch) == (pytest.approx(waits), pytest.approx(batch))


def in_turn(at_s: float, *, step_s: float, beat_s: float) -> PoolObservation:
    """Of a run in which both stages take turns: a step begins with 60 % of generation, training is the rest."""

    def clock(*, lag_s: float, busy: float, begins: float) -> ProcessTimes:
        told_s = (at_s - lag_s) // beat_s * beat_s
        steps, part = divmod(told_s, step_s)
        busy_s = steps * busy * step_s + min(max(part - begins * step_s, 0.0), busy * step_s)
        return ProcessTimes(wall_s=told_s, idle_s=told_s - busy_s)

    steps, part = divmod(at_s, step_s)
    generator = ConnectedReplica(name="g-0", slots=4, active=4, clock=clock(lag_s=0.1, busy=0.6, begins=0.0))
    return PoolObservation(
        at_s=at_s,
        attempt=1,
        step=int(steps),
        waiting=0,
        replicas=(generator,),
        trainer=clock(lag_s=0.4, busy=0.4, begins=0.6),
        since_step_s=part,
    )


@pytest.mark.parametrize("beat_s", [0.5, 3.75])
@pytest.mark.parametrize("step_s", [0.3, 1.1, 2.5, 3.3, 7.0, 41.0])
def test_parts_of_a_step_are_not_taken_for_its_pace(*, step_s: float, beat_s: float) -> None:
    before, paces = in_turn(100.0, step_s=step_s, beat_s=beat_s), []
    for poll in range(1, 200):
        now = in_turn(100.0 + 2 * poll, step_s=step_s, beat_s=beat_s)
        pace = measure(before, now)
        if pace is not None:
            before = now
            paces.append(pace)
    assert len(paces) >= 5, "a window ends in time"
    assert all(pace.interval_s == pytest.approx(step_s) for pace in paces)
    assert all(pace.t_gen_s / step_s == pytest.approx(0.6, abs=0.1) for pace in paces)
    assert all(pace.t_train_s / step_s == pytest.approx(0.4, abs=0.1) for pace in paces)


@pytest.mark.parametrize(
    ("waiting", "active", "trainer_idle_s", "interval_s", "grows"),
    [
        (4, 4, 18.0, 10.0, True),
        (3, 4, 18.0, 10.0, False),  # less than a replica takes
        (400, 3, 18.0, 10.0, False),  # a slot is free: they wait for something else
        (400, 4, 8.0, 10.0, False),  # the trainer is at work
        (400, 4, 18.0, 10.1, False),  # as it is at each step's begin
        (400, 4, 18.0, None, False),  # the first step
    ],
)
def test_when_a_step_is_overdue_the_queue_decides(
    *, waiting: int, active: int, trainer_idle_s: float, interval_s: float | None, grows: bool
) -> None:
    now = seen(30, step=5, waiting=waiting, active=active, trainer_idle_s=trainer_idle_s)
    assert balance.by_queue(seen(10, step=5), now, interval_s=interval_s)[0] is grows


def page(**more: Any) -> dict[str, Any]:
    bubbles = {"busy": 5.0, "skew": 1.0, "pipeline_staleness": 3.0, "pipeline_phase": 1.0}
    line = {"pool": "p", "slots": 8, "active": 3, "tokens": 500, "bubbles": bubbles, "wall_s": 10.0}
    generators = [{"id": f"generator-p-{n}", **line} for n in (2, 0)] + [{"id": "generator-other-0", **line}]
    trainer = {"id": "trainer-0", "bubbles": {"busy": 9.0, "pipeline_no_samples": 1.0}, "wall_s": 10.0}
    state = {
        "attempt": 1,
        "step": 5,
        "queue": 7,
        "ended": False,
        "scaling": {"since_step_s": 0.5},
        "dispatch": {"pools": {}},
    }
    return {**state, "generators": generators, "trainer": trainer, **more}


def test_the_page_is_read_for_the_wanted_ordinals_of_the_pool() -> None:
    observed = observe(page(), pool="p", wanted=2, now_s=3.0)
    assert observed is not None
    assert [(one.name, one.clock.idle_s) for one in observed.replicas] == [("generator-p-0", 4.0)]
    (replica,) = observed.replicas
    assert (replica.tokens, replica.busy_s, replica.skew_s) == (500.0, 5.0, 1.0)
    assert (observed.step, observed.waiting, observed.trainer) == (5, 7, ProcessTimes(wall_s=10.0, idle_s=1.0))
    assert observed.since_step_s == 0.5
    assert observe(page(trainer=None), pool="p", wanted=2, now_s=3.0).trainer is None  # type: ignore[union-attr] # is a page


@pytest.mark.parametrize(
    ("speed", "latency"),
    [
        ({"speed": "known", "step_s": {"16": 0.02, "4": 0.01}}, LatencyCurve((4, 16), (0.01, 0.02))),
        ({"speed": "guessed", "step_s": {}}, None),
        ({"speed": "upperHalf", "step_s": {"16": 0.02}}, None),
    ],
)
def test_a_pools_speed_counts_once_it_is_measured_whole(*, speed: dict[str, Any], latency: LatencyCurve | None) -> None:
    observed = observe(page(dispatch={"pools": {"p": speed}}), pool="p", wanted=1, now_s=0.0)
    assert observed is not None
    assert observed.latency == latency


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        page(ended=True),
        page(generators=None),
        page(generators=["x"]),
        page(step=None),
        page(queue="many"),
        page(scaling={}),
        page(dispatch={}),
        page(dispatch={"pools": {"p": {"speed": "known", "step_s": {}}}}),
        page(trainer={"wall_s": 1.0}),
        page(trainer={"wall_s": 1.0, "bubbles": {"pipeline_phase": None}}),
    ],
)
def test_a_page_that_is_not_whole_is_no_observation(broken: dict[str, Any] | None) -> None:
    assert observe(broken, pool="p", wanted=2, now_s=0.0) is None
