"""A trainer in a member cluster and a pool at home, on two real control planes: what is made where, the end, what is left, faults.

There are no kubelets: pods stay pending.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness.control_plane import ControlPlane
from cluster.members import USER, Pair, made_there, operator_with_members, wait_gone
from cluster.operators import Lab, Operator, refused
from cluster.test_members import LATE_S
from cluster.test_members_lost import wait_lost
from cluster.test_operator_ends import tell_end
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(600)

JOB = "far"
TRAINER, NEAR = f"{JOB}-trainer", f"{JOB}-near"
NODE_PORT = {"exposure": {"nodePort": {"host": "198.51.100.7"}}}
MADE_THERE = {
    "serviceaccounts": {f"{JOB}-pods"},
    "configmaps": {f"{JOB}-job", f"{JOB}-anchor", f"{JOB}-code"},
    "secrets": {f"{JOB}-tls-scheduler", f"{JOB}-tls-trainer"},
    "services": {f"{JOB}-scheduler", f"{JOB}-exposed", TRAINER},
    "networkpolicies": {TRAINER},
    "poddisruptionbudgets": set(),
    "statefulsets": {TRAINER},
}


def job(cluster: str, **spec: Any) -> dict[str, Any]:
    """A job with its trainer in a member and its pool at home."""
    document = simulated_job()
    document["metadata"]["name"] = JOB
    (pool,) = document["spec"]["generators"]
    document["spec"]["generators"] = [{**pool, "name": "near", "scaling": {"static": {"replicas": 1}}}]
    document["spec"]["trainer"]["clusterName"] = cluster
    document["spec"]["task"]["code"] = {"configMapName": "rewards"}
    document["spec"] |= spec
    return document


@pytest.fixture
def pair(lab: Lab, own_member: ControlPlane) -> Iterator[Pair]:
    """A namespace at home and one in the member, where trainers may be."""
    made = Pair.of(lab, own_member, trainers=True)
    made.join(trainers=NODE_PORT)
    lab.create("configmaps", {"metadata": {"name": "rewards"}, "data": {"rewards.py": "..."}})
    yield made
    made.leave()


@pytest.fixture
def operator(
    own_control_plane: ControlPlane, own_member: ControlPlane, namespace: str, pair: Pair
) -> Iterator[Operator]:
    """An operator that follows RLClusters and is refused nothing, here or there."""
    made = operator_with_members(own_control_plane, namespace).start()
    yield made.wait_until_leading()
    if made.runs:
        assert made.stop() == 0, made.tail()
    assert refused(own_control_plane, namespace) == set(), "asked for, and not granted by the chart (_rbac.tpl)"
    assert refused(own_member, pair.there.namespace, user=USER) == set(), "not granted by the chart streamrl-member"


def start(pair: Pair, operator: Operator) -> None:
    """Until the member has all of the trainer, and home the pool's pod."""
    pair.wait_connected(operator)
    pair.lab.create("rljobs", job(pair.name))
    pair.lab.wait(lambda: made_there(pair.there, JOB) == MADE_THERE, "the trainer's objects", operator)
    pair.lab.wait(lambda: len(pair.there.list("pods")) == 1, "the trainer's pod", operator, deadline_s=LATE_S)
    pair.lab.wait(lambda: len(pair.lab.list("pods")) == 1, "the generator's pod", operator, deadline_s=LATE_S)


def environment(lab: Lab) -> dict[str, str]:
    """Of the generators at home."""
    container = lab.must("statefulsets", NEAR)["spec"]["template"]["spec"]["containers"][0]
    return {one["name"]: one.get("value", "") for one in container["env"]}


def claims(there: Lab) -> set[str]:
    """Names of those that are not going."""
    found = (one["metadata"] for one in there.list("persistentvolumeclaims"))
    return {one["name"] for one in found if "deletionTimestamp" not in one}


