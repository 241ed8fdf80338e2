"""YAML 1.2 and JSON into plain data, with the line of every field.

Owns: the core schema of YAML 1.2 (`1e-6` is a number, `yes` a string), the refusal of duplicate keys, of
tags and of documents that are too big, too deep or grow without end by aliases. Does not own: files,
or what the data mean.

Invariant: what comes out is what JSON can carry, of at most `MAX_NODES` values, `MAX_DEPTH` levels and `MAX_CHARS` characters.
"""

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.error import YAMLError as RuamelError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from streamrl.errors import UserError, shorten
from streamrl.spec.schema import path_text

MAX_DEPTH = 64
"""A job is nested 8 deep; beyond this it is no job."""
MAX_NODES = 100_000
"""Values of one file after its aliases are written out."""
MAX_CHARS = 32 * 2**20
"""Of all values of one file and the paths to them, after its aliases are written out: twice the largest file that is read."""

_CONSTANTS: dict[str, Any] = {"": None, "~": None}
_CONSTANTS |= dict.fromkeys(("null", "Null", "NULL"))
_CONSTANTS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_DECIMAL = re.compile(r"[-+]?[0-9]{1,400}\Z")
_OCTAL_TO_SOME = re.compile(r"0[0-7]+\Z")
_OTHER_BASE = re.compile(r"0o[0-7]{1,100}\Z|0x[0-9a-fA-F]{1,100}\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")

Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of a file."""

    data: Any
    lines: dict[str, int] = field(default_factory=dict)  # path -> line, from 1; "" is the document's first line


class YamlError(ValueError):
    """The text is not what we read. `line` from 1."""

    def __init__(self, line: int, *, rule: str, fix: str = "") -> None:
        self.line = line
        self.rule = rule
        self.fix = fix
        super().__init__(f"{line}: {rule}")


def read_documents(text: str) -> list[Document]:
    """Parse a stream of documents; empty ones are left out.

    Raises `YamlError`: at the first place that cannot be read.
    """
    try:
        return [document for document in _Composer(text).documents() if document.data is not None]
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(str(error.problem or error.context).split())
        raise YamlError(mark.line + 1 if mark else 1, rule=f"is not YAML: {said}") from None
    except RuamelError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise YamlError(line, rule=f"is not YAML: {getattr(error, 'reason', 'it cannot be read')}") from None


def read_value(text: str) -> Any:  # noqa: ANN401 - plain data
    """Parse one value: `20`, `true`, `{grpo: {}}`; a text that is no YAML is a mistake of the user."""
    try:
        documents = read_documents(text)
    except YamlError as error:
        raise UserError(field=text, rule=error.rule, fix="quote it") from None
    return documents[0].data if documents else None


class _Composer:
    """Builds plain data from the parser's events."""

    def __init__(self, text: str) -> None:
        self._events: Iterator[Any] = iter(YAML(typ="safe", pure=True).parse(text))
        self._anchors: dict[str, tuple[Any, int, int]] = {}
        """Anchor -> value, its nodes, its characters."""
        self._lines: dict[str, int] = {}
        self._nodes = 0
        self._chars = 0

    def documents(self) -> Iterator[Document]:
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                self._anchors, self._lines = {}, {}
                first = next(self._events)
                self._lines[""] = _line(first)
                yield Document(data=self._node(first, at=()), lines=self._lines)

    def _node(self, event: Any, *, at: Location) -> Any:  # noqa: ANN401 - ruamel's events and plain data
        self._count(1, event, chars=len(getattr(event, "value", "")))
        if isinstance(event, AliasEvent):
            return self._alias(event)
        _refuse_tag(event)
        if len(at) > MAX_DEPTH:
            raise YamlError(_line(event), rule=f"is nested more than {MAX_DEPTH} deep")
        nodes, chars = self._nodes - 1, self._chars - len(getattr(event, "value", ""))
        value = self._value(event, at=at)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._nodes - nodes, self._chars - chars)
        return value

    def _value(self, event: Any, *, at: Location) -> Any:  # noqa: ANN401 - as above
        if isinstance(event, ScalarEvent):
            return _scalar(event) if event.implicit[0] else _text(event)
        if isinstance(event, SequenceStartEvent):
            return self._sequence(at)
        assert isinstance(event, MappingStartEvent), event
        return self._mapping(at)

    def _sequence(self, at: Location) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            here = (*at, len(items))
            self._place(here, event)
            items.append(self._node(event, at=here))
        return items

    def _mapping(self, at: Location) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = _key(event)
            if key in own:
                raise YamlError(_line(event), rule=f"key {shorten(key)} is given twice", fix="remove one")
            here = (*at, key)
            self._place(here, event)
            value = self._node(next(self._events), at=here)
            if key == "<<":
                merged |= _merge_sources(value, line=_line(event))
            else:
                own[key] = value
        return merged | own

    def _alias(self, event: Any) -> Any:  # noqa: ANN401 - as above
        if event.anchor not in self._anchors:
            raise YamlError(_line(event), rule=f"alias *{event.anchor} has no anchor before it")
        value, nodes, chars = self._anchors[event.anchor]
        self._count(nodes, event, chars=chars)
        return copy.deepcopy(value)  # so that an override changes one place

    def _place(self, at: Location, event: Any) -> None:  # noqa: ANN401 - as above
        """Note the line of a field; its path is as long as all keys above it, and counts as written out."""
        path = path_text(at)
        self._count(0, event, chars=len(path))
        self._lines[path] = _line(event)

    def _count(self, nodes: int, event: Any, *, chars: int) -> None:  # noqa: ANN401 - as above
        self._nodes += nodes
        self._chars += chars
        for count, most, what in ((self._nodes, MAX_NODES, "values"), (self._chars, MAX_CHARS, "characters")):
            if count > most:
                raise YamlError(_line(event), rule=f"holds more than {most} {what} once its aliases are written out")


