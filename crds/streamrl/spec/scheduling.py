"""`spec.scheduling`: who generates what and when."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from streamrl.spec.base import ByteQuantity, FieldRule, OneOf, PythonClass, SpecModel


class Fifo(SpecModel):
    """First planned, first issued; of the generators with a free slot the fastest takes it."""


class LongestFirst(SpecModel):
    """The longest predicted of a batch first, where the modelled makespan says that it is faster."""


class SkewAware(SpecModel):
    """Length pools: generators of their own for the longest predicted samples of a batch. A generator that has nothing left steals."""

    split: Literal["Algorithm2", "Searched"] = Field(
        default="Algorithm2",
        description="How generators are split. Algorithm2: as in StreamRL. Searched: by the modelled makespan, which also chooses how many samples are long.",
    )
    long_percent: int = Field(
        default=20, ge=1, le=50, description="Share of a batch's prompts that is long. Algorithm2 only."
    )


class Auto(SpecModel):
    """For each batch the order with the least modelled makespan: fifo, longestFirst or skewAware with Searched."""


class Dispatch(OneOf):
    """Which waiting sample a free slot takes. Where length predictions do not prove good, each of them is fifo."""

    fifo: Fifo | None = Field(default=None, description="First planned, first issued.")
    longest_first: LongestFirst | None = Field(default=None, description="Longest predicted first.")
    skew_aware: SkewAware | None = Field(
        default=None, description="Length pools, with generators of their own for long samples."
    )
    auto: Auto | None = Field(default=None, description="Which of them pays now, by modelled makespan.")
    python: PythonClass | None = Field(default=None, description="A class of your own, or of an installed package.")


class Rebalance(SpecModel):
    """Long samples that run go on, with their tokens, on an emptier generator, when nothing waits for a slot and the model says that it pays."""

    gain_percent: float = Field(
        default=5.0,
        ge=0,
        le=50,
        description="Least modelled gain, in percent of the time until both generators are done, before samples move.",
    )
    max_moves: int = Field(default=2, ge=1, le=10, description="Maximum moves per sample.")


LengthSignal = Literal["History", "Siblings", "Ranker"]


class HashingRankerSpec(SpecModel):
    """A linear model on hashed features of the prompt's text; it learns from every finished group of the run."""


class LanguageModelRanker(SpecModel):
    """A small fine-tuned transformers model; it is tuned on with finished groups while the run goes on."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Folder that `streamrl ranker fit` wrote; a relative path begins at the job file's directory."
    )
    cpu_percent: int = Field(
        default=20,
        ge=0,
        le=100,
        description="Share of one core that tuning may take, after scoring; 0 = it is never tuned.",
    )
    refit_pairs: int = Field(
        default=256, ge=16, le=2048, description="Finished groups after which a round of tuning begins."
    )


class RankerSpec(OneOf):
    """What orders prompts by the expected length of their completions, in a process of its own."""

    hashing: HashingRankerSpec | None = Field(default=None, description="A light model that learns during the run.")
    language_model: LanguageModelRanker | None = Field(
        default=None, description="A small language model, tuned during the run."
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
    ranker: RankerSpec | None = Field(
        default=None, description="Orders prompts by expected length; goes with Ranker in lengthSignals."
    )
    dispatch: Dispatch = Field(
        default_factory=lambda: Dispatch.model_validate({"longestFirst": {}}),
        description="Which waiting sample a free slot takes.",
    )
    rebalance: Rebalance | None = Field(
        default=None, description="Long samples move to emptier generators when it pays; absent = none ever moves."
    )
    lease_seconds: float = Field(
        default=15.0, ge=1, le=3600, description="A generator silent for so long is dead; its samples are issued again."
    )
    max_buffer_bytes: ByteQuantity = Field(
        default="256Mi",
        description="Bound on samples that run or wait for the trainer; what the step under way needs may always begin.",
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        # When a group begins, none of it has finished: dispatch would be fifo, and say nothing of it.
        FieldRule(
            "the length signal Siblings orders nothing alone: add History or Ranker, or give []",
            "self.lengthSignals.size() == 0 || self.lengthSignals.exists(signal, signal != 'Siblings')",
        ),
        FieldRule(
            "ranker and the length signal Ranker must be given together",
            "has(self.ranker) == ('Ranker' in self.lengthSignals)",
            lambda scheduling: (
                f"{'a' if scheduling.ranker else 'no'} ranker and lengthSignals {', '.join(scheduling.length_signals)}"
            ),
        ),
    )
