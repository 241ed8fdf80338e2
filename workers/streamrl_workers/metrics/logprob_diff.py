"""The trainer's against the generator's log-prob of every trained token: by what it is told apart, its keys, and when it is too large.

Producer: the trainer, among the metrics of a step, as `<measure>/<pool>/<version lag>`. A pair without tokens is absent: nothing was measured.
Consumers: scheduler (gauges, `/status`, the log), runner (a line in the terminal), report.

The pool is that of the generator which drew the sample's last token. The version lag is that of the sample's oldest token, in steps behind
the weights that the step begins with. At lag 0 all tokens are of these very weights: the difference is the generator's arithmetic
alone. At any other lag it holds what the policy has moved since, too.

Bounds: a pool for each of the job's and `OTHER`; lags from `LAGS`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamrl.spec.training import LogprobDiffBound

MEASURES = {
    "train_infer_logprob_diff_mean": "train_infer_logprob_diff_mean_nats",
    "train_infer_logprob_diff_max": "train_infer_logprob_diff_max_nats",
    "train_infer_logprob_diff_kl": "train_infer_logprob_diff_kl_nats",
    "train_infer_logprob_diff_tokens": "train_infer_logprob_diff_tokens",
    "clip_fraction": "pool_clip_ratio",
    "sequence_clip_fraction": "pool_sequence_clip_ratio",
}
"""What is said of each pair of pool and lag -> the scheduler's metric of it."""
MEAN, CLIPPED, TRUNCATED = "train_infer_logprob_diff_mean", "sequence_clip_fraction", "truncated"
LAGS = ("0", "1", "2", "3", "4+")
OTHER = "_other"
"""The pool of a generator whose name is not `generator-<pool>-<number>` of the job: no name of a pool has such a character."""
SEQUENCE_CLIP_BOUND = 0.9
"""Above it the clip is narrower than what it is measured on: hardly any sequence is left that both signs of the advantage move."""
SEQUENCE_CLIP_STEPS = 5
"""In a row: single steps of few sequences are above it by chance."""

TRUNCATED_BOUND = 0.9
"""Share of samples without turns that end at a limit. Above it, hardly any answer has an end that the run knows."""

DIFF_HIGH, SEQUENCES_CLIPPED, ANSWERS_TRUNCATED = "TrainInferLogprobDiffHigh", "SequencesClipped", "AnswersTruncated"
WARNINGS = (DIFF_HIGH, SEQUENCES_CLIPPED, ANSWERS_TRUNCATED)
"""All types of warnings."""
_CLIPPED_MESSAGE = (
    f"the ratios of more than {SEQUENCE_CLIP_BOUND:.0%} of the sequences are outside the clip, for {SEQUENCE_CLIP_STEPS} steps or more: the clip is "
    "narrower than the policies are apart; widen clipLow and clipHigh, lower learningRate or maxStalenessSteps, or set algorithm.correction "
    "to truncatedImportance"
)
_TRUNCATED_MESSAGE = (
    f"more than {TRUNCATED_BOUND:.0%} of a step's answers end at a limit of tokens: look at some with streamrl samples; if they are cut off, "
    "raise sampling.maxTokens; if they continue after their end, the run does not know the end token that the model writes: add it to "
    "eos_token_id in the model's generation_config.json, or to sampling.stop"
)


class PoolLag(NamedTuple):
    """What tokens are told apart by."""

    pool: str
    lag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWarning:
    """What a person should look at while the run goes on."""

    type: str
    message: str


def pool_lags(pools: Sequence[str]) -> tuple[PoolLag, ...]:
    """All that there can be in a job with these pools."""
    return tuple(PoolLag(pool, lag) for pool in (*pools, OTHER) for lag in LAGS)


def pool_lag(generator_id: str, *, lag: int, pools: Sequence[str]) -> PoolLag:
    """Of a sample by its generator and the lag of its oldest token in steps."""
    name = generator_id.removeprefix("generator-").rpartition("-")[0]
    return PoolLag(name if name in pools else OTHER, LAGS[min(lag, len(LAGS) - 1)])


def key(measure: str, at: PoolLag) -> str:
    """Among the trainer's metrics of a step."""
    return f"{measure}/{at.pool}/{at.lag}"


def read(metrics: Mapping[str, float | None], *, measure: str) -> dict[PoolLag, float]:
    """A measure by pool and lag, of the trainer's metrics of a step; what was read from a file may hold other keys, and null."""
    found: dict[PoolLag, float] = {}
    for name, value in metrics.items():
        begin, *labels = name.split("/")
        if begin == measure and len(labels) == len(PoolLag._fields) and value is not None:
            found[PoolLag(*labels)] = value
    return found


def steps_above(
    metrics: Mapping[str, float], *, truncated: float, bound: LogprobDiffBound, before: Mapping[str, int]
) -> dict[str, int]:
    """How many steps in a row, this one included, were above each bound; a step that measured nothing changes nothing.

    `truncated`: share of the step's samples that have no turns and ended at a limit of tokens.
    """
    diffs = [value for at, value in read(metrics, measure=MEAN).items() if at.lag == LAGS[0]]
    clipped = [metrics[CLIPPED]] if metrics.get("forward_tokens") and CLIPPED in metrics else []
    found = {
        MEAN: (diffs, bound.max_mean),
        CLIPPED: (clipped, SEQUENCE_CLIP_BOUND),
        TRUNCATED: ([truncated], TRUNCATED_BOUND),
    }
    return {name: _counted(values, limit=limit, before=before.get(name, 0)) for name, (values, limit) in found.items()}


def _counted(values: Sequence[float], *, limit: float, before: int) -> int:
    if not values:
        return before
    return before + 1 if any(not value <= limit for value in values) else 0  # NaN is above


def warnings(line: Mapping[str, Any], *, bound: LogprobDiffBound) -> Iterator[TrainingWarning]:
    """What holds behind a step, by its line in `steps.jsonl`."""
    above = line.get("above_bound", {})
    if above.get(MEAN, 0) >= bound.steps:
        yield TrainingWarning(type=DIFF_HIGH, message=_diff_message(line["trainer"], bound=bound))
    if above.get(CLIPPED, 0) >= SEQUENCE_CLIP_STEPS:
        yield TrainingWarning(type=SEQUENCES_CLIPPED, message=_CLIPPED_MESSAGE)
    if above.get(TRUNCATED, 0) > 0:
        yield TrainingWarning(type=ANSWERS_TRUNCATED, message=_TRUNCATED_MESSAGE)


def new_warnings(line: Mapping[str, Any], *, bound: LogprobDiffBound) -> list[TrainingWarning]:
    """Those that begin to hold with this step."""
    before = {name: count - 1 for name, count in line.get("above_bound", {}).items()}
    known = {one.type for one in warnings({**line, "above_bound": before}, bound=bound)}
    return [one for one in warnings(line, bound=bound) if one.type not in known]


def _diff_message(metrics: Mapping[str, float], *, bound: LogprobDiffBound) -> str:
    found = {at.pool: value for at, value in read(metrics, measure=MEAN).items() if at.lag == LAGS[0]}
    pool = max(found, key=lambda one: found[one], default="")
    latest = f" (pool {pool}: {found[pool]:.3g})" if pool else ""
    return (
        f"the mean train-infer log-prob difference of samples of the newest weights{latest} is above trainer.trainInferLogprobDiff.maxMean "
        f"{bound.max_mean:g}, for {bound.steps} steps or more: the generators compute another policy than the trainer; give both the same precision "
        "and the same version of the model's code, look for quantised weights, or set algorithm.correction to truncatedImportance or maskedImportance"
    )
