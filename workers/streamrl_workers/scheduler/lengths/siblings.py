"""Finished completions of the same group: the signal `Siblings` of length prediction.

    expected = (K * prior + sum of siblings) / (K + number of siblings)

the mean of a normal variable whose own mean was thought to be `prior` with the weight of K samples.
Owns the formula and K.
"""

from collections.abc import Sequence

PRIOR_SAMPLES = 2.0
"""K. One sibling says as much as the prior if lengths spread within a prompt as they do between prompts; twice that
since the first to finish are the short ones."""


def expected_tokens(siblings: Sequence[int], *, prior_tokens: float) -> float:
    """Tokens to expect of one more completion. At least one sibling; a prior of 0 is none."""
    assert siblings, "no sibling has finished"
    weight = PRIOR_SAMPLES if prior_tokens > 0 else 0.0
    return (weight * prior_tokens + sum(siblings)) / (weight + len(siblings))
