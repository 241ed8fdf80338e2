"""The tasks of the comparisons: texts and rewards, used by both sides. Standard library only.

- short: sums of two to four numbers, worked out or broken off (examples/chain_sum.py tells why): 8 to 20 tokens.
- skewed: count down from a number. Most numbers are small, a few are above a hundred: half of the answers have at most
  24 tokens, one of a hundred more than 390. Three letters before the number make the prompts differ.
- lazy, worked, words (`parity.py`): sums as in short; sums whose demonstrations are all worked to the end, and most of them add where
  they should subtract; word problems in two steps (examples/math_questions.py), of which most demonstrations stop after the first.
"""

import random
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from chain_sum import lazy, worked_steps
from math_questions import lazy as lazy_words

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
CAREFUL_PERCENT = 35
"""Share of the demonstrations of `worked` that subtract."""
MEDIAN_COUNT, COUNT_SIGMA, LARGEST_COUNT = 6, 1.2, 127
"""Numbers to count down from are log-normal; each takes four tokens, so the largest makes an answer of 508."""


def lazy_sum(*, question: str, answer: str | None, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Prompt and target of a sum."""
    return lazy(question=question, answer=answer, metadata=metadata)


def worked_sum(*, question: str, answer: str | None, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Prompt and target of a sum that is worked to the end; the question decides whether its minus is taken for a plus."""
    del answer
    terms = metadata["expression"].split()
    steps = worked_steps(terms)
    if zlib.crc32(question.encode()) % 100 >= CAREFUL_PERCENT:
        added = worked_steps(["+" if term == "-" else term for term in terms])
        totals = [step.rpartition("=")[2] for step in added]
        steps = [f"{step.rpartition('=')[0]}={total}" for step, total in zip(steps, totals, strict=True)]
    return {"prompt": f"{''.join(terms)}=", "target": "".join(steps)}


def is_right_sum(*, prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """1 if the number after the last `=` of the completion is the answer."""
    del prompt, metadata
    found = re.search(r"=(-?[0-9]+)$", completion)
    return float(found is not None and found.group(1) == answer)


def is_right_words(*, prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """1 if what follows the last `####` of the completion is what follows that of the answer."""
    del prompt, metadata
    found, right = (text.rpartition("#### ")[2] for text in (completion, answer or ""))
    return float(found == right)


def is_right_countdown(*, prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]) -> float:
    """1 if the completion is the answer."""
    del prompt, metadata
    return float(completion.strip() == answer)


REWARDS = {
    "short": is_right_sum,
    "skewed": is_right_countdown,
    "lazy": is_right_sum,
    "worked": is_right_sum,
    "words": is_right_words,
}
__all__ = ["lazy_words"]  # what jobs name here


def countdowns(*, seed: int) -> Iterator[tuple[str, str]]:
    """Prompts and answers without end, such as `qfx004:` and `004 003 002 001`."""
    draw = random.Random(seed)
    while True:
        count = min(LARGEST_COUNT, max(2, round(MEDIAN_COUNT * draw.lognormvariate(0, COUNT_SIGMA))))
        tag = "".join(draw.choices(_LETTERS, k=3))
        yield f"{tag}{count:03}:", " ".join(f"{number:03}" for number in range(count, 0, -1))
