"""The status of an RLJob and of a GeneratorPool as an API server keeps it: conditions and the few numbers that `kubectl get` shows.

Owns the shape alone. A run on one machine has no status object; its numbers are in the run folder.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints

from streamrl import names
from streamrl.spec.base import SpecModel, map_by


class StatusModel(SpecModel):
    """A piece of a status. The operator makes these, so they take the fields' python names too."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)


class Condition(StatusModel):
    """One aspect of the job's state, as in every Kubernetes object."""

    type: str = Field(description="Name of the aspect.", min_length=1, max_length=316)
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this is about."
    )
    last_transition_time: str = Field(
        description="When `status` last changed.", max_length=64, json_schema_extra={"format": "date-time"}
    )
    reason: str = Field(description="Why, in one word.", min_length=1, max_length=1024)
    message: str = Field(description="Why, for people.", max_length=32_768)


Time = Annotated[str, StringConstraints(max_length=64)]
"""RFC 3339, UTC."""
_TIME: dict[str, JsonValue] = {"format": "date-time"}


class Scaled(StatusModel):
    """One change of a pool's size."""

    time: Time = Field(description="When.", json_schema_extra=_TIME)
    from_replicas: int = Field(ge=0, description="Replicas before.")
    to_replicas: int = Field(ge=0, description="Replicas after.")
    reason: str = Field(max_length=1024, description="Why, with the numbers.")


class PoolSummary(StatusModel):
    """A pool in the job's status."""

    name: str = Field(description="Name of the pool.", min_length=1, max_length=names.MOST_POOL_CHARACTERS)
    desired: int = Field(ge=0, description="Pods that should be there.")
    ready: int = Field(ge=0, description="Pods that are ready.")


class Bubbles(StatusModel):
    """Shares of the wall time of generators and trainer, weighed by cost (docs/concepts.md)."""

    pipeline_percent: float = Field(ge=0, le=100, description="Idle because another stage had nothing for it.")
    skew_percent: float = Field(ge=0, le=100, description="Slots idle beside a long tail.")


class Images(StatusModel):
    """Images of the job's pods, where `pod.image` names none."""

    trainer: str = Field(
        min_length=1, max_length=512, description="Of trainer, scheduler and preparation of the model."
    )
    generator: str = Field(min_length=1, max_length=512, description="Of the generators.")
    tasks: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Of the container that runs the user's functions; absent = the scheduler's runs them, in a job of an earlier release.",
    )


class ClusterStatus(StatusModel):
    """A member cluster that has, or may have, objects of the job."""

    name: str = Field(description="Name of the RLCluster.", min_length=1, max_length=63)
    cluster_uid: str = Field(default="", max_length=64, description="Which cluster it was when the job came there.")
    namespace: str = Field(description="Namespace of the job's objects there.", min_length=1, max_length=63)


class SetHold(StatusModel):
    """A StatefulSet of the job of which kubelets rejected pods."""

    name: str = Field(description="Name of the StatefulSet.", min_length=1, max_length=63)
    rejections: int = Field(ge=1, description="Times that new pods of it were rejected, one after the other.")
    until: Time = Field(
        description="Until then new pods of it wait with a scheduling gate; pods that run stay.",
        json_schema_extra=_TIME,
    )


UNSEEN_GENERATION = -1
"""Generation that no object has: without it, kstatus takes a job that no operator has looked at for one that is done."""


class StartStatus(StatusModel):
    """How the job came to run since its pods were first made, or made again after suspend."""

    since: Time | None = Field(
        default=None, description="When it had no pods last, and some were made.", json_schema_extra=_TIME
    )
    ready_time: Time | None = Field(default=None, description="When it was first ready.", json_schema_extra=_TIME)
    stuck_since: Time | None = Field(
        default=None, description="Since when a pod cannot start while others hold nodes.", json_schema_extra=_TIME
    )
    released_until: Time | None = Field(
        default=None, description="Until then it has no pods, so that others may start.", json_schema_extra=_TIME
    )


