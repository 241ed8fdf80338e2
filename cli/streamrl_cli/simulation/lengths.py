"""How long each completion is. Pure: a function of the scenario, the group's number and the sample's.

    prompt p = group mod promptsPerEpoch,   epoch e = group div promptsPerEpoch
    z = sqrt(1 - w) (sqrt(1 - d) z_p + sqrt(d) z_pe) + sqrt(w) z_i        w within the group, d drift by epoch
    log-normal: exp(ln median + sigma z);  quantiles: the quantile at Phi(z);  table: row p, sample i

times the growth at the group's step, rounded, within 1 and `maxTokens`.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from random import Random
from statistics import NormalDist

from streamrl_cli.simulation.scenario import GrowthPoint, QuantilePoint, Scenario

_NORMAL = NormalDist()
_PRIME = 1_000_003
"""Sets the seeds of prompts, epochs and groups apart."""
_MAX_EXPONENT = 50.0
"""Far above the logarithm of any length, and below where exp overflows."""
_TEXT = "prompt "
_KEPT_GROUPS = 4096
"""Lengths of groups that are being generated are asked for once a sample."""
Rows = Sequence[Sequence[int]]


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
        self._known: dict[int, tuple[int, ...]] = {}
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

    def group(self, group_id: int) -> tuple[int, ...]:
        """Tokens of each sample of the group."""
        found = self._known.get(group_id)
        if found is None:
            if len(self._known) >= _KEPT_GROUPS:
                self._known.clear()
            found = self._known[group_id] = self._draw(group_id)
        return found

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
    if not points:
        return 1.0
    place = bisect_right(points, step, key=lambda point: point.step)
    if place in (0, len(points)):
        return points[max(place - 1, 0)].factor
    low, high = points[place - 1], points[place]
    return low.factor + (step - low.step) / (high.step - low.step) * (high.factor - low.factor)


def _shape(scenario: Scenario) -> Callable[[float], float]:
    """From a standard normal number to tokens."""
    spec = scenario.lengths
    if spec.log_normal is not None:
        middle, sigma = math.log(spec.log_normal.median_tokens), spec.log_normal.sigma
        return lambda z: math.exp(min(middle + sigma * z, _MAX_EXPONENT))
    points: Sequence[QuantilePoint] = () if spec.quantiles is None else spec.quantiles.points
    return lambda z: quantile(points, percent=100 * _NORMAL.cdf(z))


def quantile(points: Sequence[QuantilePoint], *, percent: float) -> float:
    """Tokens at this place of the distribution, linear between the points."""
    place = min(max(bisect_right(points, percent, key=lambda point: point.percent), 1), len(points) - 1)
    low, high = points[place - 1], points[place]
    return low.tokens + (percent - low.percent) / (high.percent - low.percent) * (high.tokens - low.tokens)
