"""What stands beside a hash is hashed too, or checked: each field of each kind of record is changed in turn.

After each change the reader refuses it in one line, or what it gives is exactly what it gave before. Fields come from descriptors, documents
and tables. Not here, since people may write them: `run.json`, `job.json`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.keys import FILE_ADOPTED, FILE_WEIGHTS_OWNER
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.models.probe import Prover, as_tensor_bytes, take_probe
from streamrl_workers.scheduler.journal.adoption import Adopted, read_adopted
from streamrl_workers.scheduler.journal.check import check_run
from streamrl_workers.stream.archive import ArchivePosition, ArchiveWriter, read_archive
from streamrl_workers.stream.digests import seal
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.folder import run_identity
from streamrl_workers.weights.hashing import TensorBytes, entry_of, tensors_hash
from streamrl_workers.weights.pull import FetchedTensor, Nearby, Route, WeightsError, pull
from streamrl_workers.weights.source import NotKeptError, Piece, SourceRefusedError
from streamrl_workers.weights.store import WeightStore
from support.changed_fields import changed_documents, changed_messages, changed_rows, filled, tables
from support.histories import attempt
from support.journal_stories import JOURNAL, LOG, Story

DEADLINE_S = 120.0


def one_line(error: Exception, *, of: str) -> None:
    assert str(error), of
    assert len(str(error).splitlines()) == 1, (of, str(error))


# ---- weights


def tensors(step: int) -> dict[str, TensorBytes]:
    probe = filled(pb.Probe)
    probe.family = str(step)
    changing = bytearray(4000)
    changing[: 8 * step] = bytes([step]) * (8 * step)
    return {
        "w": TensorBytes("float32", (10, 100), memoryview(bytes(changing))),
        "fixed": TensorBytes("bfloat16", (2, 2), memoryview(b"12345678")),
        **as_tensor_bytes(probe),
    }


class ForeignSource:
    """Gives versions and contents as a test has changed them, to whoever asks for whatever version."""

    def __init__(self) -> None:
        self.store = WeightStore(deltas=DeltaStore())
        self.store.publish(attempt=1, step=1, tensors=tensors(1))
        self.version = self.store.publish(attempt=1, step=2, tensors=tensors(2))
        with self.store.pulling(self.version) as manifest:
            assert manifest is not None
            self.written = pb.Manifest.FromString(manifest.SerializeToString())
        self.given = self.written
        self.changed: dict[bytes, bytes] = {}
        """Contents by hash."""

    async def pulled(self, target: pb.WeightsAvailable) -> dict[str, TensorBytes]:
        held = {}
        for name, tensor in tensors(1).items():
            held[name] = FetchedTensor(entry=entry_of(name, tensor), buffer=tensor.data)
            held[name].have(tensor.data)
        return await pull(Route(target), timeout_s=DEADLINE_S, connect=self.connect, nearby=Nearby(held=held))

    async def connect(self, _: pb.WeightsAvailable) -> "ForeignSource":
        return self

    async def manifest(self, _: pb.VersionName) -> pb.Manifest:
        return self.given

    async def fetch(self, piece: Piece, *, arrived: Callable[[int], None]) -> None:
        data = self.changed.get(piece.hash) or self.store.content(piece.hash)
        if data is None:
            raise NotKeptError("it is not there")
        if len(data) != len(piece.buffer):
            raise SourceRefusedError(f"it has {len(data)} bytes")
        piece.buffer[piece.begin : piece.end] = data[piece.begin : piece.end]
        piece.begin = piece.end

    def abort(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def _refused(source: ForeignSource, target: pb.WeightsAvailable, *, of: str) -> bool:
    """Whether a pull is refused; else it has what was published."""
    try:
        found = await source.pulled(target)
    except WeightsError as error:
        one_line(error, of=of)
        return True
    assert found == tensors(2), of
    return False


async def test_each_field_of_a_manifest_and_its_deltas() -> None:
    source = ForeignSource()
    target = pb.WeightsAvailable(version=source.version, address="there")
    assert source.written.deltas
    assert not await _refused(source, target, of="nothing is changed")
    for field, changed in changed_messages(source.written):
        source.given = changed
        assert await _refused(source, target, of=field) != field.startswith(("deltas", "holders")), field


async def test_each_field_of_an_announcement() -> None:
    """Where weights come from is free: their bytes are verified."""
    source = ForeignSource()
    for field, target in changed_messages(pb.WeightsAvailable(version=source.version, address="there", peer=True)):
        assert await _refused(source, target, of=field) == field.startswith("version"), field


async def test_each_byte_of_a_tensor_and_of_a_delta() -> None:
    source = ForeignSource()
    target = pb.WeightsAvailable(version=source.version, address="there")
    slices = [one for entry in source.written.tensors for one in entry.slices]
    for content in {one.hash for one in (*slices, *source.written.deltas)}:
        data = source.store.content(content)
        assert data is not None
        for place in sorted({*range(0, len(data), 97), *range(min(len(data), 96)), len(data) - 1}):
            source.changed = {content: bytes(data[:place]) + bytes([data[place] ^ 1]) + bytes(data[place + 1 :])}
            refused = await _refused(source, target, of=f"{content.hex()}[{place}]")
            if content in {delta.hash for delta in source.written.deltas}:
                assert not refused, "the tensor is fetched whole"


class _Scorer:
    def score(self, sequences: Any) -> list[list[float]]:
        return [[-1.0] * max(0, len(tokens) - 1) for tokens in sequences]


def test_each_field_of_a_probe() -> None:
    """It is a tensor, so a change is seen in the version's hash. Whatever a trainer published there ends in a line or is proved."""
    written = filled(pb.Probe)
    for scored in (written.short, written.long):
        scored.tokens, scored.logprobs = bytes(8), bytes(4)
    for field, changed in changed_messages(written):
        published = as_tensor_bytes(changed)
        assert tensors_hash(published) != tensors_hash(as_tensor_bytes(written)), field
        try:
            _, probe = take_probe(published)
            assert probe == changed
            Prover().prove(_Scorer(), changed)
        except (ValueError, UserError) as error:
            one_line(error, of=field)


