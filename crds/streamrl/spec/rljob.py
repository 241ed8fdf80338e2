"""The RLJob: the one document that a user writes."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from streamrl import changes, names
from streamrl.spec.algorithm import AlgorithmSpec
from streamrl.spec.base import ENDPOINT_PATTERN, NAME_PATTERN, CostQuantity, FieldRule, SpecModel, map_by
from streamrl.spec.generators import GeneratorPool, PoolName
from streamrl.spec.model import Model
from streamrl.spec.pod import CommonMetadata, ServiceAccount
from streamrl.spec.references import OWN_OBJECTS_RULE
from streamrl.spec.rules import JOB_RULES
from streamrl.spec.scheduling import Scheduling
from streamrl.spec.storage import Storage
from streamrl.spec.task import AgentPool, Task
from streamrl.spec.trackers import Trackers
from streamrl.spec.training import (
    FailurePolicy,
    Pipeline,
    Trainer,
    Weights,
)
from streamrl.spec.volumes import ObjectName

JobName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=names.MOST_JOB_CHARACTERS)]


class Metadata(SpecModel):
    """Name and labels of the job."""

    name: JobName = Field(description=f"Name of the job, at most {names.MOST_JOB_CHARACTERS} characters.")
    namespace: str | None = Field(default=None, max_length=63, description="Namespace; not used by a local run.")
    labels: dict[str, str] | None = Field(default=None, description="Labels.")
    annotations: dict[str, str] | None = Field(default=None, description="Annotations.")


class MaxCost(SpecModel):
    """A bound on what a job costs."""

    amount: CostQuantity = Field(
        description="By `costPerHour` of the trainer and of generators while they are connected, since the job began."
    )
    action: Literal["Suspend", "Warn"] = Field(
        default="Suspend",
        description="Above it: the trainer writes a checkpoint and all processes end, until the amount is raised; or a warning.",
    )


class Gang(SpecModel):
    """All pods of the job are placed together, or none is."""

    pod_group: Literal["SchedulerPlugins", "Volcano"] | None = Field(
        default=None,
        description=(
            "The PodGroup that is made, and the scheduler that pods have where they name none. SchedulerPlugins: scheduler-plugins-scheduler. "
            "Volcano: volcano. Absent = the pods name their group, or the cluster knows it."
        ),
    )
    queue: ObjectName | None = Field(default=None, description="Volcano's queue; absent = its default.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "queue needs podGroup Volcano",
            "!has(self.queue) || (has(self.podGroup) && self.podGroup == 'Volcano')",
            lambda gang: gang.queue is not None and gang.pod_group != "Volcano" and gang.queue,
        ),
    )


class Tracing(SpecModel):
    """OpenTelemetry spans of a group's life, and of every weight version."""

    endpoint: str = Field(
        description="Where traces go, by OTLP over HTTP: `http://collector:4318/v1/traces`.",
        pattern=ENDPOINT_PATTERN,
        max_length=2048,
    )
    share_percent: int = Field(
        default=1, ge=0, le=100, description="Share of the groups that is traced; 0 traces nothing, no version either."
    )

    @property
    def port(self) -> int:
        """Of the endpoint."""
        scheme, _, host = self.endpoint.split("/")[:3]
        port = host.rpartition("]")[2].partition(":")[2]
        return int(port) if port else 443 if scheme == "https:" else 80


