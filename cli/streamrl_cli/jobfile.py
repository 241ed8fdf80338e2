"""Job files: from a path to validated jobs, with `--set path=value` applied; every mistake carries the file and its line.

Owns what a file of jobs may hold and how a field of it is overridden. Does not own its text (`yaml_document.py`), nor the
rules: those of the contract are in `streamrl.spec`, those of a run on this machine in `streamrl_cli.local`.
"""

import argparse
import json
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from streamrl import API_VERSION
from streamrl.clusters import RLCluster
from streamrl.errors import UserError, UserErrors
from streamrl.files import parse_json, read_text
from streamrl.spec import RLJob, parse_job
from streamrl.spec.parse import parse_document, unknown_field
from streamrl.spec.pod import RLJobDefaults
from streamrl.spec.schema import is_open, job_schema, path_text, schema_at
from streamrl_cli.local import run_problems
from streamrl_cli.yaml_document import Document, YamlError, read_documents, read_value

MAX_FILE_BYTES = 1024 * 1024
"""An API server takes objects of about 1.5 MiB; a job of this size is a mistake."""
_PART = re.compile(r"([^.\[\]]+)|\[(\d{1,6})\]")
_PATH = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[\d{1,6}\])*\Z")
FLAG = "--set"
_DEFAULTS, _CLUSTER, _CONFIG_MAP = RLJobDefaults.__name__, RLCluster.__name__, "ConfigMap"
_M = TypeVar("_M", RLJobDefaults, RLCluster)


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
    path: Path,
    *,
    check: Check | None = None,
    overrides: Sequence[str] = (),
    beside: Collection[str] = (_DEFAULTS, _CLUSTER, _CONFIG_MAP),
) -> tuple[list[RLJob], list[UserError]]:
    """Validate every document of a file, after `overrides` of each job; mistakes come in the order of their lines.

    `beside`: kinds that a file may hold beside jobs; they are passed over.
    """
    jobs: list[RLJob] = []
    mistakes: list[UserError] = []
    try:
        for document in _documents(path):
            try:
                if _is_beside(document, path=path, kinds=beside):
                    continue
                jobs.append(_load(document, path=path, overrides=overrides, check=check))
            except UserErrors as errors:
                mistakes += errors.errors
    except UserError as error:
        mistakes.append(error)
    return jobs, mistakes


def load_document(path: Path, *, model: type[_M]) -> _M:
    """Read the one RLJobDefaults or RLCluster of a file. Raises `UserError`, `UserErrors`: what is wrong, with file and line."""
    documents = _documents(path)
    if len(documents) != 1:
        raise UserError(field=str(path), rule=f"must hold one {model.__name__}, holds {len(documents)}")
    return _parsed(documents[0], model=model, path=path)


def _parsed(document: Document, *, model: type[_M], path: Path) -> _M:
    try:
        return parse_document(document.data, model=model, rule=f"must be a mapping of kind {model.__name__}")
    except UserErrors as errors:
        raise UserErrors(located(errors.errors, path=path, lines=document.lines)) from None


def read_config_maps(path: Path) -> list[dict[str, Any]]:
    """Return the ConfigMaps of a file that `check_file` has checked."""
    return [one.data for one in _documents(path) if isinstance(one.data, dict) and one.data.get("kind") == _CONFIG_MAP]


def _is_beside(document: Document, *, path: Path, kinds: Collection[str]) -> bool:
    """Whether it is no job: an RLJobDefaults or an RLCluster, which are checked, or a ConfigMap, such as a job's code.

    Raises:
        UserErrors: it is of another kind, or has a mistake.
    """
    kind = document.data.get("kind") if isinstance(document.data, dict) else None
    if kind not in kinds:
        if isinstance(kind, str) and kind != RLJob.__name__ and document.data.get("apiVersion") != API_VERSION:
            kubectl = "give it to kubectl apply, in a file of its own"
            wrong = UserError(field="kind", rule=f"must be {' or '.join(('RLJob', *kinds))}", got=kind, fix=kubectl)
            raise UserErrors(located([wrong], path=path, lines=document.lines))
        return False
    if kind == _DEFAULTS:
        _parsed(document, model=RLJobDefaults, path=path)
    if kind == _CLUSTER:
        _parsed(document, model=RLCluster, path=path)
    if kind == _CONFIG_MAP and not isinstance((document.data.get("metadata") or {}).get("name"), str):
        wrong = UserError(field="metadata.name", rule="is required of a ConfigMap")
        raise UserErrors(located([wrong], path=path, lines=document.lines))
    return True


_NAME_CHARACTERS = "bcdfghjklmnpqrstvwxz2456789"
"""As an API server draws them: no vowels, so no words."""


def _generate_name(data: object) -> None:
    """Give a job with `metadata.generateName` a name, as an API server does it at a create."""
    metadata = data.get("metadata") if isinstance(data, dict) else None
    if isinstance(metadata, dict) and isinstance(metadata.get("generateName"), str) and "name" not in metadata:
        metadata["name"] = metadata.pop("generateName") + "".join(secrets.choice(_NAME_CHARACTERS) for _ in range(5))


def _load(document: Document, *, path: Path, overrides: Sequence[str], check: Check | None) -> RLJob:
    overridden = apply_overrides(document.data, overrides)
    _generate_name(document.data)
    try:
        job = parse_job(document.data)
        problems = check(job, base_dir=base_dir_of(path)) if check else []
    except UserErrors as errors:
        problems = errors.errors
    if problems:
        raise UserErrors(located(problems, path=path, lines=document.lines, overridden=overridden)) from None
    return job


