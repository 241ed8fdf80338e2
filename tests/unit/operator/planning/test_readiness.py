"""What Ready says of numbers that cannot be read, from the reading that fails and back, and of pods that are asked for and not made."""

from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from streamrl_operator.clock import OperatorClock
from streamrl_operator.kube.client import Client
from streamrl_operator.observe import Memory, refresh
from streamrl_operator.planning import readiness
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.readiness import RESYNCS
from streamrl_operator.planning.values import JobDecision, Observed, SignalsUnreachable
from support.api_server import client_of
from support.observed_jobs import (
    JOB,
    NOW,
    SETTINGS,
    all_ready,
    carried_out,
    container,
    job_document,
    observed,
    page,
    pod,
    trainer,
    trainer_worker,
    validated,
)
from support.planned import planned

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
    for words in (ERROR, "no progress is seen", "port 8080", "numbers: Proxy", "2 of 2 generators are ready"):
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


def test_a_job_that_is_suspended_is_not_told_of_it() -> None:
    document = job_document(suspend=True)
    look = replace(silent(LONG_S), raw=document, job=validated(document), pods=())
    assert ready(decide(look, settings=SETTINGS))["reason"] == "Suspended"


# ---- pods that are asked for and not made

TRAINER, POOL = f"{JOB}-trainer", f"{JOB}-sim"
ASKED = {TRAINER: 1, POOL: 2}


def sets(asked: dict[str, int]) -> dict[str, Any]:
    template = {"spec": {"containers": [{"image": "i"}]}}
    return {name: {"spec": {"replicas": replicas, "template": template}} for name, replicas in asked.items()}


def passed(look: Observed, seconds: float, **changes: Any) -> tuple[Observed, JobDecision]:
    """The job so much later, after a look; and its verdict."""
    now = replace(look, now=look.now + timedelta(seconds=seconds), **changes)
    decision = decide(now, settings=SETTINGS)
    return carried_out(now, decision), decision


def pool_ready(decision: JobDecision) -> str:
    return str(decision.pool_statuses["sim"]["conditions"][0].get("message", ""))


def advice(stateful_set: str) -> str:
    return f"; kubectl describe statefulset {stateful_set} says why (usual are a quota, a LimitRange, a priority or runtime class"


@pytest.mark.parametrize(
    ("pods", "said", "stateful_set"),
    [
        ((), f"StatefulSet {TRAINER} has not made its pod yet", TRAINER),
        ((trainer(),), "0 of 2 generators are ready", POOL),
        (all_ready(1), "the trainer is ready; 1 of 2 generators are ready", POOL),
    ],
)
def test_told_after_half_a_minute(pods: Sequence[Any], said: str, stateful_set: str) -> None:
    now, _ = passed(observed(pods=pods, sets=sets(ASKED)), 0)
    for seconds, is_told in ((0, False), (29, False), (1, True), (1700, True)):
        now, decision = passed(now, seconds)
        assert ready(decision)["message"].startswith(said + (advice(stateful_set) if is_told else ""))
        assert (advice(POOL) in pool_ready(decision)) is is_told
    now, decision = passed(now, 1, pods=all_ready())
    assert (ready(decision)["message"], pool_ready(decision)) == (
        "the trainer is ready; 2 of 2 generators are ready",
        "2 of 2 pods are ready",
    )


@pytest.mark.parametrize("asked", [{}, dict.fromkeys(ASKED, 0)], ids=["no StatefulSets", "held up"])
def test_not_told_where_no_pods_are_asked_for_yet(asked: dict[str, int]) -> None:
    now, _ = passed(observed(sets=sets(asked)), 0)
    _, decision = passed(now, 3600)
    assert ready(decision)["message"] == f"StatefulSet {TRAINER} has not made its pod yet"
    assert pool_ready(decision) == "no pods are wanted"


def test_a_pool_that_grows_or_loses_a_pod_has_time_again() -> None:
    asked = sets(ASKED | {POOL: 4})
    now, _ = passed(observed(pods=all_ready(), sets=asked), 0)
    now, _ = passed(now, 3600)
    lost, decision = passed(now, 0, pods=all_ready(1))
    assert "describe" not in ready(decision)["message"] + pool_ready(decision)
    document = {**lost.raw, "spec": {**lost.raw["spec"], "generators": job_document()["spec"]["generators"]}}
    document["spec"]["generators"][0]["scaling"] = {"static": {"replicas": 4}}
    grown, _ = passed(lost, 20, raw=document, job=validated(document))
    grown, decision = passed(grown, 20)
    assert "describe" not in pool_ready(decision)
    _, decision = passed(grown, 10)
    assert advice(POOL) in pool_ready(decision)


