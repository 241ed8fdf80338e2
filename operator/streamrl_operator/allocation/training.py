"""How long training takes for one step, from times at a few numbers of tokens and processes.

For each number of processes: a fixed part (optimiser, publishing) and a part for each token, the straight line of least
squares through its points, neither part below 0. Times in seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from streamrl_operator.allocation.stage_curve import StageCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Seconds of one step by its tokens."""

    fixed_s: float
    token_s: float

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> "StepLine":
        """Through (tokens, seconds), at least one. One number of tokens says nothing of the fixed part: it counts as 0."""
        tokens, seconds = [t for t, _ in points], [s for _, s in points]
        mean_tokens, mean_s = fmean(tokens), fmean(seconds)
        spread = sum((t - mean_tokens) ** 2 for t in tokens)
        if spread == 0:
            return cls(fixed_s=0.0, token_s=mean_s / mean_tokens)
        slope = sum((t - mean_tokens) * (s - mean_s) for t, s in points) / spread
        fixed_s = mean_s - slope * mean_tokens
        if slope <= 0:
            return cls(fixed_s=mean_s, token_s=0.0)
        if fixed_s < 0:  # the best line through the origin
            through = sum(t * s for t, s in points) / sum(t * t for t in tokens)
            return cls(fixed_s=0.0, token_s=through)
        return cls(fixed_s=fixed_s, token_s=slope)

    def at(self, tokens: float) -> float:
        """Seconds of a step with so many tokens."""
        return self.fixed_s + self.token_s * tokens


def training_curve(points: Iterable[tuple[int, float, float]], *, tokens: float) -> StageCurve:
    """P_train by the number of processes, from (processes, tokens, seconds), for steps of so many tokens."""
    by_size: dict[int, list[tuple[float, float]]] = {}
    for processes, known, seconds in points:
        by_size.setdefault(processes, []).append((known, seconds))
    lines: Mapping[int, StepLine] = {size: StepLine.fit(those) for size, those in by_size.items()}
    return StageCurve.through({size: line.at(tokens) for size, line in lines.items()})
