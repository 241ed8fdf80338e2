"""What planning is told and what it answers. Values only: no clock, no client.

    Observed ──▶ life.decide ──▶ JobDecision ── wanted ──▶ objects.plan_objects ──▶ objects to apply
                                        └── status, pool statuses, events, next reconcile

The controller observes and carries out; it decides nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from streamrl.clusters import Exposure, Trainers
from streamrl.spec import RLJob
from streamrl.status import Images
from streamrl_operator.autoscaler.values import ScalingState

Object = Mapping[str, Any]
"""A Kubernetes object as plain data, as the API server returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningSettings:
    """Of this operator, from its environment (the chart's values)."""

    namespace: str
    """Its own."""
    trainer_image: str
    generator_image: str
    namespaces: tuple[str, ...] = ()
    """That it watches; empty = all."""
    resync_s: float = 30.0
    """Least time between two readings of a running job's numbers; longer where there are very many (`reconcile.py`)."""
    progress_s: float = 0.0
    """Least time between two writes of a job's progress, where that is longer than `resync_s` (`reconcile.py`)."""
    numbers_by_proxy: bool = False
    """They are read through the API server's proxy, not at the scheduler's Service."""
    job_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The cluster's, as the `spec` of an RLJobDefaults; not checked yet."""
    rdma_namespaces: tuple[str, ...] = ()
    """Whose jobs may have their node's network, and lock memory."""
    sets_user: bool = True
    """Whether pods say as which user they run; OpenShift says so itself."""
    isolates_jobs: bool = True
    """Whether jobs have NetworkPolicies."""

    @property
    def images(self) -> Images:
        """Of the jobs that begin now."""
        return Images(trainer=self.trainer_image, generator=self.generator_image, tasks=self.trainer_image)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalsUnreachable:
    """A scheduler that is ready, and whose numbers could not be read since."""

    since: datetime
    """UTC: the first reading of a row that failed."""
    error: str
    """Of the last one, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedAddresses:
    """host:port of a job's two services, as generators in a member dial them."""

    scheduler: str
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """What is known of one job in one member cluster."""

    cluster: str
    """Name of the RLCluster."""
    cluster_uid: str = ""
    """Which cluster it is; empty: it was never reached."""
    origin: str = ""
    """UID of the home cluster."""
    namespace: str = ""
    """Of the job's objects there; empty: the job's namespace is not mapped."""
    allowed_secrets: tuple[str, ...] = ()
    allowed_claims: tuple[str, ...] = ()
    exposure: Exposure | None = None
    """How generators there reach home; None: the RLCluster is gone."""
    trainers: Trainers | None = None
    """None: no trainers may be there."""
    unreachable: str = ""
    """Why nothing newer is known; empty: all is known as it is."""
    is_clean: bool = False
    """Nothing of the job is there. Said only where all is known."""
    refused: str = ""
    """The first of what its API server refused of the job."""
    made_generation: int | None = None
    """Generation of the job of which it has everything; None: of none since the operator has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One job and everything of it, at one moment."""

    now: datetime
    """UTC."""
    raw: Object
    """The RLJob as stored: metadata, spec, status."""
    job: RLJob | None
    """The same, validated; None where it is not valid."""
    invalid: str = ""
    """Why it is not valid: one line for each mistake."""
    invalid_reason: str = "InvalidSpec"
    """In a word, of `conditions.REASONS`."""
    defaults: str = ""
    """What it inherits (`defaults.write_layers`): what it took when it began, or would take now."""
    pools: Mapping[str, Object] = field(default_factory=dict)
    """GeneratorPool objects, by the pool's name in the job."""
    sets: Mapping[str, Object] = field(default_factory=dict)
    """StatefulSets, by name, of all clusters. What is of a member says so by its label (`pods.cluster_of`)."""
    pods: Sequence[Object] = ()
    """Of all clusters."""
    rejected: Sequence[Object] = ()
    """Pods that kubelets rejected and that are gone by now, the last few: their StatefulSets replace them at once."""
    exposed: Object | None = None
    """The Service by which other clusters reach the scheduler, from where that is."""
    members: Mapping[str, MemberView] = field(default_factory=dict)
    """By name: all that the job's trainer and pools name, and all that it has been in."""
    code: Object | None = None
    """The ConfigMap with the user's modules, where a trainer in a member needs a copy; empty: there is none. None: it is not known."""
    resolved: Mapping[str, str] = field(default_factory=dict)
    """Files of the ConfigMap that pods read the job from; empty while there is none."""
    numbers: Mapping[str, Any] | None = None
    """The scheduler's status, or of one that has ended what its container left; None: not to be had now. `result` in it: how the run ended."""
    signals_unreachable: SignalsUnreachable | None = None
    """None: the last reading was good, or nobody can be asked."""
    warnings: Sequence[str] | None = None
    """Of the API server, about objects of the job that it takes all the same; None: it was not asked since the operator has started."""
    older_stuck: str = ""
    """An older job that cannot start either, by namespace and name. Looked for only once this one's deadline has come."""
    workloads: Mapping[str, Object] = field(default_factory=dict)
    """Kueue's Workloads of the job, by name."""
    kueue: bool = False
    """Whether Workloads can be had."""
    looked_up: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """(kind, name) -> what was found of `admission.lookups`."""
    scaling: Mapping[str, ScalingState] = field(default_factory=dict)
    """Pool -> what its scaling policy remembers; empty after a restart of the operator."""
    at_s: float = 0.0
    """Monotonic clock, for the scaling policies."""

    def unreachable_of(self, pool: str) -> str:
        """Why nothing newer is known of a pool's pods; empty: all is known."""
        spec = next((one for one in self.job.spec.pools if one.name == pool), None) if self.job else None
        member = None if spec is None else self.members.get(spec.cluster_name or "")
        return "" if member is None else member.unreachable

    @property
    def trainer_member(self) -> MemberView | None:
        """That the trainer is in, of a job that is not valid too; None: it is at home."""
        return self.members.get(trainer_cluster(self.raw))

    @property
    def metadata(self) -> Object:
        """Of the job, as stored."""
        metadata: Object = self.raw["metadata"]
        return metadata

    @property
    def name(self) -> str:
        """Of the job."""
        return str(self.metadata["name"])

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name) of the job."""
        return self.metadata["namespace"], self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlacement:
    """What an admission adds to the pods of a pod set; kept in an annotation of its StatefulSet."""

    reserved_at: str = ""
    """When Kueue reserved the quota. For as long as it holds, flavours that change or go touch no pod."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Object] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkload:
    """A Workload of Kueue that should be there."""

    pool: str | None
    """None: of the whole job."""
    about: Object
    """Queue and priority: its spec without the pod sets."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Pod set -> pods."""
    pod_sets: Sequence[Object] = ()
    """As they are, of one that cannot change; empty: planned by `counts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredRun:
    """What should run."""

    trainers: int
    """0 or 1 pods with trainer and scheduler."""
    generators: Mapping[str, int]
    """Pool -> pods."""
    awaits_members: bool = False
    """Pods are to come once each member has its part; until then there are none."""
    images: Images | None = None
    """Of pods that name none; None: the job has not begun, so they are this operator's."""
    restarted_at: str = ""
    """Stamp in the trainer's pod template: a new value makes its pods again."""
    keeps_checkpoints: bool = False
    """Their claim outlives the job, whatever its spec says."""
    requested: Mapping[str, int] = field(default_factory=dict)
    """Pool -> `spec.replicas` that we write now under our second field manager; absent = leave it alone."""
    asked: Mapping[str, int] = field(default_factory=dict)
    """Pool -> pods if its queue admitted them all."""
    workloads: Mapping[str, WantedWorkload] = field(default_factory=dict)
    """By name."""
    held: frozenset[str] = frozenset()
    """StatefulSets whose new pods wait (`failures.hold_sets`)."""
    placements: Mapping[str, PodPlacement] = field(default_factory=dict)
    """By pod set: `trainer`, `trainer-workers`, or the pool's name."""

    @property
    def any_pods(self) -> bool:
        """Whether there should be any, now or soon."""
        return bool(self.trainers or any(self.generators.values()) or self.awaits_members)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Something to tell in the job's events."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDecision:
    """What is to be done about a job."""

    wanted: DesiredRun
    status: Mapping[str, Any]
    """The whole status of the RLJob."""
    pool_statuses: Mapping[str, Mapping[str, Any]]
    """Pool -> the whole status of its GeneratorPool."""
    events: Sequence[JobEvent] = ()
    delete_pods: Sequence[str] = ()
    """Names of pods to be deleted (a restart of the trainer as a group)."""
    unreachable: bool = False
    """It is told that the scheduler's numbers cannot be read."""
    has_ended: bool = False
    """As its status says."""
    has_succeeded: bool = False
    is_queued: bool = False
    """It has no pods since its queue does not admit it."""
    workload_statuses: Mapping[str, Object] = field(default_factory=dict)
    """Workload -> change of its status."""
    stops_first: bool = False
    """`job.json` is held by pods of the spec before: they go, and until then nothing else is touched."""
    delete_job: bool = False
    """Its time after the end is over."""
    requeue_after_s: float | None = None
    """At the latest; None: only when something changes."""
    rests_s: float = 0.0
    """For this long there is nothing to do, unless something changes or the numbers call for it (`job_status.calls`)."""
    scaling: Mapping[str, ScalingState] = field(default_factory=dict)


def trainer_cluster(raw: Object) -> str:
    """The member that the trainer is in, by the document as it is; empty: home. It never changes."""
    return str(((raw.get("spec") or {}).get("trainer") or {}).get("clusterName") or "")


def stamp(moment: datetime) -> str:
    """As in a status."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(text: str | None, *, now: datetime) -> float | None:
    """Seconds from the written time to `now`; None if there is none, or it is no time."""
    try:
        moment = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    if moment is None:
        return None
    return (now - (moment if moment.tzinfo else moment.replace(tzinfo=UTC))).total_seconds()
