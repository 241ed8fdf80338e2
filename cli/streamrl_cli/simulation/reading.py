"""From a file to a `Scenario`, or to one line per mistake, each with its place.

Owns what a file of a scenario or of lengths may hold. Does not own the rules (`scenario.py`), what a mistake is called
(`streamrl.spec.parse`), nor YAML.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from streamrl.errors import UserError, UserErrors
from streamrl.spec.parse import parse_document, parse_job
from streamrl_cli.places import Places, read_text
from streamrl_cli.simulation.from_job import scenario_of
from streamrl_cli.simulation.lengths_spec import MOST_TOKENS
from streamrl_cli.simulation.scenario import Scenario
from streamrl_cli.yaml_document import Document, YamlError, read_documents

MAX_FILE_BYTES = 16 * 2**20
"""A scenario may hold a table of lengths."""
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
        raise UserErrors(Places(path=path, lines=document.lines).located(errors.errors)) from None


def parse_scenario(data: object) -> Scenario:
    """A scenario of plain data.

    Raises:
        UserErrors: one `UserError` for each mistake.
    """
    rule = "must be a mapping with pipeline, pools, lengths"
    return parse_document(data, model=Scenario, rule=rule, fix=_EXAMPLE)


def read_rows(path: Path) -> tuple[tuple[int, ...], ...]:
    """Lengths by prompt from a file of JSON Lines.

    Raises:
        UserError: at the first line that is no list of lengths.
    """
    rows = []
    for number, line in enumerate(read_text(path, most_bytes=MAX_FILE_BYTES).splitlines(), start=1):
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
        documents = read_documents(read_text(path, most_bytes=MAX_FILE_BYTES))
    except YamlError as error:
        raise UserError(field=f"{path}:{error.line}", rule=error.rule, fix=error.fix) from None
    if len(documents) != 1:
        raise UserError(field=str(path), rule=f"must hold one scenario, holds {len(documents)}", fix=_EXAMPLE)
    return documents[0]
