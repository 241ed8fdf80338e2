"""Which deltas a trainer keeps, and which of them a puller takes."""

import random

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.deltas import DeltaStore, way
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.store import WeightStore

SIZE = 100_000


def tensors(step: int, *, changed: int = SIZE // 50, names: tuple[str, ...] = ("w",)) -> dict[str, TensorBytes]:
    """Tensors of one content, of which the first bytes are the step's own."""
    data = random.Random(step).randbytes(changed) + random.Random("all").randbytes(SIZE - changed)
    return {name: TensorBytes("uint8", (SIZE,), memoryview(data)) for name in names}


class Trainer:
    def __init__(self) -> None:
        self.deltas = DeltaStore()
        self.store = WeightStore(deltas=self.deltas)

    def publish(self, step: int, **options) -> pb.Manifest:
        version = self.store.publish(attempt=1, step=step, tensors=tensors(step, **options))
        with self.store.pulling(version) as manifest:
            assert manifest is not None
            return manifest


def test_a_manifest_names_the_deltas_to_its_version_and_to_those_before():
    trainer = Trainer()
    manifests = [trainer.publish(step) for step in range(4)]
    hashes = [manifest.tensors[0].slices[0].hash for manifest in manifests]
    assert [len(manifest.deltas) for manifest in manifests] == [0, 1, 2, 3]
    for delta, base, new in zip(manifests[3].deltas, hashes[:-1], hashes[1:], strict=True):
        assert (delta.base_hash, delta.new_hash) == (base, new)
        data = trainer.store.content(delta.hash)
        assert data is not None
        assert len(data) == delta.size_bytes < SIZE / 40
    assert trainer.deltas.made_bytes == sum(delta.size_bytes for delta in manifests[3].deltas)
    assert manifests[3].version.hash == WeightStore().publish(attempt=1, step=3, tensors=tensors(3)).hash


def test_the_deltas_are_of_few_steps():
    trainer = Trainer()
    first = trainer.publish(0) and trainer.publish(1).deltas[0]
    for step in range(2, 10):
        manifest = trainer.publish(step)
    assert len(manifest.deltas) == 8
    assert trainer.store.content(first.hash) is None


def test_they_are_three_quarters_of_a_version_at_most():
    trainer = Trainer()
    for step in range(6):
        manifest = trainer.publish(step, changed=SIZE // 5)
    assert len(manifest.deltas) == 3
    assert sum(delta.size_bytes for delta in manifest.deltas) <= SIZE * 3 / 4


def test_what_has_changed_whole_has_none_and_what_has_not_changed_neither():
    trainer = Trainer()
    trainer.publish(0)
    assert not trainer.publish(1, changed=SIZE).deltas
    assert len(trainer.publish(1, changed=SIZE).deltas) == 0


def test_names_that_share_their_bytes_share_the_delta():
    trainer = Trainer()
    trainer.publish(0, names=("a", "b"))
    assert len(trainer.publish(1, names=("a", "b")).deltas) == 1


def delta(base: int, new: int, size: int = 10) -> pb.TensorDelta:
    return pb.TensorDelta(base_hash=bytes([base]), new_hash=bytes([new]), hash=bytes([base, new]), size_bytes=size)


CHAIN = [delta(1, 2), delta(2, 3), delta(3, 4)]


@pytest.mark.parametrize(
    ("held", "deltas", "expected"),
    [
        (1, CHAIN, CHAIN),
        (3, CHAIN, CHAIN[2:]),
        (4, CHAIN, []),
        (9, CHAIN, []),
        (1, [], []),
        (2, [delta(2, 3, 60), delta(3, 4, 60)], []),  # as long as the tensor
        (2, [delta(2, 4, 2**63)], []),
        (9, [delta(3, 4), delta(4, 3)], []),  # a circle
        (1, [delta(step, step + 1 if step < 20 else 4) for step in (1, *range(5, 21))], []),
    ],
)
def test_the_way_from_what_is_held(held: int, deltas: list[pb.TensorDelta], expected: list[pb.TensorDelta]):
    wanted = pb.TensorSlice(size_bytes=100, hash=bytes([4]))
    found = way(wanted, held=bytes([held]), leading_to={one.new_hash: one for one in deltas})
    assert list(found) == expected


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_version_is_published_where_no_deltas_can_be_made(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def failing(*_: object, **__: object) -> None:
        raise error

    trainer = Trainer()
    trainer.publish(0)
    with monkeypatch.context() as patched:
        patched.setattr("streamrl_workers.weights.delta.encode", failing)
        assert not trainer.publish(1).deltas
        assert not trainer.publish(2).deltas
    assert len([record for record in caplog.records if "no deltas" in record.getMessage()]) == 1
    assert len(trainer.publish(3).deltas) == 1