class RLJobSpec(SpecModel):
    """What is trained, on what, how, and with which resources."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of prompts, sampling and initial weights.")
    model: Model = Field(description="The model that is trained.")
    task: Task = Field(description="What is learned.")
    algorithm: AlgorithmSpec = Field(
        default_factory=lambda: AlgorithmSpec.model_validate({"grpo": {}}), description="The learning rule."
    )
    pipeline: Pipeline = Field(description="How generation and training overlap, and for how long.")
    scheduling: Scheduling = Field(default_factory=Scheduling, description="Who generates what and when.")
    generators: tuple[GeneratorPool, ...] = Field(
        description="Generator pools; none with algorithm `supervised` alone, whose pools only evaluate.",
        max_length=8,
        json_schema_extra=map_by("name"),
    )
    trainer: Trainer = Field(default_factory=Trainer, description="The trainer and its optimiser.")
    weights: Weights = Field(
        default_factory=lambda: Weights.model_validate({"http": {}}), description="How weights reach the generators."
    )
    storage: Storage = Field(default_factory=Storage, description="What is written to disk.")
    trackers: Trackers = Field(default_factory=Trackers, description="Experiment trackers; none is on by itself.")
    common_metadata: CommonMetadata | None = Field(
        default=None, description="On Kubernetes: labels and annotations of the job's objects; absent = none."
    )
    service_account: ServiceAccount = Field(
        default=ServiceAccount(), description="On Kubernetes: the account of all pods."
    )
    failure_policy: FailurePolicy = Field(
        default_factory=FailurePolicy, description="What happens when a process dies."
    )
    tracing: Tracing | None = Field(default=None, description="Traces to send; absent = none.")
    max_cost: MaxCost | None = Field(default=None, description="What the job may cost; absent = anything.")
    suspend: bool = Field(
        default=False, description="On Kubernetes: no pods; volumes stay, and the job goes on from there later."
    )
    managed_by: Literal["streamrl.io/operator", "kueue.x-k8s.io/multikueue"] = Field(
        default="streamrl.io/operator", description="Who brings the job about; this operator leaves others' jobs alone."
    )
    gang: Gang | None = Field(
        default=None,
        description="On Kubernetes: all pods are made at once, to be placed together; absent = the trainer first, then the generators.",
    )
    start_deadline_seconds: int = Field(
        default=1800,
        ge=1,
        le=604_800,
        description="On Kubernetes: for so long a job that never was ready may hold nodes while a pod cannot start; then it has no pods for as long.",
    )
    active_deadline_seconds: int | None = Field(
        default=None, ge=1, le=31_536_000, description="On Kubernetes: fails after so long; begins again after suspend."
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None, ge=0, le=31_536_000, description="On Kubernetes: deleted so long after its end; absent = never."
    )

    @property
    def has_model(self) -> bool:
        """Whether there is a model: a simulated run has none."""
        return self.trainer.engine.common.needs_model

    @property
    def agent_pool(self) -> AgentPool | None:
        """Pods of their own for agents; None: there are none."""
        return None if self.task.agent is None else self.task.agent.pool

    @property
    def pools(self) -> tuple[GeneratorPool | AgentPool, ...]:
        """All that have a GeneratorPool."""
        return (*self.generators, *([] if self.agent_pool is None else [self.agent_pool]))

    @property
    def lent_pools(self) -> frozenset[str]:
        """Names of those on the trainer's devices."""
        colocated = self.pipeline.mode == "Colocated"
        return frozenset(pool.name for pool in self.generators if colocated or pool.devices == "Trainer")

    @property
    def frozen_pool(self) -> GeneratorPool | None:
        """The pool that says the frozen model's log-probs; None: there is none."""
        named = None if self.trainer.reference is None else self.trainer.reference.pool
        return next((pool for pool in self.generators if pool.name == named), None)

    @property
    def other_clusters(self) -> list[str]:
        """With generators apart from the trainer, as those call them."""
        return sorted({self.cluster_apart(pool) for pool in self.generators} - {""})

    def cluster_apart(self, pool: GeneratorPool) -> str:
        """What generators of a pool call their cluster; empty: it is the trainer's."""
        return "" if pool.cluster_name == self.trainer.cluster_name else pool.cluster_name or names.HOME

    field_rules: ClassVar[tuple[FieldRule, ...]] = JOB_RULES

    @classmethod
    def all_cel_rules(cls) -> tuple[tuple[str, str], ...]:
        """The rules of every document, and those of a change."""
        return (*super().all_cel_rules(), *changes.cel_rules(cls))


class RLJob(SpecModel):
    """Reinforcement learning of one language model."""

    api_version: Literal["streamrl.io/v1alpha1"] = Field(description="streamrl.io/v1alpha1")
    kind: Literal["RLJob"] = Field(description="RLJob")
    metadata: Metadata = Field(description="Name and labels.")
    spec: RLJobSpec = Field(description="What is trained, on what, how, and with which resources.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            f"metadata.name and the name of a pool must have at most {names.MOST_SET_CHARACTERS - 1} characters together: "
            "pods are named after both",
            f"self.spec.generators.all(g, self.metadata.name.size() + g.name.size() < {names.MOST_SET_CHARACTERS})",
            lambda job: f"{len(job.metadata.name)} and {max(len(pool.name) for pool in job.spec.generators)}",
        ),
        OWN_OBJECTS_RULE,
    )


class GeneratorPoolSpec(SpecModel):
    """One pool of one job as an object of its own, so that `/scale` works on it.

    The operator makes it from the RLJob and owns all of its spec but `replicas`, which has an owner of its own.
    """

    job_name: JobName = Field(description="The RLJob that it belongs to.")
    pool_name: PoolName = Field(description="Name of the pool in the job.")
    role: Literal["generator", "agents"] = Field(default="generator", description="What the pool's pods do in the job.")
    scaling: Annotated[str, StringConstraints(pattern=r"^(static|auto|external)$", max_length=8)] = Field(
        description="Who sets replicas: static (the job), auto (the operator), external (/scale)."
    )
    min_replicas: int = Field(default=1, ge=0, le=1024, description="Fewer are not made, whoever asks.")
    max_replicas: int = Field(default=1024, ge=1, le=1024, description="More are not made, whoever asks.")
    replicas: int = Field(default=1, ge=0, le=1024, description="Pods that are asked for.")

    @classmethod
    def all_cel_rules(cls) -> tuple[tuple[str, str], ...]:
        """A pool's pods are found by what they do, so that stays."""
        return (*super().all_cel_rules(), ("self.role == oldSelf.role", "role cannot be changed"))
