"""A scenario: everything that a simulation is made of, as users write it.

Owns fields, units, bounds and rules. Parts that an RLJob has too (pipeline, scheduling, scaling) are the contract's own
models. Does not own reading (`reading.py`), nor the drawing of lengths (`lengths.py`).
"""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from streamrl.spec.base import (
    NAME_PATTERN,
    ByteQuantity,
    CostQuantity,
    OneOf,
    SpecModel,
    demand_different,
    demand_rising,
)
from streamrl.spec.generators import PoolName, PtlPoint, Scaling
from streamrl.spec.scheduling import Scheduling
from streamrl.spec.training import Pipeline

MOST_TOKENS = 1_048_576
"""As the contract's `maxTokens`."""
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
FilePath = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class LogNormal(SpecModel):
    """Log-normal lengths."""

    median_tokens: float = Field(ge=1, le=MOST_TOKENS, description="Median, in tokens.")
    sigma: float = Field(default=0.8, ge=0, le=4, description="Standard deviation of the logarithm.")


class QuantilePoint(SpecModel):
    """A point of a distribution: so many percent are at most so long."""

    percent: float = Field(ge=0, le=100, description="Share of completions.")
    tokens: int = Field(ge=1, le=MOST_TOKENS, description="Their largest length.")


class Quantiles(SpecModel):
    """Lengths by quantiles, linear between the points."""

    points: tuple[QuantilePoint, ...] = Field(min_length=2, max_length=64, description="By rising percent, 0 to 100.")

    @model_validator(mode="after")
    def _points_rise(self) -> Self:
        percents = [point.percent for point in self.points]
        if percents != sorted(set(percents)) or percents[0] != 0 or percents[-1] != 100:  # noqa: PLR2004 - all of them
            raise ValueError(f"points must rise from percent 0 to percent 100, got {percents}")
        if any(one.tokens > other.tokens for one, other in pairwise(self.points)):
            raise ValueError(f"tokens of points must not fall, got {[point.tokens for point in self.points]}")
        return self


class LengthTable(SpecModel):
    """Lengths as they are written down: one list for each prompt, one length for each sample; shorter lists come round again."""

    rows: tuple[Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=1024)], ...] = Field(
        min_length=1, max_length=100_000, description="Tokens of the samples of prompt 0, 1, ..."
    )


class LengthFile(SpecModel):
    """The same from a file."""

    path: FilePath = Field(
        description="JSON Lines beside the scenario: a list of lengths in tokens for each prompt, one prompt a line."
    )


class GrowthPoint(SpecModel):
    """Factor on all lengths at one step."""

    step: int = Field(ge=0, le=10_000_000, description="Step for which the group is planned.")
    factor: float = Field(gt=0, le=1000, description="Factor on all lengths.")


class ScenarioLengths(OneOf):
    """How long completions are."""

    one_of = ("log_normal", "quantiles", "table", "file")

    log_normal: LogNormal | None = Field(default=None, description="Log-normal.")
    quantiles: Quantiles | None = Field(default=None, description="By quantiles.")
    table: LengthTable | None = Field(default=None, description="By prompt, written down here.")
    file: LengthFile | None = Field(default=None, description="By prompt, in a file.")
    within_group_percent: float = Field(
        default=30.0,
        ge=0,
        le=100,
        description="Share of the spread that is between the samples of a group; the rest is between prompts.",
    )
    drift_percent: float = Field(
        default=0.0, ge=0, le=100, description="Share of the spread between prompts that is drawn anew each epoch."
    )
    prompts_per_epoch: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Prompts before they come round again; absent = never (table: its rows).",
    )
    growth: tuple[GrowthPoint, ...] = Field(
        default=(), max_length=256, description="Factor on all lengths, linear between the points, by rising step."
    )

    @model_validator(mode="after")
    def _growth_rises(self) -> Self:
        demand_rising("growth", by="step", values=(point.step for point in self.growth))
        return self


ReplicaName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=64)]
_DAY_S = 86_400.0


