"""`streamrl explain [FIELD]`: type, default, bounds and text of a field of an RLJob or an RLCluster, as `kubectl explain` does."""

import argparse
import json
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from streamrl.changes import PHRASES, has_parts, when
from streamrl.clusters import RLCluster
from streamrl.errors import EXIT_DONE, UserError
from streamrl.spec.parse import unknown_field
from streamrl.spec.rljob import RLJob
from streamrl.spec.schema import Schema, allowed, children, plain_schema, rules, schema_at, type_name, unit
from streamrl_cli import console

_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "field",
        nargs="?",
        default="",
        metavar="FIELD",
        help="path such as spec.pipeline, or rlcluster.spec; absent = the whole job",
    )


def run(args: argparse.Namespace) -> int:
    """Print what is known of the field."""
    kind, path = _kind_of(args.field)
    console.out(*_explain(path, kind=kind))
    return EXIT_DONE


def _kind_of(field: str) -> tuple[type[BaseModel], str]:
    """Which document it is of; a path that names none is of a job."""
    for kind in (RLCluster, RLJob):
        prefix = kind.__name__.lower()
        if field == prefix or field.startswith(f"{prefix}."):
            return kind, field.removeprefix(prefix).strip(".")
    return RLJob, field.rstrip(".")


def _explain(path: str, *, kind: type[BaseModel]) -> Iterator[str]:
    root = plain_schema(kind)
    schema = schema_at(path, root=root)
    if schema is None:
        raise _unknown(path, root=root)
    name = path.rsplit(".", 1)[-1]
    yield f"{path or kind.__name__} <{type_name(schema)}>"
    yield from textwrap.wrap(schema.get("description", ""), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    for label, text in (facts(name, schema) | (_change(path) if kind is RLJob else {})).items():
        yield f"  {label + ':':<9} {text}"
    yield from (f"  Rule:     {rule}" for rule in rules(schema))
    if children(schema):
        yield ""
        yield from _fields(schema)


def facts(name: str, schema: Schema) -> dict[str, str]:
    """What a table says of a field: the values it takes, its default, its unit."""
    found = {} if children(schema) and "items" not in schema else {"Value": allowed(schema)}
    if "default" in schema:
        found["Default"] = json.dumps(schema["default"])
    if unit(name):
        found["Unit"] = unit(name)
    return found


def _change(path: str) -> dict[str, str]:
    """When a field of the specification may change; nothing of a section of which parts may."""
    _, is_spec, below = path.partition("spec.")
    return {"Change": PHRASES[when(below)]} if is_spec and (when(below) or not has_parts(below)) else {}


def _fields(schema: Schema) -> Iterator[str]:
    required = schema.get("items", schema).get("required", [])
    yield "FIELDS"
    for name, field in children(schema).items():
        mark = " (required)" if name in required else ""
        default = f" = {json.dumps(field['default'])}" if "default" in field else ""
        yield f"  {name} <{type_name(field)}>{default}{mark}"
        yield from textwrap.wrap(
            field.get("description", ""), _WIDTH, initial_indent="      ", subsequent_indent="      "
        )


def _unknown(path: str, *, root: Schema) -> UserError:
    """The error for the first part of `path` that does not exist."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        here = ".".join(parts[:end])
        if schema_at(here, root=root) is None:
            break
    parent = schema_at(".".join(parts[: end - 1]), root=root) or root
    return unknown_field(here, name=parts[end - 1], section=parent)
