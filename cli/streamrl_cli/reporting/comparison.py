"""What several runs say beside each other: one line for each variant of a job, with confidence over its seeds. Pure.

Runs are of one *variant* when their jobs differ in name and `spec.seed` alone. A reward is read as a curve over four measures of effort:
steps, tokens, seconds, cost (that of all processes by `costPerHour`, spread evenly over the run). Between two values a curve is a
straight line; beyond its last one it says nothing.

Bounds are those of a 95 % confidence interval of the mean by Student's t. With one run there are none.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from streamrl.errors import UserError
from streamrl.spec import RLJobSpec
from streamrl_cli.reporting.data import RunData, cost, weighted_bubbles

EFFORTS = ("steps", "tokens", "seconds", "cost")
REWARDS = {"greedy": "mean_reward", "sampled": "sampled_reward"}
"""Name of a held-out reward -> its key in a line of `evaluations.jsonl`."""
TRAINING = "training"
"""The mean reward of each step's samples: there in every run."""
GRID_POINTS = 60
MOST_DIFFERENCES = 4
"""Fields that name a variant."""
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, 97.5 %, for 1 to 15 degrees of freedom; the normal distribution's from there is at most 8 % narrower."""
_Z_975 = 1.96


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over runs."""

    value: float
    half_width: float | None
    """Half of its 95 % interval; None: of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A reward against each measure of effort, at rising efforts."""

    rewards: tuple[float, ...]
    efforts: Mapping[str, tuple[float, ...]]
    """Of each of `EFFORTS`, a value for each reward."""

    def at(self, effort: str, amount: float) -> float | None:
        """Reward when `amount` of `effort` had been spent; None: before the first or behind the last value."""
        spent = self.efforts[effort]
        if not spent or not spent[0] <= amount <= spent[-1]:
            return None
        place = bisect_left(spent, amount)
        if spent[place] == amount:
            return self.rewards[place]
        share = (amount - spent[place - 1]) / (spent[place] - spent[place - 1])
        return self.rewards[place - 1] + share * (self.rewards[place] - self.rewards[place - 1])

    def first(self, effort: str, reward: float) -> float | None:
        """What had been spent when the reward first was at least `reward`; None: it never was."""
        spent = self.efforts[effort]
        if self.rewards and self.rewards[0] >= reward:
            return spent[0]
        for (before, r0), (after, r1) in pairwise(zip(spent, self.rewards, strict=True)):
            if r1 >= reward:
                return before + (reward - r0) / (r1 - r0) * (after - before)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run of a comparison."""

    name: str
    seed: int
    curve: Curve
    samples_per_s: float | None
    bubbles: Mapping[str, float]
    """Part -> share of the wall, weighted by cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Runs that differ in their seeds alone."""

    label: str
    runs: tuple[RunSummary, ...]

    def at(self, effort: str, amount: float) -> Mean | None:
        """Mean reward at this effort; None: not every run has one there."""
        return _mean_of_all(run.curve.at(effort, amount) for run in self.runs)

    def first(self, effort: str, reward: float) -> Mean | None:
        """Mean effort until this reward; None: not every run reached it."""
        return _mean_of_all(run.curve.first(effort, reward) for run in self.runs)

    def spent(self, effort: str) -> float:
        """The most that every run has spent."""
        return min(run.curve.efforts[effort][-1] for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Variants in the order in which they were named."""

    reward: str
    """`greedy`, `sampled` or `training`."""
    variants: tuple[Variant, ...]

    @property
    def budgets(self) -> dict[str, float]:
        """Effort -> the most that every run of every variant has spent."""
        return {effort: min(variant.spent(effort) for variant in self.variants) for effort in EFFORTS}

    @property
    def goal(self) -> float:
        """The highest reward that every run reached."""
        return min(max(run.curve.rewards) for variant in self.variants for run in variant.runs)

    def difference(self, variant: Variant) -> Mean | None:
        """Reward beyond the first variant's after equal steps, paired by seed; None: no seed in common."""
        steps = self.budgets["steps"]
        base = {run.seed: run.curve.at("steps", steps) for run in self.variants[0].runs}
        pairs = [(run.curve.at("steps", steps), base[run.seed]) for run in variant.runs if run.seed in base]
        return mean([one - other for one, other in pairs if one is not None and other is not None])


def compare(runs: Sequence[RunData], *, reward: str | None = None) -> Comparison:
    """Runs as variants; `reward` None: greedy held-out answers where every run has two evaluations, else the training reward.

    Raises `UserError`: a run has not this reward.
    """
    chosen = reward or ("greedy" if all(len(_evaluated(run, "greedy")) > 1 for run in runs) else TRAINING)
    jobs = [_settings(run) for run in runs]
    differing = [
        path for path in dict.fromkeys(p for job in jobs for p in job) if len({job.get(path) for job in jobs}) > 1
    ]
    groups: dict[tuple[str | None, ...], list[RunData]] = {}
    for run, job in zip(runs, jobs, strict=True):
        groups.setdefault(tuple(job.get(path) for path in differing), []).append(run)
    found = Comparison(
        reward=chosen,
        variants=tuple(
            Variant(
                label=_label(differing, values, name=mine[0].folder.job.metadata.name),
                runs=tuple(_run(one, chosen) for one in mine),
            )
            for values, mine in groups.items()
        ),
    )
    if not all(run.curve.rewards for variant in found.variants for run in variant.runs):
        fix = "wait for the first step" if chosen == TRAINING else f"take {TRAINING}"
        raise UserError(field="--reward", rule="is not in every run", got=chosen, fix=fix)
    return found


def _settings(run: RunData) -> dict[str, str]:
    """Every field of the job that is set, but for the seed."""
    return {path: value for path, value in set_fields(run.folder.job.spec).items() if path != "seed"}


def set_fields(spec: RLJobSpec) -> dict[str, str]:
    """Every field that is set, by its path."""
    return dict(_leaves(spec.model_dump(mode="json", by_alias=True, exclude_none=True), ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - JSON
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, str(value)


def _label(paths: Sequence[str], values: Sequence[str | None], *, name: str) -> str:
    """What sets a variant apart from the others."""
    said = [f"{path}={'-' if value is None else value}" for path, value in zip(paths, values, strict=True)]
    more = len(said) - MOST_DIFFERENCES
    return ", ".join(said[:MOST_DIFFERENCES]) + (f", {more} more" if more > 0 else "") or name


def _run(run: RunData, reward: str) -> RunSummary:
    steps = run.steps
    elapsed_s = steps[-1]["elapsed_s"] if steps else 0.0
    samples = sum(line.get("samples", 0) for line in steps)
    return RunSummary(
        name=run.folder.name,
        seed=run.folder.job.spec.seed,
        curve=_curve(run, reward),
        samples_per_s=samples / elapsed_s if elapsed_s and samples else None,
        bubbles=weighted_bubbles(run),
    )


def _curve(run: RunData, reward: str) -> Curve:
    """Rewards at the steps that have one; what those steps had cost."""
    if reward == TRAINING:
        points = [(line["step"] + 1, line["reward_mean"]) for line in run.steps]
    else:
        points = _evaluated(run, reward)
    tokens = dict(
        zip((line["step"] + 1 for line in run.steps), accumulate(line["tokens"] for line in run.steps), strict=True)
    )
    seconds = {line["step"] + 1: line["elapsed_s"] for line in run.steps}
    known = [(step, value) for step, value in points if step == 0 or step in seconds]
    spent_s = tuple(accumulate((seconds.get(step, 0.0) for step, _ in known), max))
    elapsed_s = max(seconds.values(), default=0.0)
    rate = cost(run) / elapsed_s if elapsed_s else 0.0
    return Curve(
        rewards=tuple(value for _, value in known),
        efforts={
            "steps": tuple(float(step) for step, _ in known),
            "tokens": tuple(float(tokens.get(step, 0)) for step, _ in known),
            "seconds": spent_s,
            "cost": tuple(at_s * rate for at_s in spent_s),
        },
    )


def _evaluated(run: RunData, reward: str) -> list[tuple[int, float]]:
    """(steps trained, reward) of each evaluation that has one."""
    found = ((line["step"], line.get(REWARDS[reward])) for line in run.evaluations)
    return [(step, float(value)) for step, value in found if isinstance(value, int | float)]


def mean(values: Sequence[float]) -> Mean | None:
    """Mean and half of its 95 % interval; None of nothing."""
    if not values:
        return None
    count = len(values)
    if count == 1:
        return Mean(values[0], None)
    quantile = _T_975[count - 2] if count - 2 < len(_T_975) else _Z_975
    return Mean(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(count))


def _mean_of_all(values: Iterable[float | None]) -> Mean | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return mean(known) if len(known) == len(found) else None