# ---- samples


def test_each_field_of_a_row_of_the_archive(tmp_path: Path) -> None:
    head, samples = filled(pb.ArchivedGroup), filled(pb.ArchivedSamples)
    writer = ArchiveWriter(tmp_path / "archive", max_bytes=2**20, at=ArchivePosition())
    assert writer.append(head, samples) and writer.append(head, samples)
    end = writer.sync()
    writer.close()
    (path,) = (tmp_path / "archive").iterdir()
    data = path.read_bytes()

    def read() -> list[tuple[Any, Any]]:
        return [(entry.head, entry.samples()) for entry in read_archive(path.parent, beneath=tmp_path, end=end)]

    assert read() == [(head, samples)] * 2
    for whole in (head, samples):
        written = whole.SerializeToString(deterministic=True)
        assert written in data
        for field, changed in changed_messages(whole):
            path.write_bytes(data.replace(written, changed.SerializeToString(deterministic=True), 1))
            with pytest.raises(UserError) as told:
                read()
            one_line(told.value, of=field)
    for place in range(0, len(data), 11):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(UserError) as told:
            read()
        one_line(told.value, of=f"byte {place}")


# ---- the run


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run that was stopped: steps taken, groups that wait."""
    (tmp_path / "run").mkdir()
    story = Story(tmp_path / "run")
    await story.opened.write([attempt(1, 0)])
    await story.steps(0, 14)
    await story.prepare(14)
    story.opened.journal.close()
    return story.run_dir


def _check_rows(run: Path, *, newest_only: bool) -> None:
    assert check_run(run).violations == ()
    written = (run / JOURNAL).read_bytes()
    changes = list(changed_rows(run / JOURNAL, newest_only=newest_only))
    assert {field.partition(".")[0] for field, _ in changes} == tables(run / JOURNAL), "each has a row"
    for field, change in changes:
        for name in (LOG, f"{JOURNAL}-shm"):
            (run / name).unlink(missing_ok=True)
        (run / JOURNAL).write_bytes(written)
        change(run / JOURNAL)
        try:
            assert check_run(run).violations, field
        except UserError as error:
            one_line(error, of=field)


async def test_each_column_of_each_table_of_the_journal(run: Path) -> None:
    _check_rows(run, newest_only=True)


@pytest.mark.soak
async def test_each_cell_of_the_journal(run: Path) -> None:
    _check_rows(run, newest_only=False)


def _sealed(document: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """(field, text of the changed file, whether its digest is of the change too)."""
    written = json.loads(seal(document))
    for field, changed in changed_documents(written):
        yield field, json.dumps(changed), False
    for field, changed in changed_documents(document):
        yield field, seal(changed), True


def test_each_field_of_a_checkpoint(tmp_path: Path) -> None:
    def save(directory: Path) -> None:
        (directory / "a").write_bytes(b"weights")

    store = CheckpointStore(tmp_path, keep_last=1)
    path = store.write(CheckpointMeta(step=1, attempt=1, history=("0f" * 16,)), save=save, sync=lambda: None)
    found = store.newest()
    assert found is not None
    document = json.loads((path / "meta.json").read_text())
    del document["digest"]
    for field, text, is_resealed in _sealed(document):
        (path / "meta.json").write_text(text)
        try:
            assert store.newest() == found or is_resealed, field
        except UserError as error:
            one_line(error, of=field)


def test_each_field_of_what_a_run_has_taken_over(tmp_path: Path) -> None:
    document = asdict(Adopted(run="before", step=1, chain="0f" * 16, path="checkpoints/step-00000001"))
    for field, text, is_resealed in _sealed(document):
        (tmp_path / FILE_ADOPTED).write_text(text)
        try:
            assert read_adopted(tmp_path) is not None
            assert is_resealed, field
        except UserError as error:
            one_line(error, of=field)


def test_each_character_of_a_runs_identity(tmp_path: Path) -> None:
    """Another identity is another run, which is refused."""
    identity = run_identity(tmp_path, copies=None).decode()
    for place in range(len(identity)):
        for other in ("", "\n", "0", "G"):
            (tmp_path / FILE_WEIGHTS_OWNER).write_text(changed := identity[:place] + other + identity[place + 1 :])
            try:
                assert run_identity(tmp_path, copies=None) == changed.encode()
            except UserError as error:
                one_line(error, of=str(place))
