"""The specification as one plain schema tree: what `explain`, the reference and the CRD are made of.

Owns the reading of a model's JSON schema (references inlined, `null` alternatives gone, descriptions
whole) and the paths into it (`spec.generators[0].name`). Does not own any rule: those are in the models.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from streamrl.spec.base import REFUSED_KEY
from streamrl.spec.rljob import RLJob

Schema = dict[str, Any]

_ITEM = re.compile(r"\[\d*\]")


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


def is_amount(schema: Schema) -> bool:
    """Whether it takes a whole number or text: an amount as Kubernetes writes it."""
    return bool(schema.get("x-kubernetes-int-or-string"))


def refusals(schema: Schema) -> Mapping[str, str]:
    """Fields that a section, or the items of a list of sections, does not have -> why, and what to use."""
    reasons: Mapping[str, str] = schema.get("items", schema).get(REFUSED_KEY, {})
    return reasons


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
