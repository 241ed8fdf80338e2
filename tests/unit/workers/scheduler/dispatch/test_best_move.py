"""The model of a move: what it costs, when it pays, and that it never says yes to a loss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve, replica_seconds
from streamrl_workers.scheduler.extensions.rebalancing import (
    DRAWS,
    LOOK_INTERVAL_S,
    Host,
    RunningSample,
    best_move,
    tokens_left,
)
from streamrl_workers.scheduler.lengths.quantiles import SlidingQuantiles

STEEP = LatencyCurve.of_milliseconds([(1, 8), (64, 80)])
FLAT = LatencyCurve.of_milliseconds([(1, 8), (64, 8)])
SLOW = STEEP.scaled(3.0)


def host(name: str, left: list[float], *, curve: LatencyCurve = STEEP, slots: int = 64, prefix: int = 0) -> Host:
    """Known lengths: the same in every draw."""
    first = {"a": 0, "b": 1000}.get(name, 2000)
    running = tuple(
        RunningSample(lease=first + number, expected_tokens=tokens, left_tokens=(tokens,) * DRAWS, prefix_tokens=prefix)
        for number, tokens in enumerate(left)
    )
    return Host(generator_id=name, curve=curve, slots=slots, running=running)


def leases(source: Host, target: Host, *, gain: float = 0.05) -> tuple[int, ...]:
    move = best_move(source, target, movable=source.running, gain=gain)
    return () if move is None else move.leases


@pytest.mark.parametrize(
    ("source", "target", "moved"),
    [
        (host("a", [500.0] * 32), host("b", []), 16),  # half of them
        (host("a", [500.0] * 32), host("b", [500.0] * 30), 0),  # there is nothing to gain
        (host("a", [500.0] * 32, curve=FLAT), host("b", [], curve=FLAT), 0),  # a batch costs nothing
        (host("a", [9000.0, *[6000.0] * 31]), host("b", [100.0]), 16),
        (host("a", [9000.0, *[500.0] * 31]), host("b", [600.0] * 8), 1),  # the long one alone
        (host("a", [9000.0, *[500.0] * 31]), host("b", [6000.0] * 8), 0),  # it would not be alone there
        (host("a", [500.0] * 32), host("b", [], curve=SLOW), 4),  # few, as it is slow there
        (host("a", [3.0] * 32), host("b", []), 0),  # over before it is worth its cost
        (host("a", [500.0] * 32, prefix=1000), host("b", []), 8),  # each has to be read
        (host("a", [500.0] * 32, prefix=100_000), host("b", []), 0),  # dearer than the gain
        (host("a", [500.0] * 32), host("b", [], slots=4), 4),  # no more slots
        (host("a", [500.0] * 32), host("b", [400.0] * 4, slots=4), 0),
        (host("a", [500.0]), host("b", []), 0),  # alone is as fast as it gets
    ],
)
def test_what_moves(source, target, moved):
    found = leases(source, target)
    assert len(found) == moved
    assert found == tuple(running.lease for running in source.running[:moved])  # the longest


def test_gain_is_a_threshold():
    source, target = host("a", [500.0] * 32), host("b", [])
    move = best_move(source, target, movable=source.running, gain=0.0)
    share = 1 - move.after_s / move.before_s
    assert leases(source, target, gain=share * 0.99)
    assert not leases(source, target, gain=share * 1.01)


def test_only_what_may_move_moves():
    source, target = host("a", [500.0] * 32), host("b", [])
    move = best_move(source, target, movable=source.running[-3:], gain=0.0)
    assert set(move.leases) <= {running.lease for running in source.running[-3:]}
    assert best_move(source, target, movable=[], gain=0.0) is None


LEFT = st.lists(st.floats(1, 20_000), max_size=12)
CURVES = st.lists(st.floats(1, 50), min_size=1, max_size=4).map(
    lambda ms: LatencyCurve.of_milliseconds((1 << (2 * place), value) for place, value in enumerate(sorted(ms)))
)


@given(LEFT, LEFT, st.lists(CURVES, min_size=2, max_size=2), st.integers(0, 20_000), st.floats(0, 0.3))
def test_a_yes_never_makes_the_makespan_worse(source_left, target_left, curves, prefix, gain):
    """By the exact replica times of all generators, with what the move costs."""
    source = host("a", source_left, curve=curves[0], slots=16, prefix=prefix)
    target = host("b", target_left, curve=curves[1], slots=16)
    move = best_move(source, target, movable=source.running, gain=gain)
    before_s = [replica_seconds(one.curve, [r.left_tokens[0] for r in one.running]) for one in (source, target)]
    if move is None:
        return
    moved = [running for running in source.running if running.lease in move.leases]
    staying = [running.left_tokens[0] for running in source.running if running.lease not in move.leases]
    lost = LOOK_INTERVAL_S / source.curve.at(len(source.running))
    taken = [running.left_tokens[0] + lost for running in moved]
    read_s = sum(running.prefix_tokens for running in moved) * target.curve.at(16) / 16
    after_s = [replica_seconds(source.curve, staying), read_s + replica_seconds(target.curve, target_left + taken)]
    assert move.after_s == pytest.approx(max(after_s), rel=1e-9)
    assert move.before_s == pytest.approx(max(before_s), rel=1e-9)
    assert max(after_s) <= max(before_s) * (1 - gain) * (1 + 1e-9)


@given(LEFT, LEFT, st.floats(1, 50), st.integers(0, 1000))
def test_nothing_moves_where_all_curves_are_flat(source_left, target_left, milliseconds, prefix):
    flat = LatencyCurve.of_milliseconds([(1, milliseconds)])
    source = host("a", source_left, curve=flat, prefix=prefix)
    assert best_move(source, host("b", target_left, curve=flat), movable=source.running, gain=0.0) is None


# ---- what is left

LEVELS = [(place + 0.5) / 500 for place in range(500)]


def left(lengths, tokens, *, share=None, levels=(0.5,), most=1 << 20):
    seen = SlidingQuantiles(lengths, window=4096)
    return [tokens_left(seen, tokens, level, share=share, most=most) for level in levels]


def test_without_a_prediction_what_is_left_are_the_longer_lengths_alike():
    drawn = left(range(1, 1001), 500, levels=LEVELS)
    assert 0 < min(drawn) < 20
    assert 480 < max(drawn) <= 500
    assert sum(drawn) / len(drawn) == pytest.approx(250, rel=0.05)


def test_a_predicted_long_one_has_more_left_and_none_has_less_than_it_has():
    lefts = [left(range(1, 1001), 100, share=share)[0] for share in (0.1, 0.5, 0.9, 0.999)]
    assert lefts == sorted(lefts)
    assert lefts[0] < 300 < lefts[2] < lefts[3] <= 900
    assert left(range(1, 1001), 950, share=0.1)[0] > 0  # longer than was predicted


def test_what_outlived_all_others_goes_on_for_a_share_of_its_age():
    drawn = left([10, 20, 30], 1000, levels=LEVELS)
    assert sum(drawn) / len(drawn) == pytest.approx(100, rel=0.1)


def test_no_sample_goes_beyond_the_limit():
    assert max(left(range(1, 1001), 590, levels=LEVELS, most=600)) <= 10
    assert left(range(1, 1001), 600, levels=(0.1, 0.9), most=600) == [1.0, 1.0]
