"""Reconciles of a job with a pool or its trainer in a member: what the member is told, in which order, and what the deletion waits for."""

import copy
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from streamrl import keys, names
from streamrl.clusters import Exposure
from streamrl_operator.clusters.member import MemberWork
from streamrl_operator.kube.kinds import RLJOB, STATEFUL_SET
from streamrl_operator.planning.values import MemberView
from support.api_server import Doc
from support.observed_jobs import JOB, job_document
from support.reconciled_members import LAB, VIEW, Home, environment, home_of, sent


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    """With its pool in the member."""
    document = job_document()
    document["spec"]["generators"][0]["clusterName"] = "east"
    async with home_of(document) as made:
        yield made


async def test_a_member_is_told_only_after_the_status_has_it(home: Home) -> None:
    assert await home.look() == 0.0
    assert home.member.told == []
    assert home.job["status"]["clusters"] == [{"name": "east", "clusterUid": "u-east", "namespace": "there"}]
    await home.look()
    (work,) = home.member.told
    assert (work.action, work.uid) == ("Apply", "u-job")
    assert [each["metadata"]["name"] for each in work.objects if each["kind"] == "StatefulSet"] == [f"{JOB}-sim"]
    assert STATEFUL_SET.path(LAB, f"{JOB}-sim") not in home.server.objects


async def test_a_member_whose_uid_is_not_known_is_told_nothing_and_keeps_nobody_busy(home: Home) -> None:
    home.member.seen = replace(VIEW, cluster_uid="", unreachable="it was not reached yet")
    await home.look()
    assert await home.look() != 0.0
    assert home.member.told == []
    assert home.condition("ClusterUnreachable") == ("True", "ClusterUnreachable")


async def test_nothing_is_decided_before_the_members_are_listed(home: Home) -> None:
    home.member.is_known = False
    assert await home.look() == 1.0
    assert "status" not in home.job


async def test_a_place_that_has_changed_is_told_nothing(home: Home) -> None:
    await home.look()
    home.member.seen = replace(VIEW, namespace="elsewhere")
    assert await home.look() != 0.0
    assert home.member.told == []


async def test_what_runs_stays_when_the_namespace_is_not_mapped_any_more(home: Home) -> None:
    await home.look()
    await home.look()
    await home.look()
    home.member.told.clear()
    home.member.seen = replace(VIEW, namespace="", unreachable="it has no namespace for jobs of default")
    await home.look()
    assert home.condition("Ready") == ("False", "ClusterNotAllowed")
    assert home.member.told == []


async def test_what_a_member_sends_that_nobody_can_read_stops_no_job(home: Home) -> None:
    home.member.there = {
        "Pod": [
            sent(f"{JOB}-sim-0", status={"containerStatuses": "none", "conditions": 7}),
            sent(f"{JOB}-sim-1", status=["none"]),
            sent(f"{JOB}-sim-2", status={"conditions": [{"type": "Ready", "status": "True"}]}),
        ],
        "StatefulSet": [sent(f"{JOB}-sim", spec={"replicas": "many"})],
    }
    await home.look()
    await home.look()
    (pool,) = (one for one in home.job["status"]["pools"] if one["name"] == "sim")
    assert pool["ready"] == 1


async def test_a_member_has_no_say_in_what_is_no_generator(home: Home) -> None:
    word = json.dumps({"result": {"status": "succeeded", "steps": 20}})
    ended = {"name": "scheduler", "state": {"terminated": {"exitCode": 0, "message": word}}}
    liar = sent(f"{JOB}-trainer-0", status={"initContainerStatuses": [ended]})
    liar["metadata"]["labels"] |= {names.LABEL_ROLE: "trainer"}
    home.member.there = {"Pod": [liar]}
    await home.look()
    await home.look()
    assert home.condition("Succeeded") == ("False", "InProgress")


TRAINER = STATEFUL_SET.path(LAB, names.trainer(JOB))


def pods_at_home(home: Home) -> int:
    """That the trainer's StatefulSet asks for."""
    found: int = home.server.objects[TRAINER]["spec"]["replicas"]
    return found


@pytest.mark.parametrize(
    ("lacks", "reason", "said"),
    [
        ({"refused": "limits: no"}, "ClusterRefused", "cluster east: limits: no"),
        ({"unreachable": "no answer"}, "ClusterUnreachable", "cluster east: no answer"),
        ({"exposure": Exposure.model_validate({"loadBalancer": {}})}, "ExposurePending", "has no address yet"),
    ],
)
async def test_no_pod_is_made_at_home_before_the_member_has_its_part(
    home: Home, lacks: Doc, reason: str, said: str
) -> None:
    home.member.seen = replace(VIEW, **lacks)
    for _ in range(4):
        await home.look()
    assert (pods_at_home(home), home.condition("Ready")) == (0, ("False", reason))
    assert said in home.job["status"]["conditions"][0]["message"]
    assert {
        each["spec"]["replicas"] for work in home.member.told for each in work.objects if each["kind"] == "StatefulSet"
    } <= {0}
    home.member.seen = VIEW
    for _ in range(2):
        await home.look()
    assert pods_at_home(home) == 1
    home.member.seen = replace(VIEW, **lacks)
    home.edit(suspend=False)
    await home.look()
    assert pods_at_home(home) == 1, "a job that runs goes on"


