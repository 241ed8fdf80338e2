"""Reconciles of a job whose trainer is in a member: what is made where, what is read there, and what stays while the member is lost."""

import copy
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from streamrl import keys, names
from streamrl.clusters import Exposure, Trainers
from streamrl_operator.clusters.member import MemberWork
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import CONFIG_MAP, POD, STATEFUL_SET
from support.api_server import Doc
from support.observed_jobs import JOB, job_document
from support.reconciled_members import LAB, VIEW, Home, environment, home_of, sent

CODE = {"configMapName": "rewards"}


@pytest.fixture
async def abroad() -> AsyncIterator[Home]:
    """With its trainer in the member, and its pool at home."""
    document = job_document()
    document["spec"]["trainer"]["clusterName"] = "east"
    document["spec"]["task"]["code"] = CODE
    async with home_of(document) as made:
        made.member.seen = replace(VIEW, trainers=Trainers(exposure=NODE_PORT))
        code = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "rewards", "namespace": LAB},
            "data": {"a.py": "1"},
        }
        made.server.put(CONFIG_MAP.path(LAB, "rewards"), code)
        yield made


NODE_PORT = Exposure.model_validate({"nodePort": {"host": "198.51.100.7"}})
EXPOSED = {
    "metadata": {"name": f"{JOB}-exposed", "namespace": "there"},
    "spec": {"ports": [{"name": "grpc", "nodePort": 30001}, {"name": "weights", "nodePort": 30002}]},
}


def of_trainer(**status: Any) -> Doc:
    """Its first pod as a member sends it."""
    made = sent(f"{JOB}-trainer-0", status=status)
    made["metadata"]["labels"] |= {names.LABEL_ROLE: "trainer"}
    del made["metadata"]["labels"][names.LABEL_POOL]
    return made


async def test_a_trainer_is_made_in_the_member_with_copies_of_its_leaves_and_of_the_users_modules(abroad: Home) -> None:
    await abroad.look()
    assert abroad.member.told == []
    await abroad.look()
    (work,) = abroad.member.told
    made = {(each["kind"], each["metadata"]["name"]) for each in work.objects}
    assert {
        ("StatefulSet", f"{JOB}-trainer"),
        ("PersistentVolumeClaim", f"{JOB}-journal"),
        ("Service", f"{JOB}-scheduler"),
        ("Service", f"{JOB}-exposed"),
        ("Secret", f"{JOB}-tls-scheduler"),
        ("Secret", f"{JOB}-tls-trainer"),
        ("ConfigMap", f"{JOB}-code"),
    } <= made
    assert not made & {("Secret", f"{JOB}-ca"), ("Secret", f"{JOB}-tls-generator"), ("StatefulSet", f"{JOB}-sim")}
    (pod,) = (each["spec"]["template"]["spec"] for each in work.objects if each["kind"] == "StatefulSet")
    mounted = {one["configMap"]["name"] for one in pod["volumes"] if "configMap" in one}
    assert mounted == {f"{JOB}-job", f"{JOB}-code"}, "two jobs may name one ConfigMap at home"
    assert work.kept == {f"{JOB}-checkpoints"}
    assert STATEFUL_SET.path(LAB, f"{JOB}-trainer") not in abroad.server.objects
    assert abroad.condition("Ready") == ("False", "ExposurePending")
    abroad.member.there = {"Service": [EXPOSED]}
    await abroad.look()
    assert abroad.condition("Ready") == ("False", "TrainerPending")


def trainers_told(home: Home) -> list[int]:
    """Pods of the trainer in each work that the member was given."""
    return [
        each["spec"]["replicas"]
        for work in home.member.told
        for each in work.objects
        if each["metadata"]["name"] == f"{JOB}-trainer" and each["kind"] == "StatefulSet"
    ]


