"""How the policy learns: algorithm, pipeline, trainer, weights; what follows a failure."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from streamrl.spec.base import (
    NAME_PATTERN,
    ByteQuantity,
    CostQuantity,
    FieldRule,
    OneOf,
    SpecModel,
    demand_different,
    map_by,
)
from streamrl.spec.pod import TrainerPod


class ReferenceKl(SpecModel):
    """A pull towards the initial model, by an estimate of the Kullback-Leibler divergence to it."""

    coefficient: float = Field(default=0.001, ge=0, le=100, description="Weight of the divergence; 0 only measures it.")
    estimator: Literal["K1", "K2", "K3"] = Field(
        default="K3",
        description="Of log-ratio d = log policy - log reference: K1 d, K2 d^2/2, K3 exp(-d) - 1 + d (Schulman).",
    )


ReferenceKlField = Annotated[
    ReferenceKl | None, Field(default=None, description="Pull towards the initial model; absent = none.")
]


class Clip(SpecModel):
    """The bounds of PPO's clip (arXiv 1707.06347, eq. 7)."""

    clip_low: float = Field(
        default=0.2, gt=0, lt=1, description="Ratios below 1 - clipLow get no gradient where that would lower them."
    )
    clip_high: float = Field(
        default=0.2, gt=0, le=10, description="Ratios above 1 + clipHigh get no gradient where that would raise them."
    )
    reference_kl: ReferenceKlField = None


class GrpoSpec(Clip):
    """Group relative policy optimisation (arXiv 2402.03300) on streamed, possibly stale samples."""

    normalize_std: bool = Field(default=True, description="Divide advantages by the group's standard deviation.")
    aggregation: Literal["SequenceMean", "TokenMean"] = Field(
        default="SequenceMean", description="Mean over each sequence's tokens first, or over all tokens of the step."
    )


class DrGrpoSpec(Clip):
    """GRPO without its length and difficulty biases (arXiv 2503.20783): no division by length or deviation."""


class Overlong(SpecModel):
    """Soft punishment of completions that come close to `maxTokens` (arXiv 2503.14476, eq. 13)."""

    buffer_tokens: int = Field(description="The punishment grows over the last so many tokens.", ge=1, le=1_048_576)
    penalty: float = Field(default=1.0, gt=0, le=100, description="Punishment of a completion of full length.")


class DynamicSamplingSpec(SpecModel):
    """Groups whose rewards are all equal teach nothing: they are dropped, and others take their places."""

    max_draws_per_step: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Batches that may be scored for one step; once they are used up, equal groups are taken. 1 = nothing is dropped.",
    )


class DapoSpec(Clip):
    """Decoupled clip and dynamic sampling (arXiv 2503.14476): higher upper bound, token-level loss."""

    clip_high: float = Field(default=0.28, gt=0, le=10, description="As in `grpo`.")
    overlong: Overlong | None = Field(default=None, description="Punishment of long completions; absent = none.")
    dynamic_sampling: DynamicSamplingSpec = Field(
        default=DynamicSamplingSpec(), description="Groups with equal rewards are drawn again."
    )


class RlooSpec(Clip):
    """REINFORCE with the mean of the other samples as baseline (arXiv 2402.14740)."""


class GspoSpec(Clip):
    """Group sequence policy optimisation (arXiv 2507.18071): one ratio for a whole sequence."""

    clip_low: float = Field(default=3e-4, gt=0, lt=1, description="As in `grpo`, for the sequence's ratio.")
    clip_high: float = Field(default=4e-4, gt=0, le=10, description="As in `grpo`, for the sequence's ratio.")
    normalize_std: bool = Field(default=True, description="Divide advantages by the group's standard deviation.")


class Updates(Clip):
    """Several optimiser updates on one batch."""

    epochs: int = Field(default=1, ge=1, le=64, description="Passes over the batch.")
    mini_batches: int = Field(default=1, ge=1, le=1024, description="Optimiser updates a pass.")


class ReinforcePlusPlusSpec(Updates):
    """REINFORCE++ (arXiv 2501.03262): advantages normalised over the whole batch; divergence in the reward."""

    discount: float = Field(default=1.0, gt=0, le=1, description="Discount of a reward for each token before it.")


