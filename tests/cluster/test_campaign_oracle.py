"""What the campaigns' oracle sees and what it leaves out, and that the specs of the spec campaign are what they should be."""

import copy
import random
from typing import Any

import pytest

from cluster.campaign import specs
from cluster.campaign.lab import JOB, Objects
from cluster.campaign.mistakes import single
from cluster.campaign.normal import differences, picture
from streamrl.errors import UserErrors
from streamrl.names import FIELD_MANAGER
from streamrl.spec import RLJob, parse_job

UID, OTHER = "0b1c2d3e-0000-4000-8000-000000000001", "ffffffff-1111-4111-8111-000000000002"


def objects(
    uid: str = UID, *, namespace: str = "space-1", time: str = "2026-01-02T03:04:05Z", version: str = "7"
) -> Objects:
    job: dict[str, Any] = {
        "metadata": {"name": JOB, "namespace": namespace, "uid": uid, "resourceVersion": version, "generation": 2},
        "spec": {"suspend": False},
        "status": {"observedGeneration": 2, "startTime": time, "restarts": 1, "seenFailures": [f"{uid}/pod"]},
    }
    managed = {"manager": FIELD_MANAGER, "operation": "Apply", "time": time, "fieldsV1": {f'k:{{"uid":"{uid}"}}': {}}}
    claim = {
        "metadata": {"name": "c", "namespace": namespace, "uid": uid, "managedFields": [managed]},
        "spec": {"path": f"/store/{JOB}-{uid[:8]}"},
        "status": {"phase": "Pending"},
    }
    return {("rljobs", JOB): job, ("persistentvolumeclaims", "c"): claim}


def test_what_differs_by_nature_is_left_out() -> None:
    other = objects(OTHER, namespace="space-22", time="2027-01-02T03:04:05.123456Z", version="99")
    assert differences(picture(objects(), namespace="space-1"), picture(other, namespace="space-22")) == []


@pytest.mark.parametrize(
    ("key", "path", "value", "told"),
    [
        (("rljobs", JOB), ("status", "restarts"), 2, "rljobs/sums.status.restarts: 2 should be 1"),
        (
            ("rljobs", JOB),
            ("status", "observedGeneration"),
            1,
            'rljobs/sums.status.observedGeneration: 1 should be "current"',
        ),
        (("rljobs", JOB), ("spec", "more"), 1, "rljobs/sums.spec.more: is there and should not be: 1"),
        (
            ("persistentvolumeclaims", "c"),
            ("metadata", "managedFields"),
            [],
            f"persistentvolumeclaims/c.managers.{FIELD_MANAGER} Apply: is missing: ",
        ),
    ],
)
def test_all_else_is_seen(key: tuple[str, str], path: tuple[str, str], value: Any, told: str) -> None:
    changed = copy.deepcopy(objects())
    changed[key][path[0]][path[1]] = value
    (line,) = differences(picture(changed, namespace="space-1"), picture(objects(), namespace="space-1"))
    assert line.startswith(told)
    assert differences(picture({}, namespace="x"), picture(objects(), namespace="space-1"))


def test_what_a_story_forgives_is_that_field_alone() -> None:
    changed = copy.deepcopy(objects())
    changed["rljobs", JOB]["status"] |= {"restarts": 2, "ignoredRestarts": 3}
    ours, theirs = picture(changed, namespace="space-1"), picture(objects(), namespace="space-1")
    assert differences(ours, theirs, but=["status.ignoredRestarts"]) == ["rljobs/sums.status.restarts: 2 should be 1"]


def test_specs_are_valid_varied_and_the_same_again() -> None:
    drawn = [specs.drawn(number) for number in range(6)]
    assert drawn[3] == specs.drawn(3)
    assert len({str(pair) for pair in drawn}) == len(drawn)
    for pair in drawn:
        jobs = [parse_job(specs.document(spec)) for spec in pair]
        assert _kept(jobs[0]) == _kept(jobs[1])  # one may follow the other


def _kept(job: RLJob) -> Any:
    free = {"generators", "suspend", "failure_policy", "active_deadline_seconds", "ttl_seconds_after_finished"}
    pools = [(pool.name, pool.engine, pool.cost_per_hour) for pool in job.spec.generators]
    return job.spec.model_dump(exclude=free), pools


def test_mistakes_are_mistakes() -> None:
    made = single(specs.drawn(1)[0], random.Random(0), number=50)
    refused = 0
    for mistake in made:
        try:
            parse_job(specs.document(mistake.spec))
        except UserErrors as error:
            refused += mistake.field in str(error)
    assert refused >= 45
