"""The names of the public face, by kind: what a user or a newcomer to the code meets first."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from streamrl.metrics import TABLES
from streamrl.proto import stream_pb2
from support.tree import PACKAGES, ROOT, sources, syntax

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


@cache
def public_names() -> dict[str, set[str]]:
    """Kind, as `tests/architecture/words.md` names it -> names."""
    return {
        "modules": set(_modules()),
        "classes": {name.lstrip("_") for name, _ in classes()},
        "metrics": {name for table in TABLES for name in table.specs},
        "protocol": set(_protocol()),
        "crd": {
            name
            for path in ROOT.glob("crds/*.yaml")
            for name in _fields(yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader))
        },
    }


def words_of(name: str) -> tuple[str, ...]:
    """`TrainerFeed`, `trainer_feed` and `trainerFeed` are the words trainer, feed."""
    return tuple(word.lower() for word in _WORD.findall(name))


def classes() -> Iterator[tuple[str, str]]:
    """Name of each class of the product, and its file."""
    for path in sources(*PACKAGES):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                yield node.name, str(path.relative_to(ROOT))


def _modules() -> Iterator[str]:
    for package in PACKAGES:
        for path in sources(package):
            yield from path.relative_to(ROOT / package).with_suffix("").parts


def _protocol() -> Iterator[str]:
    file = stream_pb2.DESCRIPTOR
    yield from (method.name for service in file.services_by_name.values() for method in service.methods)
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        waiting += message.nested_types
        yield message.name
        yield from (field.name for field in message.fields)
        yield from (value.name for kind in message.enum_types for value in kind.values)


def _fields(node: Any) -> Iterator[str]:
    """Fields and enumerated values; those of `pod` are Kubernetes' own."""
    if isinstance(node, list):
        for item in node:
            yield from _fields(item)
    elif isinstance(node, Mapping):
        yield from (value for value in node.get("enum", ()) if isinstance(value, str))
        fields = node.get("properties", {})
        yield from fields
        for name, schema in fields.items():
            yield from () if name == "pod" else _fields(schema)
        yield from (found for key, inner in node.items() if key != "properties" for found in _fields(inner))
