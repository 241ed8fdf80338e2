"""A modelled length ranker: as good as the scenario says, and wrong in the ways that the scenario asks for.

    score = r x + sqrt(1 - r^2) e        x where the prompt stands among all (standard normal), e noise of its own

For two normal numbers with correlation r, the recall of the true longest share a is

    recall(r) = 1/a * integral from q to infinity of phi(x) Phi((r x - q) / sqrt(1 - r^2)) dx,    q = Phi^-1(1 - a)

so r follows from the recall at 20 % that is asked for: .87 -> r = .973, .75 -> r = .900. Recall is that of prompts; samples
of a group differ, so the recall that the scheduler measures is lower.
"""

import math
from collections.abc import Callable
from random import Random
from statistics import NormalDist

from streamrl_cli.simulation.lengths import LengthModel
from streamrl_cli.simulation.scenario import ScenarioRanker

TAIL = 0.2
_NORMAL = NormalDist()
_INTERVALS = 200
_REACH = 8.0
"""Standard deviations beyond which nothing is left to integrate."""
_HALVINGS = 40


class ModelledRanker:
    """What the signal `Ranker` asks; learns nothing."""

    def __init__(self, spec: ScenarioRanker, *, lengths: LengthModel, seed: int, step: Callable[[], int]) -> None:
        """`step`: steps that are recorded now."""
        self._spec = spec
        self._lengths = lengths
        self._seed = seed
        self._step = step
        self._correlation = correlation_of(spec.recall_percent / 100)

    def score(self, prompt: str) -> float | None:
        """Higher = longer."""
        number = self._lengths.number_of(prompt)
        noise = Random(self._seed * 2 + number * 2_000_003 + 1).gauss(0.0, 1.0)
        r = self._correlation
        score = r * self._lengths.place_of(number) + math.sqrt(1 - r * r) * noise
        return -score if self._spec.inverted is not self._flipped() else score

    def learn(self, prompt: str, tokens: float) -> None:
        """It is as good as it is."""

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
