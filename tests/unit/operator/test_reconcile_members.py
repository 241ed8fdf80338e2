"""Reconciles of a job with a pool or its trainer in a member: what the member is told, in which order, and what the deletion waits for."""

import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import pytest

from streamrl import keys, names
from streamrl.clusters import Exposure, Trainers
from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters.member import MemberWork
from streamrl_operator.clusters.registry import Members
from streamrl_operator.events import Events
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import CONFIG_MAP, POD, RLJOB, STATEFUL_SET, Kind
from streamrl_operator.planning.certificates import Lives
from streamrl_operator.planning.values import MemberView
from streamrl_operator.reconcile import Reconciler
from support.api_server import ApiServer, Doc
from support.observed_jobs import JOB, NOW, SETTINGS, job_document

LAB = "default"
VIEW = MemberView(
    cluster="east",
    cluster_uid="u-east",
    origin="u-home",
    namespace="there",
    exposure=Exposure.model_validate({"address": {"host": "192.0.2.7"}}),
)


@dataclass
class FakeMembers:
    """One member that only writes down what it is told."""

    seen: MemberView = VIEW
    there: dict[str, list[Doc]] = field(default_factory=dict)
    """By kind."""
    home: CachedCluster | None = None
    """Given: the member's caches are these."""
    told: list[MemberWork] = field(default_factory=list)
    is_known: bool = True

    def view(self, _name: str, _key: object, **_: object) -> MemberView:
        return self.seen

    def objects(self, kind: Kind, name: str, _key: object) -> list[Doc]:
        return copy.deepcopy(self.there.get(kind.kind, []) if name == "east" else [])

    def known(self, kind: Kind, name: str, key: object, of: str) -> Doc | None:
        return next((one for one in self.objects(kind, name, key) if one["metadata"]["name"] == of), None)

    def reached(self, _name: str, key: tuple[str, str]) -> tuple[CachedCluster, tuple[str, str]] | None:
        return None if self.home is None or self.seen.unreachable else (self.home, ("there", key[1]))

    def want(self, _name: str, _key: object, work: MemberWork) -> None:
        self.told.append(work)

    def forget(self, _key: object) -> None:
        self.told.clear()


@dataclass
class Home:
    """The job at home, and the one member."""

    server: ApiServer
    cluster: CachedCluster
    reconciler: Reconciler
    member: FakeMembers

    @property
    def job(self) -> Doc:
        return self.server.objects[RLJOB.path(LAB, JOB)]

    async def look(self) -> float | None:
        return (await self.reconciler.reconcile((LAB, JOB))).again_s

    def put(self, document: Doc) -> None:
        self.cluster.job_watches[""].store.put(self.server.put(RLJOB.path(LAB, JOB), document))

    def edit(self, *, metadata: Doc | None = None, **spec: Any) -> None:
        self.put(
            {**self.job, "metadata": self.job["metadata"] | (metadata or {}), "spec": {**self.job["spec"], **spec}}
        )

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(each for each in self.job["status"]["conditions"] if each["type"] == kind)
        return found["status"], found["reason"]


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    """With its pool in the member."""
    document = job_document()
    document["spec"]["generators"][0]["clusterName"] = "east"
    async with home_of(document) as made:
        yield made


@asynccontextmanager
async def home_of(document: Doc) -> AsyncIterator[Home]:
    """A job that is in a member."""
    server, seconds = ApiServer(), iter(range(0, 10**6, 30))
    document["metadata"] |= {"finalizers": [names.FINALIZER]}
    async with server.client() as client:
        clock = OperatorClock(
            now=lambda: NOW + timedelta(seconds=next(seconds)), monotonic=lambda: float(next(seconds))
        )
        cluster, member = CachedCluster(client, changed=lambda *_: None), FakeMembers()
        reconciler = Reconciler(
            cluster=cluster,
            events=Events(client=client, clock=clock, instance="test"),
            settings=replace(SETTINGS, numbers_by_proxy=True),
            lives=Lives(),
            clock=clock,
            members=cast(Members, member),
        )
        made = Home(server=server, cluster=cluster, reconciler=reconciler, member=member)
        made.put(document)
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
    home.member.told.clear()
    home.member.seen = replace(VIEW, namespace="", unreachable="it has no namespace for jobs of default")
    await home.look()
    assert home.condition("Ready") == ("False", "ClusterNotAllowed")
    assert home.member.told == []


def sent(name: str, **parts: Any) -> Doc:
    """An object of pool `sim` as a member sends it."""
    labels = {
        names.LABEL_JOB: JOB,
        names.LABEL_JOB_UID: "u-job",
        names.LABEL_POOL: "sim",
        names.LABEL_ROLE: "generator",
    }
    return {"metadata": {"name": name, "namespace": "there", "uid": f"u-{name}", "labels": labels}, **parts}


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
    await home.look()
    await home.look()
    home.member.seen = replace(VIEW, exposure=BALANCER)
    await home.look()
    assert [work.action for work in home.member.told] == ["Apply"]
    home.edit(**end)
    for _ in range(3):
        await home.look()
    assert home.member.told[-1].action == "Stop"


def stateful_set(work: MemberWork) -> Doc:
    """The one that a member is told to have."""
    (found,) = (each for each in work.objects if each["kind"] == "StatefulSet")
    return copy.deepcopy(dict(found))


def environment(stateful_set: Doc) -> dict[str, str]:
    """Of its generators."""
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


async def test_a_pool_is_scaled_down_while_its_exposure_has_no_address(home: Home) -> None:
    """Its generators go on dialling where they do."""
    home.edit(generators=[home.job["spec"]["generators"][0] | {"scaling": {"static": {"replicas": 3}}}])
    await home.look()
    await home.look()
    before = stateful_set(home.member.told[-1])
    assert before["spec"]["replicas"] == 3
    home.member.there = {"StatefulSet": [before]}
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
    assert abroad.condition("Ready") == ("False", "TrainerPending")


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
        abroad.member.there = {"Pod": [there]}
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
