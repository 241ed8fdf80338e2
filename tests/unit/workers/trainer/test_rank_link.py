"""What crosses between ranks: values and errors as bytes."""

import math
import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl_workers.trainer.engines import rank_link
from streamrl_workers.trainer.engines.packing import DUMMY, Update

PLAIN = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
ARRAYS = st.lists(st.floats(width=32), max_size=5).map(lambda values: array("f", values)) | st.lists(
    st.integers(-(2**31), 2**31 - 1), max_size=5
).map(lambda values: array("i", values))
VALUES = st.recursive(
    PLAIN | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def _message(text: bytes, *, arrays: bytes = b"") -> bytes:
    return struct.pack("!Q", len(text)) + text + arrays


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, array):
        return isinstance(other, array) and (one.typecode, one.tobytes()) == (other.typecode, other.tobytes())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert _alike(rank_link.decode(rank_link.encode(value)), value)


def test_numbers_that_are_not_finite_cross() -> None:
    infinite, nothing = rank_link.decode(rank_link.encode([-math.inf, math.nan]))
    assert infinite == -math.inf
    assert math.isnan(nothing)


@pytest.mark.parametrize(
    "value",
    [
        DUMMY,
        [{"proximal_N": array("f", [0.5]), "values_N": array("f")}],
        Update(step=3, scale=0.25, critic_scale=1.0, policy=False),
    ],
)
def test_the_dataclasses_of_a_step_cross(value: Any) -> None:
    assert rank_link.decode(rank_link.encode(value)) == value


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, [lambda: None]])
def test_another_kind_of_value_is_refused_before_it_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="does not cross between ranks"):
        rank_link.encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff",
        b'"text"x',
        _message(b'"text"x'),
        _message(b'{"__kind__":"no"}'),
        _message(b'{"__kind__":"Update","steps":1}'),
        _message(b'{"__kind__":"array","typecode":"f","begin":0,"end":3}', arrays=bytes(8)),
        _message(b'{"__kind__":"array","typecode":"f","begin":0,"end":12}', arrays=bytes(8)),
        _message(b'{"__kind__":"array","typecode":"f","begin":-4,"end":8}', arrays=bytes(8)),
        _message(b'{"__kind__":"array","typecode":"f","begin":0,"end":null}', arrays=bytes(8)),
    ],
)
def test_bytes_of_a_stranger_are_an_error_not_an_object(data: bytes) -> None:
    with pytest.raises(rank_link.MalformedValueError):
        rank_link.decode(data)


@pytest.mark.parametrize(
    "error",
    [
        UserError(field="spec.trainer.precision", rule="must be FP32", got="BF16", fix="set FP32"),
        OSError(28, "No space left on device", "/run/checkpoints/x"),
    ],
)
def test_the_users_errors_keep_their_kind_and_text(error: Exception) -> None:
    crossed = rank_link.decode(rank_link.encode(rank_link.describe_error(error)))
    restored = rank_link.restore_error(crossed, peer="rank 1", what="save")
    assert (type(restored), str(restored)) == (type(error), str(error))


def test_another_error_names_the_rank_and_what_it_did() -> None:
    described = rank_link.describe_error(RuntimeError("out of memory"))
    text = str(rank_link.restore_error(described, peer="rank 1", what="accumulate"))
    assert text == "rank 1 failed in accumulate: RuntimeError: out of memory"
