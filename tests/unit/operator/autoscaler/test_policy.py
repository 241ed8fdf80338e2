"""The policy `auto` over time: grows, shrinks, holds still, and never without data."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.spec.generators import Scaling
from streamrl_operator.autoscaler import POLICIES
from streamrl_operator.autoscaler.values import Decision, PoolObservation, ProcessTimes, ScalingState
from support.pool_world import PoolWorld

POLL_S = 2.0
TRAIN_S = 10.0


def auto(*, initial: int = 2, least: int = 1, most: int = 8, cooldown_s: float = 60.0) -> Scaling:
    given_ = {"initialReplicas": initial, "minReplicas": least, "maxReplicas": most, "cooldownSeconds": cooldown_s}
    return Scaling.model_validate({"auto": given_})


def drive(
    scaling: Scaling, works_s: Iterable[float], *, missing: Iterable[bool] = (), splits: float = 1.0
) -> Iterator[tuple[float, int, Decision]]:
    """(time, replicas before, decision) of each poll; the pool follows at once. `missing`: polls without numbers."""
    world, state = PoolWorld(scaling.initial, splits=splits), ScalingState(wanted=scaling.initial)
    for work_s, blind in zip(works_s, itertools.chain(missing, itertools.repeat(False)), strict=False):
        world.advance(POLL_S, work_s=work_s, train_s=TRAIN_S)
        seen = None if blind else world.see()
        before = state.wanted
        decision, state = POLICIES["auto"](scaling, state=state, seen=seen, now_s=world.now_s)
        assert decision.replicas == state.wanted
        assert decision.reason
        world.replicas = decision.replicas
        yield world.now_s, before, decision


def changes(run: Iterable[tuple[float, int, Decision]]) -> list[tuple[float, int, int]]:
    return [(at_s, before, decision.replicas) for at_s, before, decision in run if before != decision.replicas]


def polls(seconds: float, work_s: float) -> list[float]:
    return [work_s] * int(seconds / POLL_S)


def test_growing_lengths_add_a_replica_within_a_step_of_the_data() -> None:
    (at_s, before, after), *_ = changes(drive(auto(), polls(100, 20.0) + polls(100, 60.0)))
    assert (before, after) == (2, 3)
    assert at_s - 100 <= 60.0 / 2 + TRAIN_S + POLL_S  # the step that had begun, and one whole step of long answers


def test_answers_that_grow_without_bound_bring_replicas_before_the_step_has_ended() -> None:
    world, state, scaling = PoolWorld(2, waiting=100), ScalingState(wanted=2), auto()
    for _ in range(40):
        world.advance(POLL_S, work_s=20.0, train_s=TRAIN_S)
        decision, state = POLICIES["auto"](scaling, state=state, seen=world.see(), now_s=world.now_s)
    begun_s = world.now_s
    while decision.replicas == 2 and world.now_s - begun_s < 60:
        world.advance(POLL_S, work_s=2000.0, train_s=TRAIN_S)
        decision, state = POLICIES["auto"](scaling, state=state, seen=world.see(), now_s=world.now_s)
    assert decision.replicas == 3
    assert decision.reason.endswith("100 samples wait for a slot (a replica has 8), the trainer idle 99%")
    assert 20 <= world.now_s - begun_s <= 30


def test_shrinking_lengths_let_replicas_go_one_by_one() -> None:
    run = changes(drive(auto(initial=4), polls(1000, 8.0)))
    assert [(before, after) for _, before, after in run] == [(4, 3), (3, 2), (2, 1)]
    assert all(later - earlier >= 60 for (earlier, *_), (later, *_) in itertools.pairwise(run))


@pytest.mark.parametrize("work_s", [1.0, 9.0, 10.0, 11.0, 15.0, 20.0, 35.0, 79.0, 200.0])
@pytest.mark.parametrize("initial", [1, 2, 5, 8])
def test_under_an_even_load_the_pool_comes_to_rest(*, work_s: float, initial: int) -> None:
    run = changes(drive(auto(initial=initial, cooldown_s=10.0), polls(2000, work_s)))
    directions = {after - before for _, before, after in run}
    assert len(directions) <= 1, f"went up and down: {run}"
    assert all(at_s < 1400 for at_s, *_ in run), f"never rests: {run}"


loads = st.lists(st.sampled_from([2.0, 8.0, 20.0, 45.0, 90.0, 300.0]), min_size=20, max_size=60)


@given(
    works_s=loads,
    missing=st.lists(st.booleans(), max_size=120),
    cooldown_s=st.sampled_from([0.0, 20.0, 60.0]),
    splits=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_bounds_and_cool_down_hold_and_blind_polls_change_nothing(
    works_s: list[float], missing: list[bool], cooldown_s: float, splits: float
) -> None:
    stretched = [work_s for work_s in works_s for _ in range(5)]
    blind = [one for one in missing for _ in range(5)]
    run = list(drive(auto(initial=3, least=2, most=5, cooldown_s=cooldown_s), stretched, missing=blind, splits=splits))
    assert all(2 <= decision.replicas <= 5 for _, _, decision in run)
    changed = changes(run)
    assert all(later - earlier >= cooldown_s for (earlier, *_), (later, *_) in itertools.pairwise(changed))
    assert all(abs(after - before) == 1 for _, before, after in changed)
    unseen = [decision.replicas - before for (_, before, decision), hidden in zip(run, blind, strict=False) if hidden]
    assert not any(unseen)


def few(initial: int) -> int:
    """Additions after which it must be known that they bring nothing: a fifth of the pool, at least one."""
    return max(1, math.ceil(0.2 * initial))


@given(
    initial=st.integers(1, 24),
    splits=st.floats(0.0, 0.2),
    t_gen_s=st.floats(25.0, 200.0),
    cooldown_s=st.floats(0.0, 60.0),
)
def test_where_another_replica_brings_nothing_the_pool_does_not_go_on(
    initial: int, splits: float, t_gen_s: float, cooldown_s: float
) -> None:
    scaling, until_s = auto(initial=initial, most=64, cooldown_s=cooldown_s), (few(initial) + 4) * 4 * (t_gen_s + 20.0)
    run = list(drive(scaling, polls(until_s, t_gen_s * initial**splits), splits=splits))
    *_, (_, _, last) = run
    assert initial < last.replicas <= initial + few(initial)
    assert len(changes(run)) == last.replicas - initial
    assert "tokens/s were expected of the last replicas" in last.held
    assert last.held in last.reason or "pace is not known" in last.reason


@settings(max_examples=40, deadline=None)
@given(initial=st.integers(1, 12), splits=st.floats(0.5, 1.0), work_s=st.floats(1.0, 12.0))
def test_where_work_splits_the_pool_grows_by_the_papers_rule_alone(initial: int, splits: float, work_s: float) -> None:
    one_s = work_s * TRAIN_S
    run = list(drive(auto(initial=initial, most=16, cooldown_s=5.0), polls(40 * one_s, one_s), splits=splits))
    *_, (_, _, last) = run
    wanted = initial
    while wanted < 16 and one_s / wanted**splits * (wanted / (wanted + 1)) >= TRAIN_S + 1e-6:
        wanted += 1
    assert not last.held
    assert last.replicas in (wanted, wanted + 1) if wanted > initial else last.replicas <= initial + 1


def test_circumstances_that_have_changed_are_tried_again() -> None:
    works_s = [*polls(1000, 40.0), *polls(1000, 50.0), *polls(2000, 100.0)]
    run = list(drive(auto(initial=1, most=16, cooldown_s=10.0), works_s, splits=0.0))
    (first_s, *first), (then_s, *then) = changes(run)
    assert (first, then) == ([1, 2], [2, 3])
    assert first_s < 1000
    assert then_s > 2000, "a quarter more is the noise of a step, not another world"


def test_answers_that_grow_meanwhile_are_not_held_against_a_replica() -> None:
    works_s = [work_s for grown in range(60) for work_s in polls(60, 40.0 * 1.02**grown)]
    run = list(drive(auto(initial=2, most=16, cooldown_s=30.0), works_s))
    assert not any(decision.held for _, _, decision in run)
    assert changes(run)[-1][2] >= 8


def incomplete(seen: PoolObservation) -> list[tuple[PoolObservation, str]]:
    """What a page may lack, and how it is told."""
    first, *rest = seen.replicas
    restarted = replace(first, clock=ProcessTimes(wall_s=0.5, idle_s=0.5))
    silent = replace(seen, at_s=seen.at_s + 100, step=seen.step + 50)
    return [
        (replace(seen, trainer=None), "no trainer is connected"),
        (replace(seen, replicas=tuple(rest)), "of 3 replicas are connected"),
        (replace(seen, replicas=(restarted, *rest)), "waits for the end of a step"),
        (replace(seen, attempt=2), "waits for the end of a step"),
        (replace(seen, step=0), "waits for the end of a step"),
        (silent, "the pace is not known yet"),
    ]


@pytest.mark.parametrize("case", range(6))
def test_with_a_part_of_the_data_nothing_is_taken_away(case: int) -> None:
    world, state, scaling = PoolWorld(3), ScalingState(wanted=3), auto(initial=3, cooldown_s=0.0)
    while state.slack_windows < 1 and world.now_s < 60:  # idle enough to let one go, once all is seen
        world.advance(POLL_S, work_s=1.0, train_s=TRAIN_S)
        decision, state = POLICIES["auto"](scaling, state=state, seen=world.see(), now_s=world.now_s)
    assert state.slack_windows == 1
    part, reason = incomplete(world.see())[case]
    decision, state = POLICIES["auto"](scaling, state=state, seen=part, now_s=part.at_s)
    assert decision.replicas == 3
    assert reason in decision.reason


def test_bounds_that_were_edited_are_kept_at_once() -> None:
    state = ScalingState(wanted=7, changed_s=99.0)
    decision, after = POLICIES["auto"](auto(initial=2, most=4), state=state, seen=None, now_s=100.0)
    assert (decision.replicas, decision.reason, after.changed_s) == (4, "bounds are 1 to 4", 100.0)


def test_a_fixed_size_is_what_the_job_says() -> None:
    scaling = Scaling.model_validate({"static": {"replicas": 3}})
    decision, after = POLICIES["static"](scaling, state=ScalingState(wanted=1), seen=None, now_s=0.0)
    assert (decision.replicas, after.wanted) == (3, 3)
