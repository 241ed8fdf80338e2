"""Rows of a finite data set: which are held out, and the order in which the others are trained.

Knows hashes of prompts, no files. Invariants:
- A row is held out by the hash of its prompt, so equal prompts are never in both splits; the share is
  `percent` of the rows (at least one), a little more where a prompt at the edge occurs many times.
- Train item i is row `permutation(seed, i // n)[i % n]`: every row once in each pass, each pass in its own order.
"""

import functools
import hashlib
import random
from array import array

from streamrl.errors import UserError


def hash_of(prompt: str) -> int:
    """64 bits that follow from the prompt alone."""
    return int.from_bytes(hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def split_rows(hashes: "array[int]", *, percent: int, field: str) -> tuple["array[int]", "array[int]"]:
    """(train, held out) row numbers by a share of the rows.

    Raises:
        UserError: all rows would be held out; `field` is what names them in the job.
    """
    rows = range(len(hashes))
    wanted = max(1, round(len(rows) * percent / 100))
    edge = sorted(hashes)[wanted - 1]
    held_out = array("Q", (row for row in rows if hashes[row] <= edge))
    train = array("Q", (row for row in rows if hashes[row] > edge))
    if not train:
        raise UserError(
            field=field,
            rule=f"must hold at least two different prompts, one to train on and one held out, got {len(set(hashes))}",
            fix="add prompts or lower heldOutPercent",
        )
    return train, held_out


class Passes:
    """Train rows, pass after pass, without end."""

    def __init__(self, rows: "array[int]", *, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def row(self, index: int) -> int:
        """Row of train item `index` >= 0."""
        number, position = divmod(index, len(self._rows))
        return self._order(number)[position]

    def _shuffled(self, number: int) -> "array[int]":
        order = array("Q", self._rows)
        random.Random(f"{self._seed}/{number}").shuffle(order)
        return order