class ScenarioPool(SpecModel):
    """Generators of one kind."""

    name: PoolName = Field(description="Name of the pool.")
    scaling: Scaling = Field(
        default_factory=lambda: Scaling.model_validate({"static": {"replicas": 1}}), description="How many replicas."
    )
    slots: int = Field(default=64, ge=1, le=65_536, description="Sequences generated at once.")
    latency: tuple[PtlPoint, ...] = Field(
        min_length=1,
        max_length=64,
        description="Per-token latency by batch size, linear between its points, by rising batch.",
    )
    kv_nanoseconds: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Added to a decoding step for each token of context in the batch, in nanoseconds.",
    )
    devices: Literal["Own", "Trainer"] = Field(
        default="Own", description="Trainer: they generate while the trainer waits; with mode Colocated all do."
    )
    cost_per_hour: CostQuantity = Field(default="1.00", description="Cost of one replica; weighs its bubbles.")
    start_seconds: float = Field(
        default=30.0,
        ge=0,
        le=_DAY_S,
        description="Before a new replica connects; those of the start are there at once.",
    )
    cluster_name: PoolName | None = Field(
        default=None, description="Another cluster than the trainer's, in which these are; absent = the trainer's."
    )
    bandwidth: ByteQuantity | None = Field(
        default=None,
        description="Bytes a second at which one replica fetches weights, with clusterName those that the cluster's own link takes; absent = no bound.",
    )
    load_seconds: float = Field(
        default=0.0, ge=0, le=3600, description="Pause of generation while fetched weights go into the engine."
    )
    link_seconds: float = Field(default=0.0, ge=0, le=60, description="One way between scheduler and replica.")

    @model_validator(mode="after")
    def _curve_rises(self) -> Self:
        demand_rising("latency", by="batch", values=(point.batch for point in self.latency))
        if any(one.milliseconds > other.milliseconds for one, other in pairwise(self.latency)):
            raise ValueError(f"milliseconds must not fall with the batch, got {[p.milliseconds for p in self.latency]}")
        return self


class ScenarioTrainer(SpecModel):
    """Takes time, learns nothing."""

    seconds_per_token: float = Field(default=0.0, ge=0, le=1, description="Time of one trained token of a completion.")
    seconds_per_sample: float = Field(
        default=0.0, ge=0, le=3600, description="Time of one trained sample besides, such as its prompt's."
    )
    seconds_per_step: float = Field(default=0.0, ge=0, le=_DAY_S, description="Time of one optimiser step.")
    weight_bytes: int = Field(default=1, ge=1, le=2**50, description="Size of one version of the weights.")
    uplink: ByteQuantity | None = Field(
        default=None, description="Bytes a second from the trainer's cluster to all others together; absent = no bound."
    )
    uplink_in_turn: bool = Field(
        default=True,
        description="Whether the job names its uplink (weights.http.uplinkBytesPerSecond), so that other clusters take versions in turn.",
    )
    publish_seconds: float = Field(
        default=0.0, ge=0, le=3600, description="Pause of training after a step, until its weights can be fetched."
    )
    checkpoint_interval_steps: int = Field(default=10, ge=1, le=1_000_000, description="Steps between checkpoints.")
    checkpoint_seconds: float = Field(default=0.0, ge=0, le=_DAY_S, description="Pause of training for a checkpoint.")
    cost_per_hour: CostQuantity = Field(default="1.00", description="Cost; weighs its bubbles.")


class ScenarioRewards(SpecModel):
    """Scoring."""

    seconds: float = Field(
        default=0.0, ge=0, le=3600, description="Time of scoring; samples that end meanwhile are scored together next."
    )


class ScenarioJournal(SpecModel):
    """The scheduler's record."""

    commit_seconds: float = Field(
        default=0.0, ge=0, le=60, description="Time of one commit; what comes meanwhile goes with the next."
    )


class Kill(SpecModel):
    """A replica dies; what it held is issued again."""

    generator: ReplicaName = Field(description="Its name, such as `generator-POOL-0`.")
    returns: bool = Field(default=True, description="Whether a new one is started in its place.")


class Leave(SpecModel):
    """A replica is told to go: it finishes what it holds, and takes nothing more."""

    generator: ReplicaName = Field(description="Its name, such as `generator-POOL-0`.")
    returns: bool = Field(default=False, description="Whether a new one is started in its place.")


class RestartTrainer(SpecModel):
    """The trainer dies; a new one begins at the newest checkpoint."""

    down_seconds: float = Field(default=10.0, ge=0, le=_DAY_S, description="Until the new one connects.")


