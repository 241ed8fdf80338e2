"""A member cluster beside the home cluster: two real control planes, and what the charts grant the operator in each."""

import json
import secrets
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from cluster.harness import tools
from cluster.harness.api import GROUP
from cluster.harness.base import Cluster
from cluster.harness.control_plane import ControlPlane
from cluster.harness.processes import wait_until
from cluster.operators import SOON_S, Lab, Operator
from streamrl import keys
from support.chart import MEMBER_CHART, runner

_GATEWAY_API = "sigs.k8s.io/gateway-api"
_CLUSTER_INVENTORY = "sigs.k8s.io/cluster-inventory-api"
ACCOUNT, ACCOUNT_NAMESPACE = "streamrl-home", "streamrl-member"
USER = f"system:serviceaccount:{ACCOUNT_NAMESPACE}:{ACCOUNT}"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_PATHS = {"ServiceAccount": "/api/v1", "Secret": "/api/v1", "Role": _RBAC, "RoleBinding": _RBAC}
ADDRESS = {"address": {"host": "10.9.8.7", "schedulerPort": 4430, "weightsPort": 4431}}


def admit(member: Cluster, *namespaces: str, trainers: bool = False) -> Path:
    """Install the chart `streamrl-member`; a kubeconfig of its account."""
    for namespace in (ACCOUNT_NAMESPACE, *namespaces):
        member.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    with tempfile.TemporaryDirectory(prefix="streamrl-helm-") as home:
        helm = runner(Path(home), registry="")
        given = [
            "--kube-version",
            "1.34",
            "--namespace",
            ACCOUNT_NAMESPACE,
            "--set-json",
            f"namespaces={json.dumps(namespaces)}",
            "--set",
            f"trainers={json.dumps(trainers)}",
        ]
        text = helm("template", "home", str(MEMBER_CHART), *given).stdout
    for one in filter(None, YAML(typ="safe").load_all(text)):
        metadata, plural = one["metadata"], f"{one['kind'].lower()}s"
        path = f"{_PATHS[one['kind']]}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"
        member.api.patch(path, one, kind="apply", fieldManager="streamrl-tests", force="true").expect()
    return member.kubeconfig_of_account(ACCOUNT_NAMESPACE, ACCOUNT)


@dataclass
class Pair:
    """One namespace at home, one in a member, and the RLCluster that maps them."""

    lab: Lab
    there: Lab
    name: str
    kubeconfig: Path

    @classmethod
    def of(cls, lab: Lab, member: ControlPlane, *, trainers: bool = False) -> "Pair":
        """A namespace of its own in the member, and an RLCluster of its own. `trainers`: they may be there."""
        suffix = secrets.token_hex(3)
        there = Lab(member, f"{lab.namespace[:40]}-there-{suffix}")
        lab.members += [there] if trainers else []
        return cls(
            lab=lab, there=there, name=f"east-{suffix}", kubeconfig=admit(member, there.namespace, trainers=trainers)
        )

    @property
    def path(self) -> str:
        """Of the RLCluster."""
        return f"{GROUP}/rlclusters/{self.name}"

    def join(self, *, hub: str = "", exposure: Mapping[str, Any] = ADDRESS, text: str = "", **spec: Any) -> None:
        """Make the Secret and the RLCluster. `hub`: another namespace than the test's is mapped. `spec` may name another source."""
        self.credentials(text or self.kubeconfig.read_text())
        body = {
            "apiVersion": "streamrl.io/v1alpha1",
            "kind": "RLCluster",
            "metadata": {"name": self.name},
            "spec": {
                "source": {"kubeconfigSecretName": self.name},
                "namespaces": [{"hub": hub or self.lab.namespace, "member": self.there.namespace}],
                "exposure": exposure,
                **spec,
            },
        }
        self.lab.cluster.api.create(f"{GROUP}/rlclusters", body).expect()

    def credentials(self, text: str) -> None:
        """Write the kubeconfig's Secret."""
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.name},
            "stringData": {"kubeconfig": text},
        }
        path = self.lab.path("secrets", self.name)
        self.lab.cluster.api.patch(path, body, kind="apply", fieldManager="tests", force="true").expect()

    def condition(self, kind: str) -> dict[str, Any]:
        """Of the RLCluster."""
        status = self.lab.cluster.api.get(self.path).expect().get("status", {})
        return next((each for each in status.get("conditions", []) if each["type"] == kind), {})

    def wait_connected(self, operator: Operator, status: str = "True", *, deadline_s: float = SOON_S) -> None:
        """Until it is, or (False) is not."""
        self.lab.wait(
            lambda: self.condition("Connected").get("status") == status,
            f"Connected {status}",
            operator,
            deadline_s=deadline_s,
        )

    def leave(self) -> None:
        """Delete the RLCluster, whatever waits for it."""
        self.lab.cluster.api.patch(self.path, {"metadata": {"finalizers": None}})
        self.lab.cluster.api.delete(self.path)


def install_gateway_api(cluster: Cluster) -> None:
    """TLSRoute, as Gateway API's module has it."""
    file = "config/crd/standard/gateway.networking.k8s.io_tlsroutes.yaml"
    _install_definition(cluster, "gateway-api", _GATEWAY_API, file, served="gateway.networking.k8s.io/v1/tlsroutes")


def install_cluster_profiles(cluster: Cluster) -> None:
    """ClusterProfile, as the inventory's module has it."""
    file = "config/crd/bases/multicluster.x-k8s.io_clusterprofiles.yaml"
    served = "multicluster.x-k8s.io/v1alpha1/clusterprofiles"
    _install_definition(cluster, "cluster-inventory", _CLUSTER_INVENTORY, file, served=served)


def _install_definition(cluster: Cluster, folder: str, module: str, file: str, *, served: str) -> None:
    where = tools.GO / folder
    for command in (("mod", "download"), ("list", "-m", "-f", "{{.Dir}}", module)):
        done = subprocess.run(("go", *command), cwd=where, capture_output=True, text=True, check=True, timeout=SOON_S)
    body = YAML(typ="safe", pure=True).load(Path(done.stdout.strip(), file).read_text())
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
    cluster.api.patch(path, body, kind="apply", fieldManager="streamrl-tests", force="true").expect()
    wait_until(lambda: cluster.api.get(f"/apis/{served}").ok, what=f"{served} to be served", deadline_s=SOON_S)


def operator_with_members(home: ControlPlane, namespace: str, **environ: str) -> Operator:
    """An operator that follows RLClusters."""
    return Operator(home, namespace, chart={"clusters__enabled": "true"}, **{keys.ENV_CLUSTERS: "true"}, **environ)


MADE_THERE = (
    "serviceaccounts",
    "configmaps",
    "secrets",
    "services",
    "networkpolicies",
    "poddisruptionbudgets",
    "statefulsets",
)
"""Kinds that the operator makes for a job in a member."""


def made_there(member: Lab, job: str) -> dict[str, set[str]]:
    """Names of what a member has of a job, by kind."""
    return {plural: _of_job(member, plural, job) for plural in MADE_THERE}


def _of_job(member: Lab, plural: str, job: str) -> set[str]:
    found = (each["metadata"] for each in member.list(plural))
    return {one["name"] for one in found if one.get("labels", {}).get("streamrl.io/job") == job}


def wait_gone(member: Lab, job: str, operator: Operator) -> None:
    """Until the member has nothing of a job."""
    wait_until(
        lambda: not any(_of_job(member, plural, job) for plural in (*MADE_THERE, "pods")),
        what=f"nothing of {job} in the member",
        deadline_s=SOON_S,
        log=operator.log,
    )
