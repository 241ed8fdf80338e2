"""`streamrl explain [FIELD]`: type, default, bounds and text of a field of the RLJob, as `kubectl explain` does."""

import argparse
import json
import textwrap
from collections.abc import Iterator

from streamrl.changes import PHRASES, has_parts, when
from streamrl.errors import EXIT_DONE, UserError
from streamrl.spec.parse import unknown_field
from streamrl.spec.phrases import allowed, type_name, unit
from streamrl.spec.schema import Schema, children, job_schema, schema_at
from streamrl_cli import console

_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "field", nargs="?", default="", metavar="FIELD", help="path such as spec.pipeline; absent = the whole job"
    )


def run(args: argparse.Namespace) -> int:
    """Print what is known of the field."""
    path = args.field.removeprefix("rljob").removeprefix(".").rstrip(".")
    console.out(*_explain(path))
    return EXIT_DONE


def _explain(path: str) -> Iterator[str]:
    schema = schema_at(path)
    if schema is None:
        raise _unknown(path)
    name = path.rsplit(".", 1)[-1]
    yield f"{path or 'RLJob'} <{type_name(schema)}>"
    yield from textwrap.wrap(schema.get("description", ""), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    for label, text in (facts(name, schema) | _change(path)).items():
        yield f"  {label + ':':<9} {text}"
    for rule in schema.get("x-kubernetes-validations", []):
        yield f"  Rule:     {rule['message']}"
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


def _unknown(path: str) -> UserError:
    """The error for the first part of `path` that does not exist."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        here = ".".join(parts[:end])
        if schema_at(here) is None:
            break
    parent = schema_at(".".join(parts[: end - 1])) or job_schema()
    return unknown_field(here, name=parts[end - 1], section=parent)
