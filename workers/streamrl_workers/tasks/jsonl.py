"""`jsonl`: one JSON object a line. Keeps only the place of each line in memory; lines are read when asked for.

Split and order are those of `dataset.py`. Every line is checked when the file is opened. The file must not change during a run.
"""

import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from streamrl.errors import UserError
from streamrl.files import bounded_lines, open_regular, parse_json
from streamrl.spec.task import JsonlDataset
from streamrl_workers.rewards.base import Item
from streamrl_workers.tasks.dataset import Passes, Question, hash_of, split_rows
from streamrl_workers.tasks.values import Split

FIELD = "spec.task.dataset.jsonl"
MOST_LINE_BYTES = 64 * 2**20
"""Of one line: more is no prompt, and would be held whole in memory."""


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
        file = open_regular(path)
    except UserError as error:
        raise UserError(field=f"{FIELD}.path", rule=error.rule, got=str(path)) from None
    with file:
        lines = _scan(file, path=path, options=options)
        return JsonlSource(os.dup(file.fileno()), lines=lines, options=options, seed=seed)


def _scan(file: BinaryIO, *, path: Path, options: JsonlDataset) -> _Lines:
    lines = _Lines(offsets=array("Q"), numbers=array("Q"), hashes=array("Q"))
    offset = 0
    for number, line in enumerate(bounded_lines(file, name=str(path), most_bytes=MOST_LINE_BYTES)):
        if line.strip():
            question = _parse(line, number=number, options=options)
            lines.offsets.append(offset)
            lines.numbers.append(number)
            lines.hashes.append(hash_of(question.question))
        offset += len(line)
    if not lines.offsets:
        raise UserError(field=f"{FIELD}.path", rule="must hold at least one line", got=str(path))
    return lines


def _parse(line: bytes, *, number: int, options: JsonlDataset) -> Question:
    place = f"{options.path} line {number + 1}"
    try:
        record = parse_json(line.decode("utf-8-sig" if number == 0 else "utf-8"))
        if b"\\ud" in line.lower():  # half of a pair may be written like that, and no message can carry it
            json.dumps(record, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UserError(field=f"{FIELD}.path", rule=f"{place} must be UTF-8: {error.reason}") from error
    except ValueError as error:
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
        train, self._held_out = split_rows(lines.hashes, percent=options.held_out_percent, field=f"{FIELD}.path")
        self._passes = Passes(train, seed=seed)

    @property
    def held_out_size(self) -> int:
        """Held-out lines."""
        return len(self._held_out)

    def question(self, split: Split, index: int) -> Question:
        """Train: pass after pass, without end. Held out: in the order of the file."""
        if split == "held_out":
            return self._read(self._held_out[index])
        return self._read(self._passes.row(index))

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
