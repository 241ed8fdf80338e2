"""A job that is written without end: the operator's answers are bounded, and the other jobs are looked after meanwhile."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest

from cluster.harness.api import Api
from cluster.harness.control_plane import ControlPlane
from cluster.operators import Lab, Operator, writes
from streamrl_operator.work_queue import BURST, REFILL_S
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(600)

FLOODED, OTHER = "flooded", "other"
FLOOD_S = 30.0
LARGE = "x" * 10_000
"""Each write makes the API server send all of the job."""
WRITES_A_LOOK = 3
"""Status of the job, status of its pool, and what the change is about."""
MOST_GROWTH = 64 * 2**20
Change = Callable[[int], tuple[str, Any]]
"""Number of a write -> (subresource, merge patch)."""


def status(number: int) -> tuple[str, Any]:
    said = {"type": "Ready", "status": "True", "reason": "Flood", "message": f"{number}"}
    return "status", {"status": {"conditions": [said | {"lastTransitionTime": "2026-01-01T00:00:00Z"}], "step": number}}


def spec(number: int) -> tuple[str, Any]:
    return "", {"spec": {"ttlSecondsAfterFinished": 1000 + number}}


def annotation(number: int) -> tuple[str, Any]:
    return "", {"metadata": {"annotations": {"example.com/number": str(number)}}}


@contextmanager
def flood(lab: Lab, change: Change) -> Iterator[list[int]]:
    """Write the job in the block as fast as the API server takes it, one write after the other; the codes of its answers."""
    ends, codes = Event(), list[int]()

    def write() -> None:
        with Api(lab.cluster.kubeconfig) as api:
            while not ends.is_set():
                part, body = change(len(codes))
                codes.append(api.patch(lab.path("rljobs", FLOODED, part), body).code)

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        try:
            yield codes
        finally:
            ends.set()
        writing.result()


@pytest.mark.parametrize("change", [status, spec, annotation], ids=lambda change: change.__name__)
def test_a_job_that_is_written_without_end(
    lab: Lab, operator: Operator, own_control_plane: ControlPlane, change: Change
) -> None:
    def of_flooded() -> int:
        return sum(FLOODED in each for each in writes(own_control_plane, lab.namespace))

    def is_suspended(name: str) -> bool:
        return lab.condition(name, "Suspended").get("status") == "True"

    for name in (FLOODED, OTHER):
        job = simulated_job()
        job["metadata"] |= {"name": name, "annotations": {"example.com/large": LARGE}}
        lab.create("rljobs", job)
        lab.wait(lambda name=name: lab.condition(name, "Ready"), f"{name} to be looked at", operator)
    lab.wait_until_quiet(FLOODED, operator)
    before, resident, begun_s = of_flooded(), operator.resident_bytes, time.monotonic()
    with flood(lab, change) as codes:
        lab.patch("rljobs", OTHER, {"spec": {"suspend": True}})
        lab.wait(lambda: is_suspended(OTHER), "the other job", operator)
        lab.wait(lambda: time.monotonic() - begun_s > FLOOD_S, "the flood's time", operator)
        assert operator.leads
    bound = WRITES_A_LOOK * 2 * (BURST + (time.monotonic() - begun_s) / REFILL_S)
    made, growth = of_flooded() - before, operator.resident_bytes - resident
    assert set(codes) == {200}
    assert (made <= bound, growth < MOST_GROWTH) == (True, True), (
        f"{len(codes)} writes: {made} of {bound}, {growth} bytes"
    )
    lab.patch("rljobs", FLOODED, {"spec": {"suspend": True}})
    lab.wait(lambda: is_suspended(FLOODED), "the flooded job", operator)
