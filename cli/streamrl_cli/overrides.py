"""`--set path=value`: changes to a parsed document before it is validated. Does no I/O."""

import re
from collections.abc import Sequence
from typing import Any

from streamrl.errors import UserError
from streamrl.spec.parse import suggest
from streamrl.spec.schema import children, is_free_form, job_schema, path_text, schema_at
from streamrl_cli.yaml_document import read_value

_PART = re.compile(r"([^.\[\]]+)|\[(\d{1,6})\]")
_PATH = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[\d{1,6}\])*\Z")

FLAG = "--set"


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
    parts = [int(index) if index else name for name, index in _PART.findall(path)]
    return [int(part) if isinstance(part, str) and part.isdigit() else part for part in parts]


def _check_known(parts: Sequence[str | int]) -> None:
    """Raise at the first name that the specification does not have."""
    for end in range(1, len(parts) + 1):
        if schema_at(path_text(parts[:end])) is not None:
            continue
        parent = schema_at(path_text(parts[: end - 1])) or job_schema()
        if is_free_form(parent):
            return
        fix = suggest(str(parts[end - 1]), children(parent))
        raise UserError(field=f"{FLAG} {path_text(parts[:end])}", rule="is not a known field", fix=fix)


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
