"""For how long those are waited for that load what others have loaded, and how far apart they are."""

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.generators import LOAD_GRACE_S, LOAD_PATIENCE, MOST_PATIENCE, Fleet

QUICKEST_S = 10.0


def fleet(*names: str) -> Fleet:
    found = Fleet(first_lease=1)
    for name in names:
        info = pb.GeneratorHello(generator_id=name, instance="1", pool="p", slots=4)
        found.join(info, now_s=0.0)
    return found


def load(found: Fleet, *, step: int, **seconds: float) -> float:
    """All are told of the version now, and these load it after so many seconds; when it was told."""
    told_s = found.now_s
    for generator in found:
        found.announce(generator, (1, step))
    for name, took_s in sorted(seconds.items(), key=lambda item: item[1]):
        found.now_s = told_s + took_s
        generator = found.connected.get(name)
        assert generator is not None
        found.loaded(generator, (1, step))
    return told_s


def waited_s(found: Fleet, *, told_s: float) -> float:
    """Seconds from the word on, in tenths, for which "slow" is waited for."""
    for tenths in range(1000):
        found.now_s = told_s + tenths / 10
        if found.now_s >= told_s + QUICKEST_S and not found.coming():
            return tenths / 10
    raise AssertionError("for ever")


@pytest.mark.parametrize(
    ("before", "times"),
    [
        ({}, LOAD_PATIENCE),
        ({"quick": 10.0, "slow": 12.0}, LOAD_PATIENCE),
        ({"quick": 10.0, "slow": 20.0}, LOAD_PATIENCE),
        ({"quick": 10.0, "slow": 30.0}, 3.3),
        ({"quick": 1.0, "slow": 3.0}, 3.3),
        ({"quick": 10.0, "slow": 300.0}, MOST_PATIENCE),
        ({"quick": 0.0, "slow": 1.0}, MOST_PATIENCE),
        ({"quick": 10.0}, LOAD_PATIENCE),  # the other never loaded it
    ],
)
def test_as_long_as_the_slowest_took_last_time(before: dict[str, float], times: float) -> None:
    found = fleet("quick", "slow")
    if before:
        load(found, step=0, **before)
    told_s = load(found, step=1, quick=QUICKEST_S)
    assert waited_s(found, told_s=told_s) == pytest.approx(times * QUICKEST_S + LOAD_GRACE_S, abs=0.2)


def test_it_is_forgotten_when_all_are_quick_again() -> None:
    found = fleet("quick", "slow")
    load(found, step=0, quick=10.0, slow=30.0)
    load(found, step=1, quick=10.0, slow=10.0)
    told_s = load(found, step=2, quick=QUICKEST_S)
    assert waited_s(found, told_s=told_s) == pytest.approx(LOAD_PATIENCE * QUICKEST_S + LOAD_GRACE_S, abs=0.2)