class Critic(SpecModel):
    """The value model: the initial model's body with a scalar head."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1, description="Learning rate of the critic.")
    value_clip: float = Field(
        default=0.2, gt=0, le=1e6, description="Values move at most so far from those of the batch's start."
    )
    warm_up_steps: int = Field(
        default=0, ge=0, le=1_000_000, description="First steps in which the critic learns alone."
    )


class PpoSpec(Updates):
    """Proximal policy optimisation (arXiv 1707.06347) with a critic and generalised advantages (arXiv 1506.02438)."""

    discount: float = Field(default=1.0, gt=0, le=1, description="Discount of a reward for each token before it.")
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    critic: Critic = Field(default=Critic(), description="The value model.")


class TwoSidedClip(SpecModel):
    """The ratio is that of policy to behaviour; where the advantage is negative it is bounded too (arXiv 1912.09729)."""

    cap: float = Field(default=5.0, ge=1, le=1000, description="Largest ratio of policy to behaviour probability.")


ImportanceLevel = Literal["Token", "Sequence"]
ImportanceLevelField = Annotated[
    ImportanceLevel,
    Field(
        default="Token",
        description="Token: each token has the ratio of its own probabilities. Sequence: all tokens have the product over their sequence, exact but wide.",
    ),
]


class TruncatedImportance(SpecModel):
    """Weight min(proximal / behaviour, cap); the clip is on policy / proximal."""

    level: ImportanceLevelField = "Token"
    cap: float = Field(default=2.0, ge=1, le=1000, description="Largest weight.")


class MaskedImportance(SpecModel):
    """Weight proximal / behaviour where that is within bounds, else 0; the clip is on policy / proximal."""

    level: ImportanceLevelField = "Token"
    low: float = Field(default=0.5, ge=0, le=1, description="What has a smaller weight is left out.")
    high: float = Field(default=2.0, ge=1, le=1000, description="What has a larger weight is left out.")


class DecoupledPpo(SpecModel):
    """Weight proximal / behaviour (arXiv 2505.24298, eq. 5); tokens above the cap are left out."""

    cap: float = Field(default=5.0, ge=1, le=1000, description="Tokens with a larger weight are masked.")


class Correction(OneOf):
    """How samples that another policy drew (older weights, other arithmetic) are corrected for."""

    two_sided_clip: TwoSidedClip | None = Field(default=None, description="Ratio to the behaviour policy, bounded.")
    truncated_importance: TruncatedImportance | None = Field(
        default=None, description="Truncated importance weights before the clip."
    )
    masked_importance: MaskedImportance | None = Field(
        default=None, description="Importance weights before the clip; what is out of bounds is left out."
    )
    decoupled_ppo: DecoupledPpo | None = Field(default=None, description="Full importance weights before the clip.")


class AlgorithmSpec(OneOf):
    """The learning rule."""

    one_of: ClassVar[tuple[str, ...]] = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "gspo")

    grpo: GrpoSpec | None = Field(default=None, description="Group relative policy optimisation.")
    dr_grpo: DrGrpoSpec | None = Field(default=None, description="GRPO without its length and difficulty biases.")
    dapo: DapoSpec | None = Field(default=None, description="Clip-higher, token-level loss, dynamic sampling.")
    rloo: RlooSpec | None = Field(default=None, description="REINFORCE with a leave-one-out baseline.")
    reinforce_pp: ReinforcePlusPlusSpec | None = Field(
        default=None, alias="reinforcePP", description="REINFORCE with batch-normalised advantages."
    )
    ppo: PpoSpec | None = Field(default=None, description="Proximal policy optimisation with a critic.")
    gspo: GspoSpec | None = Field(default=None, description="Sequence-level ratios.")
    correction: Correction = Field(
        default_factory=lambda: Correction.model_validate({"twoSidedClip": {}}),
        description="Correction for samples of another policy.",
    )


Mode = Literal["Colocated", "Batch", "StreamSync", "StreamAsync"]

ON_POLICY_MODES: tuple[Mode, ...] = ("Colocated", "StreamSync")
"""Modes whose samples are always of the newest weights."""


def _staleness_rule(mode: Mode) -> FieldRule:
    return FieldRule(
        f"maxStalenessSteps must be 0 (or absent) with mode {mode}",
        f"self.mode != '{mode}' || !has(self.maxStalenessSteps) || self.maxStalenessSteps == 0",
        lambda pipeline: pipeline.mode == mode and pipeline.staleness,
    )


class Pipeline(SpecModel):
    """How generation and training overlap, and for how long."""

    mode: Mode = Field(
        default="StreamAsync",
        description="Colocated: generators and trainer take turns on the same devices. Batch: apart, whole batches delivered. "
        "StreamSync: samples stream, strictly on-policy. StreamAsync: samples stream and may be `maxStalenessSteps` old.",
    )
    max_staleness_steps: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Largest age of a sample's first token in steps. Colocated, StreamSync: 0; Batch: default 0; StreamAsync: at least 1, default 1.",
    )
    partial_rollouts: bool = Field(
        default=True,
        description="Whether a sample that runs goes on under a new version of the weights, its tokens then being of several versions, each with its log-prob. "
        "False: each sample (with an environment: each turn) is of one version; a generator loads the next when those that run have ended.",
    )
    batch_groups: int = Field(description="Groups (prompts) a training step.", ge=1, le=65_536)
    steps: int = Field(description="Training steps of the run.", ge=1, le=10_000_000)

    @property
    def staleness(self) -> int:
        """S of the staleness rule, in steps."""
        if self.max_staleness_steps is None:
            return 1 if self.mode == "StreamAsync" else 0
        return self.max_staleness_steps

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        *map(_staleness_rule, ON_POLICY_MODES),
        FieldRule(
            "maxStalenessSteps must be at least 1 with mode StreamAsync",
            "self.mode != 'StreamAsync' || !has(self.maxStalenessSteps) || self.maxStalenessSteps >= 1",
            lambda pipeline: pipeline.mode == "StreamAsync" and pipeline.staleness < 1 and f"{pipeline.staleness}",
        ),
    )


class TorchTrainer(SpecModel):
    """Real training with torch."""


class SimulatedTrainer(SpecModel):
    """A trainer that only takes time: for tests and scale."""

    seconds_per_step: float = Field(default=0.01, ge=0, le=3600, description="Time of one optimiser step, in seconds.")
    seconds_per_token: float = Field(default=0.0, ge=0, le=1, description="Time of one trained token, in seconds.")
    weight_bytes: int = Field(default=4096, ge=1, le=2**31, description="Size of the published weights, in bytes.")


class TrainerEngine(OneOf):
    """What trains."""

    torch: TorchTrainer | None = Field(default=None, description="Real training.")
    simulated: SimulatedTrainer | None = Field(default=None, description="Takes time, learns nothing.")


class Lora(SpecModel):
    """Low-rank adapters (arXiv 2106.09685); generators get the base once, then the adapters of each version, and merge them."""

    rank: int = Field(default=16, ge=1, le=4096, description="Rank of the adapters.")
    alpha: float = Field(default=32.0, gt=0, le=1e6, description="The adapters' product is scaled by alpha / rank.")
    target_modules: tuple[Annotated[str, StringConstraints(min_length=1, max_length=128)], ...] = Field(
        default=(),
        max_length=64,
        description="Names of the layers that get adapters; empty = all linear ones but the head.",
    )


class LogprobDiffBound(SpecModel):
    """When the generators' log-probs are too far from the trainer's, on samples whose tokens are all of the newest weights."""

    max_mean: float = Field(
        default=0.05,
        gt=0,
        le=100,
        description="Largest mean of |trainer's - generator's log-prob| over a step's tokens of one pool; the usual is 0.01 with BF16, far less with FP32.",
    )
    steps: int = Field(
        default=5,
        ge=1,
        le=1_000_000,
        description="Steps in a row above it before the condition TrainInferLogprobDiffHigh.",
    )


class Trainer(SpecModel):
    """The trainer and its optimiser (AdamW)."""

    refused: ClassVar[Mapping[str, str]] = {
        "clusterName": "the trainer's pod has the scheduler, which members dial: it is in the job's own cluster; use generators[].clusterName",
    }

    engine: TrainerEngine = Field(
        default_factory=lambda: TrainerEngine.model_validate({"torch": {}}), description="What trains."
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Pods that train together, each with processesPerNode ranks; above 1 all write to one volume of checkpoints (ReadWriteMany).",
    )
    processes_per_node: int = Field(
        default=1, ge=1, le=64, description="Ranks: processes that share the model (FSDP2); one for each GPU."
    )
    rank_timeout_seconds: float = Field(
        default=300.0,
        ge=5,
        le=86_400,
        description="Longest wait of one rank for another; then all begin again at the checkpoint.",
    )
    learning_rate: float = Field(default=1e-6, gt=0, le=1, description="Peak learning rate.")
    schedule: Literal["Constant", "Linear", "Cosine"] = Field(
        default="Constant", description="Fall of the learning rate after its rise."
    )
    warm_up_steps: int = Field(default=0, ge=0, le=1_000_000, description="Steps of linear rise.")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="Decoupled weight decay.")
    gradient_clip_norm: float = Field(default=1.0, gt=0, le=1e6, description="Largest gradient norm.")
    micro_batch_tokens: int = Field(
        default=16_384, ge=16, le=16_777_216, description="Tokens (prompts and completions) of one forward pass."
    )
    precision: Literal["FP32", "BF16"] = Field(
        default="FP32",
        description="BF16: passes and published weights in bfloat16, where the hardware has it; weights and optimiser stay in float32.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Compute activations again in the backward pass: less memory, a third more time."
    )
    cpu_offload: bool = Field(
        default=False,
        description="Keep weights, gradients and optimiser in main memory; a block is on the GPU while it computes. Slower: the optimiser runs on the processor.",
    )
    compile: bool = Field(
        default=False,
        description="Compile each transformer block (torch.compile); needs a C++ compiler, and Triton on a GPU. Each new kind of shape costs a minute.",
    )
    train_infer_logprob_diff: LogprobDiffBound = Field(
        default=LogprobDiffBound(), description="When to warn of generators that compute another policy."
    )
    lora: Lora | None = Field(default=None, description="Train low-rank adapters only; absent = all weights.")
    disruption: Literal["Allow", "Block"] = Field(
        default="Allow", description="Block: the trainer's pods stop drains of their nodes until the job has ended."
    )
    cost_per_hour: CostQuantity = Field(default="1.00", description="Cost of the trainer; weighs its bubbles.")
    pod: TrainerPod = Field(
        default=TrainerPod(),
        description="Its pods on Kubernetes, one a node; resources are those of the trainer's container.",
    )

    @property
    def ranks(self) -> int:
        """Processes on all nodes."""
        return self.nodes * self.processes_per_node

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "nodes must be 1 with engine simulated",
            "!has(self.engine.simulated) || self.nodes == 1",
            lambda one: one.engine.simulated is not None and one.nodes > 1 and f"{one.nodes}",
        ),
        FieldRule(
            "processesPerNode must be 1 with engine simulated",
            "!has(self.engine.simulated) || self.processesPerNode == 1",
            lambda one: one.engine.simulated is not None and one.processes_per_node > 1 and f"{one.processes_per_node}",
        ),
    )


class HttpWeights(SpecModel):
    """Weights pulled over HTTP by the hashes of their bytes, several streams at once."""

    timeout_seconds: float = Field(
        default=120.0, gt=0, le=86_400, description="Longest time for one version, retries included."
    )
    deltas: bool = Field(
        default=False,
        description="Send what changed since the version before to who holds that: for generators behind a slow link. Takes the trainer's processors, and main memory of a version in each generator.",
    )
    remote_bytes_per_second: ByteQuantity | None = Field(
        default=None,
        description="Most that the trainer sends to each cluster but its own in a second, as 25M; absent = no bound.",
    )
    uplink_bytes_per_second: ByteQuantity | None = Field(
        default=None,
        description="Most that the trainer sends to all clusters but its own together in a second, as 100M. With it they take each version one after the other, "
        "and one that would not have it before the next is left out of it; absent = no bound, and all at once.",
    )


class Weights(OneOf):
    """How weights reach the generators."""

    http: HttpWeights | None = Field(default=None, description="Pulled over HTTP.")

    @property
    def has_deltas(self) -> bool:
        """Whether deltas are made, and what they lead from is held."""
        return self.http is not None and self.http.deltas

    @property
    def has_uplink(self) -> bool:
        """Whether all other clusters share one bounded link."""
        return self.http is not None and self.http.uplink_bytes_per_second is not None


class FailureRule(SpecModel):
    """What happens when a container of a pod ends with an error, or a pod is lost, on Kubernetes."""

    name: Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=32)] = Field(
        description="Name of the rule; events name it."
    )
    role: Literal["Generator", "Trainer", "Scheduler", "Agents"] | None = Field(
        default=None, description="Of this role; absent = all."
    )
    on_reasons: tuple[Literal["Preempted", "Evicted", "NodeLost", "OOMKilled", "Deleted", "Error"], ...] = Field(
        default=(),
        max_length=6,
        description="For one of these reasons. Deleted: by a person or a drain; Error: an exit code other than 0. Empty = all.",
    )
    on_exit_codes: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(
        default=(), max_length=32, description="With one of these exit codes; empty = all."
    )
    action: Literal["FailJob", "Restart", "ReplacePodAndIgnoreMaxRestarts"] = Field(
        description="FailJob: the job has failed. Restart: counts towards maxRestarts. ReplacePodAndIgnoreMaxRestarts: does not count."
    )


class FailurePolicy(SpecModel):
    """What happens when a process dies."""

    max_restarts: int = Field(
        default=5, ge=0, le=10_000, description="Restarts of all processes together before the run fails."
    )
    rules: tuple[FailureRule, ...] = Field(
        default=(),
        max_length=16,
        description=(
            "On Kubernetes, before the rest: the first that matches decides. Without a match exit code 2 fails the job, "
            "pods that were preempted, evicted, deleted or lost with their node do not count, and all else counts."
        ),
        json_schema_extra=map_by("name"),
    )

    @model_validator(mode="after")
    def _rules_differ(self) -> Self:
        demand_different("names of rules", (rule.name for rule in self.rules))
        return self
