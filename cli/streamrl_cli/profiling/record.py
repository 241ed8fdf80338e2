"""profile.json: what was measured, with its spread. Its shape, reading and writing it.

Invariant: a file that reads well can be planned by: batches rise, every time is positive.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from streamrl.errors import UserError, UserErrors
from streamrl.files import read_text, replace_file
from streamrl.latency import LatencyCurve
from streamrl.spec import RLJob
from streamrl.spec.base import SpecModel, demand_different, demand_rising
from streamrl.spec.schema import path_text

VERSION: Literal[1] = 1
_FIX = "measure again: streamrl profile JOB.yaml --out {path}"
_MAX_BYTES = 16 * 2**20


class Record(SpecModel):
    """A part of the file: as strict as the job file, and every number finite. Code makes it by the names of its fields."""

    model_config = ConfigDict(allow_inf_nan=False, populate_by_name=True)


class BatchPoint(Record):
    """Decoding with so many active sequences; medians over windows of steps."""

    batch: int = Field(ge=1, le=1_000_000, description="Active sequences.")
    milliseconds: float = Field(gt=0, description="Of one step: the median of the windows.")
    lowest_milliseconds: float = Field(gt=0, description="The fastest window.")
    highest_milliseconds: float = Field(gt=0, description="The slowest window.")
    steps: int = Field(ge=1, description="Steps measured.")


class AnswerLengths(Record):
    """Answers of the initial model to the job's prompts."""

    tokens: tuple[int, ...] = Field(min_length=1, max_length=65_536, description="Of each answer (of its first turn).")
    unfinished: int = Field(default=0, ge=0, description="Of these, answers that the deadline cut off.")
    turns: int = Field(default=1, ge=1, description="Turns that an answer may have: `task.environment.maxTurns`.")

    @property
    def mean_tokens(self) -> float:
        """Of one turn."""
        return sum(self.tokens) / len(self.tokens)


class PoolProfile(Record):
    """One generator of a pool."""

    name: str = Field(description="Name of the pool in the job.")
    engine: str = Field(description="Key of its engine.")
    devices: int = Field(default=1, ge=1, le=64, description="That it computed on: `tensorParallelSize` of vLLM.")
    latency: tuple[BatchPoint, ...] = Field(min_length=1, max_length=64, description="By rising batch.")
    fill_milliseconds: float = Field(ge=0, description="The batch waits so long while one sample is admitted.")
    lengths: AnswerLengths = Field(description="Of its answers.")

    @model_validator(mode="after")
    def _batches_rise(self) -> Self:
        demand_rising("latency", by="batch", values=(point.batch for point in self.latency))
        return self

    @property
    def curve(self) -> LatencyCurve:
        """PTL(BS)."""
        return LatencyCurve.of_milliseconds((point.batch, point.milliseconds) for point in self.latency)


class StepPoint(Record):
    """One training step; medians over repeats."""

    processes: int = Field(ge=1, le=65_536, description="Ranks.")
    samples: int = Field(ge=1, description="Of the step.")
    tokens: int = Field(ge=1, description="Completion tokens of the step; prompts as long as the job's come with them.")
    seconds: float = Field(gt=0, description="The median of the repeats.")
    lowest_seconds: float = Field(gt=0, description="The fastest one.")
    highest_seconds: float = Field(gt=0, description="The slowest one.")
    repeats: int = Field(ge=1, description="Steps measured.")


class TrainerProfile(Record):
    """The trainer."""

    engine: str = Field(description="Key of its engine.")
    points: tuple[StepPoint, ...] = Field(min_length=1, max_length=256, description="In the order of measuring.")


class Profile(Record):
    """Everything measured for a job."""

    version: Literal[1] = Field(default=VERSION, description="Of this shape.")
    job: str = Field(description="Name of the job.")
    model: dict[str, Any] = Field(default_factory=dict, description="`spec.model` of the job, without its warm-up.")
    pools: tuple[PoolProfile, ...] = Field(default=(), max_length=8, description="By pool.")
    trainer: TrainerProfile | None = Field(default=None, description="Absent: not measured.")

    @model_validator(mode="after")
    def _pools_differ(self) -> Self:
        demand_different("names of pools", (pool.name for pool in self.pools))
        return self

    def pool(self, name: str) -> PoolProfile | None:
        """What was measured of a pool."""
        return next((pool for pool in self.pools if pool.name == name), None)

    def with_part(self, other: "Profile") -> "Profile":
        """With what `other`, of the same model, has measured in the place of what is here."""
        kept = [pool for pool in self.pools if other.pool(pool.name) is None]
        return other.model_copy(update={"pools": (*kept, *other.pools), "trainer": other.trainer or self.trainer})


def model_of(job: RLJob) -> dict[str, Any]:
    """What two jobs share if one's profile is the other's: the model, however it was warmed up."""
    if not job.spec.has_model:
        return {}
    model = job.spec.model.model_dump(mode="json", by_alias=True, exclude_none=True)
    model.get("scratch", {}).pop("warmUp", None)
    return dict(model)


def write_profile(profile: Profile, *, path: Path) -> None:
    """Write the file. Raises `UserError` where that cannot be."""
    document = profile.model_dump(mode="json", by_alias=True, exclude_none=True)
    replace_file(path, (json.dumps(document, indent=1) + "\n").encode())


def read_profile(path: Path) -> Profile:
    """Read it back.

    Raises `UserError`: it cannot be read, or is no JSON. Raises `UserErrors`: it is not of this shape; one line for each mistake.
    """
    fix = _FIX.format(path=path)
    try:
        return Profile.model_validate_json(read_text(path, most_bytes=_MAX_BYTES, fix=fix))
    except ValidationError as error:
        mistakes = [_explain(path, details["loc"], details["msg"], details["type"]) for details in error.errors()]
        raise UserErrors(mistakes) from None


def _explain(path: Path, place: tuple[int | str, ...], message: str, kind: str) -> UserError:
    fix = _FIX.format(path=path)
    if kind == "json_invalid":
        return UserError(field=str(path), rule=f"is not JSON: {message.partition(': ')[2] or message}", fix=fix)
    field = f"{path}: {path_text(place)}" if place else str(path)
    if place == ("version",):
        return UserError(field=field, rule=f"must be {VERSION}: it is of another version of streamrl", fix=fix)
    return UserError(field=field, rule=message.removeprefix("Value error, "), fix=fix)
