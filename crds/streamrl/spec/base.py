"""Building blocks of the specification: strict camelCase models, one-of by key, quantities."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator
from pydantic.alias_generators import to_camel, to_snake

from streamrl.cel import compile_cel, compile_failing

MOST_FREE_FIELDS = 32
"""Of a piece that goes to the API server as it is."""
Piece = Annotated[
    dict[str, JsonValue],
    Field(max_length=MOST_FREE_FIELDS, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
]
"""A piece of a Pod that the API server checks, not we."""


Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]

URL_PATTERN = r"^[a-z][a-z0-9+.-]*://[^:\s]+(:[0-9]+)?[^:\s]*$"
"""Of an object store, as fsspec reads it, without its chains (`simplecache::s3://`)."""


PLACE_PATTERN = r"^([a-z][a-z0-9+.-]*://[^:\s]+(:[0-9]+)?[^:\s]*|/[^/:\s][^:\s]*)$"
"""The same, or the absolute path of a directory."""


def is_url(path: str) -> bool:
    """Whether it names a place in an object store, not on a disk."""
    return re.match(URL_PATTERN, path) is not None


MAP_KEYS = "x-kubernetes-list-map-keys"
"""Of the schema of a list: server-side apply merges its items by them, and an API server refuses equal ones, as we do."""


def map_by(key: str) -> dict[str, JsonValue]:
    """Schema of a list whose items are told apart by `key`."""
    return {"x-kubernetes-list-type": "map", MAP_KEYS: [key]}


def keys_differ(field: str, key: str) -> str:
    """Write the rule of a list whose items are told apart by `key`."""
    return f"{key}s of {field} must differ"


class FieldRule:
    """What must hold between the fields of a model: one text, which an API server reads too.

    Args:
        message: the rule as a statement.
        cel: the rule, over `self`.
        got: what is got where it does not hold: a function of the model, or a format string over `self`. One over another name is
            of each item that breaks the rule: `{g.name}` for `.all(g, ...)`. Empty, or True: the message says enough.
    """

    def __init__(self, message: str, cel: str, got: str | Callable[[Any], object] = "") -> None:
        self.message = message
        self.cel = cel
        self._holds = compile_cel(cel, **CEL_FUNCTIONS)
        self._got = _formatted(got, cel) if isinstance(got, str) else got

    def broken(self, model: BaseModel) -> str:
        """Return the rule with what is got; empty: it holds."""
        if self._holds({"self": model}):
            return ""
        got = self._got(model)
        return f"{self.message}, got {got}" if got and got is not True else self.message


def _formatted(got: str, cel: str) -> Callable[[Any], str]:
    each = next((name for name in re.findall(r"\{(\w+)", got) if name != "self"), "")
    if not each:
        return lambda model: got.format(self=model)
    failing = compile_failing(cel, each, **CEL_FUNCTIONS)
    return lambda model: ", ".join(got.format(**{"self": model, each: item}) for item in failing({"self": model}))


def rules_of(subject: str, *, others: str) -> Callable[..., FieldRule]:
    """Return what makes rules of some documents; `others`: CEL that is true of all others."""
    return lambda rule, cel, got="": FieldRule(f"{subject} {rule}", f"{others} || ({cel})", got)


def repeated(values: Iterable[str]) -> str:
    """All of them, if two are equal."""
    got = list(values)
    return "" if len(set(got)) == len(got) else ", ".join(got)


def demand_different(what: str, values: Iterable[str]) -> None:
    """Refuse two equal ones."""
    if got := repeated(values):
        raise ValueError(f"{what} must differ, got {got}")


def demand_rising(what: str, *, by: str, values: Iterable[int | float]) -> None:
    """Refuse points of a curve that are not given by rising `by`."""
    got = list(values)
    if got != sorted(set(got)):
        raise ValueError(f"{what} must be given by rising {by}, got {got}")


def minimal(value: object) -> Any:  # noqa: ANN401 - plain data: what a user would write
    """`value` as a user would write it: only what differs from the defaults."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if isinstance(value, (list, tuple)):
        return [minimal(item) for item in value]
    return value


def _alias(model: type[BaseModel], name: str) -> str:
    """The field's name as users write it."""
    return model.model_fields[name].alias or to_camel(name)


