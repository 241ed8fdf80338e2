"""The part `lengths` of a scenario: how long completions are. Rules only; `lengths.py` draws."""

from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from streamrl.spec.base import OneOf, SpecModel, demand_rising

MOST_TOKENS = 1_048_576
"""As the contract's `maxTokens`."""
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
FilePath = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class LogNormal(SpecModel):
    """Log-normal lengths."""

    median_tokens: float = Field(ge=1, le=MOST_TOKENS, description="Median, in tokens.")
    sigma: float = Field(default=0.8, ge=0, le=4, description="Standard deviation of the logarithm.")


class QuantilePoint(SpecModel):
    """A point of a distribution: so many percent are at most so long."""

    percent: float = Field(ge=0, le=100, description="Share of completions.")
    tokens: int = Field(ge=1, le=MOST_TOKENS, description="Their largest length.")


class Quantiles(SpecModel):
    """Lengths by quantiles, linear between the points."""

    points: tuple[QuantilePoint, ...] = Field(min_length=2, max_length=64, description="By rising percent, 0 to 100.")

    @model_validator(mode="after")
    def _points_rise(self) -> Self:
        percents = [point.percent for point in self.points]
        if percents != sorted(set(percents)) or percents[0] != 0 or percents[-1] != 100:  # noqa: PLR2004 - all of them
            raise ValueError(f"points must rise from percent 0 to percent 100, got {percents}")
        if any(one.tokens > other.tokens for one, other in pairwise(self.points)):
            raise ValueError(f"tokens of points must not fall, got {[point.tokens for point in self.points]}")
        return self


class LengthTable(SpecModel):
    """Lengths as they are written down: one list for each prompt, one length for each sample; shorter lists come round again."""

    rows: tuple[Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=1024)], ...] = Field(
        min_length=1, max_length=100_000, description="Tokens of the samples of prompt 0, 1, ..."
    )


class LengthFile(SpecModel):
    """The same from a file."""

    path: FilePath = Field(
        description="JSON Lines beside the scenario: a list of lengths in tokens for each prompt, one prompt a line."
    )


class GrowthPoint(SpecModel):
    """Factor on all lengths at one step."""

    step: int = Field(ge=0, le=10_000_000, description="Step for which the group is planned.")
    factor: float = Field(gt=0, le=1000, description="Factor on all lengths.")


class Lengths(OneOf):
    """How long completions are."""

    one_of = ("log_normal", "quantiles", "table", "file")

    log_normal: LogNormal | None = Field(default=None, description="Log-normal.")
    quantiles: Quantiles | None = Field(default=None, description="By quantiles.")
    table: LengthTable | None = Field(default=None, description="By prompt, written down here.")
    file: LengthFile | None = Field(default=None, description="By prompt, in a file.")
    within_group_percent: float = Field(
        default=30.0,
        ge=0,
        le=100,
        description="Share of the spread that is between the samples of a group; the rest is between prompts.",
    )
    drift_percent: float = Field(
        default=0.0, ge=0, le=100, description="Share of the spread between prompts that is drawn anew each epoch."
    )
    prompts_per_epoch: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Prompts before they come round again; absent = never (table: its rows).",
    )
    growth: tuple[GrowthPoint, ...] = Field(
        default=(), max_length=256, description="Factor on all lengths, linear between the points, by rising step."
    )

    @model_validator(mode="after")
    def _growth_rises(self) -> Self:
        demand_rising("growth", by="step", values=(point.step for point in self.growth))
        return self
