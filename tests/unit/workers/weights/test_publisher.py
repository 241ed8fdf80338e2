"""Which versions are kept, that published bytes never change, and what changes their hash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights import hashing
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.hashing import (
    ManifestError,
    SliceBytes,
    TensorBytes,
    bytes_hash,
    check_manifest,
    describe,
    manifest_hash,
    size_bytes,
    tensors_hash,
)
from streamrl_workers.weights.store import WeightStore


def publish(store: WeightStore, step: int) -> pb.VersionName:
    data = step.to_bytes(8, "little")
    return store.publish(attempt=1, step=step, tensors={"w": TensorBytes("uint8", (8,), memoryview(data))})


def steps(store: WeightStore) -> list[int]:
    return [version.step for version in store.versions()]


def content(store: WeightStore, version: pb.VersionName, *, tensor: str = "w") -> bytes | None:
    with store.pulling(version) as manifest:
        if manifest is None:
            return None
        (entry,) = [entry for entry in manifest.tensors if entry.name == tensor]
        data = store.content(entry.slices[0].hash)
    assert data is not None
    return bytes(data)


def test_the_newest_two_are_kept():
    store = WeightStore()
    versions = [publish(store, step) for step in range(4)]
    assert steps(store) == [2, 3]
    with store.pulling(versions[1]) as manifest:
        assert manifest is None
    assert content(store, versions[1]) is None
    assert content(store, versions[3]) == (3).to_bytes(8, "little")
    assert store.content(bytes_hash(memoryview((1).to_bytes(8, "little")))) is None


def test_what_is_pulled_stays_until_the_pull_ends():
    store = WeightStore()
    oldest = publish(store, 0)
    with store.pulling(oldest):
        for step in (1, 2):
            publish(store, step)
        assert steps(store) == [0, 1, 2]
    assert steps(store) == [1, 2]


def test_the_bound_holds_against_pulls():
    store = WeightStore()
    versions = [publish(store, step) for step in range(2)]
    with store.pulling(versions[0]), store.pulling(versions[1]):
        for step in range(2, 6):
            publish(store, step)
            assert len(steps(store)) <= 4
    assert steps(store) == [4, 5]


def test_a_writable_buffer_is_copied():
    store = WeightStore()
    data = bytearray(b"abcd")
    version = store.publish(attempt=1, step=0, tensors={"w": TensorBytes("uint8", (4,), memoryview(data))})
    data[:] = b"zzzz"
    assert content(store, version) == b"abcd"
    assert version.hash == tensors_hash({"w": TensorBytes("uint8", (4,), memoryview(b"abcd"))})


def test_a_read_only_buffer_is_kept_as_it_is():
    store, data = WeightStore(), bytearray(b"abcd")
    version = store.publish(attempt=1, step=0, tensors={"w": TensorBytes("uint8", (4,), memoryview(data).toreadonly())})
    with pytest.raises(BufferError):
        data.append(0)  # somebody still looks at it: no copy was made
    assert content(store, version) == b"abcd"


def test_a_tensor_that_is_published_again_is_hashed_once(monkeypatch):
    hashed: list[bytes] = []
    versions: list[tuple[pb.VersionName, dict[str, TensorBytes]]] = []
    monkeypatch.setattr(hashing, "bytes_hash", lambda data: hashed.append(bytes(data)) or bytes_hash(data))
    store, base = WeightStore(), tensor(b"base", shape=(1,))
    for step in range(3):
        tensors = {"base": base, "adapter": tensor(bytes([step]), dtype="uint8", shape=(1,))}
        version = store.publish(attempt=1, step=step, tensors=tensors)
        versions.append((version, tensors))
        assert content(store, version, tensor="base") == b"base"
    assert hashed == [b"\0", b"base", b"\1", b"\2"]
    assert all(version.hash == tensors_hash(tensors) for version, tensors in versions)


def test_a_writable_buffer_that_is_published_again_is_hashed_again():
    store, data = WeightStore(), bytearray(b"abcd")
    given = TensorBytes("uint8", (4,), memoryview(data))
    first = store.publish(attempt=1, step=0, tensors={"w": given})
    data[:] = b"zzzz"
    second = store.publish(attempt=1, step=1, tensors={"w": given})
    assert (content(store, first), content(store, second)) == (b"abcd", b"zzzz")
    assert first.hash != second.hash


def test_another_attempt_at_a_step_is_another_version():
    store = WeightStore()
    first = publish(store, 3)
    second = store.publish(attempt=2, step=3, tensors={"w": TensorBytes("uint8", (1,), memoryview(b"x"))})
    assert first != second
    assert content(store, first) == (3).to_bytes(8, "little")
    assert content(store, second) == b"x"


def test_shaped_and_empty_buffers():
    store = WeightStore()
    shaped = memoryview(b"12345678").cast("f", (2, 1))
    tensors = {"w": TensorBytes("float32", (2, 1), shaped), "e": TensorBytes("float32", (0,), memoryview(b""))}
    version = store.publish(attempt=1, step=0, tensors=tensors)
    with store.pulling(version) as manifest:
        assert manifest is not None
    assert [(e.name, size_bytes(e)) for e in manifest.tensors] == [("e", 0), ("w", 8)]
    assert content(store, version) == b"12345678"


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


def test_fields_do_not_run_into_each_other():
    assert tensors_hash({"ab": tensor(dtype="c")}) != tensors_hash({"a": tensor(dtype="bc")})


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (BASE, "5eb28d8da332d02a74931bd18e5ffc62b59916e0d392da45510761d111bcfa11"),
        ({}, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
    ],
)
def test_a_version_of_whole_tensors_hashes_as_in_earlier_releases(tensors, expected):
    assert tensors_hash(tensors).hex() == expected


def rows(name: str, first: int, data: bytes, *, shape: tuple[int, ...] = (4, 2)) -> SliceBytes:
    return SliceBytes(name, "uint8", shape, first, memoryview(data))


def part(*slices: SliceBytes) -> pb.Manifest:
    store = WeightStore()
    with store.pulling(store.publish_part(attempt=1, step=7, slices=slices)) as manifest:
        assert manifest is not None
        return manifest


def test_a_version_is_joined_of_what_its_ranks_hold():
    store = WeightStore()
    parts = {"b:1": part(rows("w", 3, b"gh")), "c:2": part(rows("w", 1, b"cdef"), rows("z", 2, b"xxxx"))}
    name = store.publish(
        attempt=1,
        step=7,
        tensors={"bias": tensor()},
        slices=[rows("z", 0, b"yyyy"), rows("w", 0, b"ab")],
        parts=lambda: parts,
    )
    with store.pulling(name) as manifest:
        assert manifest is not None
    check_manifest(manifest, version=name)
    assert list(manifest.holders) == ["b:1", "c:2"]
    found = {e.name: [(s.first_row, s.size_bytes, s.holder) for s in e.slices] for e in manifest.tensors}
    assert found == {
        "bias": [(0, 8, 0)],
        "w": [(0, 2, 0), (1, 4, 2), (3, 2, 1)],
        "z": [(0, 4, 0), (2, 4, 2)],
    }
    assert store.content(bytes_hash(memoryview(b"ab"))) == b"ab"
    assert store.content(bytes_hash(memoryview(b"gh"))) is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([rows("w", 0, b"ab")], "its slices have 2 bytes"),
        ([rows("w", 1, b"cdefgh")], "from row 1, expected were rows from 0"),
        ([rows("w", 0, b"abcd"), rows("w", 1, b"cdefgh")], "from row 1, expected were rows from 2"),
        ([rows("w", 0, b"abcd"), rows("w", 2, b"")], "has 0 bytes"),
        ([rows("w", 0, b"abcd"), rows("w", 2, b"efgh", shape=(2, 4))], "ranks differ"),
        ([rows("w", 0, b"", shape=(0, 2)), rows("w", 0, b"", shape=(0, 2))], "its slices have 0 bytes"),
    ],
)
def test_parts_that_are_not_each_tensor_once_are_no_version(given, told):
    parts = {f"rank:{number}": part(one) for number, one in enumerate(given)}
    with pytest.raises(ManifestError, match=f"tensor w: .*{told}"):
        WeightStore().publish(attempt=1, step=7, parts=lambda: parts)


def test_deltas_are_between_slices_of_the_same_rows():
    def published(store: WeightStore, step: int, *, cut: int, changed: bytes) -> pb.Manifest:
        data = changed + bytes(8000 - len(changed))
        slices = [rows("w", 0, data[:cut], shape=(8000,)), rows("w", cut, data[cut:], shape=(8000,))]
        with store.pulling(store.publish(attempt=1, step=step, slices=slices)) as manifest:
            assert manifest is not None
            return manifest

    store = WeightStore(deltas=DeltaStore())
    before = published(store, 0, cut=4000, changed=b"")
    after = published(store, 1, cut=4000, changed=b"a")
    (delta,) = after.deltas
    assert (delta.base_hash, delta.new_hash) == (before.tensors[0].slices[0].hash, after.tensors[0].slices[0].hash)
    assert list(published(store, 2, cut=3000, changed=b"b").deltas) == [delta]


def test_entries_are_sorted_and_sized():
    entries = describe({"b": BASE["b"], "a": BASE["a"]})
    assert [(e.name, size_bytes(e), list(e.shape)) for e in entries] == [("a", 8, [2]), ("b", 4, [1])]
    assert manifest_hash(reversed(entries)) == tensors_hash(BASE)
