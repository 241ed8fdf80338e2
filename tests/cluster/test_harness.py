"""The harness itself: it leaves nothing, and its control plane can be stopped, asked and shared out by role."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cluster.harness import reaper
from cluster.harness.api import Api
from cluster.harness.base import Cluster
from cluster.harness.control_plane import ControlPlane
from cluster.harness.processes import wait_until

TESTS = Path(__file__).parents[1]
SOON_S = 120.0
"""A second on an idle machine."""
OWNER = """
import signal
from cluster.harness.control_plane import ControlPlane
plane = ControlPlane()
print(plane.mark, plane.folder, flush=True)
signal.pause()
"""


def test_nothing_is_left_of_a_killed_owner(control_plane: Cluster) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(TESTS)}
    )
    assert owner.stdout is not None
    mark, folder = owner.stdout.readline().split()
    assert len(reaper.marked(mark)) == 3
    assert Path(folder, "etcd").is_dir()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not reaper.marked(mark), what="the end of a killed owner's processes", deadline_s=SOON_S)
    wait_until(lambda: not Path(folder).exists(), what="the end of its folder", deadline_s=SOON_S)


def test_the_api_server_comes_back_with_what_it_knew(own_control_plane: ControlPlane, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    own_control_plane.api.create(path, {"metadata": {"name": "kept"}, "data": {"a": "1"}}).expect()
    with own_control_plane.without_apiserver():
        assert own_control_plane.servers["kube-apiserver"].pid is None
        with pytest.raises(httpx.TransportError):
            own_control_plane.api.get(path)
    assert own_control_plane.api.get(f"{path}/kept").expect()["data"] == {"a": "1"}


def test_users_and_accounts_have_their_own_rights(own_control_plane: ControlPlane, namespace: str) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    with Api(own_control_plane.kubeconfig_for("jane", ("team-a",))) as jane:
        assert jane.get(pods).code == 403
        own_control_plane.kubectl(
            "create", "rolebinding", "view", "--clusterrole=view", "--group=team-a", "-n", namespace
        )
        wait_until(lambda: jane.get(pods).ok, what="jane's role", deadline_s=SOON_S)
    own_control_plane.kubectl("create", "serviceaccount", "robot", "-n", namespace)
    with Api(own_control_plane.kubeconfig_of_account(namespace, "robot")) as robot:
        assert robot.get(pods).code == 403
    used = {(use.verb, use.resource, use.code) for use in own_control_plane.uses("jane")}
    assert used == {("list", "pods", 403), ("list", "pods", 200)}
    assert own_control_plane.uses(f"system:serviceaccount:{namespace}:robot")[0].namespace == namespace


def test_stateful_sets_make_pods_and_pod_security_refuses(control_plane: Cluster, namespace: str) -> None:
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    pod = {"metadata": {"name": "root"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    refused = control_plane.api.create(f"/api/v1/namespaces/{namespace}/pods", pod)
    assert (refused.code, "runAsNonRoot" in refused.message) == (403, True)
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce-")
    labels = {"app": "x"}
    body = {
        "metadata": {"name": "set"},
        "spec": {
            "replicas": 2,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "serviceName": "set",
            "template": {"metadata": {"labels": labels}, "spec": pod["spec"]},
        },
    }
    control_plane.api.create(f"/apis/apps/v1/namespaces/{namespace}/statefulsets", body).expect()
    wait_until(
        lambda: len(control_plane.get("pods", "-n", namespace)["items"]) == 2,
        what="two pods of a set",
        deadline_s=SOON_S,
    )
