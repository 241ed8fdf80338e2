"""Names of bytes: what changes a hash and what does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.weights.hashing import HASH_BYTES, TensorBytes, describe, manifest_hash, tensors_hash


def tensor(data: bytes = b"12345678", *, dtype: str = "float32", shape: tuple[int, ...] = (2,)) -> TensorBytes:
    return TensorBytes(dtype, shape, memoryview(data))


BASE = {"a": tensor(), "b": tensor(b"abcd", shape=(1,))}


@given(st.permutations(["a", "b", "c", "d"]))
def test_order_does_not_matter(names):
    whole = {name: tensor(name.encode() * 8) for name in "abcd"}
    assert tensors_hash({name: whole[name] for name in names}) == tensors_hash(whole)


@pytest.mark.parametrize(
    "other",
    [
        {"a": tensor(b"12345679"), "b": BASE["b"]},
        {"a": tensor(dtype="int32"), "b": BASE["b"]},
        {"a": tensor(shape=(1, 2)), "b": BASE["b"]},
        {"a": tensor(shape=()), "b": BASE["b"]},
        {"c": BASE["a"], "b": BASE["b"]},
        {"a": BASE["a"]},
        {"a": BASE["b"], "b": BASE["a"]},
        {},
    ],
)
def test_any_difference_changes_the_hash(other):
    assert tensors_hash(other) != tensors_hash(BASE)
    assert len(tensors_hash(other)) == HASH_BYTES


def test_fields_do_not_run_into_each_other():
    assert tensors_hash({"ab": tensor(dtype="c")}) != tensors_hash({"a": tensor(dtype="bc")})


def test_entries_are_sorted_and_sized():
    entries = describe({"b": BASE["b"], "a": BASE["a"]})
    assert [(e.name, e.size_bytes, list(e.shape)) for e in entries] == [("a", 8, [2]), ("b", 4, [1])]
    assert manifest_hash(reversed(entries)) == tensors_hash(BASE)