def test_a_trainer_whose_pod_is_made_again_has_time() -> None:
    now, _ = passed(observed(pods=all_ready(), sets=sets(ASKED)), 0)
    now, _ = passed(now, 3600)
    now, decision = passed(now, 0, pods=all_ready()[1:])
    assert ready(decision)["message"] == f"StatefulSet {TRAINER} has not made its pod yet"
    _, decision = passed(now, 30)
    assert advice(TRAINER) in ready(decision)["message"]


@pytest.mark.parametrize(
    ("pods", "reason", "message"),
    [
        ([], "TrainerPending", "StatefulSet simulated-trainer has not made its pod yet"),
        (all_ready(), "TrainerPending", "StatefulSet simulated-trainer-workers has made 0 of its 2 pods yet"),
        (
            [*all_ready(), trainer_worker(0), trainer_worker(1, ready=False, unscheduled="no node fits")],
            "Unschedulable",
            "pod simulated-trainer-workers-1 has no node: no node fits",
        ),
        (
            [*all_ready(), trainer_worker(0), trainer_worker(1)],
            "NoGenerators",
            "no generators are asked for: scale a pool up ()",
        ),
    ],
)
def test_ready_when_all_nodes_are(pods: list[dict[str, Any]], reason: str, message: str) -> None:
    document = job_document(
        trainer={"engine": {"torch": {}}, "nodes": 3}, generators=[{"name": "sim", "engine": {"hf": {}}}]
    )
    reported = readiness.ready(observed(document, pods=pods), plans=())
    assert (reported.holds, reported.reason, reported.message) == (False, reason, message)


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
        cluster = cast(
            Any, SimpleNamespace(client=self.client, of_job=lambda *_, failed=False: [] if failed else found)
        )
        await refresh(
            cluster,
            job_document(),
            memory=self.memory,
            clock=self.clock,
            settings=replace(SETTINGS, numbers_by_proxy=True),
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

    async with client_of(serve) as client:
        yield Readings(client)


async def test_a_row_of_readings_that_fail(readings: Readings, answer: ApiResponse) -> None:
    first = await readings.after(0.0)
    assert first is not None
    assert first.since == NOW
    assert "numbers: 503 " in first.error
    assert await readings.after(10.0) == first  # too soon to be asked again
    later = await readings.after(30.0)
    assert later is not None
    assert later.since == NOW
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


def supervised(**changes: Any) -> Observed:
    """A job that learns from rows: it has no pool, and its one pod is the trainer's."""
    spec = {"algorithm": {"supervised": {}}, "generators": [], "trainer": {}}
    document = job_document(**spec, pipeline={"mode": "StreamSync", "batchGroups": 4, "steps": 20})
    document["spec"]["task"] |= {"groupSize": 1}
    del document["spec"]["task"]["rewards"]
    return observed(document, **changes)


def test_a_job_without_generators_waits_for_its_trainer_alone() -> None:
    waiting = ready(decide(supervised(), settings=SETTINGS))
    assert (waiting["status"], waiting["reason"]) == ("False", "TrainerPending")
    decision = decide(supervised(pods=[trainer()], numbers=page()), settings=SETTINGS)
    running = ready(decision)
    assert (running["status"], running["reason"]) == ("True", "Running")
    assert running["message"] == "the trainer is ready; the job has no generators"
    assert (decision.wanted.trainers, decision.wanted.generators, decision.pool_statuses) == (1, {}, {})


def test_a_job_without_generators_lives_and_ends_as_any_other() -> None:
    suspended = supervised(pods=[trainer()])
    suspended = replace(
        suspended,
        job=suspended.job.model_copy(update={"spec": suspended.job.spec.model_copy(update={"suspend": True})}),
    )
    assert not decide(suspended, settings=SETTINGS).wanted.any_pods
    objects = planned(supervised().job)
    assert {each["metadata"]["name"] for each in objects if each["kind"] == "StatefulSet"} == {"simulated-trainer"}
    assert not [each for each in objects if each["kind"] == "GeneratorPool"]
