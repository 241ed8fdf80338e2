"""The status of an RLJob as an API server keeps it: conditions and the few numbers that `kubectl get` shows.

Owns the shape alone. A run on one machine has no status object; its numbers are in the run folder.
"""

from typing import Literal

from pydantic import Field

from streamrl.spec.base import SpecModel, map_by


class Condition(SpecModel):
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


class RLJobStatus(SpecModel):
    """What is known of the job."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this is about."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=16, description="State of the job, by aspect.", json_schema_extra=map_by("type")
    )
    step: int | None = Field(default=None, ge=0, description="Training steps done.")
    reward: float | None = Field(default=None, description="Mean held-out reward of the last evaluation.")
    queue: int | None = Field(default=None, ge=0, description="Samples that wait for a generator.")
