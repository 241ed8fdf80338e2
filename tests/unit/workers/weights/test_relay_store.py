"""What a generator passes on while it pulls: who waits, who is told to come again, what is kept."""

import threading

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights import store as store_module
from streamrl_workers.weights.hashing import TensorBytes, describe, manifest_hash
from streamrl_workers.weights.source import NotYetError
from streamrl_workers.weights.store import RelayStore

DEADLINE_S = 60.0


def manifest(step: int, *, base: bytes = b"") -> pb.Manifest:
    data = memoryview(base or bytes([step]) * 8)
    entries = describe({"w": TensorBytes("uint8", (8,), data)})
    version = pb.VersionName(attempt=1, step=step, hash=manifest_hash(entries))
    return pb.Manifest(version=version, tensors=entries, hash_algorithm="blake3")


def begun(store: RelayStore, step: int) -> pb.Manifest:
    made = manifest(step)
    store.begin(made.version, mark=lambda: 7)
    store.described(made)
    return made


def had(store: RelayStore, step: int) -> pb.Manifest:
    made = begun(store, step)
    store.have(made.tensors[0].slices[0].hash, memoryview(bytes([step]) * 8))
    return made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_WAIT_S", 0.0)


def test_a_tensor_is_given_when_it_is_verified() -> None:
    store, found = RelayStore(), list[bytes]()
    made = manifest(1)
    store.begin(made.version, mark=lambda: 0)

    def ask() -> None:
        with store.pulling(made.version) as described:
            assert described == made
            data = store.content(made.tensors[0].slices[0].hash)
            assert data is not None
            assert data.readonly
            found.append(bytes(data))

    asking = threading.Thread(target=ask)
    asking.start()
    store.described(made)
    store.have(made.tensors[0].slices[0].hash, memoryview(bytes([1]) * 8))
    asking.join(DEADLINE_S)
    assert found == [bytes([1]) * 8]


@pytest.mark.usefixtures("impatient")
def test_who_asks_too_early_is_told_how_far_we_are() -> None:
    store, made = RelayStore(), manifest(1)
    store.begin(made.version, mark=lambda: 5)
    with pytest.raises(NotYetError) as manifest_later, store.pulling(made.version):
        pass
    store.described(made)
    with pytest.raises(NotYetError) as tensor_later:
        store.content(made.tensors[0].slices[0].hash)
    assert (manifest_later.value.mark, tensor_later.value.mark) == (5, 5)


def test_what_is_not_there_is_nobodys_to_wait_for() -> None:
    store, made = RelayStore(), manifest(1)
    with store.pulling(made.version) as described:
        assert described is None
    assert store.content(made.tensors[0].slices[0].hash) is None
    begun(store, 1)
    store.failed()
    assert store.content(made.tensors[0].slices[0].hash) is None
    assert store.versions() == []


def test_one_that_waits_hears_that_it_will_not_come() -> None:
    store, found = RelayStore(), list[object]()
    made = begun(store, 1)
    waiting = threading.Thread(target=lambda: found.append(store.content(made.tensors[0].slices[0].hash)))
    waiting.start()
    store.failed()
    waiting.join(DEADLINE_S)
    assert found == [None]


def test_the_newest_is_kept_and_what_somebody_pulls() -> None:
    store = RelayStore()
    one = had(store, 1)
    with store.pulling(one.version):
        had(store, 2)
        assert [version.step for version in store.versions()] == [1, 2]
        assert store.content(one.tensors[0].slices[0].hash) == bytes([1]) * 8
    assert [version.step for version in store.versions()] == [2]
    had(store, 3)
    assert [version.step for version in store.versions()] == [3]
    assert store.content(one.tensors[0].slices[0].hash) is None


def test_the_deltas_of_a_manifest_are_not_passed_on():
    """It has none of their bytes."""
    store = RelayStore()
    version = pb.VersionName(attempt=1, step=2, hash=b"v")
    store.begin(version, mark=lambda: 0)
    store.described(pb.Manifest(version=version, deltas=[pb.TensorDelta(hash=b"d")]))
    with store.pulling(version) as manifest:
        assert manifest == pb.Manifest(version=version)
