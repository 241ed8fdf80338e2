"""What of a job may change, and when. The one table behind the API server's rules, `job.json`, `streamrl explain` and the reference.

A field that is not in the table never changes. An entry speaks for all that lies below it. A job is suspended where it was before
the change or is with it, so that one write can suspend it and change it, and one can change it and let it go on.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

When = Literal["Always", "WhileSuspended"]

CHANGES: Mapping[str, When] = {
    "suspend": "Always",
    "commonMetadata": "Always",
    "failurePolicy": "Always",
    "maxCost": "Always",
    "activeDeadlineSeconds": "Always",
    "startDeadlineSeconds": "Always",
    "ttlSecondsAfterFinished": "Always",
    "generators[].scaling": "Always",
    "generators[].pod": "Always",
    "generators": "WhileSuspended",
    "gang": "WhileSuspended",
    "task.allowChangedData": "WhileSuspended",
    "pipeline.steps": "WhileSuspended",
    "trainer.pod": "WhileSuspended",
    "trainer.costPerHour": "WhileSuspended",
    "trainer.microBatchTokens": "WhileSuspended",
    "trainer.activationCheckpointing": "WhileSuspended",
    "storage.checkpoints.keepLast": "WhileSuspended",
}
"""Field below `spec`, as users write it -> when it may change. `generators`: pools come, go, and get other engines and costs."""
ALWAYS = tuple(path for path, when in CHANGES.items() if when == "Always")

_HOW = "streamrl suspend, change, resume"
_SUSPENDED = "self.suspend || oldSelf.suspend"
PHRASES: Mapping[When | None, str] = {"Always": "always", "WhileSuspended": "while the job is suspended", None: "never"}
"""For people."""


def when(path: str) -> When | None:
    """When the field at `path` below `spec` may change (with or without indices); None: never, or only parts of it."""
    bare = re.sub(r"\[\d*\]", "", path)
    found = [entry for entry in CHANGES if f"{bare}.".startswith(f"{entry.replace('[]', '')}.")]
    return CHANGES[max(found, key=len)] if found else None


def has_parts(path: str) -> bool:
    """Whether the table says something of parts of it."""
    return bool(_parts(path))


def cel_rules(spec: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """(CEL expression, message) on each change of a job with this specification."""
    for name, field in spec.model_fields.items():
        path = _alias(spec, name)
        if path not in CHANGES and _parts(path):
            yield from _section_rules(path, field)
        elif path not in CHANGES:
            yield _same([(path, field)]), f"{path} cannot be changed; make a new job"
        elif CHANGES[path] == "WhileSuspended":
            yield _list_rule(path, field) if _parts(path) else _suspended_rule(path, _same([(path, field)]))


def _section_rules(path: str, field: FieldInfo) -> Iterator[tuple[str, str]]:
    """Of a section of which only parts may change."""
    leaves = list(_leaves(path, field))
    kept = [(leaf, of) for leaf, of in leaves if leaf not in CHANGES]
    yield _same(kept), f"of {path} only {', '.join(_parts(path))} can be changed; make a new job"
    yield from (_suspended_rule(leaf, _same([(leaf, of)])) for leaf, of in leaves if leaf in CHANGES)


def _suspended_rule(path: str, same: str) -> tuple[str, str]:
    return f"{_SUSPENDED} || ({same})", f"{path} can be changed only while the job is suspended: {_HOW}"


def _list_rule(path: str, field: FieldInfo) -> tuple[str, str]:
    """Of a list of which some parts of each item may always change."""
    parts = [part.rpartition(".")[2] for part in _parts(path)]
    item = field.annotation.__args__[0]  # type: ignore[union-attr] # a tuple of models
    kept = [(own, of) for name, of in item.model_fields.items() if (own := _alias(item, name)) not in parts]
    equal = " && ".join(_same_field(own, of, new="g", old="o") for own, of in kept)
    same = f"self.{path}.size() == oldSelf.{path}.size() && self.{path}.all(g, oldSelf.{path}.exists(o, {equal}))"
    message = f"{path} can be changed only while the job is suspended, but for {' and '.join(parts)}: {_HOW}"
    return f"{_SUSPENDED} || ({same})", message


def _parts(path: str) -> list[str]:
    """What the table says of parts of it."""
    return [entry for entry in CHANGES if entry.startswith((f"{path}.", f"{path}[]"))]


def _leaves(path: str, field: FieldInfo) -> Iterator[tuple[str, FieldInfo]]:
    """What can be compared as a whole."""
    model = field.annotation
    if path in CHANGES or not _parts(path):
        yield path, field
        return
    assert isinstance(model, type), f"{path} has parts that may change, so it is a section that is always there"
    assert issubclass(model, BaseModel), f"{path} has parts that may change, so it is a section"
    for name, part in model.model_fields.items():
        yield from _leaves(f"{path}.{_alias(model, name)}", part)


def _same(fields: Iterable[tuple[str, FieldInfo]]) -> str:
    return " && ".join(_same_field(path, field) for path, field in fields)


def _same_field(path: str, field: FieldInfo, *, new: str = "self", old: str = "oldSelf") -> str:
    same = f"{new}.{path} == {old}.{path}"
    is_optional = not field.is_required() and field.get_default(call_default_factory=True, validated_data={}) is None
    return f"has({new}.{path}) == has({old}.{path}) && (!has({new}.{path}) || {same})" if is_optional else same


def _alias(model: type[BaseModel], name: str) -> str:
    return model.model_fields[name].alias or to_camel(name)


def without(model: type[BaseModel], paths: Iterable[str]) -> dict[str, Any]:
    """These fields as `model_dump(exclude=)` takes them."""
    excluded: dict[str, Any] = {}
    for path in paths:
        node, of = excluded, model
        *sections, last = path.split(".")
        for section in sections:
            name = _python_name(of, section.removesuffix("[]"))
            annotation: Any = of.model_fields[name].annotation
            node = node.setdefault(name, {})
            of = annotation
            if section.endswith("[]"):
                node, of = node.setdefault("__all__", {}), annotation.__args__[0]
        node[_python_name(of, last)] = True
    return excluded


def _python_name(model: type[BaseModel], own: str) -> str:
    return next(name for name in model.model_fields if _alias(model, name) == own)
