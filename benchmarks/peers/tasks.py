"""The two tasks of the comparison: texts and rewards, used by both sides. Standard library only.

- short: sums of two to four numbers, worked out or broken off (examples/chain_sum.py tells why): 8 to 20 tokens.
- skewed: count down from a number. Most numbers are small, a few are above a hundred: half of the answers have at most
  24 tokens, one of a hundred more than 390. Three letters before the number make the prompts differ.
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
MEDIAN_COUNT, COUNT_SIGMA, LARGEST_COUNT = 6, 1.2, 127
"""Numbers to count down from are log-normal; each takes four tokens, so the largest makes an answer of 508."""


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
    """Prompts and answers without end, such as `qfx004:` and `004 003 002 001`."""
    draw = random.Random(seed)
    while True:
        count = min(LARGEST_COUNT, max(2, round(MEDIAN_COUNT * draw.lognormvariate(0, COUNT_SIGMA))))
        tag = "".join(draw.choices(_LETTERS, k=3))
        yield f"{tag}{count:03}:", " ".join(f"{number:03}" for number in range(count, 0, -1))
