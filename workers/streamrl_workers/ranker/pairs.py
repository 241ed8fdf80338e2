"""Pairs (prompt, mean tokens) of the run, the newest `MEMORY_PAIRS` of them, in memory and in a file.

    target = (log(1 + tokens) - mean) / deviation        of the pairs that are first learnt together

A pair gets its target when it is first learnt and keeps it: lengths grow under training, and an old pair's tokens mixed with new
ones would teach how old it is. Owns the file `pairs.jsonl`: a line is appended for each pair and the file is written anew, whole or not at
all, when a round is done or it has grown to twice its content. A line that a killed process left half written is passed over.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.files import replace_file

MEMORY_PAIRS = 4096
FILE = "pairs.jsonl"


@dataclass(slots=True, kw_only=True)
class Pair:
    """A prompt and how long its completions were. Mutable: it gets its target later."""

    prompt: str
    tokens: float
    target: float | None = None
    """None: not learnt yet."""

    def line(self) -> str:
        """Of the file."""
        return json.dumps({"prompt": self.prompt, "tokens": self.tokens, "target": self.target}) + "\n"


def standardised(tokens: Sequence[float]) -> list[float]:
    """Targets of pairs that are learnt together; at least one."""
    logs = [math.log1p(count) for count in tokens]
    mean, deviation = statistics.fmean(logs), statistics.pstdev(logs) or 1.0
    return [(log - mean) / deviation for log in logs]


class PairStore:
    """The newest pairs, oldest first."""

    def __init__(self, folder: Path) -> None:
        """Take up the folder's file, if there is one."""
        self._path = folder / FILE
        self._pairs: deque[Pair] = deque(_read(self._path), maxlen=MEMORY_PAIRS)
        self._lines = 2 * MEMORY_PAIRS  # the file is written anew with the first pairs that come

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, pairs: Iterable[tuple[str, float]]) -> None:
        """More pairs; the oldest go."""
        made = [Pair(prompt=prompt, tokens=tokens) for prompt, tokens in pairs]
        self._pairs.extend(made)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(pair.line() for pair in made)
        self._lines += len(made)
        if self._lines > 2 * MEMORY_PAIRS:
            self.write()

    def new(self) -> list[Pair]:
        """Never learnt."""
        return [pair for pair in self._pairs if pair.target is None]

    def old(self) -> list[Pair]:
        """Learnt before."""
        return [pair for pair in self._pairs if pair.target is not None]

    def write(self) -> None:
        """Write the file anew: whole, or not at all."""
        replace_file(self._path, "".join(pair.line() for pair in self._pairs).encode())
        self._lines = len(self._pairs)


def _read(path: Path) -> list[Pair]:
    """The file's pairs, oldest first; none where there is no file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [pair for line in lines for pair in _pair(line)]


def _pair(line: str) -> Iterator[Pair]:
    try:
        found: Any = json.loads(line)
        target = found["target"]
        yield Pair(
            prompt=str(found["prompt"]),
            tokens=float(found["tokens"]),
            target=None if target is None else float(target),
        )
    except (ValueError, KeyError, TypeError):
        return
