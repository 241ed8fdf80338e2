"""Job files: from a path to validated jobs; every mistake carries the file and its line.

Owns reading (size, encoding, YAML or JSON) and the place of a mistake. Does not own the rules: those of
the contract are in `streamrl.spec`, those of a run on this machine in `streamrl_cli.local`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streamrl.errors import UserError, UserErrors
from streamrl.spec import RLJob, parse_job
from streamrl_cli.local import run_problems
from streamrl_cli.overrides import FLAG, apply_overrides
from streamrl_cli.yaml_document import Document, YamlError, read_documents

MAX_FILE_BYTES = 1024 * 1024
"""An API server takes objects of about 1.5 MiB; a job of this size is a mistake."""


class Check(Protocol):
    """Finds what a valid job would stumble over where it is to run."""

    def __call__(self, job: RLJob, *, base_dir: Path) -> list[UserError]:
        """Relative paths begin at `base_dir`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where each field was written."""

    path: Path
    lines: Mapping[str, int]
    overridden: Sequence[str] = ()

    def located(self, error: UserError) -> UserError:
        """`error` with its place before the field."""
        if any(error.field == path or error.field.startswith((f"{path}.", f"{path}[")) for path in self.overridden):
            return _moved(error, FLAG)
        return _moved(error, f"{self.path}:{self.line(error.field)}:")

    def line(self, field: str) -> int:
        """Line of the field, or of the nearest section around it."""
        while field not in self.lines and field:
            field = field[: max(field.rfind("."), field.rfind("["), 0)]
        return self.lines.get(field, 1)


def base_dir_of(path: Path) -> Path:
    """Where relative paths and the user's modules of a job file begin: beside the file itself, not beside a link to it."""
    return path.resolve().parent


def load_job(path: Path, *, overrides: Sequence[str] = (), local: bool = True) -> RLJob:
    """Read the one job of a file.

    Args:
        path: YAML 1.2 or JSON.
        overrides: `path=value` each, as of `--set`.
        local: also check what a run on this machine needs.

    Raises:
        UserError, UserErrors: what is wrong, with file and line.
    """
    documents = _documents(path)
    if len(documents) != 1:
        raise UserError(
            field=str(path), rule=f"must hold one job, holds {len(documents)}", fix="give each job its own file"
        )
    return _load(documents[0], path=path, overrides=overrides, check=run_problems if local else None)


def check_file(
    path: Path, *, check: Check | None = None, overrides: Sequence[str] = ()
) -> tuple[list[RLJob], list[UserError]]:
    """Validate every document of a file, after `overrides` of each; mistakes come in the order of their lines."""
    jobs: list[RLJob] = []
    mistakes: list[UserError] = []
    try:
        for document in _documents(path):
            try:
                jobs.append(_load(document, path=path, overrides=overrides, check=check))
            except UserErrors as errors:
                mistakes += errors.errors
    except UserError as error:
        mistakes.append(error)
    return jobs, mistakes


def _load(document: Document, *, path: Path, overrides: Sequence[str], check: Check | None) -> RLJob:
    overridden = apply_overrides(document.data, overrides)
    places = _Places(path=path, lines=document.lines, overridden=overridden)
    try:
        job = parse_job(document.data)
        problems = check(job, base_dir=base_dir_of(path)) if check else []
    except UserErrors as errors:
        problems = errors.errors
    if problems:
        problems.sort(key=lambda error: places.line(error.field))
        raise UserErrors([places.located(error) for error in problems]) from None
    return job


def _documents(path: Path) -> list[Document]:
    text = _read(path)
    if path.suffix == ".json":
        text = _checked_json(path, text)
    try:
        documents = read_documents(text)
    except YamlError as error:
        raise UserError(field=f"{path}:{error.line}", rule=error.rule, fix=error.fix) from None
    if not documents:
        raise UserError(field=str(path), rule="holds no document", fix="begin with examples/chain-sum.yaml")
    return documents


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(field=str(path), rule=f"cannot be read: {error.strerror}", fix="check the path") from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(
            field=str(path), rule=f"must be at most {MAX_FILE_BYTES} bytes", fix="check that it is a job file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(field=f"{path}:{line}", rule="must be UTF-8", fix="save it as UTF-8") from None


def _checked_json(path: Path, text: str) -> str:
    """JSON is YAML but for tabs between its values."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(field=f"{path}:{error.lineno}", rule=f"is not JSON: {error.msg}") from None
    except RecursionError:
        raise UserError(field=str(path), rule="is nested too deep") from None
    return text.replace("\t", " ")


def _moved(error: UserError, place: str) -> UserError:
    return UserError(field=f"{place} {error.field}", rule=error.rule, got=error.got, fix=error.fix)
