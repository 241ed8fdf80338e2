"""The Lease: who may take it, what is written, what others' clocks may say. Tables; `tests/cluster/test_operator.py` has the real one."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from streamrl_operator.kube.answers import NotFoundError, UnavailableError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.kinds import Kind
from streamrl_operator.leader import (
    Leader,
    LeaseLostError,
    LeaseSettings,
    ObservedLease,
    held,
    may_take,
    observed_lease,
    unled,
)

ME, OTHER = "me_1", "other_2"
MOMENT = "2026-01-01T00:00:00.000000Z"


def seen(holder: str, *, since_s: float = 100.0) -> ObservedLease:
    """A Lease of 15 s."""
    return ObservedLease(version="7", holder=holder, lease_s=15.0, since_s=since_s)


@pytest.mark.parametrize(
    ("sighting", "now_s", "free"),
    [
        (seen(""), 100.0, True),
        (seen(ME), 100.0, True),
        (seen(OTHER), 100.0, False),
        (seen(OTHER), 114.9, False),
        (seen(OTHER), 115.0, True),
        (seen(OTHER, since_s=110.0), 120.0, False),
    ],
)
def test_who_may_take_it(sighting: ObservedLease, now_s: float, *, free: bool) -> None:
    assert may_take(sighting, me=ME, now_s=now_s) == free


@pytest.mark.parametrize(
    ("sighting", "problem", "said"),
    [
        (None, "", "nobody leads: waits for the Lease"),
        (None, "403 Forbidden", "nobody leads: 403 Forbidden"),
        (seen(""), "", "nobody leads: waits for the Lease"),
        (seen(OTHER), "", ""),
        (seen(OTHER), "no answer", ""),
        (seen(OTHER, since_s=85.0), "no answer", "nobody leads: no answer"),
    ],
)
def test_whether_somebody_leads(sighting: ObservedLease | None, problem: str, said: str) -> None:
    assert unled(sighting, problem=problem, now_s=100.0) == said


def lease(version: str, **spec: Any) -> dict[str, Any]:
    """As the API server has it."""
    return {"metadata": {"name": "l", "namespace": "n", "resourceVersion": version}, "spec": spec}


def test_age_counts_from_the_last_change_that_we_saw() -> None:
    first = observed_lease(
        lease("7", holderIdentity=OTHER, leaseDurationSeconds=15, renewTime=MOMENT), None, now_s=100.0
    )
    assert first == seen(OTHER)
    assert observed_lease(lease("7", holderIdentity=OTHER, leaseDurationSeconds=15), first, now_s=110.0) is first
    renewed = observed_lease(lease("8", holderIdentity=OTHER, leaseDurationSeconds=15), first, now_s=110.0)
    assert renewed.since_s == 110.0  # whatever renewTime says: it is another machine's clock


@pytest.mark.parametrize(
    ("before", "me", "lease_s", "written"),
    [
        ({}, ME, 15.0, (ME, 15, MOMENT, 1)),
        ({"holderIdentity": ME, "acquireTime": "before", "leaseTransitions": 3}, ME, 15.0, (ME, 15, "before", 3)),
        ({"holderIdentity": OTHER, "acquireTime": "before", "leaseTransitions": 3}, ME, 15.0, (ME, 15, MOMENT, 4)),
        ({"holderIdentity": ME, "leaseTransitions": 4}, "", 1.0, ("", 1, MOMENT, 4)),
        ({}, ME, 0.4, (ME, 1, MOMENT, 1)),  # whole seconds
    ],
    ids=["new", "renewed", "taken over", "given back", "short"],
)
def test_what_is_written(before: dict[str, Any], me: str, lease_s: float, written: tuple[str, int, str, int]) -> None:
    made = held(lease("7", **before), me=me, lease_s=lease_s, moment=MOMENT)
    names = ("holderIdentity", "leaseDurationSeconds", "acquireTime", "leaseTransitions")
    assert tuple(made["spec"][name] for name in names) == written
    assert made["spec"]["renewTime"] == MOMENT
    assert made["metadata"]["resourceVersion"] == "7"  # so that of two who write, one is refused


def test_the_holder_gives_up_before_another_may_begin() -> None:
    lease_settings = LeaseSettings()
    assert lease_settings.retry_s < lease_settings.renew_s < lease_settings.lease_s


class SlowAnswers:
    """An API server whose answers come late, on a clock of its own: each write is done at once, its answer takes `late_s`."""

    def __init__(self, *, late_s: float) -> None:
        self.now_s = 0.0
        self.written_s = 0.0
        self._late_s = late_s
        self._version = 0
        self.works = True

    def monotonic(self) -> float:
        return self.now_s

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    async def get(self, kind: Kind, *, namespace: str, name: str) -> dict[str, Any]:
        raise NotFoundError("get", status=404, reason="NotFound", message="")

    async def create(self, kind: Kind, obj: Mapping[str, Any]) -> dict[str, Any]:
        if not self.works:
            self.now_s += 1.0
            raise UnavailableError("create", status=0, reason="Unreachable", message="")
        self.written_s = self.now_s
        self.now_s += self._late_s
        self._version += 1
        return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self._version)}}

    replace = create


async def test_it_gives_up_before_another_may_begin_however_late_answers_come() -> None:
    api = SlowAnswers(late_s=8.0)
    lease_settings = LeaseSettings(lease_s=15.0, renew_s=10.0, retry_s=0.001)
    leader = Leader(
        client=cast("Client", api),
        namespace="n",
        name="l",
        me=ME,
        lease_settings=lease_settings,
        clock=cast(Any, api),
    )
    stopped_s: list[float] = []
    leader.leading = lambda leads: None if leads else stopped_s.append(api.now_s)

    async def work() -> None:
        api.works = False
        await asyncio.Event().wait()

    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(leader.lead(work), 120.0)
    assert stopped_s[0] < api.written_s + lease_settings.lease_s


class StarvedHolder(SlowAnswers):
    """Its process stands still until its time is almost over; then an answer takes a third of a second, as on a busy machine."""

    def __init__(self) -> None:
        super().__init__(late_s=0.0)

    async def replace(self, kind: Kind, obj: Mapping[str, Any]) -> dict[str, Any]:
        await _turn(0.3)
        return await self.create(kind, obj)


async def test_a_starved_holder_keeps_a_lease_that_nobody_has_taken() -> None:
    api = StarvedHolder()
    lease_settings = LeaseSettings(lease_s=15.0, renew_s=10.0, retry_s=2.0)
    leader = Leader(
        client=cast("Client", api), namespace="n", name="l", me=ME, lease_settings=lease_settings, clock=cast(Any, api)
    )

    async def work() -> None:
        api.now_s += 12.0
        while api.written_s == 0.0:
            await _turn()

    await asyncio.wait_for(leader.lead(work), 60.0)
    assert api.written_s == 12.0


async def _turn(seconds: float = 0.05) -> None:
    loop, come = asyncio.get_running_loop(), asyncio.Event()
    loop.call_later(seconds, come.set)
    await come.wait()
