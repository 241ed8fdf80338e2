"""`streamrl logs` of pods that run on a real node."""

from pathlib import Path
from typing import Any

import pytest

from cluster.harness.api import GROUP
from cluster.harness.cluster import NodeCluster
from cluster.harness.images import WORKER_IMAGE
from cluster.harness.node import Node
from cluster.harness.pods import python_pod, wait_ended
from streamrl import names
from support.command import streamrl
from support.tree import ROOT

JOB = ROOT / "tests/corpus/good/minimal.yaml"
ENDED = {"type": "Succeeded", "status": "True", "reason": "Completed", "message": ""}


def talking_pod(name: str, namespace: str, container: str, role: str, *, lines: int) -> dict[str, Any]:
    code = f"for number in range({lines}): print('{container}', number)"
    labels = {names.LABEL_JOB: "minimal", names.LABEL_ROLE: role, names.LABEL_POOL: "fixed"}
    return python_pod(name, namespace, code, WORKER_IMAGE, labels=labels, container={"name": container})


@pytest.mark.node
def test_logs_of_real_pods(
    node_cluster: NodeCluster, node: Node, node_namespace: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ("--kubeconfig", str(node_cluster.kubeconfig), "-n", node_namespace)
    job = tmp_path / "job.yaml"
    job.write_text(JOB.read_text())
    assert streamrl(capsys, "submit", str(job), *where).code == 0
    node_cluster.apply(
        talking_pod("minimal-trainer-0", node_namespace, "trainer", "trainer", lines=30),
        talking_pod("minimal-fixed-0", node_namespace, "generator", "generator", lines=2),
    )
    for name in ("minimal-trainer-0", "minimal-fixed-0"):
        wait_ended(node.objects, node_namespace, name)
    both = streamrl(capsys, "logs", "minimal", *where).out
    assert both[:2] == ["[minimal-fixed-0] generator 0", "[minimal-fixed-0] generator 1"]
    assert both[2:] == [f"[minimal-trainer-0/trainer] trainer {number}" for number in range(10, 30)]
    assert len(streamrl(capsys, "logs", "minimal", "--role", "trainer", *where).out) == 30
    assert streamrl(capsys, "logs", "minimal", "--pool", "fixed", "--tail", "1", *where).out == both[1:2]
    path = f"{GROUP}/namespaces/{node_namespace}/rljobs/minimal/status"
    node_cluster.api.patch(
        path, {"status": {"conditions": [ENDED | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}}
    ).expect()
    followed = streamrl(capsys, "logs", "minimal", "--follow", "--role", "generators", *where)
    assert (followed.code, followed.out) == (0, both[:2])
    refused = streamrl(capsys, "logs", "minimal", "--previous", "--role", "generators", *where)
    assert "previous terminated container" in refused.err[0]
