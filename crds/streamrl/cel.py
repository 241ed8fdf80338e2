"""A subset of CEL, the language of an API server's rules, evaluated over models.

Python's own parser reads it, since of all operators in it only `&&`, `||` and `!` are spelled differently. What is not in the subset
is refused when a text is compiled. Two things differ: a guard must stand before what it guards, as `!has(self.a) || self.a.b == 1`;
and types are checked by an API server alone. `tests/cluster/test_cel.py` compares the rest with a real one.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

Expression = Callable[[Mapping[str, Any]], Any]
"""From the values of its names to its own."""

_SPELLED = {"&&": " and ", "||": " or ", "!": "~"}
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
}
_METHODS: Mapping[str, Callable[..., Any]] = {
    "size": len,
    "sum": sum,
    "startsWith": str.startswith,
    "contains": lambda text, part: part in text,
    "isSorted": lambda items: list(items) == sorted(items),
    "compareTo": lambda one, other: (one > other) - (one < other),
}
_MACROS: Mapping[str, Callable[[Iterable[tuple[Any, Any]]], Any]] = {
    "all": lambda results: all(result for _, result in results),
    "exists": lambda results: any(result for _, result in results),
    "exists_one": lambda results: sum(result for _, result in results) == 1,
    "map": lambda results: tuple(result for _, result in results),
    "filter": lambda results: tuple(item for item, result in results if result),
}
"""From pairs of an item and what the macro's body says of it."""


def compile_cel(text: str, **functions: Callable[..., Any]) -> Expression:
    """Compile an expression; `functions`: those that it calls by their names. Raises `ValueError`: it is not in the subset."""
    return _compile(_parse(text), functions)


def compile_failing(text: str, name: str, **functions: Callable[..., Any]) -> Expression:
    """Compile the items that break a rule with `LIST.all(name, CONDITION)`, or several of them, in which `name` stands for an item."""
    found = []
    for node in ast.walk(_parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(value=items, attr="all"), args=[ast.Name(id=own), body]) if own == name:
                found.append((_compile(items, functions), _compile(body, functions)))
    if not found:
        raise ValueError(f"no `all` of this rule names {name}: {text}")
    return lambda names: [item for items, holds in found for item in items(names) if not holds({**names, name: item})]


def _parse(text: str) -> ast.expr:
    spelled = re.sub(r"'[^']*'|&&|\|\||!(?!=)", lambda found: _SPELLED.get(found[0], found[0]), text)
    return ast.parse(spelled.strip(), mode="eval").body


def _compile(node: ast.expr, functions: Mapping[str, Callable[..., Any]]) -> Expression:  # noqa: PLR0912 - a branch for each form
    def compiled(*nodes: ast.expr) -> list[Expression]:
        return [_compile(one, functions) for one in nodes]

    match node:
        case ast.Constant(value=value):
            return lambda _: value
        case ast.Name(id="true" | "false" as name):
            return lambda _: name == "true"
        case ast.Name(id=name):
            return lambda names: names[name]
        case ast.List(elts=nodes):
            items = compiled(*nodes)
            return lambda names: tuple(item(names) for item in items)
        case ast.Attribute(value=of, attr=key):
            [owner] = compiled(of)
            return lambda names: _field(owner(names), key)
        case ast.Subscript(value=of, slice=ast.Constant(value=str(key))):
            [mapping] = compiled(of)
            return lambda names: mapping(names)[key]
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            [denied] = compiled(operand)
            return lambda names: not denied(names)
        case ast.BoolOp(op=of_both, values=nodes):
            parts, joined = compiled(*nodes), all if isinstance(of_both, ast.And) else any
            return lambda names: joined(part(names) for part in parts)
        case ast.Compare(left=one, ops=[sign], comparators=[other]) | ast.BinOp(left=one, op=sign, right=other) if (
            type(sign) in _OPERATORS
        ):
            (left, right), combined = compiled(one, other), _OPERATORS[type(sign)]
            return lambda names: combined(left(names), right(names))
        case ast.Call(func=ast.Name(id="has"), args=[ast.Attribute(value=of, attr=key)]):
            [owner] = compiled(of)
            return lambda names: _field(owner(names), key) is not None
        case ast.Call(func=ast.Name(id=name), args=nodes) if name in functions:
            arguments, called = compiled(*nodes), functions[name]
            return lambda names: called(*(argument(names) for argument in arguments))
        case ast.Call(func=ast.Attribute(value=of, attr=name), args=[ast.Name(id=item), node]) if name in _MACROS:
            (owner, body), macro = compiled(of, node), _MACROS[name]
            return lambda names: macro((one, body({**names, item: one})) for one in owner(names))
        case ast.Call(func=ast.Attribute(value=of, attr=name), args=nodes) if name in _METHODS:
            (owner, *arguments), method = compiled(of, *nodes), _METHODS[name]
            return lambda names: method(owner(names), *(argument(names) for argument in arguments))
    raise ValueError(f"not in the subset of CEL that is evaluated here: {ast.unparse(node)}")


def _field(owner: Any, key: str) -> Any:  # noqa: ANN401 - any value of the specification
    """Return a model's field by the key that users write; None: it is absent."""
    fields = _fields(type(owner)) if isinstance(owner, BaseModel) else {}
    if key not in fields:
        raise LookupError(f"no field {key} in {owner!r}: a guard must stand before what it guards")
    return getattr(owner, fields[key])


@cache
def _fields(model: type[BaseModel]) -> Mapping[str, str]:
    """Return a model's own names by the keys that users write."""
    return {field.alias or to_camel(name): name for name, field in model.model_fields.items()}
