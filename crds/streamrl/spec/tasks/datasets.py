"""Where prompts come from: the members of `task.dataset`."""

from typing import Any, ClassVar

from pydantic import Field

from streamrl.spec.base import FieldRule, OneOf, SpecModel


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

    path: str = Field(
        description="File, relative to the job file; or its URL: `s3://bucket/file`.", min_length=1, max_length=1024
    )
    prompt_field: str = Field(default="prompt", description="Field of the prompt.", min_length=1, max_length=128)
    answer_field: str = Field(
        default="answer", description="Field of the reference answer.", min_length=1, max_length=128
    )
    held_out_percent: int = Field(
        default=10, ge=1, le=90, description="Share of the lines kept for evaluation, in percent."
    )


class HuggingFaceDataset(SpecModel):
    """A data set of the Hugging Face `datasets` library, of the hub or on disk."""

    name: str | None = Field(default=None, min_length=1, max_length=253, description="Name on the hub: `openai/gsm8k`.")
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Directory as `save_to_disk` writes it, or with parquet, JSON or CSV files; relative to the job file.",
    )
    config: str | None = Field(default=None, min_length=1, max_length=128, description="Configuration of the data set.")
    revision: str | None = Field(default=None, min_length=1, max_length=128, description="Branch, tag or commit.")
    split: str = Field(default="train", description="Split of the training prompts.", min_length=1, max_length=128)
    prompt_field: str = Field(default="prompt", description="Field of the prompt.", min_length=1, max_length=128)
    answer_field: str | None = Field(
        default=None, min_length=1, max_length=128, description="Field of the reference answer; absent = there is none."
    )
    held_out_percent: int = Field(
        default=10,
        ge=1,
        le=90,
        description="Share of the rows kept for evaluation, in percent, if `evaluation.split` names no split.",
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "needs exactly one of name, path",
            "has(self.name) != has(self.path)",
            lambda data: "both" if data.name else "none",
        ),
    )


class Dataset(OneOf):
    """Where prompts come from."""

    reasoning_gym: ReasoningGymDataset | None = Field(default=None, description="A procedural data set.")
    jsonl: JsonlDataset | None = Field(default=None, description="A file of prompts.")
    hugging_face: HuggingFaceDataset | None = Field(default=None, description="A data set of the hub or on disk.")
