"""`spec.scheduling`: who generates what and when."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from streamrl.spec.base import ByteQuantity, OneOf, SpecModel


class Fifo(SpecModel):
    """First planned, first issued; of the generators with a free slot the fastest takes it."""


class LateBinding(SpecModel):
    """One central queue; a slot that frees takes the longest predicted sample."""


class SkewAware(SpecModel):
    """Algorithm 2 of StreamRL: generators of their own for the longest predicted samples of a batch, longest first inside."""

    tail_percent: int = Field(default=20, ge=1, le=50, description="Share of a batch's prompts that is its tail.")
    objective: Literal["Max", "Sum"] = Field(
        default="Max",
        description="What the split of the generators makes least. Max: the slower of the two sides. Sum: both added, as printed in the paper.",
    )


class TailIsolation(SpecModel):
    """Few generators take the longest predicted samples alone, where all samples fit at once and maxStalenessSteps is 0; else as lateBinding."""

    gain_percent: float = Field(
        default=0.5,
        ge=0,
        le=50,
        description="Least modelled gain, in percent of the makespan, before a tail is isolated, or on other generators.",
    )


class Auto(SpecModel):
    """The policy whose modelled makespan is least: fifo, lateBinding, tailIsolation, or static sides as skewAware has them, chosen by the model."""

    gain_percent: float = Field(
        default=0.5,
        ge=0,
        le=50,
        description="Least modelled gain, in percent of the makespan, before a tail gets generators of its own, or others.",
    )


class Dispatch(OneOf):
    """Which waiting sample a free slot takes. Where length predictions do not prove good, each of them is fifo."""

    fifo: Fifo | None = Field(default=None, description="First planned, first issued.")
    late_binding: LateBinding | None = Field(default=None, description="Longest predicted first.")
    skew_aware: SkewAware | None = Field(
        default=None, description="Static sides for long and short samples (Algorithm 2 of StreamRL)."
    )
    tail_isolation: TailIsolation | None = Field(
        default=None, description="Longest predicted samples alone on few generators, where nothing queues."
    )
    auto: Auto | None = Field(default=None, description="Which of them pays now, by modelled makespan.")


class Rebalance(SpecModel):
    """Long samples that run go on, with their tokens, on an emptier generator, when nothing waits for a slot and the model says that it pays."""

    gain_percent: float = Field(
        default=5.0,
        ge=0,
        le=50,
        description="Least modelled gain, in percent of the time until both generators are done, before samples move.",
    )
    max_moves: int = Field(default=2, ge=1, le=10, description="A sample moves at most so often.")


LengthSignal = Literal["History", "Siblings", "Ranker"]
RankerPath = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
"""A file or folder that `streamrl rank` wrote; a relative path begins at the job file's directory."""


class HashingRanker(SpecModel):
    """A linear model on hashed features of the prompt's text; it learns from every finished group of the run."""

    path: RankerPath | None = Field(
        default=None, description="File of `streamrl rank fit` to start from; absent = it starts knowing nothing."
    )


class ScoresRanker(SpecModel):
    """A table of scores, made before the run by any ranker; it learns nothing."""

    path: RankerPath = Field(description="File of `streamrl rank score --out`.")


class LanguageModelRanker(SpecModel):
    """A small fine-tuned transformers model in a process of its own; it is tuned on with finished groups while the run goes on."""

    path: RankerPath = Field(description="Folder of `streamrl rank fit --ranker languageModel`.")
    cpu_percent: int = Field(
        default=20,
        ge=0,
        le=100,
        description="Share of one core that tuning may take, after scoring; 0 = it is never tuned.",
    )
    refit_pairs: int = Field(
        default=256, ge=16, le=2048, description="Finished groups after which a round of tuning begins."
    )


class PolicyFeaturesRanker(SpecModel):
    """A regression on features of a frozen model, in a process of its own; it learns nothing during the run."""

    path: RankerPath = Field(description="Folder of `streamrl rank fit --ranker policyFeatures`.")


class Ranker(OneOf):
    """What orders prompts by the expected length of their completions."""

    hashing: HashingRanker | None = Field(default=None, description="A light model that learns during the run.")
    scores: ScoresRanker | None = Field(default=None, description="A table made before the run.")
    language_model: LanguageModelRanker | None = Field(
        default=None, description="A small language model in a process of its own, tuned during the run."
    )
    policy_features: PolicyFeaturesRanker | None = Field(
        default=None, description="A regression on features of the frozen policy, in a process of its own."
    )


class Scheduling(SpecModel):
    """Who generates what and when."""

    length_signals: tuple[LengthSignal, ...] = Field(
        default=("History", "Siblings"),
        max_length=3,
        description=(
            "What predicts lengths, the first that knows a prompt. History: past lengths of the same prompt. "
            "Siblings: finished samples of the same group. Ranker: what scheduling.ranker says of prompts never seen."
        ),
    )
    ranker: Ranker | None = Field(
        default=None, description="Orders prompts by expected length; goes with Ranker in lengthSignals."
    )
    dispatch: Dispatch = Field(
        default_factory=lambda: Dispatch.model_validate({"lateBinding": {}}),
        description="Which waiting sample a free slot takes.",
    )
    rebalance: Rebalance | None = Field(
        default=None, description="Long samples move to emptier generators when it pays; absent = none ever moves."
    )
    lease_seconds: float = Field(
        default=15.0, ge=1, le=3600, description="A generator silent for so long is dead; its samples are issued again."
    )
    max_buffer_bytes: ByteQuantity = Field(
        default="256Mi", description="Bound on finished samples that wait for the trainer."
    )

    @model_validator(mode="after")
    def _ranker_is_used(self) -> Self:
        if (self.ranker is not None) != ("Ranker" in self.length_signals):
            got = f"{'a' if self.ranker else 'no'} ranker and lengthSignals {', '.join(self.length_signals)}"
            raise ValueError(f"ranker and the length signal Ranker must be given together, got {got}")
        return self

    @model_validator(mode="after")
    def _siblings_have_company(self) -> Self:
        """Alone they would order nothing: when a group begins, none of it has finished; dispatch would be fifo, and say nothing of it."""
        if set(self.length_signals) == {"Siblings"}:
            raise ValueError("the length signal Siblings orders nothing alone: add History or Ranker, or give []")
        return self

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "self.lengthSignals.size() == 0 || self.lengthSignals.exists(signal, signal != 'Siblings')",
            "the length signal Siblings orders nothing alone: add History or Ranker, or give []",
        ),
        (
            "has(self.ranker) == ('Ranker' in self.lengthSignals)",
            "ranker and the length signal Ranker must be given together",
        ),
    )
