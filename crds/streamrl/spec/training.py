"""How the policy learns: algorithm, pipeline, scheduling, trainer, weights, storage."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from streamrl.spec.base import ByteQuantity, CostQuantity, OneOf, SpecModel, parse_bytes

MAX_CHUNK = "3Mi"
"""A gRPC message holds 4Mi by default; a chunk and its frame must fit."""


class Grpo(SpecModel):
    """Group relative policy optimisation (arXiv 2402.03300) on streamed, possibly stale samples."""

    clip_low: float = Field(
        default=0.2, gt=0, lt=1, description="Ratios below 1 - clipLow get no gradient where that would lower them."
    )
    clip_high: float = Field(
        default=0.2, gt=0, le=10, description="Ratios above 1 + clipHigh get no gradient where that would raise them."
    )
    importance_cap: float = Field(
        default=5.0, ge=1, le=1000, description="Largest ratio of policy to behaviour probability of one token."
    )
    normalize_std: bool = Field(default=True, description="Divide advantages by the group's standard deviation.")
    aggregation: Literal["SequenceMean", "TokenMean"] = Field(
        default="SequenceMean", description="Mean over each sequence's tokens first, or over all tokens of the step."
    )


class Algorithm(OneOf):
    """The learning rule."""

    grpo: Grpo | None = Field(default=None, description="Group relative policy optimisation.")


class Pipeline(SpecModel):
    """How generation and training overlap, and for how long."""

    mode: Literal["StreamSync", "StreamAsync"] = Field(
        default="StreamAsync",
        description="StreamSync: strictly on-policy. StreamAsync: samples may be `maxStalenessSteps` old.",
    )
    max_staleness_steps: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Largest age of a sample's first token in steps; StreamSync: 0; StreamAsync: at least 1, default 1.",
    )
    batch_groups: int = Field(description="Groups (prompts) a training step.", ge=1, le=65_536)
    steps: int = Field(description="Training steps of the run.", ge=1, le=10_000_000)

    @property
    def staleness(self) -> int:
        """S of the staleness rule, in steps."""
        if self.max_staleness_steps is None:
            return 0 if self.mode == "StreamSync" else 1
        return self.max_staleness_steps

    @model_validator(mode="after")
    def _staleness_fits_mode(self) -> Self:
        if self.mode == "StreamSync" and self.staleness != 0:
            raise ValueError(f"maxStalenessSteps must be 0 (or absent) with mode StreamSync, got {self.staleness}")
        if self.mode == "StreamAsync" and self.staleness < 1:
            raise ValueError(f"maxStalenessSteps must be at least 1 with mode StreamAsync, got {self.staleness}")
        return self

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "self.mode != 'StreamSync' || !has(self.maxStalenessSteps) || self.maxStalenessSteps == 0",
            "maxStalenessSteps must be 0 (or absent) with mode StreamSync",
        ),
        (
            "self.mode != 'StreamAsync' || !has(self.maxStalenessSteps) || self.maxStalenessSteps >= 1",
            "maxStalenessSteps must be at least 1 with mode StreamAsync",
        ),
    )


class Fifo(SpecModel):
    """First planned, first issued."""


class LateBinding(SpecModel):
    """One central queue; a slot that frees takes the longest predicted sample."""


class Dispatch(OneOf):
    """Which waiting sample a free slot takes."""

    fifo: Fifo | None = Field(default=None, description="First planned, first issued.")
    late_binding: LateBinding | None = Field(default=None, description="Longest predicted first.")


class Scheduling(SpecModel):
    """Who generates what and when."""

    length_signals: tuple[Literal["History"], ...] = Field(
        default=("History",),
        max_length=3,
        description="What predicts lengths, cheapest first. History: past lengths of the same prompt.",
    )
    dispatch: Dispatch = Field(
        default_factory=lambda: Dispatch.model_validate({"lateBinding": {}}),
        description="Which waiting sample a free slot takes.",
    )
    lease_seconds: float = Field(
        default=15.0, ge=1, le=3600, description="A generator silent for so long is dead; its samples are issued again."
    )
    max_buffer_bytes: ByteQuantity = Field(
        default="256Mi", description="Bound on finished samples that wait for the trainer."
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


class Trainer(SpecModel):
    """The trainer and its optimiser (AdamW)."""

    engine: TrainerEngine = Field(
        default_factory=lambda: TrainerEngine.model_validate({"torch": {}}), description="What trains."
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
    precision: Literal["FP32"] = Field(default="FP32", description="Number format of weights and arithmetic.")
    cost_per_hour: CostQuantity = Field(default="1.00", description="Cost of the trainer; weighs its bubbles.")


class GrpcWeights(SpecModel):
    """Weights pulled in hash-checked chunks over gRPC."""

    chunk_bytes: ByteQuantity = Field(default="1Mi", description="Bytes of one chunk, at most 3Mi.")
    timeout_seconds: float = Field(
        default=120.0, gt=0, le=86_400, description="Longest time for one version, retries included."
    )

    @model_validator(mode="after")
    def _chunk_fits_a_message(self) -> Self:
        if parse_bytes(self.chunk_bytes) > parse_bytes(MAX_CHUNK):
            raise ValueError(f"chunkBytes must be at most {MAX_CHUNK}, got {self.chunk_bytes}")
        return self

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            f"quantity(self.chunkBytes).compareTo(quantity('{MAX_CHUNK}')) <= 0",
            f"chunkBytes must be at most {MAX_CHUNK}",
        ),
    )


class Weights(OneOf):
    """How weights reach the generators."""

    grpc: GrpcWeights | None = Field(default=None, description="Pulled over gRPC.")


class Checkpoints(SpecModel):
    """Checkpoints of model, optimiser, random state and journal position."""

    interval_steps: int = Field(
        default=10, ge=1, le=1_000_000, description="Steps between checkpoints; one is always written at the end."
    )
    keep_last: int = Field(default=2, ge=1, le=1000, description="Checkpoints kept.")


class Storage(SpecModel):
    """What is written to disk."""

    checkpoints: Checkpoints = Field(default=Checkpoints(), description="Checkpoints.")


class FailurePolicy(SpecModel):
    """What happens when a process dies."""

    max_restarts: int = Field(
        default=5, ge=0, le=10_000, description="Restarts of all processes together before the run fails."
    )
