"""What is learned: the data set, how answers are sampled, what they earn, how they are evaluated."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, StringConstraints, model_validator

from streamrl.spec.base import OneOf, PythonFunction, SpecModel, map_by

Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


WHOLE_PERCENT = 100


class ReasoningGymDataset(SpecModel):
    """A procedural data set of reasoning-gym: endless prompts with a verifier of its own."""

    name: str = Field(description="Name of the data set: `chain_sum`.", min_length=1, max_length=128)
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        max_length=64,
        description="Parameters of the data set, as reasoning-gym names them (not `seed`, not `size`).",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class JsonlDataset(SpecModel):
    """One JSON object a line."""

    path: str = Field(description="File; relative to the job file.", min_length=1, max_length=1024)
    prompt_field: str = Field(default="prompt", description="Field of the prompt.", min_length=1, max_length=128)
    answer_field: str = Field(
        default="answer", description="Field of the reference answer.", min_length=1, max_length=128
    )
    held_out_percent: int = Field(
        default=10, ge=1, le=90, description="Share of the lines kept for evaluation, in percent."
    )


class Dataset(OneOf):
    """Where prompts come from."""

    reasoning_gym: ReasoningGymDataset | None = Field(default=None, description="A procedural data set.")
    jsonl: JsonlDataset | None = Field(default=None, description="A file of prompts.")


class Sampling(SpecModel):
    """How completions are sampled in training."""

    temperature: float = Field(default=1.0, gt=0, le=10, description="Softmax temperature.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus: least set of tokens with this probability.")
    top_k: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Only the k most likely tokens; absent = all."
    )
    max_tokens: int = Field(description="Longest completion in tokens.", ge=1, le=1_048_576)
    stop: tuple[Text, ...] = Field(default=(), max_length=16, description="Strings that end a completion.")


class VerifierReward(SpecModel):
    """The data set's own verifier (reasoning-gym) or equality with the reference answer (JSONL)."""

    answer_pattern: Pattern | None = Field(
        default=None,
        description="Regular expression; its first group (or the whole match) of the last match is the answer. Absent = the whole completion.",
    )


class ExactMatchReward(SpecModel):
    """1 if the answer equals the reference after trimming, else 0."""

    answer_pattern: Pattern | None = Field(default=None, description="As in `verifier`.")
    ignore_case: bool = Field(default=False, description="Compare without regard to case.")


class RegexReward(SpecModel):
    """1 if the pattern is found in the completion, else 0."""

    pattern: Pattern = Field(description="Regular expression in Python's syntax.")


class Reward(OneOf):
    """One part of the reward. The sample's reward is the weighted sum of the parts."""

    one_of: ClassVar[tuple[str, ...]] = ("verifier", "exact_match", "regex", "python")

    name: str = Field(
        description="Name in metrics.", pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=32
    )
    weight_percent: int = Field(default=100, ge=1, le=100, description="Weight in percent; all weights sum to 100.")
    timeout_seconds: float = Field(
        default=5.0, gt=0, le=3600, description="Longest time for one sample, in seconds; then it counts as failed."
    )
    verifier: VerifierReward | None = Field(default=None, description="The data set's own verifier.")
    exact_match: ExactMatchReward | None = Field(default=None, description="Equality with the reference answer.")
    regex: RegexReward | None = Field(default=None, description="A pattern that must occur.")
    python: PythonFunction | None = Field(
        default=None, description="`f(*, prompt, completion, answer, metadata) -> float` of the user's own."
    )


class Evaluation(SpecModel):
    """Greedy answers to held-out prompts, before the first step, every `intervalSteps`, and at the end."""

    max_prompts: int = Field(default=128, ge=1, le=100_000, description="Held-out prompts.")
    interval_steps: int = Field(default=20, ge=1, le=1_000_000, description="Steps between evaluations.")


class Task(SpecModel):
    """What is learned."""

    dataset: Dataset = Field(description="Where prompts come from.")
    format: PythonFunction | None = Field(
        default=None,
        description="`f(*, question, answer, metadata) -> {'prompt': str, 'target': str}`: how an item becomes a prompt and a warm-up text. Absent = the question and the answer.",
    )
    group_size: int = Field(default=8, ge=2, le=1024, description="Completions of one prompt.")
    sampling: Sampling = Field(description="How completions are sampled.")
    rewards: tuple[Reward, ...] = Field(
        description="Parts of the reward.", min_length=1, max_length=16, json_schema_extra=map_by("name")
    )
    evaluation: Evaluation = Field(default=Evaluation(), description="Held-out evaluation.")
    processes: int = Field(default=1, ge=1, le=256, description="Processes that make prompts and score completions.")

    @model_validator(mode="after")
    def _weights_and_names(self) -> Self:
        total = sum(reward.weight_percent for reward in self.rewards)
        if total != WHOLE_PERCENT:
            raise ValueError(f"weightPercent of rewards must sum to {WHOLE_PERCENT}, got {total}")
        names = [reward.name for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"names of rewards must differ, got {', '.join(names)}")
        return self

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        ("self.rewards.map(r, r.weightPercent).sum() == 100", "weightPercent of rewards must sum to 100"),
        ("self.rewards.all(r, self.rewards.exists_one(o, o.name == r.name))", "names of rewards must differ"),
    )
