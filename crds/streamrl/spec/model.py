"""Which model is trained: one from the hub, one on disk, or one built from scratch."""

from typing import ClassVar

from pydantic import Field

from streamrl.spec.base import FieldRule, OneOf, SpecModel


class HuggingFaceModel(SpecModel):
    """A causal language model by its name on the hub."""

    name: str = Field(description="Name on the hub: `Qwen/Qwen2.5-0.5B`.", min_length=1, max_length=253)
    revision: str = Field(default="main", description="Branch, tag or commit.", min_length=1, max_length=128)


class PathModel(SpecModel):
    """A causal language model as `save_pretrained` writes it."""

    directory: str = Field(
        description="Directory with config.json, weights and tokenizer, relative to the job file; or its URL: `s3://bucket/folder`.",
        min_length=1,
        max_length=1024,
    )


class WarmUp(SpecModel):
    """Supervised training on the task's own answers before reinforcement learning starts."""

    steps: int = Field(default=400, ge=0, le=1_000_000, description="Optimiser steps; 0 starts from random weights.")
    batch_size: int = Field(default=64, ge=1, le=65_536, description="Examples a step.")
    learning_rate: float = Field(default=3e-3, gt=0, le=1, description="Peak learning rate; linear rise, cosine fall.")


class ScratchModel(SpecModel):
    """A small Qwen3 with a character tokenizer, built and warmed up on the task itself."""

    hidden_size: int = Field(default=128, ge=8, le=8192, description="Width; a multiple of `heads`.")
    layers: int = Field(default=2, ge=1, le=128, description="Transformer blocks.")
    heads: int = Field(default=4, ge=1, le=128, description="Attention heads.")
    intermediate_size: int = Field(default=256, ge=8, le=65_536, description="Width of the feed-forward layer.")
    max_positions: int = Field(
        default=512, ge=16, le=1_048_576, description="Longest prompt and completion together, in tokens."
    )
    warm_up: WarmUp = Field(default=WarmUp(), description="Supervised warm-up; its result is cached by its hash.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "hiddenSize must be a multiple of 2 x heads",
            "self.hiddenSize % (2 * self.heads) == 0",
            "hiddenSize {self.hidden_size} and heads {self.heads}",
        ),
    )


class FrozenModel(OneOf):
    """A model that is not trained: it says how likely each token of a sample is."""

    hugging_face: HuggingFaceModel | None = Field(default=None, description="A model of the hub.")
    path: PathModel | None = Field(default=None, description="A model on disk; no URL.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "path.directory must be a directory, not a URL",
            "!has(self.path) || !self.path.directory.contains('://')",
            "{self.path.directory}",
        ),
    )


class Model(OneOf):
    """The model that is trained."""

    hugging_face: HuggingFaceModel | None = Field(default=None, description="A model of the hub.")
    path: PathModel | None = Field(default=None, description="A model on disk.")
    scratch: ScratchModel | None = Field(default=None, description="A new small model.")
