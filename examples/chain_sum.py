"""The user's own code of the examples `chain-sum` and `skewed-lengths`: how a sum becomes a prompt and a text to imitate.

A question of reasoning-gym's `chain_sum` reads "State the final answer to the following arithmetic problem: 4 + 3 - 2 =".
The prompt keeps `4+3-2=`; the worked answer shows every running sum: `4+3=7-2=5`. What follows the last `=` counts.
"""

import itertools
import re
import zlib
from collections.abc import Mapping
from typing import Any

WORKED_PERCENT = 20
"""Share of the lazy demonstrations that go on to the end."""

SHORT_TERMS, LONG_TERMS = 2, 12
LONGER_PERCENT = 40
"""Chance of one term more: 60 % of the skewed sums have two terms, 1 % have ten or more."""


def lazy(*, question: str, answer: str | None, metadata: Mapping[str, Any]) -> dict[str, str]:
    """A lazy demonstrator: four of five times it stops after the first sum (`4+3=7`); the question decides when.

    A model that imitates it can add but seldom goes on to the end. Reinforcement learning sees only whether the
    final answer is right, and finds that going on pays.
    """
    del answer
    terms = metadata["expression"].split()
    steps = worked_steps(terms)
    is_worked = _draw(question) < WORKED_PERCENT
    return {"prompt": f"{''.join(terms)}=", "target": "".join(steps if is_worked else steps[:1])}


def skewed(*, question: str, answer: str | None, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Only the first terms of a long sum, most often two of them, worked to the end."""
    del answer
    count = SHORT_TERMS
    while count < LONG_TERMS and _draw(f"{question}{count}") < LONGER_PERCENT:
        count += 1
    terms = metadata["expression"].split()[: 2 * count - 1]
    return {"prompt": f"{''.join(terms)}=", "target": "".join(worked_steps(terms))}


def is_right(*, prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """1 if the number after the last `=` of the completion is the sum in the prompt."""
    del answer, metadata
    total = sum(int(number) for number in re.findall(r"[+-]?\d+", prompt))
    return float(completion.rpartition("=")[2] == str(total))


def worked_steps(terms: list[str]) -> list[str]:
    """`["4", "+", "3", "-", "2"]` gives `["4+3=7", "-2=5"]`: together, every running sum."""
    changes = [sign + number for sign, number in zip(terms[1::2], terms[2::2], strict=True)]
    sums = itertools.accumulate(map(int, changes), initial=int(terms[0]))
    steps = [f"{change}={total}" for change, total in zip(changes, itertools.islice(sums, 1, None), strict=True)]
    return [terms[0] + steps[0], *steps[1:]]


def _draw(text: str) -> int:
    """A number of 0..99 that follows from the text."""
    return zlib.crc32(text.encode()) % 100
