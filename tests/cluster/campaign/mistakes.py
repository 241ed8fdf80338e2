"""Wrong specs: one mistake put into a valid one, and which field must be named by whoever refuses it.

`single` breaks one rule of the schema at one place: type, bound, pattern, enumeration, a field missing or unknown. `POD_MISTAKES` are those
that the contract cannot see and the API server finds in the pods' template.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.campaign.specs import Spec
from streamrl.spec.schema import Schema, is_amount, job_schema

_UNKNOWN = "notAField"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A wrong spec."""

    field: str
    """That must be named."""
    what: str
    spec: Spec


def single(spec: Spec, rng: random.Random, *, number: int) -> list[Mistake]:
    """So many specs, each with one mistake at a place drawn by `rng`."""
    places = list(_places(spec, job_schema()["properties"]["spec"], ("spec",)))
    made: list[Mistake] = []
    while len(made) < number:
        path, schema = rng.choice(places)
        options = list(_broken(schema, path))
        if not options:
            continue
        what, at, value = rng.choice(options)
        made.append(Mistake(field=_text(at), what=what, spec=_put(spec, at[1:], value)))
    return made


_Path = tuple[str | int, ...]
_DROP = object()


def _places(value: Any, schema: Schema, path: _Path) -> Iterator[tuple[_Path, Schema]]:
    yield path, schema
    if isinstance(value, dict):
        for name, child in (schema.get("properties") or {}).items():
            if name in value:
                yield from _places(value[name], child, (*path, name))
            elif not child.get("properties"):
                yield (*path, name), child
    elif isinstance(value, list) and "items" in schema:
        for place, item in enumerate(value):
            yield from _places(item, schema["items"], (*path, place))


def _broken(schema: Schema, path: _Path) -> Iterator[tuple[str, _Path, Any]]:
    """(rule, path, value that breaks it)."""
    kind = "amount" if is_amount(schema) else schema.get("type")
    if kind in _OTHER_TYPE:
        yield "type", path, _OTHER_TYPE[kind]
    if kind == "integer":
        yield "whole number", path, 1.5
    for rule, breaks in _BREAKS.items():
        if rule in schema:
            yield rule, path, breaks(schema[rule])
    if schema.get("properties") and not schema.get("x-kubernetes-preserve-unknown-fields"):
        yield "unknown field", (*path, _UNKNOWN), 1
    for name in schema.get("required") or () if kind == "object" else ():
        yield "required", (*path, name), _DROP


_OTHER_TYPE: Mapping[str, Any] = {
    "integer": "seven",
    "number": "seven",
    "boolean": "yes",
    "string": 7,
    "amount": 0.5,
    "array": {},
    "object": [],
}
_BREAKS: Mapping[str, Callable[[Any], Any]] = {
    "minimum": lambda bound: bound - 1,
    "exclusiveMinimum": lambda bound: bound,
    "maximum": lambda bound: bound + 1,
    "enum": lambda _: "Nonsense",
    "pattern": lambda _: " ",
    "maxLength": lambda bound: "a" * (bound + 1),
}


def _put(spec: Spec, path: _Path, value: Any) -> Spec:
    made = copy.deepcopy(spec)
    if not path:
        return value
    node: Any = made
    for part in path[:-1]:
        node = node[part]
    if value is _DROP:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return made


def _text(path: _Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


_UNMADE = "priority or runtime class"
"""The StatefulSet is taken, and no pod is made of it: all that can be said is where to look and for what."""
POD_MISTAKES: Mapping[str, tuple[Spec, str]] = {
    "requests above limits": ({"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}, "resources.requests"),
    "resource without a domain": ({"resources": {"requests": {"no such": "1"}}}, "resources.requests"),
    "label's key": ({"labels": {"bad key!": "x"}}, "labels"),
    "annotation's key": ({"annotations": {"bad key!": "x"}}, "annotations"),
    "selector's key": ({"nodeSelector": {"bad key!": "x"}}, "nodeSelector"),
    "Exists with a value": ({"tolerations": [{"key": "k", "operator": "Exists", "value": "x"}]}, "tolerations[0]"),
    "seconds without NoExecute": (
        {"tolerations": [{"key": "k", "value": "x", "effect": "NoSchedule", "tolerationSeconds": 3}]},
        "tolerations[0]",
    ),
    "affinity of another kind": ({"affinity": {"nodeAffinity": {"nonsense": 1}}}, "affinity"),
    "unknown priority class": ({"priorityClassName": "nonsense"}, _UNMADE),
    "unknown runtime class": ({"runtimeClassName": "nonsense"}, _UNMADE),
}
"""What is given of a pool's pod, and the field that the condition of the job or of the pool must name."""
