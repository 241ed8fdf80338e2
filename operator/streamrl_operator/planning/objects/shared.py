"""What every object of a job has (name, labels, owner, the hash of what we apply), and the objects that all pods share.

Those are the resolved job, an account without access, the volumes, and the NetworkPolicies: gRPC is for pods of the job alone, signals are
numbers and open to all. The signals ports have no `from`: the operator, Prometheus and, with `numbers: Proxy`, the API server read them, from wherever those are.
"""

import contextlib
import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl import API_VERSION, keys, names
from streamrl.clusters import Exposure
from streamrl.spec import RLJob
from streamrl.spec.base import is_url
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.pod import CommonMetadata
from streamrl.spec.storage import Claim
from streamrl.spec.task import AgentPool
from streamrl.status import Images
from streamrl_operator.planning.objects.job_file import canonical, job_json
from streamrl_operator.planning.pods import ROLE_GENERATOR, ROLE_TRAINER, ROLE_TRAINER_WORKER
from streamrl_operator.planning.values import DesiredRun, ExposedAddresses, PlanningSettings

Built = dict[str, Any]
"""A Kubernetes object, or a part of one, as it is applied."""

_APPLICATION = "streamrl"
_HASH_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlace:
    """Where in a member cluster the objects of a job are, and what is copied there from home."""

    cluster: str
    namespace: str
    origin: str
    """UID of the home cluster."""
    leaves: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Role, as its pods there call it -> data of the Secret with its leaf."""
    code: Mapping[str, Any] | None = None
    """The ConfigMap with the user's modules, for a trainer there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What the builders build from."""

    job: RLJob
    namespace: str
    uid: str
    wanted: DesiredRun
    settings: PlanningSettings
    resolved: Mapping[str, str] = field(default_factory=dict)
    """Files of the ConfigMap with the job as they are now."""
    defaults: str = ""
    """What is in `job` already, to be kept from when it begins."""
    exposures: Mapping[str, Exposure] = field(default_factory=dict)
    """Cluster with generators apart from the trainer -> how they reach the scheduler."""
    dials: ExposedAddresses | None = None
    """Where generators of the cluster that is planned for reach a scheduler in another one; None: it is here, or nobody knows yet."""
    place: MemberPlace | None = None
    """Given: objects are planned for there, without the owner, which is known when its anchor is."""

    @property
    def images(self) -> Images:
        """Of pods that name none."""
        return self.wanted.images or self.settings.images

    @property
    def moves_by_grpc(self) -> bool:
        """Whether it began with a release whose images know no `weights.http`. Its pods stay as they are."""
        return '"weights":{"grpc":' in self.resolved.get(keys.FILE_JOB, "")

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.job.metadata.name

    @property
    def service_account(self) -> str:
        """Name of the account of all pods."""
        given = None if self.place else self.job.spec.service_account.name  # no account there is the job's to name
        return given or names.service_account(self.name)

    @property
    def _cluster(self) -> str | None:
        """That is planned for, as a job names it."""
        return self.place.cluster if self.place else None

    @property
    def has_trainer(self) -> bool:
        """Whether the trainer is in the cluster that is planned for."""
        return self.job.spec.trainer.cluster_name == self._cluster

    def pools(self) -> list[GeneratorPool | AgentPool]:
        """Whose pods are in the cluster that is planned for; none while nobody knows where they would dial."""
        return self._here() if self.has_trainer or self.dials is not None else []

    def waiting(self) -> dict[str, int]:
        """Pools of the cluster that is planned for which `pools` leaves out -> the pods that each may have."""
        planned = self.pools()
        return {pool.name: self.wanted.generators.get(pool.name, 0) for pool in self._here() if pool not in planned}

    def _here(self) -> list[GeneratorPool | AgentPool]:
        return [pool for pool in self.job.spec.pools if pool.cluster_name == self._cluster]

    def generators(self) -> list[GeneratorPool]:
        """Those of generators."""
        return [pool for pool in self.pools() if isinstance(pool, GeneratorPool)]

    def labels(self, *, pool: str | None = None) -> dict[str, str]:
        """Labels of an object of the job."""
        labels = {
            names.LABEL_NAME: _APPLICATION,
            names.LABEL_INSTANCE: self.name,
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
            names.LABEL_JOB: self.name,
            names.LABEL_JOB_UID: self.uid,
        }
        if self.place is not None:
            labels |= {names.LABEL_CLUSTER: self.place.cluster, names.LABEL_ORIGIN: self.place.origin}
            labels |= {names.LABEL_HUB_NAMESPACE: self.namespace}
        return labels if pool is None else labels | {names.LABEL_POOL: pool}

    def selector(self, *, role: str, pool: str | None = None) -> dict[str, str]:
        """Labels by which pods are found; they cannot change in the life of a StatefulSet."""
        labels = {names.LABEL_JOB: self.name, names.LABEL_ROLE: role}
        return labels if pool is None else labels | {names.LABEL_POOL: pool}

    def object(
        self,
        api_version: str,
        kind: str,
        name: str,
        *,
        pool: str | None = None,
        owned: bool = True,
        **parts: object,
    ) -> Built:
        """An object of the job; `parts` stand beside its metadata."""
        metadata = self.metadata(name, pool=pool, owned=owned)
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts}

    def metadata(self, name: str, *, pool: str | None = None, owned: bool = True) -> Built:
        """Metadata of an object; without an owner it stays when the job is deleted."""
        namespace = self.place.namespace if self.place else self.namespace
        common = self.job.spec.common_metadata or CommonMetadata()
        metadata: Built = {"name": name, "namespace": namespace, "labels": {**common.labels, **self.labels(pool=pool)}}
        if common.annotations and self.place is None:  # there one could give an account a role, or an address a name
            metadata["annotations"] = dict(common.annotations)
        job = {"apiVersion": API_VERSION, "kind": "RLJob", "name": self.name, "uid": self.uid}
        owner = job | {"controller": True, "blockOwnerDeletion": True}
        return metadata | {"ownerReferences": [owner]} if owned and self.place is None else metadata


