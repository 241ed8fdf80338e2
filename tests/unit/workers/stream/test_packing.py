"""Bytes of numbers: exact layout, round trips, what does not fit. Digests of a history: in constant size they say the same as all."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.stream import packing
from streamrl_workers.stream.digests import EMPTY_CHAIN, History, composition_digest, extend_chain


def test_layout_is_little_endian() -> None:
    assert packing.pack_int32([1, -2]) == struct.pack("<ii", 1, -2)
    assert packing.pack_int64([1 << 40]) == struct.pack("<q", 1 << 40)
    assert packing.pack_float32([0.5]) == struct.pack("<f", 0.5)
    assert packing.count_32(packing.pack_int32([1, 2, 3])) == 3


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_int32_round_trip(values: list[int]) -> None:
    assert list(packing.unpack_int32(packing.pack_int32(values))) == values


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_int64_round_trip(values: list[int]) -> None:
    assert list(packing.unpack_int64(packing.pack_int64(values))) == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_float32_round_trip(values: list[float]) -> None:
    assert list(packing.unpack_float32(packing.pack_float32(values))) == values


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_negative_numbers_are_seen(values: list[int]) -> None:
    data = packing.pack_int32(values)
    assert packing.no_negative_32(data) == (min(values, default=0) >= 0)
    assert not packing.no_negative_32(data + b"1")


@given(st.lists(st.floats(width=32)))
def test_what_is_no_finite_number_is_seen(values: list[float]) -> None:
    values = [value for value in values if not 1.7e38 < abs(value) < math.inf]
    data = packing.pack_float32(values)
    assert packing.all_finite_32(data) == all(map(math.isfinite, values))
    assert not packing.all_finite_32(data + b"1")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        packing.pack_int32([1 << 31])
    with pytest.raises(ValueError, match="multiple"):
        packing.unpack_int32(b"123")


def test_digest_knows_the_groups_not_their_order() -> None:
    assert composition_digest([3, 1, 2]) == composition_digest([1, 2, 3])
    assert composition_digest([1, 2]) != composition_digest([1, 2, 3])
    assert len(composition_digest([])) == 32


def test_a_long_history_is_folded_and_its_chain_is_that_of_all_steps() -> None:
    history, digests = History(), []
    for step in range(2_500):
        history = history.with_step([2 * step + 1, 2 * step])
        digests.append(composition_digest([2 * step, 2 * step + 1]))
    assert len(history) == 2_500
    assert (history.folded_steps, len(history.digests)) == (1_500, 1_000)
    assert extend_chain(history.chain, digests=history.digests) == extend_chain(EMPTY_CHAIN, digests=digests)


def test_a_chain_knows_the_order_of_its_steps() -> None:
    one, two = composition_digest([1]), composition_digest([2])
    assert extend_chain(EMPTY_CHAIN, digests=[one, two]) != extend_chain(EMPTY_CHAIN, digests=[two, one])
    assert extend_chain(EMPTY_CHAIN, digests=()) == EMPTY_CHAIN
