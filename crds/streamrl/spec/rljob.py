"""The RLJob: the one document that a user writes."""

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from streamrl import changes, names
from streamrl.spec.algorithm import KL_ALGORITHMS, AlgorithmSpec
from streamrl.spec.base import ENDPOINT_PATTERN, NAME_PATTERN, CostQuantity, FieldRule, SpecModel, map_by, repeated
from streamrl.spec.generators import GeneratorEngine, GeneratorPool, PoolName
from streamrl.spec.model import Model
from streamrl.spec.pod import ServiceAccount
from streamrl.spec.scheduling import Scheduling
from streamrl.spec.storage import Storage
from streamrl.spec.task import AgentPool, Task
from streamrl.spec.trackers import Trackers
from streamrl.spec.training import (
    FailurePolicy,
    Pipeline,
    Trainer,
    TrainerEngine,
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


_ENGINES_WITHOUT_MODEL = GeneratorEngine.those(lambda engine: not engine.needs_model)
_FROZEN_ENGINES = GeneratorEngine.those(lambda engine: engine.scores_frozen)
_SIDE_PATH_ENGINES = GeneratorEngine.those(lambda engine: engine.side_path)
_CUT_ENGINES = GeneratorEngine.those(lambda engine: not engine.whole_logprobs)
_ALONE, _ALONE_CEL = GeneratorEngine.alone("g.engine")
_TRAINERS = TrainerEngine.those(lambda engine: engine.needs_model)
_TRAINERS_WITHOUT_MODEL = TrainerEngine.those(lambda engine: not engine.needs_model)


_Broken = Callable[["RLJobSpec"], object]
"""What is wrong, or False."""


def _rules_of(subject: str, *, others: str, applies: _Broken) -> Callable[[str, str, _Broken], FieldRule]:
    """Makes rules of the jobs that it applies to; `others`: CEL that is true of all others."""
    return lambda rule, cel, broken: FieldRule(
        f"{subject} {rule}", f"{others} || ({cel})", lambda spec: applies(spec) and broken(spec)
    )


_logical_rule = _rules_of(
    "pipeline.delivery Logical",
    others="self.pipeline.delivery != 'Logical'",
    applies=lambda spec: spec.pipeline.delivery == "Logical",
)
"""Of a job whose weights are to follow from the job alone."""
_supervised_rule = _rules_of(
    "algorithm.supervised",
    others="!has(self.algorithm.supervised)",
    applies=lambda spec: spec.algorithm.supervised is not None,
)
"""Of a job whose samples are the data set's own answers."""
_reference_rule = _rules_of(
    "trainer.reference",
    others="!has(self.trainer.reference)",
    applies=lambda spec: spec.trainer.reference is not None,
)
"""Of a job with a pool for the frozen model."""

SUPERVISED_RULES = (
    _supervised_rule(
        "needs task.groupSize 1: each row is a group",
        "self.task.groupSize == 1",
        lambda spec: spec.task.group_size > 1 and f"{spec.task.group_size}",
    ),
    _supervised_rule(
        "needs pipeline.mode StreamSync: there is no generation to overlap with",
        "self.pipeline.mode == 'StreamSync'",
        lambda spec: spec.pipeline.mode != "StreamSync" and spec.pipeline.mode,
    ),
    _supervised_rule(
        "needs task.sampling.temperature 1: its loss is that of the model as it is",
        "self.task.sampling.temperature == 1.0",
        lambda spec: spec.task.sampling.temperature != 1 and f"{spec.task.sampling.temperature:g}",
    ),
    _supervised_rule(
        "goes without task.environment, task.agent and task.mixture: a row is one answer of one data set",
        "!has(self.task.environment) && !has(self.task.agent) && !has(self.task.mixture)",
        lambda spec: spec.task.has_turns or spec.task.mixture,
    ),
    _supervised_rule(
        f"needs trainer.engine {_TRAINERS}: the {_TRAINERS_WITHOUT_MODEL} trainer has no tokenizer",
        _TRAINERS.cel("self.trainer.engine"),
        lambda spec: not spec.has_model,
    ),
    FieldRule(
        "task.groupSize must be at least 2: advantages are relative to the group; only algorithm.supervised takes 1",
        "self.task.groupSize > 1 || has(self.algorithm.supervised)",
        lambda spec: spec.task.group_size == 1 and spec.algorithm.supervised is None,
    ),
    FieldRule(
        "generators must hold a pool: only algorithm.supervised trains without",
        "self.generators.size() > 0 || has(self.algorithm.supervised)",
        lambda spec: not spec.generators and spec.algorithm.supervised is None,
    ),
    FieldRule(
        "task needs rewards, or mixture, where there are generators; only algorithm.distillation takes neither",
        "self.generators.size() == 0 || has(self.task.mixture) || self.task.rewards.size() > 0 || "
        "has(self.algorithm.distillation)",
        lambda spec: (
            bool(spec.generators)
            and not spec.task.mixture
            and not spec.task.rewards
            and spec.algorithm.distillation is None
        ),
    ),
    FieldRule(
        "task.rewards must be absent without generators: nobody makes what they would score",
        "self.generators.size() > 0 || self.task.rewards.size() == 0",
        lambda spec: not spec.generators and ", ".join(reward.name for reward in spec.task.rewards),
    ),
    FieldRule(
        "scheduling.rebalance must be absent without generators",
        "self.generators.size() > 0 || !has(self.scheduling.rebalance)",
        lambda spec: not spec.generators and spec.scheduling.rebalance is not None,
    ),
)
"""What goes with `algorithm.supervised`, and what has no meaning without generators."""


REFERENCE_RULES = (
    _reference_rule(
        "needs a frozen model: algorithm distillation or trajectoryBalance, or a referenceKl",
        " || ".join(
            [
                "has(self.algorithm.distillation) || has(self.algorithm.trajectoryBalance)",
                *(f"(has(self.algorithm.{key}) && has(self.algorithm.{key}.referenceKl))" for key in KL_ALGORITHMS),
            ]
        ),
        lambda spec: getattr(spec.algorithm.value, "reference_kl", None) is None and spec.algorithm.key,
    ),
    _reference_rule(
        "must name one of several pools: the others generate",
        "self.generators.size() > 1 && self.generators.exists(g, g.name == self.trainer.reference.pool)",
        lambda spec: (
            (spec.frozen_pool is None or len(spec.generators) == 1)
            and spec.trainer.reference is not None
            and spec.trainer.reference.pool
        ),
    ),
    _reference_rule(
        f"needs a pool with engine {_FROZEN_ENGINES}, without scaling auto, weightCache and devices Trainer",
        "!self.generators.exists(g, g.name == self.trainer.reference.pool && "
        f"(!{_FROZEN_ENGINES.cel('g.engine')} || has(g.scaling.auto) || has(g.weightCache) || (has(g.devices) && g.devices == 'Trainer')))",
        lambda spec: spec.frozen_pool is not None and not _may_be_frozen(spec.frozen_pool) and spec.frozen_pool.name,
    ),
    _reference_rule(
        "goes without pipeline.mode Colocated: its pool works while the others generate",
        "self.pipeline.mode != 'Colocated'",
        lambda spec: spec.pipeline.mode == "Colocated",
    ),
    _reference_rule(
        "goes without storage.checkpoints.weightsFrom, but with algorithm distillation: its pool cannot reach that model",
        "!has(self.storage.checkpoints.weightsFrom) || has(self.algorithm.distillation)",
        lambda spec: spec.storage.checkpoints.weights_from is not None and spec.algorithm.teacher is None,
    ),
)
"""What goes with a pool for the frozen model."""


def _may_be_frozen(pool: GeneratorPool) -> bool:
    return (
        pool.engine.common.scores_frozen
        and pool.scaling.auto is None
        and pool.weight_cache is None
        and pool.devices != "Trainer"
    )


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

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "gang goes without clusterName: no scheduler places pods of two clusters together",
            "!has(self.gang) || (!has(self.trainer.clusterName) && self.generators.all(g, !has(g.clusterName)))",
            lambda spec: (
                spec.gang is not None
                and next(
                    filter(None, (spec.trainer.cluster_name, *(pool.cluster_name for pool in spec.generators))), ""
                )
            ),
        ),
        FieldRule(
            "task.agent.pool must be absent with trainer.clusterName: agents have no way to a scheduler in another cluster",
            "!has(self.trainer.clusterName) || !has(self.task.agent) || !has(self.task.agent.pool)",
            lambda spec: spec.agent_pool is not None and spec.trainer.cluster_name,
        ),
        FieldRule(
            f"name of generators must not be {names.AGENTS} beside task.agent.pool, which has that",
            f"!has(self.task.agent) || !has(self.task.agent.pool) || self.generators.all(g, g.name != '{names.AGENTS}')",
            lambda spec: spec.agent_pool is not None and any(pool.name == names.AGENTS for pool in spec.generators),
        ),
        FieldRule(
            "names of generators must differ",
            "self.generators.all(g, self.generators.exists_one(o, o.name == g.name))",
            lambda spec: repeated(pool.name for pool in spec.generators),
        ),
        FieldRule(
            "devices of generators must not all be Trainer but with mode Colocated: add a pool that generates while it trains",
            "self.generators.size() == 0 || self.pipeline.mode == 'Colocated' || "
            "self.generators.exists(g, (!has(g.devices) || g.devices == 'Own') && "
            "(!has(self.trainer.reference) || g.name != self.trainer.reference.pool))",
            lambda spec: (
                spec.pipeline.mode != "Colocated"
                and spec.generators
                and all(pool is spec.frozen_pool or pool.devices == "Trainer" for pool in spec.generators)
                and spec.pipeline.mode
            ),
        ),
        FieldRule(
            "devices of generators must not be Own with mode Colocated: all are on the trainer's; leave it out",
            "self.pipeline.mode != 'Colocated' || self.generators.all(g, !has(g.devices) || g.devices == 'Trainer')",
            lambda spec: (
                spec.pipeline.mode == "Colocated"
                and ", ".join(pool.name for pool in spec.generators if pool.devices == "Own")
            ),
        ),
        FieldRule(
            f"engine {_ENGINES_WITHOUT_MODEL} must be used by all generators and the trainer, or by none",
            f"self.generators.all(g, {_ENGINES_WITHOUT_MODEL.cel('g.engine')} == "
            f"{_TRAINERS_WITHOUT_MODEL.cel('self.trainer.engine')})",
            lambda spec: len({one.engine.common.needs_model for one in (*spec.generators, spec.trainer)}) > 1,
        ),
        FieldRule(
            f"engine {_CUT_ENGINES} needs task.sampling with topP 1 and without topK: its log-probs are those behind them",
            f"!self.generators.exists(g, {_CUT_ENGINES.cel('g.engine')}) || "
            "(self.task.sampling.topP == 1.0 && !has(self.task.sampling.topK))",
            lambda spec: (
                not all(pool.engine.common.whole_logprobs for pool in spec.generators)
                and (spec.task.sampling.top_p < 1 or spec.task.sampling.top_k is not None)
                and f"topP {spec.task.sampling.top_p:g}, topK {spec.task.sampling.top_k}"
            ),
        ),
        FieldRule(
            f"trainer.sherl needs engine {_SIDE_PATH_ENGINES} in all generators: no other computes a side path",
            f"!has(self.trainer.sherl) || self.generators.all(g, {_SIDE_PATH_ENGINES.cel('g.engine')})",
            lambda spec: (
                spec.trainer.sherl is not None
                and ", ".join(pool.engine.key for pool in spec.generators if not pool.engine.common.side_path)
            ),
        ),
        FieldRule(
            "algorithm.trajectoryBalance.replay must be absent with task.environment, task.agent or task.mixture: its samples are told apart by their prompts",
            "!has(self.algorithm.trajectoryBalance) || !has(self.algorithm.trajectoryBalance.replay) || "
            "!(has(self.task.environment) || has(self.task.agent) || has(self.task.mixture))",
            lambda spec: (
                (spec.task.has_turns or spec.task.mixture is not None)
                and spec.algorithm.trajectory_balance is not None
                and spec.algorithm.trajectory_balance.replay is not None
            ),
        ),
        FieldRule(
            "algorithm.archer needs task.environment or task.agent, and no task.mixture: its critic is of turns",
            "!has(self.algorithm.archer) || has(self.task.environment) || has(self.task.agent)",
            lambda spec: (
                spec.algorithm.archer is not None and spec.task.environment is None and spec.task.agent is None
            ),
        ),
        FieldRule(
            "algorithm.dapo.overlong must be absent where a task of task.mixture has maxTokens: it counts from sampling.maxTokens",
            "!has(self.algorithm.dapo) || !has(self.algorithm.dapo.overlong) || !has(self.task.mixture) || "
            "self.task.mixture.all(t, !has(t.maxTokens))",
            lambda spec: (
                spec.algorithm.dapo is not None
                and spec.algorithm.dapo.overlong is not None
                and ", ".join(one.name for one in spec.task.mixture or () if one.max_tokens is not None)
            ),
        ),
        _logical_rule(
            f"needs engine {_ALONE}: else the last digits of a log-prob follow from the batch",
            f"self.generators.all(g, {_ALONE_CEL})",
            lambda spec: ", ".join(
                pool.engine.key for pool in spec.generators if not pool.engine.common.computes_alone
            ),
        ),
        _logical_rule(
            "needs algorithm.dapo.dynamicSampling.maxDrawsPerStep 1: which groups are dropped follows from who comes first",
            "!has(self.algorithm.dapo) || self.algorithm.dapo.dynamicSampling.maxDrawsPerStep == 1",
            lambda spec: spec.algorithm.dapo and spec.algorithm.dapo.dynamic_sampling.max_draws_per_step > 1,
        ),
        _logical_rule(
            "goes without scheduling.rebalance: a sample that moves is computed otherwise",
            "!has(self.scheduling.rebalance)",
            lambda spec: spec.scheduling.rebalance is not None,
        ),
        *SUPERVISED_RULES,
        *REFERENCE_RULES,
    )

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
            lambda job: next(
                (
                    f"{len(job.metadata.name)} and {len(pool.name)}"
                    for pool in job.spec.generators
                    if len(job.metadata.name) + len(pool.name) >= names.MOST_SET_CHARACTERS
                ),
                "",
            ),
        ),
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
