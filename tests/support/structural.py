"""What an API server does with a structural schema: defaults and checks, without CEL."""

import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """(path, node) for every node of a schema."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def defaulted(value: Any, schema: Schema) -> Any:
    """`value` with the defaults of fields that are absent, at every level."""
    if isinstance(value, list) and "items" in schema:
        return [defaulted(item, schema["items"]) for item in value]
    if isinstance(value, dict) and "additionalProperties" in schema:
        return {name: defaulted(item, schema["additionalProperties"]) for name, item in value.items()}
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    fields = schema["properties"]
    whole = {name: field["default"] for name, field in fields.items() if "default" in field} | value
    return {name: defaulted(item, fields.get(name, {})) for name, item in whole.items()}


def faults(value: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """Paths of what the schema refuses."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)) or not _scalar_fits(str(value), schema):
            yield path
        return
    kind = schema["type"]
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield path
    elif isinstance(value, dict):
        yield from _object_faults(value, schema, path)
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema["maxItems"]:
            yield path
        keys = schema.get("x-kubernetes-list-map-keys", [])
        if keys and len({tuple(str(item.get(key)) for key in keys) for item in value}) != len(value):
            yield path
        for index, item in enumerate(value):
            yield from faults(item, schema["items"], f"{path}[{index}]")
    elif not _scalar_fits(value, schema):
        yield path


def _object_faults(value: dict[str, Any], schema: Schema, path: str) -> Iterator[str]:
    if len(value) > schema.get("maxProperties", len(value)):
        yield path
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    fields, entries = schema.get("properties", {}), schema.get("additionalProperties")
    yield from (f"{path}.{name}" for name in schema.get("required", []) if name not in value)
    for name, item in value.items():
        if name in fields or entries is not None:
            yield from faults(item, fields.get(name, entries), f"{path}.{name}")
        else:
            yield f"{path}.{name}"


def _scalar_fits(value: Any, schema: Schema) -> bool:
    if isinstance(value, str):
        length_fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return (
            length_fits and bool(re.search(schema.get("pattern", ""), value)) and value in schema.get("enum", [value])
        )
    if isinstance(value, bool):
        return True
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above = value > low if schema.get("exclusiveMinimum") else value >= low
    below = value < high if schema.get("exclusiveMaximum") else value <= high
    return bool(above and below)
