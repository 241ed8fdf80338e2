"""Inputs made from honest ones by a few edits: of bytes, of whole words, and of values and names where a line is JSON.

Edits of the second kind keep an input well formed: so they reach what stands behind a door's parser. Shrunk, inputs have fewer and smaller edits.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from support.hostile import CONTROLS, MARKUP

_MOST_EDITS = 4
_MOST_GROWN_BYTES = 100_000
_MOST_REPEATED_BYTES = 8 << 20
SIZES = st.sampled_from([0, 1, 10, 100, 1000, 10_000])
"""Of what is repeated."""
_TIMES = st.sampled_from([1, 1, 1, 2, 3, 10, 100, 1000] * 3 + [100_000, 1_000_000])
"""Seldom large: that takes long, and one missing bound is seen as well as many."""
_PIECES = (b"\x00", b"\xff", b"\r\n", b"\n", b"\xed\xa0\x80", b"\xc3\x28", b" ", b"0", b"-", b'"', b"{", b"[", b"x")
_NUMBERS = (
    *(b"-1", b"0", b"0.5", b"1e308", b"1e999", b"-1e999", b"NaN", b"Infinity", b"9223372036854775808"),
    *(b"1" + b"0" * 30, b"9" * 5000, b"1e-400", b"5e-324"),
)
_TEXTS = (MARKUP, "<img src=x>", CONTROLS, "\x00", "\ud800", "\u2028", "", "7", "../..", "{0}{x}%s%(x)s", "x" * 40_000)
_OTHERS = (
    *(b"null", b"true", b"[]", b"{}", b"[[],[]]", b'{"":{}}', b'["a","a"]', b'{"a":1,"a":2}'),
    *(b"[" * 100_000, b'{"a":' * 100_000),  # without an end
)


@st.composite
def grown(draw: st.DrawFn) -> bytes:
    """A long text, in up to three lists, maps or nests that are long themselves."""
    value = b'"' + b"x" * draw(SIZES) + b'"'
    for _ in range(draw(st.integers(0, 3))):
        times = min(draw(SIZES), _MOST_GROWN_BYTES // (len(value) + 10))
        grow = draw(st.sampled_from([_list, _map, _nest, _named]))
        value = grow(value, times)
    return value


def _list(value: bytes, times: int) -> bytes:
    return b"[" + b",".join([value] * times) + b"]"


def _map(value: bytes, times: int) -> bytes:
    return b"{" + b",".join(b'"k%d":%b' % (number, value) for number in range(times)) + b"}"


def _nest(value: bytes, times: int) -> bytes:
    return b"[" * times + value + b"]" * times


def _named(value: bytes, times: int) -> bytes:
    return b'{"' + b"k" * times + b'":' + value + b"}"


_NAMES = st.sampled_from([json.dumps(text).encode() for text in _TEXTS])
VALUES = st.one_of(st.sampled_from(_NUMBERS), _NAMES, st.sampled_from(_OTHERS), grown())
"""JSON that a reader did not think of."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """What inputs are made from."""

    honest: Sequence[bytes]
    found: Sequence[bytes]
    """By the search: most are ways of being refused, which hide what is behind them. So half of the inputs begin at `honest`."""
    words: Sequence[bytes]
    values: st.SearchStrategy[bytes]
    most_bytes: int

    @property
    def seeds(self) -> st.SearchStrategy[bytes]:
        """What is edited."""
        return st.sampled_from(self.honest) | st.sampled_from(self.found or self.honest)

    @property
    def pieces(self) -> st.SearchStrategy[bytes]:
        """What is put between other bytes."""
        return st.sampled_from([*_PIECES, *self.words]) | st.binary(max_size=16) | self.values


@st.composite
def edited(draw: st.DrawFn, material: Material) -> bytes:
    """One of the seeds with some edits. Where it has JSON, most inputs keep it: one edit of bytes breaks what the others are for."""
    data: bytes = draw(material.seeds)
    of_bytes = [_insert, _cut, _flip, _repeat, _splice]
    edits = [_value] if _JSON.search(data) and draw(st.integers(0, 2)) else [*of_bytes, _value]
    for _ in range(draw(st.integers(0, _MOST_EDITS))):
        data = draw(st.sampled_from(edits))(draw, data, material)[: material.most_bytes]
    return data


def _span(draw: st.DrawFn, data: bytes, *, longest: int = 1 << 16) -> tuple[int, int]:
    start: int = draw(st.integers(0, len(data)))
    return start, min(len(data), start + draw(st.integers(0, longest)))


def _insert(draw: st.DrawFn, data: bytes, material: Material) -> bytes:
    start, end = _span(draw, data, longest=8)
    return data[:start] + _repeated(draw(material.pieces), draw(_TIMES)) + data[end:]


def _cut(draw: st.DrawFn, data: bytes, _: Material) -> bytes:
    start, end = _span(draw, data)
    return data[:start] + data[end:]


def _flip(draw: st.DrawFn, data: bytes, _: Material) -> bytes:
    if not data:
        return data
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]


def _repeat(draw: st.DrawFn, data: bytes, _: Material) -> bytes:
    start, end = _span(draw, data, longest=64)
    return data[:start] + _repeated(data[start:end], draw(_TIMES)) + data[end:]


def _splice(draw: st.DrawFn, data: bytes, material: Material) -> bytes:
    other = draw(material.seeds)
    return data[: _span(draw, data)[0]] + other[_span(draw, other)[0] :]


def _repeated(piece: bytes, times: int) -> bytes:
    return piece * min(times, _MOST_REPEATED_BYTES // (len(piece) or 1))


_JSON = re.compile(rb"^[{\[].*[}\]]$", re.MULTILINE)
_HOLE = "@here@"


def _value(draw: st.DrawFn, data: bytes, material: Material) -> bytes:
    """Another value, or another name, at one place of one of the lines that are JSON; where there is none nothing changes."""
    lines = [line for line in _JSON.finditer(data) if len(line.group()) < 1 << 16]
    if not lines:
        return data
    line = draw(st.sampled_from(lines))
    try:
        whole = [json.loads(line.group())]
        holder, key = draw(st.sampled_from(_places(whole)))
        new = _NAMES if isinstance(holder, dict) and draw(st.integers(0, 3)) == 0 else material.values
        if new is _NAMES:
            holder[_HOLE] = holder.pop(key)
        else:
            holder[key] = _HOLE
        text = json.dumps(whole[0]).encode()
    except (ValueError, RecursionError):
        return data
    return data[: line.start()] + text.replace(f'"{_HOLE}"'.encode(), draw(new)) + data[line.end() :]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of all that is inside."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        keys = holder if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return found
