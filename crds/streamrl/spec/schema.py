"""The specification as one plain schema tree: what `explain`, the reference and the CRD are made of.

Owns the reading of a model's JSON schema (references inlined, `null` alternatives gone, descriptions
whole), the paths into it (`spec.generators[0].name`), and a field's type, bounds and unit in plain words. Does not own any rule: those are in the models.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from streamrl.spec.base import (
    BYTES_PATTERN,
    COST_PATTERN,
    ENDPOINT_PATTERN,
    MAP_KEYS,
    NAME_PATTERN,
    PLACE_PATTERN,
    REFUSED_KEY,
    keys_differ,
)
from streamrl.spec.rljob import RLJob
from streamrl.spec.task import CIDR_PATTERN
from streamrl.spec.tasks.rewards import COMPLETION_PATTERN, VARIABLE_PATTERN
from streamrl.spec.trackers import PROJECT_PATTERN, SERVER_PATTERN
from streamrl.spec.volumes import LABEL_PATTERN, OBJECT_PATTERN, PATH_PATTERN, QUANTITY_PATTERN, SUB_PATH_PATTERN

Schema = dict[str, Any]

_ITEM = re.compile(r"\[\d*\]")
_PATTERNS = {
    BYTES_PATTERN: "a byte quantity (such as 64Mi)",
    COST_PATTERN: "a decimal number in quotes (such as '1.00')",
    r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$": "`module:function`",
    r"^https?://[^\s]+$": "an address (http:// or https://)",
    ENDPOINT_PATTERN: "an address (http:// or https://, then host, port and path alone)",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "the name of an environment variable",
    NAME_PATTERN: "a name (a-z, 0-9 and '-', beginning with a letter, not ending with '-')",
    OBJECT_PATTERN: "the name of an object (a-z, 0-9, '-' and '.')",
    QUANTITY_PATTERN: "an amount (such as 1, 500m, 8Gi)",
    LABEL_PATTERN: "the value of a label (letters, digits, '-', '_' and '.')",
    PLACE_PATTERN: "a URL of an object store or an absolute path",
    PATH_PATTERN: "an absolute path without ':', '//', '.', '..' or a '/' at its end",
    SUB_PATH_PATTERN: "a path in the volume without '//', '.', '..' or a '/' at its ends",
    PROJECT_PATTERN: "a name (letters, digits, '-', '_' and '.', beginning with a letter or digit)",
    CIDR_PATTERN: "a block of addresses (such as 10.0.0.0/16)",
    SERVER_PATTERN: "an address without user and password (http:// or https://)",
    COMPLETION_PATTERN: "a text with {completion}",
    VARIABLE_PATTERN: "REWARD_TOKEN or REWARD_TOKEN_NAME (capital letters, digits and '_')",
}
_UNITS = {
    "Steps": "steps",
    "Seconds": "seconds",
    "Bytes": "bytes",
    "Percent": "percent",
    "Tokens": "tokens",
    "PerHour": "per hour",
    "Groups": "groups",
    "Prompts": "prompts",
    "Milliseconds": "milliseconds",
    "Nanoseconds": "nanoseconds",
}
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
}


@cache
def plain_schema(model: type[BaseModel]) -> Schema:
    """Return the schema of `model` without references, titles and alternatives. Not to be changed by the caller."""
    raw = model.model_json_schema(by_alias=True)
    result: Schema = _inline(raw, raw.get("$defs", {}))
    return result


def job_schema() -> Schema:
    """Return the schema of an RLJob. Not to be changed by the caller."""
    return plain_schema(RLJob)


def path_text(location: Iterable[str | int]) -> str:
    """Render a location as users write it: `spec.generators[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def schema_at(path: str, *, root: Schema | None = None) -> Schema | None:
    """Return the schema of the field at `path`; list indices may be left out. None: there is no such field.

    Args:
        path: as `path_text` renders it.
        root: where it begins; None: an RLJob.
    """
    node = job_schema() if root is None else root
    for name in [part for part in _ITEM.sub("", path).split(".") if part]:
        if (entry := entries(node)) is not None:
            return entry  # the rest is one key, whose dots are its own
        if name not in children(node):
            return None
        node = children(node)[name]
    return node


def children(schema: Schema) -> Mapping[str, Schema]:
    """Return the fields of a section, or of the items of a list of sections."""
    fields: Mapping[str, Schema] = schema.get("items", schema).get("properties", {})
    return fields


def entries(schema: Schema) -> Schema | None:
    """Return the schema of a mapping's values where its keys are free: labels, amounts; else None."""
    values = schema.get("additionalProperties")
    return values if isinstance(values, dict) else None


def is_free_form(schema: Schema) -> bool:
    """Whether any fields may stand in this mapping."""
    return schema.get("type") == "object" and "properties" not in schema


def is_open(schema: Schema) -> bool:
    """Whether fields that are not described may stand in this section, or in the items of this list."""
    node = schema.get("items", schema)
    return is_free_form(node) or bool(node.get("x-kubernetes-preserve-unknown-fields"))


def is_amount(schema: Schema) -> bool:
    """Whether it takes a whole number or text: an amount as Kubernetes writes it."""
    return bool(schema.get("x-kubernetes-int-or-string"))


def refusals(schema: Schema) -> Mapping[str, str]:
    """Fields that a section, or the items of a list of sections, does not have -> why, and what to use."""
    reasons: Mapping[str, str] = schema.get("items", schema).get(REFUSED_KEY, {})
    return reasons


def rules(schema: Schema) -> list[str]:
    """Return what must hold between the fields of a section, or of the items of a list of sections."""
    maps = ((name, key) for name, field in children(schema).items() for key in field.get(MAP_KEYS, ()))
    stated = schema.get("items", schema).get("x-kubernetes-validations", ())
    return [*(keys_differ(name, key) for name, key in maps), *(rule["message"] for rule in stated)]


def _inline(node: Any, definitions: Mapping[str, Schema]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(_merge(definitions[node["$ref"].rsplit("/", 1)[1]], node), definitions)
    if "anyOf" in node:
        [value] = [option for option in node["anyOf"] if option != {"type": "null"}]
        return _inline(
            value | {key: item for key, item in node.items() if key not in ("anyOf", "default")}, definitions
        )
    return {key: _entry(key, item, definitions) for key, item in node.items() if key not in ("$defs", "title")}


def _entry(key: str, item: Any, definitions: Mapping[str, Schema]) -> Any:  # noqa: ANN401 - any JSON value
    if key == "properties":  # here the keys are field names, `title` could be one
        return {name: _inline(field, definitions) for name, field in item.items()}
    if key == REFUSED_KEY:
        return item
    if key == "description":
        return " ".join(item.split())
    return item if key == "default" else _inline(item, definitions)


def _merge(definition: Schema, reference: Schema) -> Schema:
    """What stands beside a reference goes over the definition; both descriptions are kept where they differ."""
    about_type, about_field = definition.get("description", ""), reference.get("description", "")
    merged = definition | {key: item for key, item in reference.items() if key != "$ref"}
    merged["description"] = _join(about_field, about_type)
    return merged


def _join(about_field: str, about_type: str) -> str:
    if about_type.startswith(about_field.rstrip(".")):
        return about_type
    return (
        about_field
        if not about_type or about_field.startswith(about_type.rstrip("."))
        else f"{about_field} {about_type}"
    )


def type_name(schema: Schema) -> str:
    """Short name of the type: `integer`, `[]object`."""
    if schema.get("type") == "array":
        return f"[]{type_name(schema['items'])}"
    return "amount" if is_amount(schema) else str(schema.get("type", "any"))


def allowed(schema: Schema) -> str:
    """What a value must be, as the end of a sentence: `a whole number from 1 to 64`."""
    if "const" in schema or "enum" in schema:
        values = schema.get("enum") or [schema["const"]]
        return f"one of {', '.join(values)}" if len(values) > 1 else str(values[0])
    kind = schema.get("type")
    if kind == "string":
        return _string(schema)
    if kind == "object" and children(schema):
        return f"a mapping with fields of {', '.join(children(schema))}"
    if kind == "object" and "maxProperties" in schema:
        return f"a mapping of {_count(schema, 'Properties')} entries"
    if kind == "array":
        return f"a list of {_count(schema, 'Items')} items"
    return f"{_TYPES.get(str(kind), 'any value')}{bounds(schema, lead=' ')}"


def bounds(schema: Schema, *, lead: str = "") -> str:
    """Bounds of a number: `from 1 to 64`; empty without."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{lead}from {_number(low)} to {_number(high)}"
    parts = [
        f"{word} {_number(value)}"
        for word, value in (("at least", low), ("above", above), ("at most", high), ("below", below))
        if value is not None
    ]
    return lead + " and ".join(parts) if parts else ""


def unit(name: str) -> str:
    """Unit that the field's name carries; empty if none."""
    return next((text for suffix, text in _UNITS.items() if name.endswith(suffix) or name == suffix.lower()), "")


def _string(schema: Schema) -> str:
    what = _PATTERNS.get(schema.get("pattern", ""), "a string")
    return f"{what} of {_count(schema, 'Length')} characters" if "maxLength" in schema else what


def _count(schema: Schema, noun: str) -> str:
    low, high = schema.get(f"min{noun}", 0), schema.get(f"max{noun}")
    return f"{low} to {high}" if low else f"at most {high}"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