def _complete_schema(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add to a model's JSON schema what pydantic leaves out: CEL rules, and defaults that a factory makes."""
    assert issubclass(model, SpecModel)
    for name, field in model.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        if default is not None:
            schema["properties"][_alias(model, name)]["default"] = minimal(default)
    if model.refused:
        schema[REFUSED_KEY] = dict(model.refused)
    if model.model_config.get("extra") == "allow":
        schema |= {"x-kubernetes-preserve-unknown-fields": True, "maxProperties": MOST_FREE_FIELDS}
    if rules := model.all_cel_rules():
        schema["x-kubernetes-validations"] = [{"rule": rule, "message": message} for rule, message in rules]


@cache
def _map_keys(model: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    """Return the lists of a model whose items are told apart, each with the key of its items."""
    schemas = ((name, field.json_schema_extra) for name, field in model.model_fields.items())
    return tuple(
        (name, str(key))
        for name, schema in schemas
        if isinstance(schema, dict) and isinstance(keys := schema.get(MAP_KEYS), list)
        for key in keys
    )


REFUSED_KEY = "x-refused"
"""Of a schema; API servers are not told of it."""


class SpecModel(BaseModel):
    """A frozen piece of the specification: camelCase in files, no unknown fields, no coercion."""

    model_config = ConfigDict(
        alias_generator=to_camel, extra="forbid", frozen=True, strict=True, json_schema_extra=_complete_schema
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = ()
    refused: ClassVar[Mapping[str, str]] = {}
    """Fields that people know from elsewhere -> why there is none here, and what to use."""

    @classmethod
    def all_cel_rules(cls) -> tuple[tuple[str, str], ...]:
        """(CEL expression, message) of this model, for an API server."""
        return tuple((rule.cel, rule.message) for rule in cls.field_rules)

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if len(self.model_fields_set) > MOST_FREE_FIELDS and self.model_extra:
            raise ValueError(f"must have at most {MOST_FREE_FIELDS} fields")
        for name, key in _map_keys(type(self)):
            if got := repeated(getattr(item, to_snake(key)) for item in getattr(self, name) or ()):
                raise ValueError(f"{keys_differ(_alias(type(self), name), key)}, got {got}")
        for rule in self.field_rules:
            if broken := rule.broken(self):
                raise ValueError(broken)
        return self


class Choices(tuple[str, ...]):
    """Keys of some choices of a one-of, for a rule about them: in its message by `str`, and in its CEL."""

    def __str__(self) -> str:
        return " or ".join(self)

    def cel(self, at: str) -> str:
        """Write that the one-of at `at` is one of them."""
        given = [f"has({at}.{key})" for key in self] or ["false"]
        return given[0] if len(given) == 1 else f"({' || '.join(given)})"


class OneOf(SpecModel):
    """Exactly one of `one_of` is set; a choice is a key so that each can have its own fields.

    A subclass may carry common fields beside the choices; `one_of` names the choices (python names).
    """

    one_of: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def choices(cls) -> tuple[str, ...]:
        """Keys of the choices as users write them."""
        return tuple(cls.kinds())

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """The class of each choice, by its key."""
        names = cls.one_of or tuple(cls.model_fields)
        return {_alias(cls, name): get_args(cls.model_fields[name].annotation)[0] for name in names}

    @classmethod
    def those(cls, which: Callable[[Any], object]) -> Choices:
        """Find the choices of whose class it is true."""
        return Choices(key for key, kind in cls.kinds().items() if which(kind))

    @classmethod
    def all_cel_rules(cls) -> tuple[tuple[str, str], ...]:
        """Exactly one of the choices, and the rules of the class."""
        given = ", ".join(f"has(self.{key})" for key in cls.choices())
        return ((f"[{given}].filter(given, given).size() == 1", cls._one_rule()), *super().all_cel_rules())

    @classmethod
    def _one_rule(cls) -> str:
        return f"needs exactly one of {', '.join(cls.choices())}"

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = self._given()
        if len(given) != 1:
            got = ", ".join(_alias(type(self), name) for name in given) or "none"
            raise ValueError(f"{self._one_rule()}; got {got}")
        return self

    def _given(self) -> list[str]:
        names = self.one_of or tuple(type(self).model_fields)
        return [name for name in names if getattr(self, name) is not None]

    @property
    def key(self) -> str:
        """The chosen key as users write it."""
        return _alias(type(self), self._given()[0])

    @property
    def value(self) -> Any:  # noqa: ANN401 - the member's own model; callers know it by `key`
        """The chosen member's model."""
        return getattr(self, self._given()[0])


_SUFFIX_BYTES = {
    "": 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}

BYTES_PATTERN = r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?$"
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
ENDPOINT_PATTERN = rf"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:({_PORT}))?(/[^\s?#]*)?$"
COST_PATTERN = r"^[0-9]+(\.[0-9]{1,6})?$"

ByteQuantity = Annotated[str, StringConstraints(pattern=BYTES_PATTERN, max_length=16)]
"""Bytes as a Kubernetes quantity: `64Mi`, `2Gi`."""
CostQuantity = Annotated[str, StringConstraints(pattern=COST_PATTERN, max_length=16)]
"""Money per hour as a decimal string: `1.00`."""
FunctionName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$", max_length=253)
]
"""`module:function`, importable from the job file's directory."""


MOST_CLUSTER_CHARACTERS = 40
"""Of a member cluster's name: it is part of the names of Secrets, and a label's value."""
ClusterName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=MOST_CLUSTER_CHARACTERS)]
"""Of an RLCluster."""


def parse_bytes(quantity: str) -> int:
    """Number of bytes that a byte quantity names."""
    digits = quantity.rstrip("KMGTik")
    return int(digits) * _SUFFIX_BYTES[quantity[len(digits) :]]


def _whole(amount: str) -> int:
    """Number that an amount is, as CEL's `int`. An API server cannot bound what `string(amount)` costs."""
    if not amount.isdecimal():
        raise ValueError(f"an amount that is counted must be a whole number without a unit, got {amount}")
    return int(amount)


CEL_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"quantity": parse_bytes, "int": _whole}
"""Functions of CEL that rules call by their names."""


class PythonFunction(SpecModel):
    """A function of the user's own, in a module beside the job file."""

    function: FunctionName = Field(description="`module:function`; the module lies beside the job file.")


MOST_OPTIONS = 64
ClassName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_]*)?$", max_length=253)
]
"""`module:Class`, or the name by which an installed package gives a class."""


class PythonClass(SpecModel):
    """A plug-in: a class of the user's own beside the job file, or of an installed package."""

    class_: ClassName = Field(
        alias="class",
        description="`module:Class`, the module beside the job file or installed; or a name that an installed package gives.",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict,
        max_length=MOST_OPTIONS,
        description="Options of the class, checked by its own model before the run starts.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class PluginOptions(SpecModel):
    """Base of the options of a plug-in: camelCase in job files, no unknown names, no coercion."""
