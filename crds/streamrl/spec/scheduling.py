"""`spec.scheduling`: who generates what and when."""

from typing import Literal

from pydantic import Field

from streamrl.spec.base import ByteQuantity, OneOf, SpecModel


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
