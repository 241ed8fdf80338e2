"""PodGroups that the operator makes, at a real API server: one that a person deletes or changes is as planned again. No scheduler is here."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness.control_plane import ControlPlane
from cluster.harness.processes import wait_until
from cluster.operators import SOON_S, Lab, Operator, refused
from streamrl import keys
from support.jobs import simulated_job

GROUP = "scheduling.x-k8s.io"
JOB = "grouped"
DEFINITION: dict[str, Any] = {
    "metadata": {
        "name": f"podgroups.{GROUP}",
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"},
    },
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups", "singular": "podgroup"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "minMember": {"type": "integer"},
                                    "scheduleTimeoutSeconds": {"type": "integer"},
                                },
                            }
                        },
                    }
                },
            }
        ],
    },
}


@pytest.fixture
def pod_groups(own_control_plane: ControlPlane) -> Iterator[None]:
    """The kind as scheduler-plugins defines it, as far as a job asks for it; that of Volcano is not there."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    own_control_plane.api.create(path, DEFINITION).expect()
    served = f"/apis/{GROUP}/v1alpha1/podgroups"
    wait_until(lambda: own_control_plane.api.get(served).ok, what="PodGroups to be served", deadline_s=SOON_S)
    yield
    own_control_plane.api.delete(f"{path}/podgroups.{GROUP}").expect()


@pytest.fixture
def operator(own_control_plane: ControlPlane, namespace: str, pod_groups: None) -> Iterator[Operator]:
    """An operator that may make PodGroups and is refused nothing."""
    chart, environ = {"gangs__enabled": "true"}, {keys.ENV_GANGS: "true"}
    made = Operator(own_control_plane, namespace, chart=chart, **environ).start()
    yield made.wait_until_leading()
    assert made.stop() == 0, made.tail()
    assert refused(own_control_plane, namespace) == set(), "asked for, and not granted by the chart (_rbac.tpl)"


def test_a_pod_group_comes_back_as_it_was(lab: Lab, operator: Operator) -> None:
    document = simulated_job()
    document["metadata"]["name"] = JOB
    document["spec"]["gang"] = {"podGroup": "SchedulerPlugins"}
    lab.create("rljobs", document)
    path = f"/apis/{GROUP}/v1alpha1/namespaces/{lab.namespace}/podgroups/{JOB}"

    def found() -> dict[str, Any]:
        answer = lab.cluster.api.get(path)
        return answer.expect() if answer.ok else {}

    lab.wait(lambda: len(lab.list("pods")) == 3, "all pods at once", operator)
    first = found()
    assert first["spec"] == {"minMember": 3}
    lab.cluster.api.delete(path).expect()
    lab.wait(
        lambda: found().get("metadata", {}).get("uid") not in (None, first["metadata"]["uid"]), "another", operator
    )
    changed = {"spec": {"minMember": 99, "scheduleTimeoutSeconds": 10}}
    lab.cluster.api.patch(path, changed).expect()
    lab.wait(lambda: found()["spec"] == {"minMember": 3, "scheduleTimeoutSeconds": 10}, "its size again", operator)
    lab.delete("rljobs", JOB)
    lab.wait(lambda: lab.get("rljobs", JOB) is None, "the job to go", operator)
    assert found() == {}
