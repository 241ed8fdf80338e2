"""What a job writes to disk: checkpoints, the journal, the archive of samples."""

from typing import ClassVar, Literal

from pydantic import Field

from streamrl.spec.base import URL_PATTERN, ByteQuantity, FieldRule, SpecModel
from streamrl.spec.volumes import ObjectName

MIN_ARCHIVE = "4Mi"
"""A sixteenth of it is one segment."""


class Claim(SpecModel):
    """A volume of the job on Kubernetes; a local run writes into its run folder."""

    storage_class_name: ObjectName | None = Field(default=None, description="Storage class; absent = the cluster's.")
    size: ByteQuantity = Field(default="10Gi", description="Size of the claim that is made.")
    when_deleted: Literal["Delete", "Retain"] = Field(
        default="Delete", description="What becomes of the claim that was made when the job is deleted."
    )


class EarlierRun(SpecModel):
    """A run on a volume that was kept."""

    claim_name: ObjectName = Field(
        description="Its persistent volume claim. The job's own checkpoints go there too, and it is kept when the job is deleted."
    )
    run: ObjectName | None = Field(
        default=None,
        description="Its directory on the volume: the first part of its `status.checkpointPath`. Absent = the only one with checkpoints.",
    )


class ResumeFrom(EarlierRun):
    """A run that has ended, on a volume that was kept: the job begins with weights, optimiser and steps of its newest checkpoint."""


class WeightsFrom(EarlierRun):
    """A run with all of its steps, on a volume that was kept: the job trains the model that it exported, and counts from step 0."""


class Checkpoints(Claim):
    """Checkpoints of model, optimiser, random state and journal position; the trained model lies beside them."""

    interval_steps: int = Field(
        default=10, ge=1, le=1_000_000, description="Steps between checkpoints; one is always written at the end."
    )
    keep_last: int = Field(default=2, ge=1, le=1000, description="Checkpoints kept.")
    url: str | None = Field(
        default=None,
        max_length=1024,
        pattern=URL_PATTERN,
        description="Folder of an object store that also gets each checkpoint and the trained model: `s3://bucket/folder`.",
    )
    claim_name: ObjectName | None = Field(
        default=None,
        description="A persistent volume claim that exists; kept when the job is deleted. Absent = one is made.",
    )
    resume_from: ResumeFrom | None = Field(
        default=None,
        description="The run that this one goes on from; absent = none. Locally `streamrl run --from RUN`.",
    )
    weights_from: WeightsFrom | None = Field(
        default=None,
        description="The run whose trained model this one begins with, in place of `spec.model`; absent = none. Locally `streamrl run --weights-from RUN`.",
    )
    when_deleted: Literal["Delete", "Retain"] = Field(
        default="Retain", description="What becomes of the claim that was made when the job is deleted."
    )

    @property
    def given_claim(self) -> str | None:
        """The claim that is there; None: one is made."""
        earlier = self.resume_from or self.weights_from
        return self.claim_name if earlier is None else earlier.claim_name

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "claimName and resumeFrom must not be given together: checkpoints go where the job resumes from",
            "!has(self.claimName) || !has(self.resumeFrom)",
        ),
        FieldRule(
            "weightsFrom must stand alone, without claimName and resumeFrom: checkpoints go where its run lies",
            "!has(self.weightsFrom) || !(has(self.claimName) || has(self.resumeFrom))",
        ),
    )


class JournalSpec(Claim):
    """The scheduler's journal: on a volume of its own, never on a network file system."""


class Archive(SpecModel):
    """Samples of groups that are trained or dropped, kept in the run folder (on Kubernetes: on the journal's volume)."""

    share_percent: int = Field(
        default=100,
        ge=0,
        le=100,
        description="Share of the groups that is kept; 0 keeps none, and so no samples to look at.",
    )
    max_bytes: ByteQuantity = Field(
        default="256Mi", description=f"Bytes on the disk, at least {MIN_ARCHIVE}; the oldest samples go first."
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            f"maxBytes must be at least {MIN_ARCHIVE}",
            f"quantity(self.maxBytes).compareTo(quantity('{MIN_ARCHIVE}')) >= 0",
            "{self.max_bytes}",
        ),
    )


class Storage(SpecModel):
    """What is written to disk."""

    checkpoints: Checkpoints = Field(default=Checkpoints(), description="Checkpoints.")
    journal: JournalSpec = Field(default=JournalSpec(), description="The scheduler's journal.")
    archive: Archive = Field(default=Archive(), description="Samples to look at, and for later use.")
