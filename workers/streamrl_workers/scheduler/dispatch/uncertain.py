"""What lengths may turn out to be: draws around predictions that are right only to a degree. Pure and repeatable.

    z of a sample = r z_p + noise of its group + noise of its own        z_p: normal quantile of its group's place
    tokens        = the batch's own distribution at Phi(z)

r is the correlation of a prediction with one sample; what was measured is that with means of groups, c:

    r = c sqrt(1 - w + w / G)        w: share of the spread that is between the samples of a group

A plan that takes predictions for the truth is too bold: it gives the predicted short ones slow crowded generators, and
the makespan is that of the one which was long after all. Over draws the same plan shows what it costs.

Owns the distribution. Does not own plans (`modelled.py`).
"""

from collections import Counter
from collections.abc import Collection, Sequence
from math import pi, sin, sqrt
from random import Random
from statistics import NormalDist

WITHIN_SHARE = 0.4
"""w is not measured; answers of one prompt differ by about half as much as prompts do, and too much noise is the safe side."""
SAMPLES_DRAWN = 16_384
"""Samples of all draws together: bounds the time of a plan."""
FEWEST_DRAWS, MOST_DRAWS = 2, 24
_NORMAL = NormalDist()
_SEED = 20_240


def possible_lengths(
    predicted: Sequence[float], *, samples: int, rank_correlation: float, unknown: Collection[int] = ()
) -> list[list[float]]:
    """Draws of the tokens of all samples, group after group.

    Args:
        predicted: tokens of each group.
        samples: of each group.
        rank_correlation: Spearman's, of predicted places with means of groups; 1: predictions are the truth, and so
            is the one draw for groups of one sample.
        unknown: places of groups whose prediction says nothing: they may be any of the others.
    """
    if not predicted:
        return [[]]
    exact = rank_correlation >= 1 and samples == 1 and not unknown
    if exact:
        return [list(predicted)]
    table = sorted(tokens for place, tokens in enumerate(predicted) if place not in unknown) or sorted(predicted)
    within = WITHIN_SHARE if samples > 1 else 0.0
    known = min(1.0, 2 * sin(pi / 6 * max(0.0, rank_correlation))) * sqrt(1 - within + within / samples)
    chance = Random(_SEED)
    draws = min(max(FEWEST_DRAWS, SAMPLES_DRAWN // (samples * len(predicted))), MOST_DRAWS)
    places = _normal_places(table)
    groups = [(0.0, 0.0) if number in unknown else (known, places[tokens]) for number, tokens in enumerate(predicted)]
    return [
        [
            tokens
            for correlation, place in groups
            for tokens in _group(table, correlation, place, within, samples, chance)
        ]
        for _ in range(draws)
    ]


def _group(
    table: Sequence[float], correlation: float, place: float, within: float, samples: int, chance: Random
) -> list[float]:
    common = sqrt(max(0.0, 1 - within - correlation * correlation))
    own = sqrt(max(0.0, 1 - correlation * correlation - common * common))
    middle = correlation * place + common * chance.gauss(0.0, 1.0)
    last = len(table) - 1
    return [
        table[min(int(_NORMAL.cdf(middle + (own * chance.gauss(0.0, 1.0) if own else 0.0)) * len(table)), last)]
        for _ in range(samples)
    ]


def _normal_places(table: Sequence[float]) -> dict[float, float]:
    """Prediction -> normal quantile of its place; equal ones share the middle of theirs."""
    counts = Counter(table)
    found: dict[float, float] = {}
    below = 0
    for tokens in sorted(counts):
        found[tokens] = _NORMAL.inv_cdf((below + counts[tokens] / 2) / len(table))
        below += counts[tokens]
    return found
