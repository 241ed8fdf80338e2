"""Numbers that cannot be read: from the reading that fails to what is told of it, and back."""

from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl_operator.clock import OperatorClock
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_operator.observe import Memory, refresh
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.readiness import RESYNCS
from streamrl_operator.planning.values import JobDecision, Observed, SignalsUnreachable
from support.observed_jobs import (
    NOW,
    SETTINGS,
    all_ready,
    carried_out,
    container,
    generator,
    job_document,
    observed,
    page,
    pod,
    trainer,
    validated,
)

ERROR = "proxy /api/v1/x: 503 ServiceUnavailable: dial tcp 10.0.0.5:8080: connect: connection refused"
LONG_S = RESYNCS * SETTINGS.resync_s


def silent(seconds: float, **changes: Any) -> Observed:
    """A job whose pods are ready, and whose numbers could not be read for so long."""
    signals_unreachable = SignalsUnreachable(since=NOW - timedelta(seconds=seconds), error=ERROR)
    return replace(observed(**{"pods": all_ready()} | changes), signals_unreachable=signals_unreachable)


def ready(decision: JobDecision) -> dict[str, Any]:
    return next(one for one in decision.status["conditions"] if one["type"] == "Ready")


def events(decision: JobDecision) -> list[tuple[str, str]]:
    return [(event.kind, event.reason) for event in decision.events if event.reason not in ("Started", "Resumed")]


def test_it_is_told_after_a_while_once_and_until_a_good_reading() -> None:
    look = silent(LONG_S - 1)
    decision = decide(look, settings=SETTINGS)
    assert (ready(decision)["reason"], decision.unreachable) == ("Running", False)

    look = carried_out(look, decision, seconds=1)
    decision = decide(look, settings=SETTINGS)
    assert (ready(decision)["status"], ready(decision)["reason"]) == ("False", "NumbersUnreachable")
    assert events(decision) == [("Warning", "NumbersUnreachable")]
    assert decision.unreachable
    for words in (ERROR, "nor the end of the run", "port 8080", "services/proxy", "2 of 2 generators are ready"):
        assert words in ready(decision)["message"]

    look = carried_out(look, decision, seconds=30)
    again = decide(look, settings=SETTINGS)
    assert (again.status, events(again), again.unreachable) == (decision.status, [], True)

    look = replace(carried_out(look, again, seconds=30), signals_unreachable=None, numbers=page())
    after = decide(look, settings=SETTINGS)
    assert (ready(after)["reason"], events(after), after.unreachable) == ("Running", [], False)


def test_an_operator_that_is_replaced_goes_on_saying_it() -> None:
    look = carried_out(silent(LONG_S), decide(silent(LONG_S), settings=SETTINGS), seconds=5)
    decision = decide(
        replace(look, signals_unreachable=SignalsUnreachable(since=look.now, error=ERROR)), settings=SETTINGS
    )
    assert (ready(decision)["reason"], events(decision)) == ("NumbersUnreachable", [])


def test_what_else_is_awaited_is_told_with_it() -> None:
    pods = [trainer(), generator(ready=False, unscheduled="no GPU is free")]
    reported = ready(decide(silent(LONG_S, pods=pods), settings=SETTINGS))
    assert reported["reason"] == "NumbersUnreachable"
    assert "no GPU is free" in reported["message"]


def test_a_job_that_is_suspended_is_not_told_of_it() -> None:
    document = job_document(suspend=True)
    look = replace(silent(LONG_S), raw=document, job=validated(document), pods=())
    assert ready(decide(look, settings=SETTINGS))["reason"] == "Suspended"


# ---- readings


class Readings:
    """One job's readings, through a real client, of a server that answers as it is told."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.memory = Memory(uid="u-job")
        self.at_s = 0.0
        self.clock = OperatorClock(now=lambda: NOW + timedelta(seconds=self.at_s), monotonic=lambda: self.at_s)
        self.is_ready = True
        self.runs = True

    async def after(self, seconds: float) -> SignalsUnreachable | None:
        self.at_s += seconds
        status = container("scheduler", waiting=None if self.runs else "CrashLoopBackOff") | {"ready": self.is_ready}
        found = [pod("simulated-trainer-0", init=[status])]
        cluster = cast(Any, SimpleNamespace(client=self.client, of_job=lambda *_: found))
        await refresh(
            cluster,
            job_document(),
            memory=self.memory,
            clock=self.clock,
            resync_s=30.0,
            aside=nullcontext,
        )
        return self.memory.signals_unreachable


@dataclass
class ApiResponse:
    status: int = 503
    text: str = "error trying to reach service"


@pytest.fixture
def answer() -> ApiResponse:
    return ApiResponse()


@pytest.fixture
async def readings(answer: ApiResponse) -> AsyncIterator[Readings]:
    async def serve(_: web.Request) -> web.Response:
        return web.Response(status=answer.status, text=answer.text, content_type="application/json")

    application = web.Application()
    application.router.add_get("/{path:.*}", serve)
    server = TestServer(application)
    await server.start_server(shutdown_timeout=0.1)
    async with Client(RestConfig(server=str(server.make_url("")).rstrip("/"), tls=None, token="t")) as client:
        yield Readings(client)
    await server.close()


async def test_a_row_of_readings_that_fail(readings: Readings, answer: ApiResponse) -> None:
    first = await readings.after(0.0)
    assert first is not None
    assert first.since == NOW
    assert "503 Error: error trying to reach service" in first.error
    answer.text = "connection refused"
    assert await readings.after(10.0) == first  # too soon to be asked again
    later = await readings.after(30.0)
    assert later is not None
    assert (later.since, "connection refused" in later.error) == (NOW, True)
    answer.status, answer.text = 200, "{}"
    assert await readings.after(30.0) is None
    assert readings.memory.numbers == b"{}"
    answer.text = "[]"
    again = await readings.after(30.0)
    assert again is not None
    assert (again.since, "it is no JSON object" in again.error) == (readings.clock.now(), True)


async def test_a_scheduler_that_starts_or_is_away_is_no_news(readings: Readings) -> None:
    readings.is_ready = False
    assert await readings.after(0.0) is None
    readings.is_ready = True
    assert await readings.after(600.0) == SignalsUnreachable(since=readings.clock.now(), error=_error(readings))
    readings.runs = False
    assert await readings.after(1.0) is None


def _error(readings: Readings) -> str:
    assert readings.memory.signals_unreachable is not None
    return readings.memory.signals_unreachable.error
