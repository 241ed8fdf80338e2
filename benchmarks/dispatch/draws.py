"""Lengths of completions, and predictors that know as much of them as they are said to. Pure: a function of the seed.

    z = sqrt(1 - w) z_p + sqrt(w) z_i       w within the group; tokens = shape(z), at most `most`
    score = r z_p + sqrt(1 - r^2) e         r = 1 an oracle of prompts, 0 chance, -1 inverted

The scheduler's own `Lengths` predicts: it gets the score, finds its place among recent scores, and the quantile of recent
completions. Its guard has seen `warm` groups of the same kind before the run, as in a run that has gone on for a while.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, prompt_key

WARM_GROUPS = 320
"""Pairs that the guard has seen at the start: 256 are the least that it asks for."""
_WARM_IDS = 1 << 40

Shape = Callable[[float], float]
"""From a standard normal number to tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Where lengths come from."""

    shape: Shape
    within: float
    """Share of the spread between samples of a group, 0..1."""
    most: int
    """Tokens; longer ones are cut."""
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt's completions."""

    place: float
    """Standard normal; where the prompt stands."""
    tokens: tuple[int, ...]


def log_normal(*, median: float, sigma: float) -> Shape:
    """Log-normal lengths."""
    return lambda z: median * math.exp(sigma * z)


def heavy(*, median: float, power: float) -> Shape:
    """Pareto tail of this power, median as given: P(L > x) = (x / least) ** -power."""
    least = median / 2 ** (1 / power)
    return lambda z: least * max(0.5 * math.erfc(z / math.sqrt(2)), 1e-9) ** (-1 / power)


def draw(population: Population, *, groups: int, chance: Random) -> list[Group]:
    """So many prompts, each with its samples."""
    between, spread = math.sqrt(1 - population.within), math.sqrt(population.within)
    return [
        again(population, place=chance.gauss(0, 1), between=between, spread=spread, chance=chance)
        for _ in range(groups)
    ]


def again(population: Population, *, place: float, between: float, spread: float, chance: Random) -> Group:
    """New samples of a prompt."""
    raw = (population.shape(between * place + spread * chance.gauss(0, 1)) for _ in range(population.group_size))
    return Group(place=place, tokens=tuple(min(max(1, round(tokens)), population.most) for tokens in raw))


def scores(groups: Sequence[Group], *, correlation: float, chance: Random) -> list[float]:
    """What a predictor says of each."""
    rest = math.sqrt(max(0.0, 1 - correlation * correlation))
    return [correlation * group.place + rest * chance.gauss(0, 1) for group in groups]


class Sure(Lengths):
    """Trusts whatever is predicted: the guard is off."""

    @property
    def trusted(self) -> bool:
        """Always."""
        return True


def ranked(
    said: Sequence[float],
    *,
    past: Sequence[Group],
    past_said: Sequence[float],
    unit: int,
    guarded: bool = True,
) -> Lengths:
    """Predictions by a ranker that was judged on past groups.

    Args:
        said: scores of the run's groups.
        past: groups that have finished before the run, and `past_said` their scores.
        unit: tokens of one unit of length, as the core is told.
        guarded: whether the guard decides on trust; else it is given.
    """
    made = Lengths if guarded else Sure
    lengths = made(LengthHistory(), signals=("Ranker",))
    lengths.ranked({prompt_key(str(number)): score for number, score in enumerate([*said, *past_said])})
    for place, group in enumerate(past):
        prompt = str(len(said) + place)
        _live(lengths, group, prompt=prompt, group_id=_WARM_IDS + place, unit=unit)
    return lengths


def remembered(population: Population, groups: Sequence[Group], *, epochs: int, unit: int, chance: Random) -> Lengths:
    """Predictions by history: the run's prompts have come so often before."""
    between, spread = math.sqrt(1 - population.within), math.sqrt(population.within)
    lengths = Lengths(LengthHistory(), signals=("History",))
    number = _WARM_IDS
    for _ in range(epochs):
        for place, group in enumerate(groups):
            past = again(population, place=group.place, between=between, spread=spread, chance=chance)
            _live(lengths, past, prompt=str(place), group_id=number, unit=unit)
            number += 1
    return lengths


def _live(lengths: Lengths, group: Group, *, prompt: str, group_id: int, unit: int) -> None:
    """A group begins and ends."""
    key = prompt_key(prompt)
    lengths.began(group_id, key=key)
    tokens = [max(1, round(tokens / unit)) for tokens in group.tokens]
    lengths.learn(key, tokens=tokens, prompt=prompt, group_id=group_id)
