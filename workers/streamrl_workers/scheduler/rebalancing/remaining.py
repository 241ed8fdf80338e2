"""How many tokens a running sample still has, drawn from what is known.

    u                                                       a number of the sample and the draw, even in 0 .. 1
    p0  = place of its tokens so far in the run's lengths   so it is of the longest 1 - p0
    nothing predicted:  place = p0 + (1 - p0) u             any of those lengths, alike
    predicted place s:  z = r Phi^-1(s) + sqrt(1 - r^2) e   e standard normal, given that Phi(z) > p0  (Gaussian copula)
    left = length at that place - tokens so far

r = KNOWN says how much a trusted prediction of a prompt tells of one sample of it. A sample that is longer than all
that have been seen goes on for OUTLIVED_SHARE of what it has, on average.

Owns the run's lengths and the draws. Pure: the same sample has the same draws whenever it is asked, so that two looks at
one state agree. Does not own predictions (`lengths/`).
"""

from collections.abc import Callable
from math import sqrt
from statistics import NormalDist

from streamrl_workers.scheduler.lengths.quantiles import SlidingQuantiles

DRAWS = 4
"""Enough to tell a tail of one from a tail of many; each costs."""
KNOWN = 0.7
"""Half of the variance of lengths is within a prompt's samples; a trusted prediction is nearly exact about the rest."""
OUTLIVED_SHARE = 0.1
WINDOW = 4096
"""Finished completions that make the distribution: a few steps, so that it follows the policy."""
_MARGIN = 1e-6
"""Places are kept so far from 0 and 1, where the normal quantile has no end."""
_NORMAL = NormalDist()
_Place = Callable[[float], float]
_REST = sqrt(1 - KNOWN**2)


class Remaining:
    """Learns from completions that have finished."""

    def __init__(self, *, most_tokens: int) -> None:
        """`most_tokens`: of one completion."""
        self._most_tokens = most_tokens
        self._lengths = SlidingQuantiles(window=WINDOW)

    @property
    def seen(self) -> int:
        """Completions known, at most WINDOW."""
        return len(self._lengths)

    def learn(self, tokens: int) -> None:
        """A completion has ended with so many tokens."""
        self._lengths.add(tokens)

    def drawn(self, tokens: int, *, share: float | None, number: int) -> tuple[float, ...]:
        """Tokens still to go, one value for each draw.

        Args:
            tokens: of the completion so far.
            share: predicted place in the length distribution, 0 .. 1; None: nothing is known.
            number: of the sample: other samples have other draws.
        """
        place = self._places(tokens, share)
        mixed = _mixed(number)
        within, turns = (mixed >> 16) / 2**16, mixed % DRAWS
        return tuple(
            self._left(tokens, place=place, level=((draw + turns) % DRAWS + within) / DRAWS) for draw in range(DRAWS)
        )

    def expected(self, tokens: int, *, share: float | None) -> float:
        """Tokens still to go, in the middle of what may be."""
        return self._left(tokens, place=self._places(tokens, share), level=0.5)

    # ---- inside

    def _left(self, tokens: int, *, place: _Place, level: float) -> float:
        left = max(self._lengths.at(place(level)) - tokens, 2 * OUTLIVED_SHARE * tokens * level, 1.0)
        return min(left, max(1.0, float(self._most_tokens - tokens)))

    def _places(self, tokens: int, share: float | None) -> _Place:
        """From a level to where the whole completion stands, given that it is beyond its tokens and was predicted at `share`."""
        passed = self._lengths.place(tokens)
        if share is None:
            return lambda level: passed + (1 - passed) * level
        mean = KNOWN * _NORMAL.inv_cdf(_inside(share))
        least = _NORMAL.cdf((_NORMAL.inv_cdf(_inside(passed)) - mean) / _REST)
        return lambda level: _NORMAL.cdf(mean + _REST * _NORMAL.inv_cdf(_inside(least + (1 - least) * level)))


def _inside(place: float) -> float:
    return min(max(place, _MARGIN), 1 - _MARGIN)


def _mixed(number: int) -> int:
    """32 bits that look random (the finaliser of MurmurHash3)."""
    value = (number + 1) & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return value ^ (value >> 16)
