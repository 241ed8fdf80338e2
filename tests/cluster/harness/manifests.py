"""Objects that every test cluster with a node has: CoreDNS, storage class, runtime class. Pure."""

from typing import Any

from cluster.harness.network import Addresses
from cluster.harness.node_config import HOST_PYTHON_RUNTIME

COREDNS_IMAGE = "streamrl.test/coredns:1"
STORAGE_CLASS = "streamrl-test"
PROVISIONER = "streamrl.test/hostpath"
COREFILE = """.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        ttl 1
    }
    reload
}
"""
"""One second to live: a test that moves a Service sees the new address soon. No forward: nothing outside is looked up."""
DNS_LABELS = {"k8s-app": "kube-dns"}


def cluster_objects(addresses: Addresses) -> list[dict[str, Any]]:
    """All of them, in the order in which they are applied."""
    return [*dns_objects(addresses), storage_class(), runtime_class()]


def storage_class() -> dict[str, Any]:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    }


def runtime_class() -> dict[str, Any]:
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": HOST_PYTHON_RUNTIME},
        "handler": HOST_PYTHON_RUNTIME,
    }


def _binding(name: str, role: str, subject: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [subject],
    }


def dns_objects(addresses: Addresses) -> list[dict[str, Any]]:
    """CoreDNS as other clusters have it: a pod of kube-system behind the Service kube-dns, so policies see it."""
    read = {"verbs": ["list", "watch"]}
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "system:coredns"},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], **read},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], **read},
        ],
    }
    account = {"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}
    metadata = {"name": "coredns", "namespace": "kube-system"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        role,
        _binding("system:coredns", "system:coredns", account),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"Corefile": COREFILE}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": _dns_deployment()},
        _dns_service(addresses),
    ]


def _dns_service(addresses: Addresses) -> dict[str, Any]:
    ports = [{"name": name, "port": 53, "protocol": name.upper().split("-")[-1]} for name in ("dns-udp", "dns-tcp")]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": DNS_LABELS},
        "spec": {"clusterIP": addresses.dns, "selector": DNS_LABELS, "ports": ports},
    }


def _dns_deployment() -> dict[str, Any]:
    container = {
        "name": "coredns",
        "image": COREDNS_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "securityContext": {"readOnlyRootFilesystem": True},
    }
    return {
        "replicas": 1,
        "selector": {"matchLabels": DNS_LABELS},
        "template": {
            "metadata": {"labels": DNS_LABELS},
            "spec": {
                "serviceAccountName": "coredns",
                "dnsPolicy": "Default",
                "priorityClassName": "system-cluster-critical",
                "tolerations": [{"operator": "Exists"}],
                "terminationGracePeriodSeconds": 1,
                "containers": [container],
                "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
            },
        },
    }
