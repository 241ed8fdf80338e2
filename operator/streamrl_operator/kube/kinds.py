"""The kinds of objects that the operator has to do with, and where an API server keeps them.

Owns: API group, plural and scope of each kind. A table instead of discovery: nothing else is ever asked for, so a request less
at the start and no cache of the API server's groups on disk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamrl import API_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of object."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True
    optional: bool = False
    """Its definition may not be installed: then there are none."""

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of the collection, of an object in it, or of a part of the object."""
        group = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [group + self.api_version]
        if namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


RLJOB = Kind(api_version=API_VERSION, kind="RLJob", plural="rljobs")
GENERATOR_POOL = Kind(api_version=API_VERSION, kind="GeneratorPool", plural="generatorpools")
JOB_DEFAULTS = Kind(api_version=API_VERSION, kind="RLJobDefaults", plural="rljobdefaults")
"""Read when a job begins, never watched: a change of them reaches no job that has begun."""
SCALE = Kind(api_version="autoscaling/v1", kind="Scale", plural="")
"""What `/scale` of an object answers with."""
STATEFUL_SET = Kind(api_version="apps/v1", kind="StatefulSet", plural="statefulsets")
POD = Kind(api_version="v1", kind="Pod", plural="pods")
CLAIM = Kind(api_version="v1", kind="PersistentVolumeClaim", plural="persistentvolumeclaims")
SERVICE = Kind(api_version="v1", kind="Service", plural="services")
CONFIG_MAP = Kind(api_version="v1", kind="ConfigMap", plural="configmaps")
SECRET = Kind(api_version="v1", kind="Secret", plural="secrets")
SERVICE_ACCOUNT = Kind(api_version="v1", kind="ServiceAccount", plural="serviceaccounts")
DISRUPTION_BUDGET = Kind(api_version="policy/v1", kind="PodDisruptionBudget", plural="poddisruptionbudgets")
NETWORK_POLICY = Kind(api_version="networking.k8s.io/v1", kind="NetworkPolicy", plural="networkpolicies")
TLS_ROUTE = Kind(api_version="gateway.networking.k8s.io/v1", kind="TLSRoute", plural="tlsroutes", optional=True)
POD_GROUPS: Mapping[str, Kind] = {
    "SchedulerPlugins": Kind(
        api_version="scheduling.x-k8s.io/v1alpha1", kind="PodGroup", plural="podgroups", optional=True
    ),
    "Volcano": Kind(api_version="scheduling.volcano.sh/v1beta1", kind="PodGroup", plural="podgroups", optional=True),
}
"""By `gang.podGroup`."""
WORKLOAD = Kind(api_version="kueue.x-k8s.io/v1beta2", kind="Workload", plural="workloads", optional=True)
RESOURCE_FLAVOR = Kind(
    api_version="kueue.x-k8s.io/v1beta2", kind="ResourceFlavor", plural="resourceflavors", namespaced=False
)
WORKLOAD_PRIORITY = Kind(
    api_version="kueue.x-k8s.io/v1beta2",
    kind="WorkloadPriorityClass",
    plural="workloadpriorityclasses",
    namespaced=False,
)
PRIORITY = Kind(api_version="scheduling.k8s.io/v1", kind="PriorityClass", plural="priorityclasses", namespaced=False)
QUOTA = Kind(api_version="v1", kind="ResourceQuota", plural="resourcequotas")
"""Compared with all pods of a job before the first is made."""
CLUSTER_KINDS = {kind.kind: kind for kind in (RESOURCE_FLAVOR, WORKLOAD_PRIORITY, PRIORITY)}
"""What has no namespace and is asked for by name."""
CLUSTER = Kind(api_version=API_VERSION, kind="RLCluster", plural="rlclusters", namespaced=False)
CLUSTER_PROFILE = Kind(
    api_version="multicluster.x-k8s.io/v1alpha1", kind="ClusterProfile", plural="clusterprofiles", optional=True
)
"""Read for one RLCluster, never watched."""
NAMESPACE = Kind(api_version="v1", kind="Namespace", plural="namespaces", namespaced=False)
ACCESS_REVIEW = Kind(
    api_version="authorization.k8s.io/v1",
    kind="SelfSubjectAccessReview",
    plural="selfsubjectaccessreviews",
    namespaced=False,
)
LEASE = Kind(api_version="coordination.k8s.io/v1", kind="Lease", plural="leases")
EVENT = Kind(api_version="events.k8s.io/v1", kind="Event", plural="events")

APPLIED: tuple[Kind, ...] = (
    SERVICE_ACCOUNT,
    CONFIG_MAP,
    SECRET,
    SERVICE,
    TLS_ROUTE,
    NETWORK_POLICY,
    DISRUPTION_BUDGET,
    CLAIM,
    *POD_GROUPS.values(),
    WORKLOAD,
    GENERATOR_POOL,
    STATEFUL_SET,
)
"""What the operator makes for a job, in the order in which it is made: what a pod needs comes before the pod."""
CHILDREN: tuple[Kind, ...] = (*(kind for kind in APPLIED if not kind.optional), POD)
"""All that carries the label of a job; watched with that label. Optional kinds are too, where they are asked for."""

IN_MEMBERS: tuple[Kind, ...] = (
    SERVICE_ACCOUNT,
    CONFIG_MAP,
    SECRET,
    SERVICE,
    NETWORK_POLICY,
    DISRUPTION_BUDGET,
    STATEFUL_SET,
)
"""What the operator makes for a job in a member cluster; pods are followed there too."""

_BY_NAME = {
    (kind.api_version, kind.kind): kind
    for kind in (RLJOB, *CHILDREN, *POD_GROUPS.values(), WORKLOAD, TLS_ROUTE, LEASE, EVENT, CLUSTER)
}


def of(obj: Mapping[str, Any]) -> Kind:
    """The kind of an object that says what it is."""
    return _BY_NAME[obj["apiVersion"], obj["kind"]]
