"""A value with one of its fields changed, for each field in turn: the fields are those of the message's descriptor, the document, or the table."""

import copy
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_M = TypeVar("_M", bound=Message)
_Edit = Callable[[Any], object]
_Number = FieldDescriptor
_LARGEST = {
    _Number.CPPTYPE_UINT32: 2**32 - 1,
    _Number.CPPTYPE_UINT64: 2**64 - 1,
    _Number.CPPTYPE_INT32: 2**31 - 1,
    _Number.CPPTYPE_INT64: 2**63 - 1,
}


def filled(kind: type[_M]) -> _M:
    """A message in which each field, at each depth, has a value."""
    message = kind()
    _fill(message, message.DESCRIPTOR)
    return message


def _fill(message: Any, kind: Descriptor) -> None:
    for field in kind.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)["a"] = 1
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            _fill(inner.add() if field.is_repeated else inner, field.message_type)
        elif field.is_repeated:
            getattr(message, field.name).append(_value(field))
        elif (
            field.containing_oneof is None
            or field.containing_oneof.fields[0] is field
            or len(field.containing_oneof.fields) == 1
        ):
            setattr(message, field.name, _value(field))


def _value(field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case _Number.CPPTYPE_STRING:
            return b"\1\2\3\4" if field.type == _Number.TYPE_BYTES else "text"
        case _Number.CPPTYPE_BOOL:
            return True
        case _:
            return 3


def changed_messages(whole: _M) -> Iterator[tuple[str, _M]]:
    """(path of the field, the message with another value there), for each field."""
    for path, edit in _edits(whole, lambda root: root, path=""):
        changed = copy.deepcopy(whole)
        edit(changed)
        if changed.SerializeToString(deterministic=True) != whole.SerializeToString(deterministic=True):
            yield path.lstrip("."), changed


def _edits(message: Any, at: Callable[[Any], Any], *, path: str) -> Iterator[tuple[str, _Edit]]:
    for field in message.DESCRIPTOR.fields:
        yield from _edits_of(message, field, at, path=f"{path}.{field.name}")


def _edits_of(
    message: Any, field: FieldDescriptor, at: Callable[[Any], Any], *, path: str
) -> Iterator[tuple[str, _Edit]]:
    name, kind = field.name, field.message_type
    value = getattr(message, name)
    yield path, lambda root: at(root).ClearField(name)
    if kind is not None and kind.GetOptions().map_entry:
        for key, held in value.items():
            yield f"{path}[{key}]", lambda root, key=key, held=held: getattr(at(root), name).__setitem__(key, held + 1)
    elif field.is_repeated:
        for place, held in enumerate(value):
            here = f"{path}[{place}]"
            if kind is not None:
                yield from _edits(held, lambda root, place=place: getattr(at(root), name)[place], path=here)
            else:
                for other in _others(field, held):
                    yield here, lambda root, place=place, other=other: getattr(at(root), name).__setitem__(place, other)
        if value:
            yield f"{path}[twice]", lambda root: getattr(at(root), name).append(getattr(at(root), name)[0])
            yield f"{path}[last]", lambda root: getattr(at(root), name).pop()
    elif kind is not None:
        yield path, lambda root: getattr(at(root), name).SetInParent()
        if message.HasField(name):
            yield from _edits(value, lambda root: getattr(at(root), name), path=path)
    else:
        for other in _others(field, value):
            yield path, lambda root, other=other: setattr(at(root), name, other)


def _others(field: FieldDescriptor, value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case bytes():
            return [value + b"\0", value[:-1], bytes([value[0] ^ 1]) + value[1:] if value else b"\1"]
        case str():
            return [value + "\n", value[:-1], "other"]
        case float():
            return [value + 1, float("nan"), float("inf")]
        case _:
            return [value + 1, max(0, value - 1), _LARGEST.get(field.cpp_type, value + 2)]


def changed_documents(whole: Any) -> Iterator[tuple[str, Any]]:
    """(path, the JSON document with another value there), for each value at each depth."""
    for path in _paths(whole):
        *way, last = path
        for other in (None, [], {}, "other", -1, 2**70, 0.5, True, _missing):
            changed = copy.deepcopy(whole)
            place = changed
            for key in way:
                place = place[key]
            if other is _missing:
                del place[last]
            else:
                place[last] = other
            if repr(changed) != repr(whole):
                yield ".".join(map(str, path)), changed


_missing = object()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def changed_rows(path: Path, *, newest_only: bool) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """(table and column, what changes a cell of it in a copy of the database), for each table and column that it has."""
    with closing(sqlite3.connect(path)) as connection:
        for table in tables(path):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            limit = "LIMIT 1" if newest_only else ""
            rows = connection.execute(f"SELECT rowid, {', '.join(columns)} FROM {table} ORDER BY rowid DESC {limit}")
            for rowid, *cells in rows.fetchall():
                for column, cell in zip(columns, cells, strict=True):
                    change = partial(overwrite, table=table, rowid=rowid, cell=column, value=other_cell(cell))
                    yield f"{table}.{column}", change


def tables(path: Path) -> set[str]:
    """Names of a database's tables."""
    with closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def other_cell(cell: object) -> object:
    """Another value for a cell."""
    match cell:
        case None:
            return 1
        case str():
            return chr(ord(cell[0]) ^ 1) + cell[1:]
        case bytes():
            return bytes([cell[0] ^ 1]) + cell[1:] if cell else b"\1"
        case int():
            return cell ^ 64  # no other row's key
        case _:
            return cell + 1  # type: ignore[operator]


def overwrite(path: Path, *, table: str, cell: str, value: object, rowid: int | None = None) -> None:
    """Change a cell without its row's digest, as a flipped bit does; None: of the last row."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        if rowid is None:
            (rowid,) = connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()
        if any(row[1] == "digest" for row in connection.execute(f"PRAGMA table_xinfo({table})")):
            (digest,) = connection.execute(f"SELECT digest FROM {table} WHERE rowid = ?", (rowid,)).fetchone()
            connection.create_function("row_digest", -1, lambda *_: digest, deterministic=True)
        connection.execute(f"UPDATE {table} SET {cell} = ? WHERE rowid = ?", (value, rowid))