def with_spec_hash(built: Mapping[str, Any]) -> Built:
    """The object with the hash of all the rest of it."""
    digest = hashlib.sha256(canonical(built).encode()).hexdigest()[:_HASH_CHARACTERS]
    return annotated(built, {names.ANNOTATION_SPEC_HASH: digest})


def annotated(built: Mapping[str, Any], annotations: Mapping[str, str]) -> Built:
    """Return the object with more annotations, which go over those that it has."""
    if not annotations:
        return dict(built)
    merged = {**built["metadata"].get("annotations", {}), **annotations}
    return dict(built) | {"metadata": built["metadata"] | {"annotations": merged}}


def service_account(plan: JobPlan) -> Built:
    """The account of all pods; we bind nothing to it and mount no token."""
    built = plan.object("v1", "ServiceAccount", plan.service_account, automountServiceAccountToken=False)
    given = (
        {} if plan.place else plan.job.spec.service_account.annotations
    )  # a cloud's role is not the job's to take there
    return annotated(built, given)


def resolved_job(plan: JobPlan) -> Built:
    """The ConfigMap that every worker reads the job from, and that keeps at home what its pods were begun with."""
    there = plan.resolved.get(keys.FILE_JOB, "")
    data, images = {keys.FILE_JOB: job_json(plan.job, namespace=plan.namespace, there=there)}, plan.wanted.images
    if images is not None and plan.place is None:
        data[keys.FILE_IMAGES] = canonical(images.model_dump(by_alias=True, exclude_none=True)) + "\n"
        data |= {keys.FILE_DEFAULTS: plan.defaults} if plan.defaults else {}
    return plan.object("v1", "ConfigMap", names.resolved(plan.name), data=data)


def claims(plan: JobPlan) -> list[Built]:
    """The claims that the job does not bring along."""
    storage = plan.job.spec.storage
    made = [_claim(plan, name=names.journal_claim(plan.name), claim=storage.journal)]
    if storage.checkpoints.given_claim is None:
        shared = plan.job.spec.trainer.nodes > 1
        made.append(_claim(plan, name=names.checkpoints_claim(plan.name), claim=storage.checkpoints, shared=shared))
    return made


def kept_claims(plan: JobPlan) -> frozenset[str]:
    """Names of the claims that outlive the job: nobody owns them."""
    storage = plan.job.spec.storage
    keeps_checkpoints = plan.wanted.keeps_checkpoints or storage.checkpoints.when_deleted == "Retain"
    journal = [names.journal_claim(plan.name)] if storage.journal.when_deleted == "Retain" else []
    return frozenset([*journal, *([names.checkpoints_claim(plan.name)] if keeps_checkpoints else [])])


