"""A trainer of several nodes: what is planned besides the first pod, and when it is ready."""

from typing import Any

import pytest

from streamrl import keys, names
from streamrl.spec import RLJob, parse_job
from streamrl_operator.planning.objects.shared import Built
from streamrl_operator.planning.readiness import ready
from streamrl_operator.planning.values import DesiredRun
from support.observed_jobs import all_ready, job_document, observed, trainer_worker
from support.planned import find, full_document, full_job, planned

NODES = 3


def job_of_nodes() -> RLJob:
    document = full_document()
    document["spec"]["trainer"]["nodes"] = NODES
    return parse_job(document)


def containers(built: Built, kind: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in built["spec"]["template"]["spec"].get(kind, ())}


def environ(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def test_further_nodes_touch_these_objects() -> None:
    def by_name(objects: list[Built]) -> dict[tuple[str, str], Built]:
        return {(each["kind"], each["metadata"]["name"]): each for each in objects}

    one, several = by_name(planned(full_job())), by_name(planned(job_of_nodes()))
    assert set(several) - set(one) == {
        ("StatefulSet", "full-trainer-workers"),
        ("Service", "full-trainer-workers"),
        ("NetworkPolicy", "full-trainer-workers"),
        ("PodDisruptionBudget", "full-trainer-workers"),
    }
    assert {key for key in one if one[key] != several[key]} == {
        ("ConfigMap", "full-job"),
        ("PersistentVolumeClaim", "full-checkpoints"),
        ("NetworkPolicy", "full-trainer"),
        ("StatefulSet", "full-trainer"),
    }
    assert find(planned(job_of_nodes()), "PersistentVolumeClaim", "full-checkpoints")["spec"]["accessModes"] == [
        "ReadWriteMany"
    ]
    budget = find(planned(job_of_nodes()), "PodDisruptionBudget", "full-trainer-workers")
    assert budget["spec"]["minAvailable"] == NODES - 1


@pytest.mark.parametrize(("trainers", "replicas"), [(1, NODES - 1), (0, 0)])
def test_they_come_and_go_with_the_first(trainers: int, replicas: int) -> None:
    objects = planned(job_of_nodes(), wanted=DesiredRun(trainers=trainers, generators={}))
    assert find(objects, "StatefulSet", "full-trainer-workers")["spec"]["replicas"] == replicas


def test_a_further_node_has_ranks_and_nothing_else() -> None:
    built = find(planned(job_of_nodes()), "StatefulSet", "full-trainer-workers")
    spec = built["spec"]["template"]["spec"]
    assert list(containers(built, "initContainers")) == [names.CONTAINER_PREPARE]
    assert list(containers(built, "containers")) == [names.CONTAINER_TRAINER]
    claims = [one["persistentVolumeClaim"]["claimName"] for one in spec["volumes"] if "persistentVolumeClaim" in one]
    assert claims == ["full-checkpoints", "data"], "the journal is the scheduler's alone"
    secrets = [one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one]
    assert secrets == ["full-tls-trainer"]
    given = environ(containers(built, "containers")[names.CONTAINER_TRAINER])
    assert (given[keys.ENV_MASTER_ADDR], given[keys.ENV_MASTER_PORT]) == ("full-trainer-0.full-trainer", "50053")
    assert given[keys.ENV_NODE_ORDINAL] == {
        "fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}
    }
    assert keys.ENV_SCHEDULER_ADDRESS not in given
    mounted = {one["name"] for one in containers(built, "containers")["trainer"]["volumeMounts"]}
    assert mounted <= {one["name"] for one in spec["volumes"]}


def test_the_first_knows_its_own_address() -> None:
    built = find(planned(job_of_nodes()), "StatefulSet", "full-trainer")
    given = environ(containers(built, "containers")[names.CONTAINER_TRAINER])
    assert given[keys.ENV_MASTER_ADDR] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert keys.ENV_NODE_ORDINAL not in given
    alone = environ(
        containers(find(planned(full_job()), "StatefulSet", "full-trainer"), "containers")[names.CONTAINER_TRAINER]
    )
    assert keys.ENV_MASTER_ADDR not in alone


def test_only_ranks_of_the_job_reach_ranks() -> None:
    for name in ("full-trainer", "full-trainer-workers"):
        rules = find(planned(job_of_nodes()), "NetworkPolicy", name)["spec"]["ingress"]
        (open_to_ranks,) = [rule for rule in rules if "ports" not in rule]
        (peer,) = open_to_ranks["from"]
        assert peer["podSelector"]["matchLabels"] == {names.LABEL_JOB: "full"}
        (roles,) = peer["podSelector"]["matchExpressions"]
        assert (roles["key"], roles["values"]) == (names.LABEL_ROLE, ["trainer", "trainer-worker"])
    assert all(
        "ports" in rule for rule in find(planned(full_job()), "NetworkPolicy", "full-trainer")["spec"]["ingress"]
    )


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
        trainer={"engine": {"torch": {}}, "nodes": NODES}, generators=[{"name": "sim", "engine": {"hf": {}}}]
    )
    reported = ready(observed(document, pods=pods), plans=())
    assert (reported.holds, reported.reason, reported.message) == (False, reason, message)
