"""What a running pull does when it hears of another address, and when nothing comes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.address import BadSourceError, Route, WeightsError
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.puller import Puller
from streamrl_workers.weights.source import BusyTime


def target(step: int, *, address: str = "trainer:1", peer: bool = False) -> pb.WeightsAvailable:
    return pb.WeightsAvailable(version=pb.VersionName(attempt=1, step=step, hash=b"h"), address=address, peer=peer)


class Pulls:
    """Pulls that never end, or fail with what a test says."""

    def __init__(self) -> None:
        self.errors: list[WeightsError] = []
        self.routes: list[Route] = []
        self.stalls: list[str] = []
        self.begun = asyncio.Event()
        self.puller = Puller(
            self._pull, wake=lambda: None, failed=lambda *_: None, stalled=lambda one: self.stalls.append(one.address)
        )

    async def _pull(self, route: Route) -> dict[str, TensorBytes]:
        self.routes.append(route)
        self.begun.set()
        if self.errors:
            raise self.errors.pop()
        await asyncio.Event().wait()
        return {}

    async def until(self, count: int) -> Route:
        while len(self.routes) < count:
            self.begun.clear()
            await self.begun.wait()
        return self.routes[-1]


@pytest.fixture
async def pulls() -> AsyncIterator[Pulls]:
    made = Pulls()
    yield made
    await made.puller.close()


async def test_the_same_version_from_elsewhere_is_the_same_pull(pulls: Pulls) -> None:
    pulls.puller.announce(target(1))
    route = await pulls.until(1)
    pulls.puller.announce(target(1, address="peer:2", peer=True))
    assert pulls.routes == [route]
    assert (route.target.address, route.target.peer) == ("peer:2", True)
    route.stalled(route.target)
    assert pulls.stalls == ["peer:2"]


async def test_where_nothing_comes_and_a_newer_one_waits_that_is_next(pulls: Pulls) -> None:
    pulls.puller.announce(target(1))
    route = await pulls.until(1)
    pulls.puller.announce(target(2, address="peer:2", peer=True))
    assert route.target.version.step == 1
    route.stalled(route.target)
    newer = await pulls.until(2)
    assert newer.target.version.step == 2
    assert pulls.stalls == []


async def test_a_source_with_bad_bytes_is_left_and_one_that_is_late_is_not(
    pulls: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl_workers.weights.puller._RETRY_FIRST_S", 0.0)
    pulls.errors = [WeightsError("late"), BadSourceError("corrupt")]
    pulls.puller.announce(target(1, address="peer:2", peer=True))
    await pulls.until(2)
    assert pulls.stalls == ["peer:2"]
    pulls.puller.announce(target(1, address="peer:3", peer=True))
    assert (await pulls.until(3)).target.address == "peer:3"
    assert pulls.stalls == ["peer:2"]


async def test_a_pulled_version_says_where_its_time_went() -> None:
    now_s, woken = 0.0, asyncio.Event()

    async def pull(route: Route) -> dict[str, TensorBytes]:
        nonlocal now_s
        busy = route.times.fetch = BusyTime(lambda: now_s)
        with busy.running():
            now_s += 1.0
            with busy.running():  # calls at once count once
                now_s += 2.0
        now_s += 4.0
        return {}

    puller = Puller(pull, wake=woken.set, failed=lambda *_: None)
    puller.announce(target(1))
    await woken.wait()
    seconds = puller.take().times.seconds()
    assert seconds == {"manifest": 0.0, "fetch": 3.0, "deltas": 0.0, "verify": 0.0, "cache": 0.0}
    await puller.close()
