"""Continuous batching by events gives the times that single steps would give."""

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve, replica_seconds
from streamrl_cli.simulation.engine import ModelledEngine
from streamrl_workers.metrics.step_times import StepCounts, bucket_of

CURVE = LatencyCurve((1, 4, 8), (0.01, 0.02, 0.06))
STEP_S = [CURVE.at(batch) for batch in range(9)]
lengths = st.lists(st.integers(1, 200), min_size=1, max_size=8)


def run_out(engine: ModelledEngine, *, ends: dict[int, float] | None = None) -> dict[int, float]:
    """Lease -> when it ends."""
    found = {} if ends is None else ends
    while (at_s := engine.next_end_s()) is not None:
        found |= dict.fromkeys(engine.end(at_s), at_s)
    return found


@given(lengths)
def test_samples_that_all_fit_take_the_exact_replica_time(tokens: list[int]) -> None:
    engine = ModelledEngine(STEP_S, kv_s=0.0)
    for lease, count in enumerate(tokens):
        engine.admit(lease, tokens=count, context=7)
    ends = run_out(engine)
    assert max(ends.values()) == pytest.approx(replica_seconds(CURVE, tokens))
    assert sorted(ends, key=lambda lease: (ends[lease], lease)) == sorted(
        ends, key=lambda lease: (tokens[lease], lease)
    )
    times = engine.step_times(unit=1)
    assert sum(of.tokens for of in times.values()) == pytest.approx(sum(tokens))
    assert sum(of.seconds for of in times.values()) == pytest.approx(max(ends.values()))


def test_it_tells_the_time_of_its_steps_by_batch_and_not_that_of_pauses() -> None:
    engine = ModelledEngine(STEP_S, kv_s=0.0)
    engine.admit(0, tokens=30, context=0)
    engine.admit(1, tokens=10, context=0)
    engine.pause(paused=True)
    engine.advance(5.0)
    engine.pause(paused=False)
    run_out(engine)
    told = {bucket_of(1): StepCounts(10, 10, 20 * STEP_S[1]), bucket_of(2): StepCounts(5, 10, 10 * STEP_S[2])}
    assert {bucket: astuple(of) for bucket, of in engine.step_times(unit=2).items()} == {
        bucket: pytest.approx(astuple(of)) for bucket, of in told.items()
    }


@given(lengths, st.floats(0.0, 1e-3), st.integers(0, 50))
def test_context_slows_a_step_down_by_each_token(tokens: list[int], kv_s: float, context: int) -> None:
    engine = ModelledEngine(STEP_S, kv_s=kv_s)
    for lease, count in enumerate(tokens):
        engine.admit(lease, tokens=count, context=context)
    now_s, made, active = 0.0, 0, dict(enumerate(tokens))
    while active:  # the fluid's step from n to n + 1 has the context of n + 1/2
        now_s += STEP_S[len(active)] + kv_s * len(active) * (context + made + 0.5)
        made += 1
        active = {lease: count for lease, count in active.items() if count > made}
    assert max(run_out(engine).values()) == pytest.approx(now_s)


@given(lengths, st.floats(0.0, 3.0), st.floats(0.0, 1e-4))
def test_looking_in_between_changes_nothing(tokens: list[int], at_s: float, kv_s: float) -> None:
    engines = [ModelledEngine(STEP_S, kv_s=kv_s) for _ in range(2)]
    for engine in engines:
        for lease, count in enumerate(tokens):
            engine.admit(lease, tokens=count, context=3)
    looked_at, other = engines
    ends: dict[int, float] = {}
    while (end_s := looked_at.next_end_s()) is not None and end_s <= at_s:
        ends |= dict.fromkeys(looked_at.end(end_s), end_s)
    looked_at.advance(at_s)
    assert run_out(looked_at, ends=ends) == pytest.approx(run_out(other))


def test_a_pause_moves_every_end() -> None:
    engine = ModelledEngine(STEP_S, kv_s=0.0)
    engine.admit(0, tokens=100, context=0)
    engine.advance(0.3)
    engine.pause(paused=True)
    assert engine.next_end_s() is None
    engine.advance(2.3)
    engine.pause(paused=False)
    assert engine.next_end_s() == pytest.approx(3.0)


def test_who_is_cancelled_makes_room_and_never_ends() -> None:
    engine = ModelledEngine(STEP_S, kv_s=1e-3)
    engine.admit(0, tokens=10, context=100)
    engine.admit(1, tokens=50, context=0)
    engine.advance(0.1)
    engine.cancel(0)
    left = 50 - engine.made
    end_s = 0.1 + left * (STEP_S[1] + 1e-3 * (engine.made + left / 2))  # alone, with its own context only
    assert run_out(engine) == {1: pytest.approx(end_s)}
    assert len(engine) == 0