async def test_a_resumed_job_waits_for_the_member_again_and_one_that_is_given_up_holds_nothing_up(home: Home) -> None:
    for _ in range(3):
        await home.look()
    for is_suspended in (True, False):
        home.edit(suspend=is_suspended)
        home.member.seen = replace(VIEW, unreachable="" if is_suspended else "no answer")
        for _ in range(3):
            await home.look()
    assert pods_at_home(home) == 0
    home.edit(metadata={"annotations": {names.ANNOTATION_ABANDON: "east"}})
    await home.look()
    assert pods_at_home(home) == 1


async def test_a_suspended_job_has_no_pods_there(home: Home) -> None:
    await home.look()
    await home.look()
    home.edit(suspend=True)
    await home.look()
    (found,) = (each for each in home.member.told[-1].objects if each["kind"] == "StatefulSet")
    assert found["spec"]["replicas"] == 0


BALANCER = Exposure.model_validate({"loadBalancer": {}})
"""Without an address: nobody gives the Service one here."""


@pytest.mark.parametrize("end", [{"suspend": True}, {"activeDeadlineSeconds": 1}], ids=["suspended", "ended"])
async def test_pods_there_end_with_the_run_also_while_nobody_knows_their_way_home(home: Home, end: Doc) -> None:
    for _ in range(3):
        await home.look()
    home.member.seen = replace(VIEW, exposure=BALANCER)
    await home.look()
    assert {work.action for work in home.member.told} == {"Apply"}
    home.edit(**end)
    for _ in range(3):
        await home.look()
    assert home.member.told[-1].action == "Stop"


def stateful_set(work: MemberWork) -> Doc:
    """The one that a member is told to have."""
    (found,) = (each for each in work.objects if each["kind"] == "StatefulSet")
    return copy.deepcopy(dict(found))


async def test_a_pool_is_scaled_down_while_its_exposure_has_no_address(home: Home) -> None:
    """Its generators go on dialling where they do."""
    home.edit(generators=[home.job["spec"]["generators"][0] | {"scaling": {"static": {"replicas": 3}}}])
    await home.look()
    await home.look()
    before = stateful_set(home.member.told[-1])
    assert before["spec"]["replicas"] == 0, "the trainer is not ready"
    before["spec"]["replicas"] = 3
    home.member.there = {"StatefulSet": [before]}
    await home.look()
    assert stateful_set(home.member.told[-1])["spec"]["replicas"] == 3
    home.member.seen = replace(VIEW, exposure=BALANCER)
    home.edit(generators=[home.job["spec"]["generators"][0] | {"scaling": {"static": {"replicas": 1}}}])
    for _ in range(3):
        await home.look()
    after = stateful_set(home.member.told[-1])
    assert after["spec"]["replicas"] == 1
    assert environment(after) == environment(before)


@pytest.mark.parametrize(
    "value",
    [None, 7, "", "192.0.2.7", "192.0.2.7:http", "192.0.2.7:0", "192.0.2.7:70000", "a b:443", "x" * 300 + ":443"],
)
async def test_an_address_that_a_member_sends_is_one_or_is_not_believed(home: Home, value: object) -> None:
    await home.look()
    await home.look()
    found = stateful_set(home.member.told[-1])
    (container,) = found["spec"]["template"]["spec"]["containers"]
    for one in container["env"]:
        if one["name"] == keys.ENV_WEIGHTS_ADDRESS:
            one["value"] = value
    home.member.there = {"StatefulSet": [found]}
    home.member.told.clear()
    home.member.seen = replace(VIEW, exposure=BALANCER)
    await home.look()
    assert home.member.told == []


async def test_a_wish_to_keep_checkpoints_is_for_the_cluster_that_has_them(home: Home) -> None:
    for _ in range(2):
        await home.look()
    gone = {"deletionTimestamp": "2026-01-01T12:00:00Z", "annotations": {names.ANNOTATION_KEEP_CHECKPOINTS: "true"}}
    home.edit(metadata=gone)
    await home.look()
    last = home.member.told[-1]
    assert (last.action, last.kept) == ("Remove", frozenset())


async def test_a_pool_that_moves_home_is_removed_there_before_the_entry_goes(home: Home) -> None:
    await home.look()
    await home.look()
    pool = {key: value for key, value in home.job["spec"]["generators"][0].items() if key != "clusterName"}
    home.edit(generators=[pool])
    await home.look()
    assert home.member.told[-1].action == "Remove"
    assert home.job["status"]["clusters"]
    home.member.seen = replace(VIEW, is_clean=True)
    await home.look()
    assert "clusters" not in home.job["status"]


@pytest.mark.parametrize(
    ("seen", "annotations", "goes"),
    [
        (VIEW, {}, False),
        (replace(VIEW, unreachable="no answer"), {}, False),
        (replace(VIEW, is_clean=True), {}, True),
        (replace(VIEW, cluster_uid="u-another"), {}, True),
        (replace(VIEW, unreachable="no answer"), {names.ANNOTATION_ABANDON: "east"}, True),
    ],
)
async def test_a_deletion_waits_for_the_member(
    home: Home, seen: MemberView, annotations: dict[str, str], goes: bool
) -> None:
    await home.look()
    await home.look()
    home.member.seen = seen
    home.edit(metadata={"deletionTimestamp": "2026-01-01T12:00:00Z", "annotations": annotations})
    for _ in range(6):
        await home.look()
    finalizers = home.server.objects.get(RLJOB.path(LAB, JOB), {"metadata": {}})["metadata"].get("finalizers") or []
    assert (names.FINALIZER not in finalizers) is goes
    assert ("Remove" in {work.action for work in home.member.told}) is not goes
