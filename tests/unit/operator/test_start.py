"""A job that starts: nothing of it is made unless all of it can be, the trainer comes first, and what cannot start lets go."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from streamrl import names
from streamrl.clusters import Exposure
from streamrl_operator.kube.kinds import CONFIG_MAP, POD, POD_GROUPS, RLJOB, STATEFUL_SET
from streamrl_operator.planning.conditions import Aspect
from streamrl_operator.planning.start import RELEASED
from streamrl_operator.planning.termination import with_blocked_condition
from streamrl_operator.planning.values import MemberView, SignalsUnreachable
from support.api_server import Doc
from support.job_lives import conditions, edited, lived, message, reported
from support.observed_jobs import (
    JOB,
    NOW,
    all_ready,
    carried_out,
    container,
    generator,
    job_document,
    observed,
    trainer,
)
from support.reconciled_jobs import LAB, World, world_of

QUOTAS = f"/api/v1/namespaces/{LAB}/resourcequotas"
TRAINER, POOL = names.trainer(JOB), names.pool(JOB, "sim")
NO_NODE = {"ready": False, "unscheduled": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu"}
SETTINGS_REF = {"envFrom": [{"configMapRef": {"name": "settings"}}]}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with world_of() as made:
        yield made


async def said(world: World) -> str:
    """Return what Ready says after one reconcile."""
    await world.look()
    return f"{world.condition('Ready')[1]}: {world.ready_message()}"


def job(*, pod: Doc | None = None, own: Doc | None = None, **spec: Any) -> Doc:
    """`pod`: of the pool, `own`: of the trainer."""
    document = job_document(**spec)
    document["spec"]["generators"][0]["pod"] = pod or {}
    document["spec"]["trainer"]["pod"] = own or {}
    return document


async def test_a_refused_pool_holds_up_the_trainer_too(world: World) -> None:
    world.server.refuse = lambda _, path, __: (422, "limits: no") if path.endswith(f"/{POOL}") else None
    world.put(job())
    assert (await said(world)).startswith("Refused: ")
    assert "limits: no" in world.ready_message()
    assert world.sizes() == {}
    assert [
        line for line in world.server.writes if "/statefulsets/" in line or "/persistentvolumeclaims/" in line
    ] == []
    world.server.refuse = lambda *_: None
    await world.look()
    assert world.sizes() == {"trainer": 1, "sim": 0}


async def test_what_the_pods_name_must_be_there_first(world: World) -> None:
    world.put(job(pod=SETTINGS_REF))
    assert await said(world) == (
        f"ObjectMissing: ConfigMap settings: must exist before the job starts, since StatefulSet {POOL} names it; create it"
    )
    assert world.sizes() == {}
    world.server.put(CONFIG_MAP.path(LAB, "settings"), {"metadata": {"name": "settings", "namespace": LAB}})
    await world.look()
    assert world.sizes() == {"trainer": 1, "sim": 0}


async def test_pods_that_are_refused_where_their_sets_are_taken_hold_up_all(world: World) -> None:
    world.server.refuse = lambda method, path, body: (
        (403, 'violates PodSecurity "restricted"')
        if (method, path) == ("POST", POD.path(LAB)) and body["metadata"]["name"] == f"{POOL}-0"
        else None
    )
    world.put(job())
    assert "violates PodSecurity" in await said(world)
    assert world.sizes() == {}


async def test_the_quota_must_have_room_for_all_pods(world: World) -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    hard = {"requests.nvidia.com/gpu": "5", "pods": "10"}
    quota = {"metadata": {"name": "team", "namespace": LAB}, "apiVersion": "v1", "kind": "ResourceQuota"}
    world.server.put(f"{QUOTAS}/team", quota | {"status": {"hard": hard, "used": {"pods": "1"}}})
    world.put(job(pod=gpus, own=gpus))
    lack = "ResourceQuota team: requests.nvidia.com/gpu: the job asks for 6, left are 5 of 5"
    assert lack in await said(world)
    assert world.sizes() == {}
    world.server.put(f"{QUOTAS}/team", quota | {"status": {"hard": hard | {"requests.nvidia.com/gpu": "6"}}})
    await world.look()
    assert world.sizes() == {"trainer": 1, "sim": 0}


async def test_generators_are_made_once_the_trainer_is_ready_and_stay_when_it_is_not(world: World) -> None:
    world.put(job())
    await world.look()
    assert world.sizes() == {"trainer": 1, "sim": 0}
    await world.trainer_is_ready()
    await world.look()
    assert world.sizes() == {"trainer": 1, "sim": 2}
    await world.cluster.delete(world.server.objects[POD.path(LAB, f"{TRAINER}-0")])
    await world.look()
    assert world.sizes() == {"trainer": 1, "sim": 2}


async def test_a_webhook_that_knows_no_dry_run_holds_nothing_up(world: World) -> None:
    world.server.refuse_dry_runs = (400, 'admission webhook "x" does not support dry run')
    world.put(job())
    await world.look()
    assert world.sizes() == {"trainer": 1, "sim": 0}


async def test_warnings_of_the_api_server_are_a_condition(world: World) -> None:
    world.server.warnings = ['would violate PodSecurity \\"restricted:latest\\"']
    world.put(job())
    await world.look()
    await world.look()
    assert world.condition("AdmissionWarning") == ("True", "AdmissionWarnings")
    assert 'would violate PodSecurity "restricted:latest"' in [one["message"] for one in world.status["conditions"]]


VIEW = MemberView(
    cluster="east",
    cluster_uid="u-east",
    namespace="there",
    made_generation=1,
    exposure=Exposure.model_validate({"address": {"host": "192.0.2.7"}}),
)
GANGS = {
    "volcano by hand": {"annotations": {"scheduling.k8s.io/group-name": "g"}, "schedulerName": "volcano"},
    "scheduler-plugins by hand": {"labels": {"scheduling.x-k8s.io/pod-group": "g"}, "schedulerName": "s"},
}


@pytest.mark.parametrize("pod", GANGS.values(), ids=GANGS.keys())
async def test_pods_that_name_a_group_are_made_at_once(world: World, pod: Doc) -> None:
    world.put(job(pod=pod, own=pod))
    await world.look()
    assert world.sizes() == {"trainer": 1, "sim": 2}


MADE = {
    "SchedulerPlugins": ("scheduler-plugins-scheduler", "labels", "scheduling.x-k8s.io/pod-group"),
    "Volcano": ("volcano", "annotations", "scheduling.k8s.io/group-name"),
}


@pytest.mark.parametrize("pod_group", MADE)
async def test_a_pod_group_is_made_and_named_by_all_pods(world: World, pod_group: str) -> None:
    scheduler, where, key = MADE[pod_group]
    world.put(job(gang={"podGroup": pod_group}))
    await world.look()
    assert world.sizes() == {"trainer": 1, "sim": 2}
    made = world.server.objects[POD_GROUPS[pod_group].path(LAB, JOB)]
    assert made["spec"] == {"minMember": 3}
    for name in (TRAINER, POOL):
        template = world.server.objects[STATEFUL_SET.path(LAB, name)]["spec"]["template"]
        assert (template["spec"]["schedulerName"], template["metadata"][where][key]) == (scheduler, JOB)


async def test_a_pod_group_that_somebody_deletes_is_there_at_the_next_start(world: World) -> None:
    made = POD_GROUPS["Volcano"].path(LAB, JOB)
    document = job(gang={"podGroup": "Volcano"})
    world.put(document)
    await world.look()
    for is_suspended in (True, False):
        stored = world.server.objects[RLJOB.path(LAB, JOB)]
        world.put({**stored, "spec": {**stored["spec"], "suspend": is_suspended}})
        world.server.objects.pop(made, None)
        await world.look()
    assert made in world.server.objects
    assert world.sizes() == {"trainer": 1, "sim": 2}


@pytest.mark.parametrize("answer", [404, 403], ids=["no such kind", "no right to it"])
async def test_a_cluster_without_pod_groups_is_named(world: World, answer: int) -> None:
    world.server.refuse = lambda _, path, __: (answer, "no") if "/podgroups/" in path else None
    world.put(job(gang={"podGroup": "Volcano"}))
    assert (
        "gang.podGroup: the operator can have no PodGroup of scheduling.volcano.sh/v1beta1 here: install"
        in await said(world)
    )
    assert world.sizes() == {}


# ---- the deadline


def stuck(*pods: Doc, **changes: Any) -> Any:
    """A job that has waited for so long as its deadline, and what is decided then."""
    begun, _ = lived({"pods": [trainer()]}, {"pods": pods}, start=observed(spec={"startDeadlineSeconds": 60}))
    late = replace(begun, now=begun.now + timedelta(seconds=60), **changes)
    return late, reported(late)


def without_sandbox(made: Doc) -> Doc:
    """Return a pod whose node does not mount its volumes."""
    status = {**made["status"], "phase": "Pending"}
    status["conditions"] = [*status["conditions"], {"type": "PodReadyToStartContainers", "status": "False"}]
    return {**made, "status": status}


NO_IMAGE = [trainer(), generator(ready=False, containers=[container("generator", waiting="ImagePullBackOff")])]
NO_ROOM = [trainer(), generator(**NO_NODE)]


def test_an_image_that_cannot_be_pulled_lets_the_nodes_go() -> None:
    late, decision = stuck(*NO_IMAGE)
    assert (decision.wanted.trainers, decision.wanted.generators) == (0, {"sim": 0})
    assert conditions(decision)["Ready"] == ("False", RELEASED)
    assert "cannot be pulled" in message(decision, "Ready")
    assert [event.reason for event in decision.events if event.kind == "Warning"] == [RELEASED]
    after = reported(carried_out(replace(late, pods=()), decision, seconds=30))
    assert (after.wanted.trainers, conditions(after)["Ready"], after.events) == (0, ("False", RELEASED), ())
    again = reported(carried_out(replace(late, pods=()), decision, seconds=61))
    assert (again.wanted.trainers, again.wanted.generators) == (1, {"sim": 0})


WAITING = generator(ready=False, containers=[container("generator", waiting="ContainerCreating")])


@pytest.mark.parametrize(
    ("pods", "members", "said"),
    [
        ([trainer(), without_sandbox(WAITING)], {}, "waits for its volumes or its network"),
        ([trainer()], {"refused": "limits: no"}, "cluster east: limits: no"),
        ([trainer()], {"unreachable": "no answer"}, "cluster east: no answer"),
        ([trainer()], {"exposure": Exposure.model_validate({"loadBalancer": {}})}, "has no address yet"),
    ],
    ids=["volumes", "a member refuses", "a member is lost", "a member without a way home"],
)
def test_whatever_keeps_a_job_from_its_start_lets_the_nodes_go(pods: list[Doc], members: Doc, said: str) -> None:
    document = job_document(startDeadlineSeconds=60)
    if members:
        document["spec"]["generators"][0]["clusterName"] = "east"
    whole, lacking = {"east": VIEW}, {"east": replace(VIEW, **members)}
    start = observed(document, members=whole)
    begun, _ = lived({"pods": [trainer()]}, {"pods": pods, "members": lacking}, start=start)
    assert begun.raw["status"]["start"].get("stuckSince")
    decision = reported(replace(begun, now=begun.now + timedelta(seconds=60)))
    assert (decision.wanted.trainers, conditions(decision)["Ready"]) == (0, ("False", RELEASED))
    assert said in message(decision, "Ready")


def test_a_member_that_has_its_part_and_loads_its_model_has_no_deadline() -> None:
    document = job_document(startDeadlineSeconds=60)
    document["spec"]["generators"][0]["clusterName"] = "east"
    begun, _ = lived({"pods": [trainer()]}, {}, start=observed(document, members={"east": VIEW}))
    assert reported(replace(begun, now=begun.now + timedelta(hours=9))).wanted.trainers == 1


def test_what_is_in_the_way_meanwhile_makes_the_release_no_longer() -> None:
    late, decision = stuck(*NO_IMAGE)
    let_go = carried_out(replace(late, pods=()), decision, seconds=30)
    until = decision.status["start"]["releasedUntil"]
    refused = Aspect(type="Ready", holds=False, reason="Refused", message="m")
    status = with_blocked_condition(let_go.raw, refused, status=let_go.raw["status"], now=let_go.now)
    after = reported(replace(let_go, raw={**let_go.raw, "status": status}))
    assert (after.status["start"]["releasedUntil"], conditions(after)["Ready"]) == (until, ("False", RELEASED))
    assert until in message(after, "Ready")


@pytest.mark.parametrize(("older", "runs"), [("", 1), ("default/older", 0)], ids=["oldest", "younger"])
def test_where_there_is_no_room_the_younger_lets_go_first(older: str, runs: int) -> None:
    late, decision = stuck(*NO_ROOM, older_stuck=older)
    assert decision.wanted.trainers == runs
    later = reported(replace(late, now=late.now + timedelta(seconds=60)))
    assert later.wanted.trainers == 0


@pytest.mark.parametrize(
    "pods",
    [[trainer(**NO_NODE)], [trainer(ready=False, init=[container("prepare")])]],
    ids=["nothing is held", "it makes progress"],
)
def test_a_job_that_holds_nothing_or_goes_on_has_no_deadline(pods: list[Doc]) -> None:
    _, decision = stuck(*pods)
    assert decision.wanted.trainers == 1


@pytest.mark.parametrize("unread", [None, SignalsUnreachable(since=NOW - timedelta(hours=1), error="403")])
def test_a_job_that_was_ready_once_keeps_its_nodes(unread: SignalsUnreachable | None) -> None:
    begun, _ = lived(
        {"pods": all_ready(), "signals_unreachable": unread},
        {"pods": NO_IMAGE},
        start=observed(spec={"startDeadlineSeconds": 60}),
    )
    decision = reported(replace(begun, now=begun.now + timedelta(hours=9)))
    assert decision.wanted.trainers == 1


def test_suspend_begins_a_new_start() -> None:
    late, _ = stuck(*NO_ROOM)
    decision = reported(edited(late, suspend=True))
    assert "start" not in decision.status


def test_a_job_that_has_ended_is_not_stuck() -> None:
    late, _ = stuck(*NO_ROOM)
    assert "stuckSince" in late.raw["status"]["start"]
    decision = reported(edited(late, activeDeadlineSeconds=1))
    assert (conditions(decision)["Failed"][0], decision.status.get("start")) == ("True", None)


@pytest.mark.parametrize(
    "pods",
    [all_ready(), NO_ROOM, [trainer(ready=False), generator(**NO_NODE)]],
    ids=["ready", "stuck", "not ready yet"],
)
def test_a_job_of_an_operator_that_knew_no_deadline_keeps_its_pods(pods: list[Doc]) -> None:
    begun, _ = lived({"pods": pods}, start=observed(spec={"startDeadlineSeconds": 60}))
    pools = [{"name": "sim", "desired": 2, "ready": 0}]
    status = {key: value for key, value in begun.raw["status"].items() if key != "start"} | {"pools": pools}
    upgraded, _ = lived({}, {"pods": NO_ROOM}, start=replace(begun, raw={**begun.raw, "status": status}))
    decision = reported(replace(upgraded, now=upgraded.now + timedelta(hours=9)))
    assert (decision.wanted.trainers, decision.wanted.generators) == (1, {"sim": 2})


async def test_a_resumed_job_that_is_held_up_says_so_and_not_that_it_is_suspended(world: World) -> None:
    world.put(job(pod=SETTINGS_REF, suspend=True))
    await world.look()
    assert world.condition("Suspended")[0] == "True"
    stored = world.server.objects[RLJOB.path(LAB, JOB)]
    world.put({**stored, "spec": {**stored["spec"], "suspend": False}})
    await world.look()
    status = world.server.objects[RLJOB.path(LAB, JOB)]["status"]
    assert (status["state"], world.condition("Suspended")[0]) == ("ObjectMissing", "False")
