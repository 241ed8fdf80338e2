"""Building blocks of the specification: strict camelCase models, one-of by key, quantities."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel


class SpecModel(BaseModel):
    """A frozen piece of the specification: camelCase in files, no unknown fields, no coercion."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, strict=True)


class OneOf(SpecModel):
    """Exactly one of `one_of` is set; a choice is a key so that each can have its own fields.

    A subclass may carry common fields beside the choices; `one_of` names the choices (python names).
    """

    one_of: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def choices(cls) -> tuple[str, ...]:
        """Keys of the choices as users write them."""
        return tuple(to_camel(name) for name in (cls.one_of or tuple(cls.model_fields)))

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = self._given()
        if len(given) != 1:
            known = ", ".join(self.choices())
            got = ", ".join(to_camel(name) for name in given) or "none"
            raise ValueError(f"needs exactly one of {known}; got {got}")
        return self

    def _given(self) -> list[str]:
        names = self.one_of or tuple(type(self).model_fields)
        return [name for name in names if getattr(self, name) is not None]

    @property
    def key(self) -> str:
        """The chosen key as users write it."""
        return to_camel(self._given()[0])

    @property
    def value(self) -> Any:  # noqa: ANN401 - the member's own model; callers know it by `key`
        """The chosen member's model."""
        return getattr(self, self._given()[0])


_SUFFIX_BYTES = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

BYTES_PATTERN = r"^[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?$"
COST_PATTERN = r"^[0-9]+(\.[0-9]{1,6})?$"

ByteQuantity = Annotated[str, StringConstraints(pattern=BYTES_PATTERN, max_length=16)]
"""Bytes as a Kubernetes quantity: `64Mi`, `2Gi`."""
CostQuantity = Annotated[str, StringConstraints(pattern=COST_PATTERN, max_length=16)]
"""Money per hour as a decimal string: `1.00`."""
FunctionName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$", max_length=253)
]
"""`module:function`, importable from the job file's directory."""
DnsName = StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")


def parse_bytes(quantity: str) -> int:
    """Number of bytes that a byte quantity names."""
    digits = quantity.rstrip("KMGTik")
    return int(digits) * _SUFFIX_BYTES[quantity[len(digits) :]]


class PythonFunction(SpecModel):
    """A function of the user's own, in a module beside the job file."""

    function: FunctionName = Field(description="`module:function`; the module lies beside the job file.")
