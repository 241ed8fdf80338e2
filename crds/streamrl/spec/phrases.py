"""A field's type, bounds and unit in plain words, from its schema. Used by errors, `explain` and the reference."""

from streamrl.spec.base import BYTES_PATTERN, COST_PATTERN, ENDPOINT_PATTERN, NAME_PATTERN
from streamrl.spec.pod import LABEL_PATTERN
from streamrl.spec.schema import Schema, children, is_amount
from streamrl.spec.task import CIDR_PATTERN, VARIABLE_PATTERN
from streamrl.spec.trackers import PROJECT_PATTERN, SERVER_PATTERN
from streamrl.spec.volumes import OBJECT_PATTERN, PATH_PATTERN, QUANTITY_PATTERN, SUB_PATH_PATTERN

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
    PATH_PATTERN: "an absolute path without ':', '//', '.', '..' or a '/' at its end",
    SUB_PATH_PATTERN: "a path in the volume without '//', '.', '..' or a '/' at its ends",
    PROJECT_PATTERN: "a name (letters, digits, '-', '_' and '.', beginning with a letter or digit)",
    CIDR_PATTERN: "a block of addresses (such as 10.0.0.0/16)",
    SERVER_PATTERN: "an address without user and password (http:// or https://)",
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
    "milliseconds": "milliseconds",
}
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
}


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
    return next((text for suffix, text in _UNITS.items() if name.endswith((suffix, suffix.lower()))), "")


def _string(schema: Schema) -> str:
    what = _PATTERNS.get(schema.get("pattern", ""), "a string")
    return f"{what} of {_count(schema, 'Length')} characters" if "maxLength" in schema else what


def _count(schema: Schema, noun: str) -> str:
    low, high = schema.get(f"min{noun}", 0), schema.get(f"max{noun}")
    return f"{low} to {high}" if low else f"at most {high}"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
