"""The two tasks of the comparison: texts and rewards, used by both sides. Standard library only.

- short: sums of two to four numbers, worked out or broken off (examples/chain_sum.py tells why): 8 to 20 tokens.
- skewed: count down from a number. Most numbers are small, a few are above a hundred: half of the answers have fewer
  than 20 tokens, one of a hundred nearly 500. Three letters before the number make the prompts differ.
"""

import random
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from chain_sum import lazy

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
MEDIAN_COUNT, COUNT_SIGMA, LARGEST_COUNT = 8, 1.25, 150
"""Numbers to count down from are log-normal; 150 makes an answer of 491 tokens."""


def lazy_sum(*, question: str, answer: str | None, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Prompt and target of a sum."""
    return lazy(question=question, answer=answer, metadata=metadata)


def is_right_sum(*, prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """1 if the number after the last `=` of the completion is the answer."""
    del prompt, metadata
    found = re.search(r"=(-?[0-9]+)$", completion)
    return float(found is not None and found.group(1) == answer)


def is_right_countdown(*, prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """1 if the completion is the answer."""
    del prompt, metadata
    return float(completion.strip() == answer)


REWARDS = {"short": is_right_sum, "skewed": is_right_countdown}


def countdowns(*, seed: int) -> Iterator[tuple[str, str]]:
    """Prompts and answers without end, such as `qfx12:` and `12 11 10 9 8 7 6 5 4 3 2 1`."""
    draw = random.Random(seed)
    while True:
        count = min(LARGEST_COUNT, max(2, round(MEDIAN_COUNT * draw.lognormvariate(0, COUNT_SIGMA))))
        tag = "".join(draw.choices(_LETTERS, k=3))
        yield f"{tag}{count}:", " ".join(str(number) for number in range(count, 0, -1))
