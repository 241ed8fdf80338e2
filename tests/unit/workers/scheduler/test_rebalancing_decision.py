"""The model of a move: what it costs, when it pays, and that it never says yes to a loss."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve, replica_seconds
from streamrl_workers.scheduler.rebalancing import Host, Remaining, Running, best_move
from streamrl_workers.scheduler.rebalancing.decision import PROGRESS_INTERVAL_S, makespan_s
from streamrl_workers.scheduler.rebalancing.remaining import DRAWS

STEEP = LatencyCurve.of_milliseconds([(1, 8), (64, 80)])
FLAT = LatencyCurve.of_milliseconds([(1, 8), (64, 8)])
SLOW = STEEP.scaled(3.0)


def host(name: str, left: list[float], *, curve: LatencyCurve = STEEP, slots: int = 64, prefix: int = 0) -> Host:
    """Known lengths: one draw."""
    first = {"a": 0, "b": 1000}.get(name, 2000)
    running = tuple(
        Running(lease=first + number, expected_tokens=tokens, drawn_tokens=(tokens,), prefix_tokens=prefix)
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


@given(LEFT, LEFT, LEFT, st.lists(CURVES, min_size=3, max_size=3), st.integers(0, 20_000), st.floats(0, 0.3))
def test_a_yes_never_makes_the_makespan_worse(source_left, target_left, other_left, curves, prefix, gain):
    """By the exact replica times of all generators, with what the move costs."""
    source = host("a", source_left, curve=curves[0], slots=16, prefix=prefix)
    target = host("b", target_left, curve=curves[1], slots=16)
    other = host("c", other_left, curve=curves[2], slots=16)
    move = best_move(source, target, movable=source.running, gain=gain)
    before_s = [replica_seconds(one.curve, [r.drawn_tokens[0] for r in one.running]) for one in (source, target, other)]
    assert makespan_s([source, target, other]) == pytest.approx(max(before_s), rel=1e-9)
    if move is None:
        return
    moved = [running for running in source.running if running.lease in move.leases]
    staying = [running.drawn_tokens[0] for running in source.running if running.lease not in move.leases]
    lost = PROGRESS_INTERVAL_S / source.curve.at(len(source.running))
    taken = [running.drawn_tokens[0] + lost for running in moved]
    read_s = sum(running.prefix_tokens for running in moved) * target.curve.at(16) / 16
    after_s = [replica_seconds(source.curve, staying), read_s + replica_seconds(target.curve, target_left + taken)]
    assert move.after_s == pytest.approx(max(after_s), rel=1e-9)
    assert max(after_s) <= max(before_s[:2]) * (1 - gain) * (1 + 1e-9)
    assert max(*after_s, before_s[2]) <= max(before_s) * (1 + 1e-9)


@given(LEFT, LEFT, st.floats(1, 50), st.integers(0, 1000))
def test_nothing_moves_where_all_curves_are_flat(source_left, target_left, milliseconds, prefix):
    flat = LatencyCurve.of_milliseconds([(1, milliseconds)])
    source = host("a", source_left, curve=flat, prefix=prefix)
    assert best_move(source, host("b", target_left, curve=flat), movable=source.running, gain=0.0) is None


@given(st.lists(st.tuples(st.floats(1, 9000), st.floats(1, 9000)), min_size=1, max_size=20))
def test_draws_count_alike(left):
    """Two draws are worth the mean of each alone."""
    source = host("a", [first for first, _ in left])
    both = replace(
        source, running=tuple(replace(r, drawn_tokens=pair) for r, pair in zip(source.running, left, strict=True))
    )
    alone = [makespan_s([host("a", [pair[place] for pair in left])]) for place in (0, 1)]
    assert makespan_s([both]) == pytest.approx(sum(alone) / 2)


# ---- what is left


def learnt(lengths: list[int], *, most_tokens: int = 1 << 20) -> Remaining:
    found = Remaining(most_tokens=most_tokens)
    for tokens in lengths:
        found.learn(tokens)
    return found


def test_without_a_prediction_what_is_left_are_the_longer_lengths_alike():
    remaining = learnt(list(range(1, 1001)))
    drawn = [value for number in range(500) for value in remaining.drawn(500, share=None, number=number)]
    assert 0 < min(drawn) < 20
    assert 480 < max(drawn) <= 500
    assert sum(drawn) / len(drawn) == pytest.approx(250, rel=0.05)
    assert remaining.expected(500, share=None) == pytest.approx(250, rel=0.01)


def test_a_predicted_long_one_has_more_left_and_none_has_less_than_it_has():
    remaining = learnt(list(range(1, 1001)))
    lefts = [remaining.expected(100, share=share) for share in (0.1, 0.5, 0.9, 0.999)]
    assert lefts == sorted(lefts)
    assert lefts[0] < 300 < lefts[2] < lefts[3] <= 900
    assert remaining.expected(950, share=0.1) > 0  # longer than was predicted


def test_what_outlived_all_others_goes_on_for_a_share_of_its_age():
    remaining = learnt([10, 20, 30])
    drawn = [value for number in range(200) for value in remaining.drawn(1000, share=None, number=number)]
    assert sum(drawn) / len(drawn) == pytest.approx(100, rel=0.1)


def test_no_sample_goes_beyond_the_limit():
    remaining = learnt(list(range(1, 1001)), most_tokens=600)
    assert max(remaining.drawn(590, share=None, number=3)) <= 10
    assert remaining.drawn(600, share=None, number=3) == (1.0,) * DRAWS


def test_a_sample_has_the_same_draws_at_every_look_and_others_have_others():
    remaining = learnt(list(range(1, 1001)))
    assert remaining.drawn(100, share=0.5, number=7) == remaining.drawn(100, share=0.5, number=7)
    assert len({remaining.drawn(100, share=0.5, number=number) for number in range(50)}) == 50
