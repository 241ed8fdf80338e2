"""`jsonl`: one JSON object a line. Keeps only the place of each line in memory; lines are read when asked for.

Owns the split and the order. Invariants:
- A line is held out by the hash of its prompt, so equal prompts are never in both splits; the share is
  `heldOutPercent` of the lines (at least one), a little more where a prompt at the edge occurs many times.
- Train item i is line `permutation(seed, i // n)[i % n]`: every line once in each pass, each pass in its own order.
Every line is checked when the file is opened. The file must not change during a run.
"""

import functools
import hashlib
import json
import os
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.spec.task import JsonlDataset
from streamrl_workers.rewards.base import Item
from streamrl_workers.tasks.dataset import Question
from streamrl_workers.tasks.values import Split

FIELD = "spec.task.dataset.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """Place of each line that is not blank, and the hash of its prompt."""

    offsets: "array[int]"
    numbers: "array[int]"
    hashes: "array[int]"


def open_jsonl(options: JsonlDataset, *, seed: int, base_dir: Path) -> "JsonlSource":
    """Read and check the whole file once. Raises `UserError` with the line number of what is wrong."""
    path = base_dir / options.path
    try:
        lines = _scan(path, options=options)
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(field=f"{FIELD}.path", rule=f"cannot be read: {error.strerror}", got=str(path)) from error
    return JsonlSource(file, lines=lines, options=options, seed=seed)


def _scan(path: Path, *, options: JsonlDataset) -> _Lines:
    lines = _Lines(offsets=array("Q"), numbers=array("Q"), hashes=array("Q"))
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if line.strip():
                question = _parse(line, number=number, options=options)
                digest = hashlib.blake2b(question.question.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                lines.offsets.append(offset)
                lines.numbers.append(number)
                lines.hashes.append(int.from_bytes(digest, "big"))
            offset += len(line)
    if not lines.offsets:
        raise UserError(field=f"{FIELD}.path", rule="must hold at least one line", got=str(path))
    return lines


def _parse(line: bytes, *, number: int, options: JsonlDataset) -> Question:
    place = f"{options.path} line {number + 1}"
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(field=f"{FIELD}.path", rule=f"{place} must be UTF-8: {error.reason}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(field=f"{FIELD}.path", rule=f"{place} must be JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(field=f"{FIELD}.path", rule=f"{place} must be an object", got=record)
    prompt = _text(record, options.prompt_field, field=f"{FIELD}.promptField", place=place)
    if not prompt:
        raise UserError(field=f"{FIELD}.promptField", rule=f"{place}: {options.prompt_field} must not be empty")
    answer = _text(record, options.answer_field, field=f"{FIELD}.answerField", place=place)
    rest = {key: value for key, value in record.items() if key not in (options.prompt_field, options.answer_field)}
    return Question(question=prompt, answer=answer, metadata=rest, source_index=number)


def _text(record: Mapping[str, Any], name: str, *, field: str, place: str) -> str:
    if name not in record:
        fields = ", ".join(record) or "none"
        raise UserError(field=field, rule=f"{place} has no field {name}", fix=f"its fields are {fields}")
    value = record[name]
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(field=field, rule=f"{place}: {name} must be a text or a number", got=value)


class JsonlSource:
    """An opened file. Reads by position, so processes that were forked from one another can share it."""

    def __init__(self, file: int, *, lines: _Lines, options: JsonlDataset, seed: int) -> None:
        self._file = file
        self._lines = lines
        self._options = options
        self._seed = seed
        self._train, self._held_out = _split(lines, percent=options.held_out_percent)
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    @property
    def held_out_size(self) -> int:
        """Held-out lines."""
        return len(self._held_out)

    def question(self, split: Split, index: int) -> Question:
        """Train: pass after pass, without end. Held out: in the order of the file."""
        if split == "held_out":
            return self._read(self._held_out[index])
        epoch, position = divmod(index, len(self._train))
        return self._read(self._order(epoch)[position])

    def _shuffled(self, epoch: int) -> "array[int]":
        order = array("Q", self._train)
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _read(self, row: int) -> Question:
        start = self._lines.offsets[row]
        end = self._lines.offsets[row + 1] if row + 1 < len(self._lines.offsets) else os.fstat(self._file).st_size
        return _parse(os.pread(self._file, end - start, start), number=self._lines.numbers[row], options=self._options)

    def verify(self, answer: str, item: Item) -> float:
        """Equality with the reference after trimming."""
        return float(answer.strip() == (item.answer or "").strip())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _split(lines: _Lines, *, percent: int) -> tuple["array[int]", "array[int]"]:
    rows = range(len(lines.offsets))
    wanted = max(1, round(len(rows) * percent / 100))
    edge = sorted(lines.hashes)[wanted - 1]
    held_out = array("Q", (row for row in rows if lines.hashes[row] <= edge))
    train = array("Q", (row for row in rows if lines.hashes[row] > edge))
    if not train:
        raise UserError(
            field=f"{FIELD}.path",
            rule=f"must hold at least two different prompts, one to train on and one held out, got {len(set(lines.hashes))}",
            fix="add lines or lower heldOutPercent",
        )
    return train, held_out
