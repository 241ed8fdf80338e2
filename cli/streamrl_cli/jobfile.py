"""Job files: from a path to validated jobs; every mistake carries the file and its line.

Owns what a file of jobs may hold. Does not own its text and the places in it (`places.py`), nor the rules: those of
the contract are in `streamrl.spec`, those of a run on this machine in `streamrl_cli.local`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from streamrl.errors import UserError, UserErrors
from streamrl.spec import RLJob, parse_job
from streamrl_cli.local import run_problems
from streamrl_cli.overrides import apply_overrides
from streamrl_cli.places import Places, read_text
from streamrl_cli.yaml_document import Document, YamlError, read_documents

MAX_FILE_BYTES = 1024 * 1024
"""An API server takes objects of about 1.5 MiB; a job of this size is a mistake."""


class Check(Protocol):
    """Finds what a valid job would stumble over where it is to run."""

    def __call__(self, job: RLJob, *, base_dir: Path) -> list[UserError]:
        """Relative paths begin at `base_dir`."""
        ...


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
    try:
        job = parse_job(document.data)
        problems = check(job, base_dir=base_dir_of(path)) if check else []
    except UserErrors as errors:
        problems = errors.errors
    if problems:
        raise UserErrors(Places(path=path, lines=document.lines, overridden=overridden).located(problems)) from None
    return job


def _documents(path: Path) -> list[Document]:
    text = read_text(path, most_bytes=MAX_FILE_BYTES, fix="check that it is a job file")
    if path.suffix == ".json":
        text = _checked_json(path, text)
    try:
        documents = read_documents(text)
    except YamlError as error:
        raise UserError(field=f"{path}:{error.line}", rule=error.rule, fix=error.fix) from None
    if not documents:
        raise UserError(field=str(path), rule="holds no document", fix="begin with examples/chain-sum.yaml")
    return documents


def _checked_json(path: Path, text: str) -> str:
    """JSON is YAML but for tabs between its values."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(field=f"{path}:{error.lineno}", rule=f"is not JSON: {error.msg}") from None
    except RecursionError:
        raise UserError(field=str(path), rule="is nested too deep") from None
    return text.replace("\t", " ")
