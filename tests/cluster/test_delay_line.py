"""What a delay line does to packets, told by a clock of the test's own: when each comes out, which are lost, what is counted."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.harness.delay_line import Line, Shape, Traffic

KILO = bytes(1000)
"""A millisecond at 8 Mbit/s."""
SLOW = Shape(rate_bps=8e6, delay_s=0.02)


def line(shape: Shape, *, drawn: Sequence[float] = ()) -> Line:
    numbers = iter(drawn)
    return Line(shape, draw=lambda: next(numbers))


def comes_out(one: Line) -> list[tuple[float, int]]:
    """(time, length) of each packet on the line, by asking at no other times than it says."""
    found = []
    while (now := one.next_due) is not None:
        found += [(round(now, 6), len(packet)) for packet in one.due(now)]
    return found


@pytest.mark.parametrize(
    ("shape", "offered", "expected"),
    [
        (Shape(), [(0.0, 100), (0.0, 200)], [(0.0, 100), (0.0, 200)]),
        (Shape(delay_s=0.02), [(0.0, 100), (0.005, 200)], [(0.02, 100), (0.025, 200)]),
        (SLOW, [(0.0, 1000), (0.0, 2000), (0.0, 1000)], [(0.021, 1000), (0.023, 2000), (0.024, 1000)]),
        (SLOW, [(0.0, 1000), (0.5, 1000)], [(0.021, 1000), (0.521, 1000)]),
    ],
    ids=["at once", "later", "one after the other", "an idle line saves nothing up"],
)
def test_when_packets_come_out(
    shape: Shape, offered: list[tuple[float, int]], expected: list[tuple[float, int]]
) -> None:
    one = line(shape)
    for now, length in offered:
        one.offer(now, bytes(length))
    assert comes_out(one) == expected
    assert one.traffic == Traffic(packets=len(expected), bytes=sum(length for _, length in expected))


def test_nothing_comes_out_early() -> None:
    one = line(SLOW)
    one.offer(0.0, KILO)
    assert list(one.due(0.0209)) == []
    assert list(one.due(0.0211)) == [KILO]
    assert one.next_due is None


def test_a_full_buffer_drops_what_comes_last() -> None:
    one = line(Shape(rate_bps=8e6, buffer_s=0.0025))
    for _ in range(5):
        one.offer(0.0, KILO)
    assert [when for when, _ in comes_out(one)] == [0.001, 0.002, 0.003]
    assert one.traffic == Traffic(packets=3, bytes=3000, overflowed=2)


def test_loss_is_drawn_for_each_packet() -> None:
    one = line(Shape(loss=0.05), drawn=[0.049, 0.05, 0.9, 0.0])
    for length in (1, 2, 3, 4):
        one.offer(0.0, bytes(length))
    assert comes_out(one) == [(0.0, 2), (0.0, 3)]
    assert one.traffic == Traffic(packets=2, bytes=5, lost=2)


def test_late_packets_are_overtaken_and_some_come_twice() -> None:
    one = line(Shape(delay_s=0.02, late=0.1, late_s=0.03, twice=0.1), drawn=[0.5, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5])
    for number in range(3):  # late; twice; as it should
        one.offer(0.01 * number, bytes(1 + number))
    assert comes_out(one) == [(0.03, 2), (0.03, 2), (0.04, 3), (0.05, 1)]
    assert one.traffic == Traffic(packets=4, bytes=8)


def test_a_cut_loses_what_is_on_the_line_and_what_comes_until_it_heals() -> None:
    one = line(SLOW)
    one.offer(0.0, KILO)
    one.reshape(Shape(cut=True))
    one.offer(0.001, KILO)
    assert one.next_due is None
    one.reshape(SLOW)
    one.offer(0.002, KILO)
    assert comes_out(one) == [(0.023, 1000)]
    assert one.traffic == Traffic(packets=1, bytes=1000, lost=2)


def test_a_shorter_delay_lets_no_packet_overtake() -> None:
    one = line(Shape(delay_s=0.1))
    one.offer(0.0, bytes(1))
    one.reshape(Shape(delay_s=0.01))
    one.offer(0.0, bytes(2))
    one.offer(0.2, bytes(3))
    assert comes_out(one) == [(0.1, 1), (0.1, 2), (0.21, 3)]


SHAPES = st.builds(
    Shape,
    delay_s=st.sampled_from([0.0, 0.001, 0.02]),
    rate_bps=st.sampled_from([None, 1e6, 8e6]),
    loss=st.sampled_from([0.0, 0.3]),
    cut=st.booleans(),
    buffer_s=st.sampled_from([0.0, 0.005]),
)


@given(st.lists(st.tuples(st.floats(0, 0.01), st.one_of(SHAPES, st.just("packet"))), max_size=60), st.randoms())
def test_every_packet_ends_once_and_none_overtakes(
    steps: list[tuple[float, Shape | str]], chance: random.Random
) -> None:
    one = Line(Shape(), draw=chance.random)
    now, offered, came = 0.0, 0, []
    for wait, step in steps:
        now += wait
        came += list(one.due(now))
        if isinstance(step, Shape):
            one.reshape(step)
        else:
            one.offer(now, offered.to_bytes(4, "big"))
            offered += 1
    came += list(one.due(float("inf")))
    assert came == sorted(came)
    traffic = one.traffic
    assert (traffic.packets, traffic.bytes) == (len(came), 4 * len(came))
    assert traffic.packets + traffic.lost + traffic.overflowed == offered