async def test_no_trainer_is_made_in_the_member_where_a_pool_at_home_is_refused(abroad: Home) -> None:
    abroad.server.refuse = lambda _, path, __: (422, "limits: no") if path.endswith(f"/{JOB}-sim") else None
    abroad.member.there = {"Service": [EXPOSED]}
    for _ in range(4):
        await abroad.look()
    assert abroad.condition("Ready") == ("False", "Refused")
    assert set(trainers_told(abroad)) <= {0}
    abroad.server.refuse = lambda *_: None
    for _ in range(3):
        await abroad.look()
    assert trainers_told(abroad)[-1] == 1


async def test_no_trainer_is_made_in_the_member_where_pods_at_home_are_refused(abroad: Home) -> None:
    abroad.server.refuse = lambda method, path, _: (403, "no") if (method, path) == ("POST", POD.path(LAB)) else None
    abroad.member.there = {"Service": [EXPOSED]}
    for _ in range(4):
        await abroad.look()
    assert (abroad.condition("Ready"), set(trainers_told(abroad)) <= {0}) == (("False", "Refused"), True)


async def test_a_pool_at_home_waits_for_the_members_address_and_goes_on_dialling_it(abroad: Home) -> None:
    path = STATEFUL_SET.path(LAB, f"{JOB}-sim")
    for _ in range(3):
        await abroad.look()
    assert path not in abroad.server.objects
    abroad.member.there = {"Service": [EXPOSED], "Pod": [of_trainer(conditions=[{"type": "Ready", "status": "True"}])]}
    await abroad.look()
    found = environment(abroad.server.objects[path])
    assert (found[keys.ENV_SCHEDULER_ADDRESS], found[keys.ENV_WEIGHTS_ADDRESS]) == (
        "198.51.100.7:30001",
        "198.51.100.7:30002",
    )
    for lost in ({}, {"Service": [{**EXPOSED, "spec": {"ports": "none"}}]}):
        abroad.member.there = {"Pod": abroad.member.there["Pod"], **lost}
        await abroad.look()
        assert environment(abroad.server.objects[path]) == found


@pytest.mark.parametrize("weights", [{"http": {}}, {"folder": {"url": "s3://bucket/f"}}], ids=["http", "folder"])
@pytest.mark.parametrize("is_read", [True, False], ids=["as made", "not to be read"])
async def test_a_pool_at_home_stays_while_the_member_is_lost(abroad: Home, weights: Doc, *, is_read: bool) -> None:
    path = STATEFUL_SET.path(LAB, f"{JOB}-sim")
    abroad.edit(weights=weights)
    abroad.member.there = {"Service": [EXPOSED]}
    for _ in range(2):
        await abroad.look()
    made = copy.deepcopy(abroad.server.objects[path])
    if not is_read:
        made["spec"]["template"]["spec"]["containers"][0]["env"] = []
        abroad.cluster._stores[STATEFUL_SET].put(abroad.server.put(path, made))
    abroad.member.there = {}
    abroad.member.seen = replace(abroad.member.seen, unreachable="no answer")
    for _ in range(2):
        await abroad.look()
    assert abroad.server.objects[path]["spec"] == made["spec"]
    abroad.edit(suspend=True)
    for _ in range(2):
        await abroad.look()
    assert abroad.server.objects[path]["spec"]["replicas"] == 0


async def test_numbers_are_read_in_the_member_while_it_is_reached(abroad: Home) -> None:
    running = {"name": "scheduler", "state": {"running": {}}, "ready": True}
    there = of_trainer(initContainerStatuses=[running])
    abroad.server.page = {"attempt": 1, "step": 7}
    async with abroad.server.client() as client:
        abroad.member.home = CachedCluster(client, changed=lambda *_: None)
        abroad.member.home._stores[POD].put({**there, "metadata": {**there["metadata"], "resourceVersion": "5"}})
        abroad.member.there = {"Pod": [there], "Service": [EXPOSED]}
        for _ in range(3):
            await abroad.look()
        assert abroad.job["status"]["step"] == 7
        page = f"/api/v1/namespaces/there/services/http:{JOB}-scheduler:signals/proxy/numbers"
        assert set(abroad.server.pages) == {page}
        abroad.server.pages.clear()
        abroad.member.seen = replace(abroad.member.seen, unreachable="no answer")
        for _ in range(3):
            await abroad.look()
    assert abroad.server.pages == []
    assert abroad.job["status"]["step"] == 7
    assert abroad.condition("Ready") == ("Unknown", "ClusterUnreachable")