def _line(event: Any) -> int:  # noqa: ANN401 - ruamel's events
    line: int = event.start_mark.line + 1
    return line


def _refuse_tag(event: Any) -> None:  # noqa: ANN401 - ruamel's events
    if event.tag is not None:
        raise YamlError(_line(event), rule=f"tag {str(event.tag)[:60]} is not allowed", fix="remove it")


def _key(event: Any) -> str:  # noqa: ANN401 - ruamel's events
    if not isinstance(event, ScalarEvent):
        raise YamlError(_line(event), rule="a key must be a string", fix="quote it")
    _refuse_tag(event)
    return _text(event)


def _text(event: Any) -> str:  # noqa: ANN401 - ruamel's events
    """Of a scalar. JSON writes characters beyond 16 bits as two escapes, which are one character here."""
    text: str = event.value
    if text.isascii():
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        rule = f"must be UTF-8, which cannot carry half of a surrogate pair, got {shorten(text)}"
        raise YamlError(_line(event), rule=rule, fix="write the whole character") from None


def _scalar(event: Any) -> Any:  # noqa: ANN401 - ruamel's events and plain data
    text = _text(event)
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _OCTAL_TO_SOME.match(text):
        rule = f"{text[:60]} is octal to kubectl and decimal to YAML 1.2"
        raise YamlError(_line(event), rule=rule, fix="write 0o before the digits of an octal number")
    if _DECIMAL.match(text):
        return int(text)
    if _OTHER_BASE.match(text):
        return int(text, 0)
    number = float(text) if _FLOAT.match(text) else 0.0
    if _NOT_FINITE.match(text) or not math.isfinite(number):
        raise YamlError(_line(event), rule=f"{text[:60]} is not a finite number")
    return number if _FLOAT.match(text) else text


def _merge_sources(value: Any, *, line: int) -> dict[str, Any]:  # noqa: ANN401 - plain data
    sources = value if isinstance(value, list) else [value]
    if not all(isinstance(source, dict) for source in sources):
        raise YamlError(line, rule="`<<` must merge mappings")
    merged: dict[str, Any] = {}
    for source in sources:
        merged = source | merged
    return merged
