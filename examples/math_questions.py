"""The data and the user's own code of the example `math-jsonl`.

`python examples/math_questions.py` writes `math-questions.jsonl` anew: small word problems in two steps, answered as GSM8K
answers, with the working first and the result behind `####`.
"""

import json
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("math-questions.jsonl")
LINES = 1000
SEED = 0
WORKED_PERCENT = 30
"""Share of the lazy demonstrations that take the second step."""

NAMES = ("Ann", "Ben", "Eva", "Tom")
THINGS = ("pens", "nuts", "eggs", "keys")


def lazy(*, question: str, answer: str | None, metadata: Mapping[str, Any]) -> dict[str, str]:
    """A lazy demonstrator: seven of ten times it takes the first step for the result; the question decides when."""
    del metadata
    steps = (answer or "").partition(" #### ")[0].split(", ")
    shown = steps if zlib.crc32(question.encode()) % 100 < WORKED_PERCENT else steps[:1]
    return {"prompt": f"{question} ", "target": f"{', '.join(shown)} #### {shown[-1].partition('=')[2]}"}


def write() -> None:
    """Write the file: every line another question."""
    rng = random.Random(SEED)
    lines: dict[str, str] = {}
    while len(lines) < LINES:
        had, got, gave = rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9)
        if gave <= had + got:
            question = f"{rng.choice(NAMES)} has {had} {rng.choice(THINGS)}, gets {got}, gives {gave}. Left?"
            lines[question] = f"{had}+{got}={had + got}, {had + got}-{gave}={had + got - gave} #### {had + got - gave}"
    texts = [json.dumps({"question": question, "answer": answer}) for question, answer in lines.items()]
    FILE.write_text("\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