def _documents(path: Path) -> list[Document]:
    text = read_text(path, most_bytes=MAX_FILE_BYTES, fix="check that it is a job file")
    if path.suffix == ".json":
        text = _checked_json(path, text)
    documents = documents_in(text, path=path)
    if not documents:
        raise UserError(field=str(path), rule="holds no document", fix="begin with examples/chain-sum.yaml")
    return documents


def documents_in(text: str, *, path: Path) -> list[Document]:
    """The documents of the file `path`, which holds `text`. Raises `UserError` with the line that cannot be read."""
    try:
        return read_documents(text)
    except YamlError as error:
        raise UserError(field=f"{path}:{error.line}", rule=error.rule, fix=error.fix) from None


def _checked_json(path: Path, text: str) -> str:
    """JSON is YAML but for tabs between its values."""
    try:
        parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(field=f"{path}:{error.lineno}", rule=f"is not JSON: {error.msg}") from None
    except ValueError as error:
        raise UserError(field=str(path), rule=f"is not JSON: {error}") from None
    return text.replace("\t", " ")


def add_overrides(parser: argparse.ArgumentParser, *, example: str = "spec.pipeline.steps=50") -> None:
    """The flag of commands that take a job file."""
    parser.add_argument(FLAG, action="append", default=[], metavar="PATH=VALUE", help=f"change a field: {example}")


def apply_overrides(data: Any, overrides: Sequence[str]) -> list[str]:  # noqa: ANN401 - plain data
    """Change `data` in place; returns the paths that were set."""
    return [_apply(data, override) for override in overrides]


def _apply(data: Any, override: str) -> str:  # noqa: ANN401 - plain data
    path, equals, text = override.partition("=")
    if not equals or not _PATH.match(path):
        raise UserError(field=FLAG, rule="must be path=value", got=override, fix="for example spec.pipeline.steps=20")
    parts = _split(path)
    _check_known(parts)
    value = read_value(text)
    parent = _descend(data, parts[:-1])
    if value is None and isinstance(parent, dict):
        parent.pop(str(parts[-1]), None)  # null: as if the field were not in the file
    else:
        _put(parent, parts=parts, value=value)
    return path_text(parts)


def _split(path: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in (index or name for name, index in _PART.findall(path))]


def _check_known(parts: Sequence[str | int]) -> None:
    """Raise at the first name that the specification does not have."""
    for end in range(1, len(parts) + 1):
        if schema_at(path_text(parts[:end])) is not None:
            continue
        parent = schema_at(path_text(parts[: end - 1])) or job_schema()
        if is_open(parent):
            return
        raise unknown_field(f"{FLAG} {path_text(parts[:end])}", name=str(parts[end - 1]), section=parent)


def _descend(data: Any, parts: Sequence[str | int]) -> Any:  # noqa: ANN401 - plain data
    for end, part in enumerate(parts, start=1):
        if isinstance(part, int):
            data = _item(data, part, path=path_text(parts[:end]))
        elif isinstance(data, dict):
            if not isinstance(data.get(part), (dict, list)):
                data[part] = {}
            data = data[part]
        else:
            raise _wrong_kind(path_text(parts[:end]), data)
    return data


def _put(parent: Any, *, parts: Sequence[str | int], value: Any) -> None:  # noqa: ANN401 - plain data
    last = parts[-1]
    if isinstance(last, int):
        _item(parent, last, path=path_text(parts))
        parent[last] = value
    elif isinstance(parent, dict):
        parent[last] = value
    else:
        raise _wrong_kind(path_text(parts), parent)


def _item(data: Any, index: int, *, path: str) -> Any:  # noqa: ANN401 - plain data
    if not isinstance(data, list):
        raise UserError(field=f"{FLAG} {path}", rule="has an index, but the file has no list there")
    if index >= len(data):
        raise UserError(
            field=f"{FLAG} {path}", rule=f"must be an item of the file's list, which has {len(data)}", got=index
        )
    return data[index]


def _wrong_kind(path: str, data: object) -> UserError:
    if isinstance(data, list):
        return UserError(
            field=f"{FLAG} {path}",
            rule="is a field of a list's items",
            fix="give the item's index, as in generators[0]",
        )
    return UserError(field=f"{FLAG} {path}", rule="is a field, but the file has no mapping there", got=data)


def located(
    errors: Iterable[UserError], *, path: Path, lines: Mapping[str, int], overridden: Sequence[str] = ()
) -> list[UserError]:
    """`errors` of a file by their lines (field -> line), each with its place before the field; `overridden`: fields that the command line gave."""

    def line_of(field: str) -> int:
        """Of the field, or of the nearest section around it."""
        while field not in lines and field:
            field = field[: max(field.rfind("."), field.rfind("["), 0)]
        return lines.get(field, 1)

    found = []
    for error in sorted(errors, key=lambda error: line_of(error.field)):
        given = any(error.field == one or error.field.startswith((f"{one}.", f"{one}[")) for one in overridden)
        place = FLAG if given else f"{path}:{line_of(error.field)}:"
        found.append(UserError(field=f"{place} {error.field}", rule=error.rule, got=error.got, fix=error.fix))
    return found


def hub_dir() -> Path:
    """Return the hub's cache, where the library of Hugging Face has it."""
    home = os.environ.get("HF_HOME")
    return Path(os.environ.get("HF_HUB_CACHE") or (f"{home}/hub" if home else "~/.cache/huggingface/hub")).expanduser()