def _claim(plan: JobPlan, *, name: str, claim: Claim, shared: bool = False) -> Built:
    """`shared`: pods on several nodes write to it."""
    mode = "ReadWriteMany" if shared else "ReadWriteOnce"
    spec: Built = {"accessModes": [mode], "resources": {"requests": {"storage": claim.size}}}
    if claim.storage_class_name is not None:
        spec["storageClassName"] = claim.storage_class_name
    owned = name not in kept_claims(plan)
    return plan.object("v1", "PersistentVolumeClaim", name, owned=owned, spec=spec)


_PORT_DNS = 53


def policies(plan: JobPlan) -> list[Built]:
    """All NetworkPolicies, where the administrator wants them."""
    if not plan.settings.isolates_jobs:
        return []
    own = trainer_policies(plan) if plan.has_trainer else []
    return [*own, *(generators_policy(plan, pool=pool) for pool in plan.generators())]


def trainer_policies(plan: JobPlan) -> list[Built]:
    """No policy knows a pod that is in its node's network, or in another cluster, by its labels: where such pods come from or go to is not said, certificates are asked all the same.

    Of the trainer's first pod, which may go out to hubs, rewards and environments, so nothing is said of that; and of the pods of its
    further nodes, which only the trainer's other pods reach, besides signals and what generators take of their weights."""
    pods_of_job: Built = {"podSelector": {"matchLabels": {names.LABEL_JOB: plan.name}}}
    from_afar = bool(plan.job.spec.other_clusters) or any(pool.pod.host_network for pool in plan.job.spec.generators)
    ingress: list[Built] = [
        {**({} if from_afar else {"from": [pods_of_job]}), "ports": [tcp(names.PORT_GRPC), tcp(names.PORT_WEIGHTS)]},
        {"ports": [tcp(names.PORT_SIGNALS), _rank_signals(plan)]},
        *_from_generators(plan, ports=_rank_weights(plan)),
    ]
    first = names.trainer(plan.name)
    if plan.job.spec.trainer.nodes == 1:
        return [policy(plan, first, role=ROLE_TRAINER, ingress=ingress)]
    roles = {"key": names.LABEL_ROLE, "operator": "In", "values": [ROLE_TRAINER, ROLE_TRAINER_WORKER]}
    ranks = {"podSelector": {**pods_of_job["podSelector"], "matchExpressions": [roles]}}
    from_ranks: Built = {"from": [ranks]}  # on any port: collectives choose theirs as they start
    weights = _from_generators(plan, ports=_node_weights(plan))
    further = [{"ports": [_rank_signals(plan)]}, *weights, from_ranks]
    return [
        policy(plan, first, role=ROLE_TRAINER, ingress=[*ingress, from_ranks]),
        policy(plan, names.trainer_workers(plan.name), role=ROLE_TRAINER_WORKER, ingress=further),
    ]


def _rank_signals(plan: JobPlan) -> Built:
    """Of all ranks of a node."""
    several = plan.job.spec.trainer.processes_per_node - 1
    end = {"endPort": names.PORT_TRAINER_SIGNALS + several} if several else {}
    return {**tcp(names.PORT_TRAINER_SIGNALS), **end}


def _rank_weights(plan: JobPlan) -> list[Built]:
    """Return the ports of weights of a node's ranks without its first one; none with a folder, in which generators find all of them."""
    several = plan.job.spec.trainer.processes_per_node - 1
    if not several or plan.job.spec.weights.folder is not None:
        return []
    return [{**tcp(names.PORT_RANK_WEIGHTS), "endPort": names.PORT_RANK_WEIGHTS + several - 1}]


def _node_weights(plan: JobPlan) -> list[Built]:
    """Return the ports of weights of all ranks of a further node."""
    has_folder = plan.job.spec.weights.folder is not None
    return [] if has_folder or plan.job.spec.trainer.nodes == 1 else [tcp(names.PORT_WEIGHTS), *_rank_weights(plan)]


def _from_generators(plan: JobPlan, *, ports: list[Built]) -> list[Built]:
    """Return the rule that lets generators of this cluster in at `ports`."""
    generators: Built = {"podSelector": {"matchLabels": plan.selector(role=ROLE_GENERATOR)}}
    on_nodes = any(one.pod.host_network for one in plan.job.spec.generators)
    return [{**({} if on_nodes else {"from": [generators]}), "ports": ports}] if ports else []


