"""The reader of YAML 1.2 against what JSON and ruamel's own loader make of the same text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from streamrl_cli.yaml_document import MAX_CHARS, MAX_DEPTH, YamlError, read_documents

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab \"':#-\\é\n😀\ue000", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(data=st.dictionaries(st.text("abc", min_size=1, max_size=3), PLAIN, min_size=1, max_size=4))
def test_json_comes_out_as_it_went_in(data: dict[str, Any]) -> None:
    [document] = read_documents(json.dumps(data))
    assert document.data == data


@pytest.mark.parametrize(
    "text",
    [
        *("1e-6", "1.0e-6", "1e3", ".5", "5.", "0o17", "0x1f", "0", "08", "+3", "-0.0", "1_000", "1.2.3", "0b1"),
        *("yes", "no", "on", "True", "~", "", "12:30", "2001-01-01", "null", "'1'"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str) -> None:
    expected = YAML(typ="safe", pure=True).load(f"a: {text}")["a"]
    if not isinstance(expected, str | int | float | bool | None):
        expected = text  # ruamel makes dates, which the core schema does not know
    if text in ("1_000", "0b1"):
        expected = text  # ruamel keeps these numbers of YAML 1.1
    found = read_documents(f"a: {text}")[0].data["a"]
    assert (found, type(found)) == (expected, type(expected))


def test_every_field_has_its_line() -> None:
    text = "# comment\na:\n  b: 1\n  c:\n  - x\n  - d: 2\n---\n\na: 1\n"
    first, second = read_documents(text)
    assert first.lines == {"": 2, "a": 2, "a.b": 3, "a.c": 4, "a.c[0]": 5, "a.c[1]": 6, "a.c[1].d": 6}
    assert second.lines == {"": 9, "a": 9}


def test_merge_keys_give_way_to_own_fields() -> None:
    [document] = read_documents("x: &x {p: 1, q: 1}\ny: &y {q: 2, r: 2}\nz: {<<: [*x, *y], r: 3}")
    assert document.data["z"] == {"p": 1, "q": 1, "r": 3}


def test_depth_is_bounded_and_reached() -> None:
    assert read_documents("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(YamlError, match="nested more than"):
        read_documents("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))


ALIASES = f'a: &a "{"x" * 900_000}"\n'
LONG_KEYS = "".join(f"{{{'k' * 1000}{depth}: " for depth in range(60))


@pytest.mark.parametrize(
    "text",
    [
        ALIASES + f"b: [{','.join(['*a'] * 40_000)}]",
        ALIASES + "".join(f"a{n}: {{<<: {{x: *a}}}}\n" for n in range(100)),
        ALIASES + "b0: &b0 [*a]\n" + "".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 12)),
        LONG_KEYS + f"[{','.join('1' * 90_000)}]" + "}" * 60,  # each value has a path as long as all keys above it
    ],
)
def test_characters_are_counted_as_written_out(text: str) -> None:
    with pytest.raises(YamlError, match=f"holds more than {MAX_CHARS} characters once its aliases are written out"):
        read_documents(text)


@pytest.mark.parametrize("text", ["a: !!python/object:os.system x", "!!str a: 1", "a: !x {}", "a: !<t> []"])
def test_tags_are_refused_of_keys_too(text: str) -> None:
    with pytest.raises(YamlError, match=r"tag .* is not allowed"):
        read_documents(text)


def test_a_leading_zero_is_not_guessed_at() -> None:
    with pytest.raises(YamlError, match="0400 is octal to kubectl") as refused:
        read_documents("a: 1\nmode: 0400")
    assert refused.value.line == 2
    assert read_documents("[0o400, '0400', 0, 0.5]")[0].data == [256, "0400", 0, 0.5]


@pytest.mark.parametrize(
    "text", ['a: 1\nb: "x\\uD83D"', 'a: 1\n"\\udE00\\ud83d": 1', 'a: 1\nb: {"c": ["\\ud800 hello"]}']
)
def test_half_a_surrogate_pair_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(YamlError, match="half of a surrogate pair") as refused:
        read_documents(text)
    assert refused.value.line == 2


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab:-[]{}&*!|>'\"#%@?,\n\t 1\x00\ud7ff", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        documents = read_documents(text)
    except YamlError as error:
        assert error.line >= 1
    else:
        assert all(json.dumps(document.data) for document in documents)