class ScenarioRanker(SpecModel):
    """Orders prompts never seen, as well as it is said to."""

    recall_percent: float = Field(
        default=87.0, ge=20, le=100, description="Share of the longest 20 % of prompts that it finds; 20 is chance."
    )
    inverted: bool = Field(default=False, description="Whether it takes the longest for the shortest.")
    flips_at_step: int | None = Field(default=None, ge=0, description="From this step on its order is reversed.")


class ScenarioEvent(OneOf):
    """Something that happens to the run from outside."""

    one_of = ("kill", "leave", "restart_trainer")

    at_seconds: float = Field(ge=0, description="When, in virtual time.")
    kill: Kill | None = Field(default=None, description="A replica dies.")
    leave: Leave | None = Field(default=None, description="A replica goes in peace.")
    restart_trainer: RestartTrainer | None = Field(default=None, description="The trainer dies and comes back.")


class Scenario(SpecModel):
    """One simulation."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Of all that is drawn.")
    group_size: int = Field(default=8, ge=2, le=1024, description="Completions of one prompt.")
    prompt_tokens: int = Field(
        default=0, ge=0, le=MOST_TOKENS, description="Length of a prompt; counts as context only."
    )
    max_tokens: int = Field(default=MOST_TOKENS, ge=1, le=MOST_TOKENS, description="Longest completion.")
    resolution_tokens: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="The scheduler is told lengths in units of so many tokens: long completions then take less memory.",
    )
    pipeline: Pipeline = Field(description="As in an RLJob.")
    batch_by_batch: bool = Field(
        default=False,
        description="Whether prompts of a batch come only when all samples of the batch before are scored and all generators "
        "have a version for it, as where a trainer updates the weights and then asks for a batch; else when the scheduler asks.",
    )
    scheduling: Scheduling = Field(default_factory=Scheduling, description="As in an RLJob.")
    pools: tuple[ScenarioPool, ...] = Field(min_length=1, max_length=64, description="Generator pools.")
    lengths: ScenarioLengths = Field(description="How long completions are.")
    ranker: ScenarioRanker | None = Field(
        default=None, description="A modelled ranker behind scheduling.lengthSignals; absent = none."
    )
    curves_known: bool = Field(
        default=False, description="Whether the scheduler knows the latency curves at the start, or measures them."
    )
    partial_progress: bool = Field(
        default=False,
        description=(
            "Whether replicas tell of running samples each second while nothing waits, and samples that come with tokens have to be read. "
            "With scheduling.rebalance it is always so."
        ),
    )
    trainer: ScenarioTrainer = Field(default=ScenarioTrainer(), description="The trainer.")
    rewards: ScenarioRewards = Field(default=ScenarioRewards(), description="Scoring.")
    journal: ScenarioJournal = Field(default=ScenarioJournal(), description="The scheduler's record.")
    events: tuple[ScenarioEvent, ...] = Field(default=(), max_length=10_000, description="What happens from outside.")
    limit_seconds: float = Field(
        default=1e8, gt=0, le=1e12, description="In virtual time; a run that is not over by then is an error."
    )

    @model_validator(mode="after")
    def _pools_differ(self) -> Self:
        demand_different("names of pools", (pool.name for pool in self.pools))
        return self

    @model_validator(mode="after")
    def _ranker_is_modelled(self) -> Self:
        if self.scheduling.ranker is not None:
            raise ValueError("scheduling.ranker reads real prompts; give the scenario's own ranker")
        return self

    @model_validator(mode="after")
    def _policy_is_ours(self) -> Self:
        if self.scheduling.dispatch.python is not None:
            raise ValueError("scheduling.dispatch.python must be absent: a simulation runs no code of the user")
        return self

    @model_validator(mode="after")
    def _named_pools_exist(self) -> Self:
        known = [pool.name for pool in self.pools]
        for event in self.events:
            named = getattr(event.value, "generator", None)
            if named is not None and pool_of(named) not in known:
                raise ValueError(f"generator of an event must be generator-POOL-N of {', '.join(known)}, got {named}")
        return self


def pool_of(generator: str) -> str | None:
    """Pool that a replica's name names; None if it is no such name."""
    prefix, _, ordinal = generator.rpartition("-")
    return prefix.removeprefix("generator-") if prefix.startswith("generator-") and ordinal.isdigit() else None