def generators_policy(plan: JobPlan, *, pool: GeneratorPool) -> Built:
    """A pool's pods: out to scheduler, weights and other generators and to look names up, to where traces go if the engine sends its own, with weights in an object store anywhere; in for signals and weights."""
    generators: Built = {"podSelector": {"matchLabels": plan.selector(role=ROLE_GENERATOR)}}
    on_nodes = any(one.pod.host_network for one in plan.job.spec.generators)
    trainer: Built = {"to": [{"podSelector": {"matchLabels": plan.selector(role=ROLE_TRAINER)}}]}
    workers: Built = {"to": [{"podSelector": {"matchLabels": plan.selector(role=ROLE_TRAINER_WORKER)}}]}
    on_node = plan.job.spec.trainer.pod.host_network
    ports = [tcp(names.PORT_GRPC), tcp(names.PORT_WEIGHTS), *_rank_weights(plan)]
    home: list[Built] = [{**({} if on_node else trainer), "ports": ports}]
    if further := _node_weights(plan):
        home.append({**({} if on_node else workers), "ports": further})
    egress: list[Built] = [
        *(home if plan.dials is None else _out_of_cluster(plan.dials)),
        {**({} if on_nodes else {"to": [generators]}), "ports": [tcp(names.PORT_WEIGHTS)]},
        dns(),
    ]
    tracing = plan.job.spec.tracing
    if tracing is not None and tracing.share_percent and pool.engine.common.own_traces:
        egress.append({"ports": [tcp(tracing.port)]})  # a policy knows addresses, the endpoint is a name
    folder = plan.job.spec.weights.folder
    if folder is not None and is_url(folder.url):
        egress.append({"ports": [{"protocol": "TCP"}]})  # to the store, and to who gives credentials for it
    ingress = [
        {"ports": [tcp(names.PORT_SIGNALS)]},
        {**({} if on_nodes else {"from": [generators]}), "ports": [tcp(names.PORT_WEIGHTS)]},
    ]
    name = names.pool(plan.name, pool.name)
    return policy(plan, name, role=ROLE_GENERATOR, pool=pool.name, ingress=ingress, egress=egress)


def _out_of_cluster(exposed: ExposedAddresses) -> list[Built]:
    """To the exposed addresses; of one that is a name, to its port anywhere, since a policy knows addresses."""
    ways: list[Built] = []
    for address in dict.fromkeys((exposed.scheduler, exposed.weights)):
        host, _, port = address.rpartition(":")
        way: Built = {"ports": [tcp(int(port))]}
        with contextlib.suppress(ValueError):
            found = ipaddress.ip_address(host.strip("[]"))
            way = {"to": [{"ipBlock": {"cidr": f"{found}/{found.max_prefixlen}"}}], **way}
        ways.append(way)
    return ways


def policy(plan: JobPlan, name: str, *, role: str, pool: str | None = None, **rules: list[Built]) -> Built:
    """`rules`: by direction."""
    pods = {"matchLabels": plan.selector(role=role, pool=pool)}
    spec = {"podSelector": pods, "policyTypes": [key.capitalize() for key in rules], **rules}
    return plan.object("networking.k8s.io/v1", "NetworkPolicy", name, pool=pool, spec=spec)


def dns() -> Built:
    """To look names up, wherever that is."""
    return {"ports": [{"port": _PORT_DNS, "protocol": "UDP"}, tcp(_PORT_DNS)]}


def tcp(port: int) -> Built:
    """A port of a policy."""
    return {"port": port, "protocol": "TCP"}


def service(
    plan: JobPlan, name: str, *, role: str, ports: Mapping[str, int], pool: str | None = None, **spec: object
) -> Built:
    """A Service of the pods of a role. `ports`: by name."""
    listed = [{"name": port, "port": number, "targetPort": number, "protocol": "TCP"} for port, number in ports.items()]
    whole = {**spec, "selector": plan.selector(role=role, pool=pool), "ports": listed}
    return plan.object("v1", "Service", name, pool=pool, spec=whole)


def disruption_budget(plan: JobPlan, name: str, *, role: str, pool: str | None = None, **spec: object) -> Built:
    """How far drains of nodes may go with the pods of a role."""
    whole = {**spec, "selector": {"matchLabels": plan.selector(role=role, pool=pool)}}
    return plan.object("policy/v1", "PodDisruptionBudget", name, pool=pool, spec=whole)
