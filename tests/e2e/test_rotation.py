"""Certificates change under a running job, leaves and the authority itself: nothing is lost, and who comes later is let in."""

from collections.abc import Iterator

import pytest

from cluster.harness.cluster import NodeCluster
from cluster.harness.node import Node
from cluster.operators import Operator
from e2e.conftest import a_stage
from e2e.jobs import simulated
from e2e.release import Release, kill_container
from e2e.stage import Stage
from streamrl import keys, names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

CA_S, LEAF_S, SETTLE_S = 150, 60, 20
"""The kubelet brings a changed Secret within seconds here; workers look at their files at each handshake."""
CHANGED_S = 300.0
MORE_STEPS = 10
JOB = "sim"


@pytest.fixture
def stage(node_cluster: NodeCluster, node: Node) -> Iterator[Stage]:
    lives = {
        keys.ENV_CA_LIFE_SECONDS: str(CA_S),
        keys.ENV_LEAF_LIFE_SECONDS: str(LEAF_S),
        keys.ENV_CA_SETTLE_SECONDS: str(SETTLE_S),
    }
    with Release.absent(node_cluster), a_stage(node_cluster, "rotation") as made:
        operator = Operator(node_cluster, made.namespace, **lives).start().wait_until_leading()
        yield made
        made.close()
        operator.stop()


def test_a_new_authority_under_a_running_job(stage: Stage) -> None:
    job = simulated(JOB, steps=10_000, step_s=0.5)
    job["spec"]["generators"][0]["scaling"] = {"external": {"initialReplicas": 1}}
    stage.apply(job)
    stage.wait_step(JOB, 1)
    before = authority(stage)
    stage.wait_for(lambda: authority(stage) != before, "a new authority", job=JOB, deadline_s=CHANGED_S)
    assert (stage.status(JOB)["restarts"], stage.status(JOB).get("ignoredRestarts", 0)) == (0, 0)
    assert stage.page(JOB)["reissued"] == 0
    kill_container(stage.nodes, stage.pods(JOB)[f"{names.trainer(JOB)}-0"], names.CONTAINER_SCHEDULER)
    stage.kubectl("scale", "generatorpool", names.pool(JOB, "sim"), "--replicas=2")
    stage.wait_for(lambda: len(stage.page(JOB).get("generators", ())) == 2, "both generators to be connected", job=JOB)
    stage.wait_step(JOB, stage.steps(JOB) + MORE_STEPS)
    stage.change(JOB, suspend=True)
    stage.wait_for(lambda: not stage.pods(JOB), "no pods", job=JOB)
    stage.assert_exact(JOB)
    assert stage.status(JOB)["restarts"] == 1, "the scheduler that was killed"


def authority(stage: Stage) -> str:
    """The certificate of the job's authority."""
    return str(stage.must("secrets", names.ca_secret(JOB))["data"]["ca.crt"])