class RLJobStatus(StatusModel):
    """What is known of the job."""

    observed_generation: int | None = Field(
        default=None,
        ge=UNSEEN_GENERATION,
        description="Generation of the spec that this is about; -1: no operator has looked at the job.",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=16, description="State of the job, by aspect.", json_schema_extra=map_by("type")
    )
    state: str | None = Field(
        default=None,
        max_length=1024,
        description="How the job is, in one word: Running, Succeeded, Failed, Suspended, or what it waits for.",
    )
    start_time: Time | None = Field(
        default=None, description="When the pods were first made, or made again after suspend.", json_schema_extra=_TIME
    )
    start: StartStatus | None = Field(default=None, description="How it came to run.")
    completion_time: Time | None = Field(default=None, description="When the job ended.", json_schema_extra=_TIME)
    attempt: int | None = Field(default=None, ge=0, description="Lives of the trainer, the present one included.")
    step: int | None = Field(default=None, ge=0, description="Training steps done.")
    reward: float | None = Field(default=None, description="Mean held-out reward of the last evaluation.")
    queue: int | None = Field(default=None, ge=0, description="Samples that wait for a generator.")
    tokens_per_second: float | None = Field(default=None, ge=0, description="Generated by all generators together.")
    cost: float | None = Field(
        default=None, ge=0, description="Of trainer and connected generators by `costPerHour`, since the job began."
    )
    bubbles: Bubbles | None = Field(default=None, description="Where time is lost.")
    progress_time: Time | None = Field(
        default=None, description="When step, reward and the like were last renewed.", json_schema_extra=_TIME
    )
    restarts: int | None = Field(default=None, ge=0, description="Restarts that count towards maxRestarts.")
    ignored_restarts: int | None = Field(default=None, ge=0, description="Restarts that do not.")
    seen_failures: tuple[Annotated[str, StringConstraints(max_length=128)], ...] = Field(
        default=(), max_length=256, description="Failures of containers and pods that are counted already."
    )
    holds: tuple[SetHold, ...] = Field(
        default=(),
        max_length=16,
        description="StatefulSets of which kubelets rejected pods, until all of their pods run.",
        json_schema_extra=map_by("name"),
    )
    checkpoint_path: str | None = Field(
        default=None, max_length=1024, description="Directory of the newest checkpoint on the checkpoints' volume."
    )
    images: Images | None = Field(
        default=None,
        description="Images of the job's pods, where `pod.image` names none: the operator's when the job began; no upgrade changes them.",
    )
    pools: tuple[PoolSummary, ...] = Field(
        default=(), max_length=8, description="Pods by pool.", json_schema_extra=map_by("name")
    )
    clusters: tuple[ClusterStatus, ...] = Field(
        default=(),
        max_length=16,
        description="Member clusters that the job has objects in, written before the first; deleting the job waits for each of them.",
        json_schema_extra=map_by("name"),
    )


class GeneratorPoolStatus(StatusModel):
    """What is known of a pool."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this is about."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=16, description="State of the pool, by aspect.", json_schema_extra=map_by("type")
    )
    replicas: int | None = Field(default=None, ge=0, description="Pods that exist; what /scale shows.")
    ready_replicas: int | None = Field(default=None, ge=0, description="Pods that are ready.")
    desired_replicas: int | None = Field(
        default=None,
        ge=0,
        description="Pods that should be there: spec.replicas within bounds, 0 without a running job.",
    )
    selector: str | None = Field(default=None, max_length=1024, description="Label selector of the pods, for /scale.")
    reason: str | None = Field(default=None, max_length=1024, description="Why so many.")
    scaling_history: tuple[Scaled, ...] = Field(default=(), max_length=10, description="Last changes, newest last.")


class RLClusterStatus(StatusModel):
    """What is known of a member cluster."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this is about."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=16, description="State of the member, by aspect.", json_schema_extra=map_by("type")
    )
    cluster_uid: str | None = Field(
        default=None, max_length=64, description="UID of its namespace kube-system: another one is another cluster."
    )
    last_contact_time: Time | None = Field(
        default=None, description="When it last answered, to the minute.", json_schema_extra=_TIME
    )
