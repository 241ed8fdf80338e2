"""Rows of alike lengths stand together, and every row is wide enough."""

from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.generator.engines.hf.kv_cache import LengthBucket, length_buckets, length_class, swaps

LENGTHS = st.lists(st.integers(min_value=1, max_value=2000), min_size=1, max_size=40)


def test_classes_double() -> None:
    assert [length_class(tokens) for tokens in (1, 64, 65, 128, 129, 256, 257, 512)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_short_rows_are_one_bucket_as_wide_as_the_longest_rounded_up() -> None:
    assert length_buckets([5, 33, 7]) == (LengthBucket(0, 3, 48),)


def test_a_long_row_is_a_bucket_of_its_own() -> None:
    assert length_buckets([400, 20, 30]) == (LengthBucket(0, 1, 400), LengthBucket(1, 3, 32))


def test_a_row_that_outgrew_its_class_goes_before_the_shorter_ones() -> None:
    assert swaps([300, 200, 10, 65, 20]) == [(2, 3)]


def test_rows_in_order_stay() -> None:
    assert swaps([300, 310, 65, 100, 1, 64]) == []


@given(LENGTHS)
def test_after_the_swaps_longer_classes_come_first_and_each_class_is_one_bucket(lengths: list[int]) -> None:
    rows = list(lengths)
    done = swaps(rows)
    for row, other in done:
        rows[row], rows[other] = rows[other], rows[row]
    classes = [length_class(tokens) for tokens in rows]
    assert classes == sorted(classes, reverse=True)
    assert sorted(rows) == sorted(lengths)
    assert len(length_buckets(rows)) == len(set(classes))
    assert len(done) < len(rows)


@given(LENGTHS)
def test_buckets_cover_the_rows_in_order_and_are_wide_enough(lengths: list[int]) -> None:
    found = length_buckets(lengths)
    assert [bucket.first for bucket in found] == [0, *(bucket.end for bucket in found[:-1])]
    assert found[-1].end == len(lengths)
    for bucket in found:
        longest = max(lengths[bucket.first : bucket.end])
        assert longest <= bucket.width < longest + 16
