"""How long each completion is, and what a modelled ranker knows of it. Pure: a function of the scenario, the group's number and the sample's.

    prompt p = group mod promptsPerEpoch,   epoch e = group div promptsPerEpoch
    z = sqrt(1 - w) (sqrt(1 - d) z_p + sqrt(d) z_pe) + sqrt(w) z_i        w within the group, d drift by epoch
    log-normal: exp(ln median + sigma z);  quantiles: the quantile at Phi(z);  table: row p, sample i

times the growth at the group's step, rounded, within 1 and `maxTokens`.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from random import Random
from statistics import NormalDist

from streamrl_cli.simulation.scenario import GrowthPoint, Scenario, ScenarioRanker

_NORMAL = NormalDist()
_PRIME = 1_000_003
"""Sets the seeds of prompts, epochs and groups apart."""
_MAX_EXPONENT = 50.0
"""Far above the logarithm of any length, and below where exp overflows."""
_TEXT = "prompt "
_KEPT_GROUPS = 4096
"""Lengths of groups that are being generated are asked for once a sample."""
Rows = Sequence[Sequence[int]]
TAIL = 0.2
_INTERVALS = 200
_REACH = 8.0
"""Standard deviations beyond which nothing is left to integrate."""
_HALVINGS = 40


class LengthModel:
    """Lengths of a scenario's completions."""

    def __init__(self, scenario: Scenario, *, rows: Rows | None = None) -> None:
        """`rows`: the content of `lengths.file`, if that is what the scenario names."""
        spec = scenario.lengths
        self._size = scenario.group_size
        self._seed = scenario.seed
        self._most = scenario.max_tokens
        self._batch = scenario.pipeline.batch_groups
        self._growth = spec.growth
        self._rows = spec.table.rows if spec.table is not None else rows
        assert (spec.file is None) or rows is not None, "the file's rows are passed in"
        self._period = spec.prompts_per_epoch or (len(self._rows) if self._rows else None)
        self._within = spec.within_group_percent / 100
        self._drift = spec.drift_percent / 100
        self._shape = _shape(scenario)
        self.group = lru_cache(maxsize=_KEPT_GROUPS)(self._draw)
        """Group's number -> tokens of each of its samples."""
        self._places: dict[int, float] | None = None

    def prompt_of(self, group_id: int) -> int:
        """Number of the group's prompt."""
        return group_id % self._period if self._period else group_id

    def text_of(self, prompt_index: int) -> str:
        """What the scheduler is told of the prompt."""
        return f"{_TEXT}{self.prompt_of(prompt_index)}"

    def number_of(self, text: str) -> int:
        """The prompt that `text_of` made the text of."""
        return int(text.removeprefix(_TEXT))

    def place_of(self, prompt: int) -> float:
        """Where the prompt stands among all by its lasting length: a standard normal number, higher is longer."""
        if self._rows is None:
            return self._lasting(prompt)
        if self._places is None:
            means = [sum(row) / len(row) for row in self._rows]
            order = sorted(range(len(means)), key=means.__getitem__)
            self._places = {n: _NORMAL.inv_cdf((rank + 0.5) / len(order)) for rank, n in enumerate(order)}
        return self._places[prompt % len(self._rows)]

    def _draw(self, group_id: int) -> tuple[int, ...]:
        factor = growth_at(self._growth, step=group_id / self._batch)
        if self._rows is not None:
            row = self._rows[self.prompt_of(group_id) % len(self._rows)]
            raw: list[float] = [row[index % len(row)] for index in range(self._size)]
        else:
            between = math.sqrt(1 - self._within) * self._of_prompt(group_id)
            noise, spread = Random(self._mixed(3, group_id)), math.sqrt(self._within)
            raw = [self._shape(between + spread * noise.gauss(0.0, 1.0)) for _ in range(self._size)]
        return tuple(min(max(1, round(tokens * factor)), self._most) for tokens in raw)

    def _of_prompt(self, group_id: int) -> float:
        lasting = self._lasting(self.prompt_of(group_id))
        if not self._drift or not self._period:
            return lasting
        fresh = Random(self._mixed(2, group_id)).gauss(0.0, 1.0)
        return math.sqrt(1 - self._drift) * lasting + math.sqrt(self._drift) * fresh

    def _lasting(self, prompt: int) -> float:
        return Random(self._mixed(1, prompt)).gauss(0.0, 1.0)

    def _mixed(self, kind: int, number: int) -> int:
        return (self._seed * _PRIME + number) * 8 + kind


