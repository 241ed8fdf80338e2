"""Kueue takes a running job's quota away and gives it back: on a real node, with real processes, and nothing is lost."""

from collections.abc import Iterator

import pytest

from cluster import rights
from cluster.harness import kueue
from cluster.harness.cluster import NODE_NAME, NodeCluster
from cluster.harness.node import Node
from cluster.operators import Operator
from e2e.conftest import a_stage
from e2e.jobs import Document, simulated
from e2e.release import Release
from e2e.stage import Stage
from streamrl import keys, names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

USER = "streamrl-operator-with-kueue"
QUEUE, HIGH = "team", "high"
QUOTA = {"cpu": "350m", "memory": "64Gi"}
"""For one job: its trainer's pod asks for 210m, each of its two generators for 10m."""


@pytest.fixture
def queued(node_cluster: NodeCluster, node: Node) -> Iterator[Stage]:
    """A namespace with a queue, and the operator that looks after it."""
    with Release.absent(node_cluster), a_stage(node_cluster, "queued") as stage:
        kueue.install(node_cluster)
        server = kueue.start(node_cluster)
        kueue.priority(node_cluster, HIGH, 1000)
        kueue.flavor(node_cluster, "node", nodeLabels={"kubernetes.io/hostname": NODE_NAME})
        preemption = {"withinClusterQueue": "LowerPriority"}
        kueue.queue(node_cluster, stage.namespace, QUEUE, flavor="node", quota=QUOTA, preemption=preemption)
        rights.grant(node_cluster.api, USER, home=stage.namespace, kueue__enabled="true")
        operator = Operator(node_cluster, stage.namespace, user=USER, **{keys.ENV_KUEUE: "true"})
        operator.start().wait_until_leading()
        yield stage
        stage.close()
        operator.stop()
        server.stop()


def job(name: str, *, priority: str = "", steps: int) -> Document:
    """A job in the queue."""
    document = simulated(name, steps=steps, step_s=0.5)
    labels = {names.LABEL_QUEUE: QUEUE} | ({names.LABEL_QUEUE_PRIORITY: priority} if priority else {})
    document["metadata"]["labels"] = labels
    return document


def test_a_job_that_is_preempted_in_mid_run_comes_back_and_its_journal_is_exact(queued: Stage) -> None:
    queued.apply(job("low", steps=30))
    queued.wait_step("low", 3)
    pods = queued.pods("low")
    assert {pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] for pod in pods.values()} == {NODE_NAME}
    queued.apply(job("high", priority=HIGH, steps=4))
    queued.wait_for(lambda: not queued.pods("low"), "low to be preempted", job="low")
    done = queued.steps("low")
    assert 3 <= done < 30
    queued.wait_succeeded("high")
    status = queued.wait_succeeded("low")
    assert status["step"] == 30
    assert status["restarts"] == 0
    for name in ("low", "high"):
        queued.assert_exact(name)
