"""From a file to a `Scenario`, or to one line per mistake, each with its place.

Owns what a mistake in a scenario is called. Does not own the rules (`scenario.py`), nor YAML.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from streamrl.errors import UserError, UserErrors
from streamrl.spec.parse import nearest, parse_job, suggest
from streamrl.spec.phrases import allowed
from streamrl.spec.schema import Schema, children, path_text, plain_schema
from streamrl_cli.simulation.from_job import scenario_of
from streamrl_cli.simulation.lengths_spec import MOST_TOKENS
from streamrl_cli.simulation.scenario import Scenario
from streamrl_cli.yaml_document import Document, YamlError, read_documents

MAX_FILE_BYTES = 16 * 2**20
"""A scenario may hold a table of lengths."""
_DOCUMENT = "(document)"
_EXAMPLE = "begin with examples/simulations/skewed.yaml"


def read_scenario(path: Path) -> Scenario:
    """The scenario of a file; an RLJob with simulated engines is one as well.

    Raises:
        UserError, UserErrors: what is wrong, with file and line.
    """
    document = _document(path)
    try:
        if isinstance(document.data, Mapping) and document.data.get("kind") == "RLJob":
            return scenario_of(parse_job(document.data))
        return parse_scenario(document.data)
    except UserErrors as errors:
        mistakes = sorted(errors.errors, key=lambda error: _line(error.field, document))
        raise UserErrors([_located(error, path=path, document=document) for error in mistakes]) from None


def parse_scenario(data: object) -> Scenario:
    """A scenario of plain data.

    Raises:
        UserErrors: one `UserError` for each mistake.
    """
    if not isinstance(data, Mapping):
        rule = "must be a mapping with pipeline, pools, lengths"
        raise UserErrors([UserError(field=_DOCUMENT, rule=rule, got=data, fix=_EXAMPLE)])
    try:
        return Scenario.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise UserErrors([_explain(details) for details in _own_mistakes(error.errors())]) from None
    except (TypeError, ValueError) as error:
        raise UserErrors([UserError(field=_DOCUMENT, rule=f"must be plain data: {error}")]) from None


def read_rows(path: Path) -> tuple[tuple[int, ...], ...]:
    """Lengths by prompt from a file of JSON Lines.

    Raises:
        UserError: at the first line that is no list of lengths.
    """
    rows = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = line
        if not isinstance(row, list) or not row or not all(_is_length(value) for value in row):
            raise UserError(
                field=f"{path}:{number}", rule=f"must be a list of whole numbers from 1 to {MOST_TOKENS}", got=row
            )
        rows.append(tuple(row))
    if not rows:
        raise UserError(field=str(path), rule="holds no lengths", fix="write one list a line: [812, 640, 3010]")
    return tuple(rows)


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_TOKENS


# ---- files


def _document(path: Path) -> Document:
    try:
        documents = read_documents(_text(path))
    except YamlError as error:
        raise UserError(field=f"{path}:{error.line}", rule=error.rule, fix=error.fix) from None
    if len(documents) != 1:
        raise UserError(field=str(path), rule=f"must hold one scenario, holds {len(documents)}", fix=_EXAMPLE)
    return documents[0]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(field=str(path), rule=f"cannot be read: {error.strerror}", fix="check the path") from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(field=str(path), rule=f"must be at most {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(field=f"{path}:{line}", rule="must be UTF-8", fix="save it as UTF-8") from None


def _line(field: str, document: Document) -> int:
    while field not in document.lines and field:
        field = field[: max(field.rfind("."), field.rfind("["), 0)]
    return document.lines.get(field, 1)


def _located(error: UserError, *, path: Path, document: Document) -> UserError:
    place = f"{path}:{_line(error.field, document)}:"
    return UserError(field=f"{place} {error.field}", rule=error.rule, got=error.got, fix=error.fix)


# ---- mistakes


@cache
def _schema() -> Schema:
    return plain_schema(Scenario)


def _schema_at(location: tuple[str | int, ...]) -> Schema | None:
    """Schema of the field there; an item of a list has its own."""
    node = _schema()
    for part in location:
        if isinstance(part, int):
            node = node.get("items", {})
        elif part in children(node):
            node = children(node)[part]
        else:
            return None
    return node


def _own_mistakes(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without the lists that are too short only because their items are wrong."""
    items = {error["loc"][:end] for error in errors for end in range(len(error["loc"]))}
    return [error for error in errors if error["type"] != "too_short" or error["loc"] not in items]


def _explain(details: ErrorDetails) -> UserError:
    location, kind, got = details["loc"], details["type"], details["input"]
    field = path_text(location) or _DOCUMENT
    schema = _schema_at(location)
    if kind == "missing":
        return UserError(field=field, rule="is required", fix=f"give {allowed(schema or {})}")
    if kind == "extra_forbidden":
        section = _schema_at(location[:-1]) or {}
        return UserError(field=field, rule="is not a known field", fix=suggest(str(location[-1]), children(section)))
    if kind == "value_error" or schema is None:
        return UserError(field=field, rule=details["msg"].removeprefix("Value error, "))
    fix = nearest(got, schema["enum"]) if isinstance(got, str) and "enum" in schema else ""
    if got is None:
        return UserError(
            field=field, rule=f"must be {allowed(schema)}, got null", fix="give a value or remove the line"
        )
    return UserError(field=field, rule=f"must be {allowed(schema)}", got=got, fix=fix)
