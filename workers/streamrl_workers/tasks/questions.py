"""Questions of a data set, and what the sources of finite data sets share: splits, order, content, texts."""

import functools
import hashlib
import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.errors import UserError
from streamrl_workers.rewards.base import Item
from streamrl_workers.tasks.values import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a source gives."""

    question: str
    answer: str | None
    metadata: Mapping[str, Any]
    source_index: int


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


def content_of(digests: Sequence[str]) -> str:
    """The content of files whose SHA-256 these are, in their order, in a word or two; of one file it is that of `sha256sum`."""
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return f"sha256 {digest[:_DIGEST_CHARACTERS]}"


_DIGEST_CHARACTERS = 16
"""64 bits: a person can compare them, and no two files meet by chance."""


def text_of(value: object, *, field: str, place: str) -> str:
    """A text, or a finite number in its shortest form; `field` of the job names where it is to be found, `place` what was found there.

    Raises:
        UserError: it is neither.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value).removesuffix(".0")
    raise UserError(field=field, rule=f"{place} must be a text or a number", got=value)


class RowSource:
    """Questions of a finite data set, by row."""

    def __init__(
        self,
        *,
        train: Callable[[int], Question],
        train_rows: "array[int]",
        held_out: Callable[[int], Question],
        held_out_rows: "array[int]",
        seed: int,
        place: Callable[[int], str],
        content: str,
    ) -> None:
        """`train` and `held_out` read a row; `content`: hash or revision of what the rows are read from."""
        self.place = place
        self._content = content
        self._train = train
        self._train_rows = train_rows
        self._held_out = held_out
        self._held_out_rows = held_out_rows
        self._seed = seed
        self._pass = functools.lru_cache(maxsize=2)(self._shuffled)

    @property
    def held_out_size(self) -> int:
        """Held-out rows."""
        return len(self._held_out_rows)

    @property
    def train_size(self) -> int:
        """Rows that are trained."""
        return len(self._train_rows)

    @property
    def data(self) -> str:
        """Number of rows of each split, and where they are from."""
        return f"{self.train_size} rows to train on, {self.held_out_size} held out, {self._content}"

    def questions(self) -> Iterator[Question]:
        """Each row once."""
        yield from map(self._train, self._train_rows)
        yield from map(self._held_out, self._held_out_rows)

    def keep(self, wanted: Callable[[Question], bool]) -> None:
        """Leave all other rows out, before the first question."""
        self._train_rows = array("Q", (row for row in self._train_rows if wanted(self._train(row))))
        self._held_out_rows = array("Q", (row for row in self._held_out_rows if wanted(self._held_out(row))))

    def question(self, split: Split, index: int) -> Question:
        """Train: pass after pass, without end. Held out: in the order of the data set."""
        if split == "held_out":
            return self._held_out(self._held_out_rows[index])
        number, position = divmod(index, len(self._train_rows))
        return self._train(self._pass(number)[position])

    def verify(self, answer: str, item: Item) -> float:
        """Equality with the reference after trimming. Raises `ValueError` where there is none."""
        if item.answer is None:
            raise ValueError("the data set has no reference answer; set dataset.huggingFace.answerField")
        return float(answer.strip() == item.answer.strip())

    def _shuffled(self, number: int) -> "array[int]":
        order = array("Q", self._train_rows)
        random.Random(f"{self._seed}/{number}").shuffle(order)
        return order