WORD = json.dumps({"result": {"status": "succeeded", "steps": 20}})
ENDED = {"name": "scheduler", "state": {"terminated": {"exitCode": 0, "message": WORD}}}


async def test_the_end_is_the_last_word_of_the_container_there_and_its_pods_go(abroad: Home) -> None:
    for _ in range(2):
        await abroad.look()
    abroad.member.there = {"Pod": [of_trainer(initContainerStatuses=[ENDED])]}
    await abroad.look()
    assert abroad.condition("Succeeded") == ("True", "Completed")
    assert abroad.member.told[-1].action == "Stop"


async def test_a_member_beside_the_trainers_has_no_say_in_it(abroad: Home) -> None:
    abroad.edit(trainer={**abroad.job["spec"]["trainer"], "clusterName": "west"})
    abroad.edit(generators=[abroad.job["spec"]["generators"][0] | {"clusterName": "east"}])
    abroad.member.there = {"Pod": [of_trainer(initContainerStatuses=[ENDED])]}
    for _ in range(3):
        await abroad.look()
    assert abroad.condition("Succeeded") == ("False", "InProgress")


async def test_a_deletion_says_which_claims_were_to_be_kept(abroad: Home) -> None:
    for _ in range(2):
        await abroad.look()
    gone = {"deletionTimestamp": "2026-01-01T12:00:00Z", "annotations": {names.ANNOTATION_KEEP_CHECKPOINTS: "true"}}
    abroad.edit(metadata=gone)
    for _ in range(2):
        await abroad.look()
    last = abroad.member.told[-1]
    assert (last.action, last.kept) == ("Remove", {f"{JOB}-checkpoints"})


async def test_a_trainer_does_not_begin_anew_in_another_cluster_of_the_same_name(abroad: Home) -> None:
    for _ in range(2):
        await abroad.look()
    before = abroad.job["status"]["clusters"]
    abroad.member.told.clear()
    abroad.member.seen = replace(abroad.member.seen, cluster_uid="u-another", is_clean=True)
    for _ in range(3):
        await abroad.look()
    assert abroad.member.told == []
    assert abroad.job["status"]["clusters"] == before
    assert abroad.condition("Ready") == ("False", "ClusterNotAllowed")


async def test_the_users_modules_stay_as_they_were_and_nothing_is_applied_while_nobody_knows_them(abroad: Home) -> None:
    for _ in range(2):
        await abroad.look()
    begun = code_of(abroad.member.told[-1])
    changed = copy.deepcopy(abroad.server.objects[CONFIG_MAP.path(LAB, "rewards")])
    abroad.server.put(CONFIG_MAP.path(LAB, "rewards"), {**changed, "data": {"a.py": "2"}})
    abroad.member.told.clear()
    reached = abroad.member.seen
    abroad.member.seen = replace(reached, unreachable="namespace there cannot be listed (yet)")
    await abroad.look()
    assert abroad.member.told == []
    abroad.member.seen, abroad.member.there = reached, {"ConfigMap": [begun]}
    await abroad.look()
    assert code_of(abroad.member.told[-1])["data"] == {"a.py": "1"}


async def test_a_trainer_whose_modules_are_nowhere_is_made_and_waits_as_at_home(abroad: Home) -> None:
    del abroad.server.objects[CONFIG_MAP.path(LAB, "rewards")]
    for _ in range(2):
        await abroad.look()
    (work,) = abroad.member.told
    assert "StatefulSet" in {each["kind"] for each in work.objects}


def code_of(work: MemberWork) -> Doc:
    """The copy of the user's modules that a member is told to have."""
    (found,) = (each for each in work.objects if each["metadata"]["name"] == f"{JOB}-code")
    return copy.deepcopy(dict(found))
