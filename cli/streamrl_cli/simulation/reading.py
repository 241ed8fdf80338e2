"""From a file to a `Scenario`, or to one line per mistake, each with its place.

Owns what a file of a scenario or of lengths may hold. Does not own the rules (`scenario.py`), what a mistake is called
(`streamrl.spec.parse`), nor YAML.
"""

from pathlib import Path

from streamrl.errors import UserError, UserErrors
from streamrl.files import parse_json, read_text
from streamrl.spec.parse import parse_document
from streamrl_cli.jobfile import documents_in, located
from streamrl_cli.simulation.scenario import MOST_TOKENS, Scenario

MAX_FILE_BYTES = 16 * 2**20
"""A scenario may hold a table of lengths."""
_EXAMPLE = "begin with examples/simulations/skewed.yaml"


def read_scenario(path: Path) -> Scenario:
    """The scenario of a file. Raises `UserError` or `UserErrors`: what is wrong, with file and line."""
    documents = documents_in(read_text(path, most_bytes=MAX_FILE_BYTES), path=path)
    if len(documents) != 1:
        raise UserError(field=str(path), rule=f"must hold one scenario, holds {len(documents)}", fix=_EXAMPLE)
    document = documents[0]
    try:
        return parse_scenario(document.data)
    except UserErrors as errors:
        raise UserErrors(located(errors.errors, path=path, lines=document.lines)) from None


def parse_scenario(data: object) -> Scenario:
    """A scenario of plain data. Raises `UserErrors`: one `UserError` for each mistake."""
    rule = "must be a mapping with pipeline, pools, lengths"
    return parse_document(data, model=Scenario, rule=rule, fix=_EXAMPLE)


def read_rows(path: Path) -> tuple[tuple[int, ...], ...]:
    """Lengths by prompt from a file of JSON Lines. Raises `UserError`: at the first line that is no list of lengths."""
    rows = []
    for number, line in enumerate(read_text(path, most_bytes=MAX_FILE_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
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