def growth_at(points: Sequence[GrowthPoint], *, step: float) -> float:
    """Factor on lengths, linear between the points and constant outside of them; 1 without points."""
    return _interpolated([(point.step, point.factor) for point in points], at=step) if points else 1.0


def _shape(scenario: Scenario) -> Callable[[float], float]:
    """From a standard normal number to tokens."""
    spec = scenario.lengths
    if spec.log_normal is not None:
        middle, sigma = math.log(spec.log_normal.median_tokens), spec.log_normal.sigma
        return lambda z: math.exp(min(middle + sigma * z, _MAX_EXPONENT))
    points = [] if spec.quantiles is None else [(point.percent, point.tokens) for point in spec.quantiles.points]
    return lambda z: _interpolated(points, at=100 * _NORMAL.cdf(z))


def _interpolated(points: Sequence[tuple[float, float]], *, at: float) -> float:
    """Linear between the points (place, value) by rising place, constant outside of them."""
    place = bisect_right(points, at, key=itemgetter(0))
    if place in (0, len(points)):
        return points[max(place - 1, 0)][1]
    (low, below), (high, above) = points[place - 1], points[place]
    return below + (at - low) / (high - low) * (above - below)


class ModelledRanker:
    """What the signal `Ranker` asks; as good as the scenario says, and wrong in the ways that it asks for. Learns nothing.

        score = r x + sqrt(1 - r^2) e        x where the prompt stands among all (standard normal), e noise of its own

    For two normal numbers with correlation r, the recall of the true longest share a is

        recall(r) = 1/a * integral from q to infinity of phi(x) Phi((r x - q) / sqrt(1 - r^2)) dx,    q = Phi^-1(1 - a)

    so r follows from the recall at 20 % that is asked for: .87 -> r = .973, .75 -> r = .900. Recall is that of prompts;
    samples of a group differ, so the recall that the scheduler measures is lower.
    """

    def __init__(self, spec: ScenarioRanker, *, lengths: LengthModel, seed: int, step: Callable[[], int]) -> None:
        """`step`: steps that are recorded now."""
        self._spec = spec
        self._lengths = lengths
        self._seed = seed
        self._step = step
        self._correlation = correlation_of(spec.recall_percent / 100)

    def score(self, prompt: str) -> float:
        """Higher = longer."""
        number = self._lengths.number_of(prompt)
        noise = Random(self._seed * 2 + number * 2_000_003 + 1).gauss(0.0, 1.0)
        r = self._correlation
        score = r * self._lengths.place_of(number) + math.sqrt(1 - r * r) * noise
        return -score if self._spec.inverted is not self._flipped() else score

    def _flipped(self) -> bool:
        return self._spec.flips_at_step is not None and self._step() >= self._spec.flips_at_step


def recall_of(correlation: float) -> float:
    """Share of the true longest 20 % that are among the predicted longest 20 %."""
    low = _NORMAL.inv_cdf(1 - TAIL)
    if correlation >= 1:
        return 1.0
    rest = math.sqrt(1 - correlation * correlation)
    width = _REACH / _INTERVALS
    values = [
        _NORMAL.pdf(x) * _NORMAL.cdf((correlation * x - low) / rest)
        for x in (low + width * place for place in range(_INTERVALS + 1))
    ]
    simpson = values[0] + values[-1] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2])
    return simpson * width / 3 / TAIL


def correlation_of(recall: float) -> float:
    """The correlation that gives this recall; between chance (0) and an oracle (1)."""
    if recall >= 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if recall_of(middle) < recall else (low, middle)
    return low
