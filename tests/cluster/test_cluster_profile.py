"""A member by a ClusterProfile, on two real control planes: the inventory says the server, an administrator's Secret the token."""

from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from cluster.harness.control_plane import ControlPlane
from cluster.members import Pair, install_cluster_profiles, operator_with_members
from cluster.operators import Lab, Operator, refused

pytestmark = pytest.mark.timeout(300)

PROFILES = "/apis/multicluster.x-k8s.io/v1alpha1/namespaces/{}/clusterprofiles"


@pytest.fixture
def pair(lab: Lab, own_member: ControlPlane) -> Iterator[Pair]:
    """A namespace at home and one in the member, not joined yet."""
    install_cluster_profiles(lab.cluster)
    made = Pair.of(lab, own_member)
    yield made
    made.leave()


@pytest.fixture
def operator(own_control_plane: ControlPlane, namespace: str) -> Iterator[Operator]:
    """An operator that follows RLClusters and is refused nothing."""
    made = operator_with_members(own_control_plane, namespace).start()
    yield made.wait_until_leading()
    assert made.stop() == 0, made.tail()
    assert refused(own_control_plane, namespace) == set(), "asked for, and not granted by the chart (_rbac.tpl)"


def write_profile(pair: Pair, cluster: dict[str, Any]) -> None:
    """As a cluster manager does, in the test's namespace."""
    path = PROFILES.format(pair.lab.namespace)
    body = {
        "apiVersion": "multicluster.x-k8s.io/v1alpha1",
        "kind": "ClusterProfile",
        "metadata": {"name": pair.name},
        "spec": {"displayName": pair.name, "clusterManager": {"name": "tests"}},
    }
    given = {"fieldManager": "tests", "force": "true"}
    pair.lab.cluster.api.patch(f"{path}/{pair.name}", body, kind="apply", **given).expect()
    status = {"accessProviders": [{"name": "secretreader", "cluster": cluster}]}
    of = {key: body[key] for key in ("apiVersion", "kind", "metadata")}
    pair.lab.cluster.api.patch(f"{path}/{pair.name}/status", of | {"status": status}, kind="apply", **given).expect()


def write_token(pair: Pair, token: str) -> None:
    """The Secret that an administrator makes."""
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{pair.name}-token"},
        "stringData": {"token": token},
    }
    path = pair.lab.path("secrets", f"{pair.name}-token")
    pair.lab.cluster.api.patch(path, body, kind="apply", fieldManager="tests", force="true").expect()


def test_a_member_is_reached_by_its_profile_and_a_changed_one_is_followed(pair: Pair, operator: Operator) -> None:
    kubeconfig = YAML(typ="safe", pure=True).load(pair.kubeconfig.read_text())
    cluster = kubeconfig["clusters"][0]["cluster"]
    write_token(pair, kubeconfig["users"][0]["user"]["token"])
    named = {"name": pair.name, "namespace": pair.lab.namespace, "tokenSecretName": f"{pair.name}-token"}
    pair.join(source={"clusterProfile": named})
    pair.wait_connected(operator, "False")
    pair.lab.wait(
        lambda: "must be there" in pair.condition("Connected")["message"], "the profile to be missed", operator
    )
    write_profile(pair, cluster)
    pair.wait_connected(operator)
    pair.lab.wait(lambda: pair.condition("Authorized").get("status") == "True", "Authorized", operator)
    write_profile(pair, cluster | {"insecure-skip-tls-verify": True})
    pair.wait_connected(operator, "False")
    assert "insecure-skip-tls-verify" in pair.condition("Connected")["message"]
    write_profile(pair, cluster)
    pair.wait_connected(operator)
    write_token(pair, "another")
    pair.wait_connected(operator, "False")
    assert pair.condition("Connected")["reason"] == "Unauthorized"
