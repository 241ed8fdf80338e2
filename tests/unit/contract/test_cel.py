"""A rule is one text: models and API servers read the same one."""

from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from streamrl.cel import compile_cel
from streamrl.spec.base import CEL_FUNCTIONS, FieldRule, SpecModel
from support.cel_cases import CASES, DOCUMENT


class Part(SpecModel):
    n: int
    name: str | None = None


class Sheet(SpecModel):
    n: int
    share: float
    on: bool
    name: str
    size: str
    absent: int | None = None
    names: tuple[str, ...]
    parts: tuple[Part, ...]
    part: Part
    labels: dict[str, str]


class Bounds(SpecModel):
    least_n: int = 1
    most_n: int = 4
    parts: tuple[Part, ...] = ()

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule("must not fall", "self.leastN <= self.mostN", "{self.least_n} and {self.most_n}"),
        FieldRule("n must be small", "self.parts.all(p, p.n <= self.mostN)", "{p.n}"),
        FieldRule("needs few parts", "self.parts.size() < 3", lambda bounds: len(bounds.parts)),
        FieldRule("needs parts", "self.mostN < 9 || self.parts.size() > 0"),
    )


@pytest.mark.parametrize("text", CASES)
def test_the_value_of_an_expression(text: str) -> None:
    sheet = Sheet.model_validate(DOCUMENT, strict=False)
    assert compile_cel(text, **CEL_FUNCTIONS)({"self": sheet}) is CASES[text]


@pytest.mark.parametrize(
    "text",
    [
        "self.n ? 1 : 2",
        "1 < 2 < 3",
        "self.n - 1 == 2",
        "self.names[0] == 'a'",
        "matches(self.name, 'a')",
        "self.name.matches('a')",
        "self.names.map(x, x.n, 1) == []",
    ],
)
def test_what_is_not_in_the_subset_is_refused_where_it_is_written(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        FieldRule("must hold", text)


def test_a_guard_stands_before_what_it_guards() -> None:
    with pytest.raises(LookupError, match="a guard must stand before"):
        compile_cel("self.name.n == 1")({"self": Part(n=1)})


def test_an_amount_that_is_counted_is_whole() -> None:
    counted = compile_cel("int(self.name) == 2", **CEL_FUNCTIONS)
    assert counted({"self": Part(n=1, name="2")})
    with pytest.raises(ValueError, match="must be a whole number without a unit, got 1500m"):
        counted({"self": Part(n=1, name="1500m")})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"leastN": 5}, "must not fall, got 5 and 4"),
        ({"parts": [{"n": 5}, {"n": 4}, {"n": 9}]}, "n must be small, got 5, 9"),
        ({"parts": [{"n": 1}] * 3}, "needs few parts, got 3"),
        ({"mostN": 9}, "needs parts"),
    ],
)
def test_models_refuse_what_the_text_refuses(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Bounds.model_validate(given, strict=False)
    assert [error["msg"] for error in caught.value.errors()] == [f"Value error, {line}"]


def test_what_is_got_names_an_item_of_the_rule() -> None:
    with pytest.raises(ValueError, match="no `all` of this rule names q"):
        FieldRule("must hold", "self.parts.all(p, p.n == 1)", "{q.n}")
