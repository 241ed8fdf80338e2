"""`jsonl`: one JSON object a line. Keeps only the place of each line in memory; lines are read when asked for.

Split and order are those of `dataset.py`. Every line is checked when the file is opened, and all of it hashed. The file must not change while
it is open; a change is noticed when it is opened again, as is one of what a URL holds.
"""

import hashlib
import itertools
import json
import os
import weakref
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from streamrl.errors import UserError
from streamrl.files import bounded_lines, open_regular, parse_json
from streamrl.spec.tasks.datasets import JsonlDataset
from streamrl_workers.stream.object_store import local_file
from streamrl_workers.tasks.questions import Question, RowSource, content_of, hash_of, split_rows, text_of

FIELD = "spec.task.dataset.jsonl"
MOST_LINE_BYTES = 64 * 2**20
"""Of one line: more is no prompt, and would be held whole in memory."""
_FIRST_LINES = 20


def open_jsonl(options: JsonlDataset, *, seed: int, base_dir: Path, answered: bool = True) -> RowSource:
    """Read and check the whole file once. `answered`: a line needs an answer. Raises `UserError` with the line number of what is wrong."""
    try:
        path = local_file(options.path, base_dir=base_dir, field=f"{FIELD}.path")
        file = open_regular(path)
    except UserError as error:
        raise UserError(field=f"{FIELD}.path", rule=error.rule, got=options.path) from None
    except OSError as error:
        raise UserError(
            field=f"{FIELD}.path", rule=f"cannot be copied: {error}", got=options.path, fix="free the disk"
        ) from error
    with file:
        lines = _Lines(file, path=path, options=options, answered=answered)
    train_rows, held_out_rows = split_rows(lines.hashes, percent=options.held_out_percent, field=f"{FIELD}.path")
    return RowSource(
        train=lines.question,
        train_rows=train_rows,
        held_out=lines.question,
        held_out_rows=held_out_rows,
        seed=seed,
        place=lambda number: f"{options.path} line {number + 1}",
        content=content_of([lines.digest]),
    )


def check_first_lines(options: JsonlDataset, *, base_dir: Path, answered: bool) -> None:
    """Check the first lines of a file, in milliseconds. Raises `UserError` as `open_jsonl`; an unreadable file is left to that."""
    try:
        with open_regular(base_dir / options.path) as file:
            lines = bounded_lines(file, name=options.path, most_bytes=MOST_LINE_BYTES)
            for number, line in enumerate(itertools.islice(lines, _FIRST_LINES)):
                if line.strip():
                    _parse(line, number=number, options=options, answered=answered)
    except OSError:
        return


class _Lines:
    """The lines that are not blank. Read by position, so processes that were forked from one another can share the file."""

    def __init__(self, file: BinaryIO, *, path: Path, options: JsonlDataset, answered: bool) -> None:
        self._options = options
        self._answered = answered
        self._offsets, self._numbers = array("Q"), array("Q")
        self.hashes = array("Q")
        """Of each line's prompt."""
        offset, digest = 0, hashlib.sha256()
        for number, line in enumerate(bounded_lines(file, name=str(path), most_bytes=MOST_LINE_BYTES)):
            if line.strip():
                self._offsets.append(offset)
                self._numbers.append(number)
                self.hashes.append(hash_of(self._parse(line, number=number).question))
            offset += len(line)
            digest.update(line)
        if not self.hashes:
            raise UserError(field=f"{FIELD}.path", rule="must hold at least one line", got=str(path))
        self.digest = digest.hexdigest()
        """Of the whole file."""
        self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def question(self, row: int) -> Question:
        """One line."""
        start = self._offsets[row]
        end = self._offsets[row + 1] if row + 1 < len(self._offsets) else os.fstat(self._file).st_size
        return self._parse(os.pread(self._file, end - start, start), number=self._numbers[row])

    def _parse(self, line: bytes, *, number: int) -> Question:
        return _parse(line, number=number, options=self._options, answered=self._answered)


def _parse(line: bytes, *, number: int, options: JsonlDataset, answered: bool) -> Question:
    place = f"{options.path} line {number + 1}"
    try:
        text = line.decode("utf-8-sig" if number == 0 else "utf-8")
        record = parse_json(text)
        if b"\\ud" in line.lower():  # half of a pair may be written like that, and no message can carry it
            json.dumps(record, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UserError(field=f"{FIELD}.path", rule=f"{place} must be UTF-8: {error.reason}") from error
    except ValueError as error:
        raise UserError(field=f"{FIELD}.path", rule=f"{place} must be JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(field=f"{FIELD}.path", rule=f"{place} must be an object", got=record)
    prompt = _text(record, options.prompt_field, line=text, field=f"{FIELD}.promptField", place=place)
    if not prompt:
        raise UserError(field=f"{FIELD}.promptField", rule=f"{place}: {options.prompt_field} must not be empty")
    has_answer = answered or options.answer_field in record
    answer = (
        _text(record, options.answer_field, line=text, field=f"{FIELD}.answerField", place=place)
        if has_answer
        else None
    )
    rest = {key: value for key, value in record.items() if key not in (options.prompt_field, options.answer_field)}
    return Question(question=prompt, answer=answer, metadata=rest, source_index=number)


def _text(record: Mapping[str, Any], name: str, *, line: str, field: str, place: str) -> str:
    """A text, or a number as the line has it."""
    if name not in record:
        fields = ", ".join(record) or "none"
        raise UserError(field=field, rule=f"{place} has no field {name}", fix=f"its fields are {fields}")
    text = text_of(record[name], field=field, place=f"{place}: {name}")
    return parse_json(line, parse_float=str)[name] if isinstance(record[name], float) else text