def test_a_trainer_is_made_there_its_end_is_seen_and_its_checkpoints_alone_stay(pair: Pair, operator: Operator) -> None:
    start(pair, operator)
    assert claims(pair.there) == {f"{JOB}-journal", f"{JOB}-checkpoints"}
    assert pair.there.must("configmaps", f"{JOB}-code")["data"] == {"rewards.py": "..."}
    ports = {one["name"]: one["nodePort"] for one in pair.there.must("services", f"{JOB}-exposed")["spec"]["ports"]}
    found = environment(pair.lab)
    assert found["STREAMRL_SCHEDULER_ADDRESS"] == f"198.51.100.7:{ports['grpc']}"
    assert found["STREAMRL_WEIGHTS_ADDRESS"] == f"198.51.100.7:{ports['weights']}"
    assert found["STREAMRL_CLUSTER"] == "home"
    for plural in ("statefulsets", "services", "secrets"):
        at_home = {one["metadata"]["name"] for one in pair.lab.list(plural)}
        assert not at_home & {TRAINER, f"{JOB}-scheduler", f"{JOB}-exposed"}, plural
    assert pair.lab.list("persistentvolumeclaims") == []
    pair.lab.wait_until_quiet(JOB, operator)
    tell_end(pair.there, life="lastState", of=JOB)
    pair.lab.wait(lambda: pair.lab.condition(JOB, "Succeeded").get("status") == "True", "the end", operator)
    assert pair.lab.must("rljobs", JOB)["status"]["step"] == 40
    pair.lab.wait(lambda: pair.there.must("statefulsets", TRAINER)["spec"]["replicas"] == 0, "no trainer", operator)
    pair.lab.wait(lambda: pair.there.list("pods") == pair.lab.list("pods") == [], "no pods", operator)
    pair.lab.delete("rljobs", JOB)
    pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator)
    wait_gone(pair.there, JOB, operator)
    pair.lab.wait(lambda: claims(pair.there) == {f"{JOB}-checkpoints"}, "the journal to go", operator)


def test_a_member_that_is_lost_keeps_its_trainer_and_the_job_says_since_when(
    pair: Pair, operator: Operator, own_member: ControlPlane
) -> None:
    start(pair, operator)
    before = {one["metadata"]["uid"] for one in (*pair.there.list("pods"), *pair.lab.list("pods"))}
    with own_member.without_apiserver():
        wait_lost(pair, operator)
        pair.lab.wait(
            lambda: pair.lab.condition(JOB, "Ready").get("reason") == "ClusterUnreachable", "Ready Unknown", operator
        )
        assert pair.name in pair.lab.condition(JOB, "ClusterUnreachable")["message"]
        since = pair.lab.condition(JOB, "ClusterUnreachable")["lastTransitionTime"]
        assert operator.stop() == 0
        operator.start().wait_until_leading()  # which has never seen the trainer
        operator.wait_for_looks()
        assert pair.lab.condition(JOB, "ClusterUnreachable")["lastTransitionTime"] == since
    wait_lost(pair, operator, is_lost=False)
    pair.lab.wait_until_quiet(JOB, operator)
    assert {one["metadata"]["uid"] for one in (*pair.there.list("pods"), *pair.lab.list("pods"))} == before
    assert pair.lab.must("rljobs", JOB)["status"]["restarts"] == 0


def test_a_cut_in_the_midst_of_making_or_removing_is_made_good(
    pair: Pair, operator: Operator, own_member: ControlPlane
) -> None:
    pair.wait_connected(operator)
    pair.lab.create("rljobs", job(pair.name))
    pair.lab.wait(lambda: bool(pair.there.get("configmaps", f"{JOB}-anchor")), "the anchor", operator)
    own_member.restart_apiserver(kill=True)
    pair.lab.wait(lambda: made_there(pair.there, JOB) == MADE_THERE, "the rest", operator, deadline_s=LATE_S)
    pair.lab.wait(lambda: pair.lab.get("statefulsets", NEAR) is not None, "the pool", operator, deadline_s=LATE_S)
    pair.lab.delete("rljobs", JOB)
    pair.lab.wait(
        lambda: pair.there.get("statefulsets", TRAINER) is None, "the first to go", operator, deadline_s=LATE_S
    )
    own_member.restart_apiserver(kill=True)
    pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator, deadline_s=LATE_S)
    wait_gone(pair.there, JOB, operator)
    pair.lab.wait(lambda: claims(pair.there) == {f"{JOB}-checkpoints"}, "the journal to go", operator)


def test_a_member_that_takes_no_trainers_is_named(pair: Pair, operator: Operator) -> None:
    wanted = pair.lab.cluster.api.patch(pair.path, {"spec": {"trainers": None}}).expect()["metadata"]["generation"]
    pair.lab.wait(lambda: pair.condition("Connected").get("observedGeneration") == wanted, "the change", operator)
    pair.lab.create("rljobs", job(pair.name))
    pair.lab.wait(
        lambda: "must be a cluster that takes trainers" in pair.lab.condition(JOB, "Ready").get("message", ""),
        "ClusterNotAllowed",
        operator,
    )
    assert made_there(pair.there, JOB) == {plural: set() for plural in MADE_THERE}
