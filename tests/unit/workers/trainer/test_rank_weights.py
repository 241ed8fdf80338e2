"""What ranks above 0 publish, how rank 0 asks for it and passes it on, and the folder of all of them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.training import FolderWeights, Weights
from streamrl_workers.process.environment_variables import WorkerVariables
from streamrl_workers.stream.tls import Tls
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.rank_weights import RankParts, RankWeights
from streamrl_workers.trainer.settings import TrainerSettings
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.folder import FolderSource
from streamrl_workers.weights.hashing import SliceBytes, bytes_hash, check_manifest
from streamrl_workers.weights.http_client import PassingWeightServer
from streamrl_workers.weights.http_server import CLUSTER_HEADER, content_path, versions_path
from streamrl_workers.weights.store import WeightStore
from support.certificates import Authority, mount
from support.folder_weights import TIMEOUT_S, FolderTrainer
from support.jobs import parsed_job
from support.runs import wait_for
from support.trainer_groups import trainer_spec
from support.trainer_settings import trainer_settings

ROW = 100_000
ROWS = 3
"""Of each rank."""
TOKEN = "a token"


def slices(step: int, *, rank: int) -> list[SliceBytes]:
    """Rows of `w`, of which a byte differs in each version; the base is that of every version."""
    data = bytearray(bytes(range(250)) * (ROW // 250 * ROWS))
    data[0:2] = bytes([step, rank])
    return [SliceBytes("w", "uint8", (2 * ROWS, ROW), ROWS * rank, memoryview(bytes(data)))]


def settings(tmp_path: Path, **weights: Any) -> TrainerSettings:
    spec = parsed_job().spec
    spec = spec.model_copy(update={"weights": Weights(**weights) if weights else spec.weights})
    return replace(trainer_settings(spec), token=TOKEN, store=tmp_path)


@contextmanager
def rank_1(given: TrainerSettings, *, failed: list[BaseException] | None = None) -> Iterator[RankWeights]:
    weights = RankWeights(given, failed=[].append if failed is None else failed.append)
    try:
        yield weights
    finally:
        weights.close()


def parts_of(*addresses: str, timeout_s: float = 60.0, tls: Tls | None = None) -> RankParts:
    return RankParts(addresses, timeout_s=timeout_s, token=TOKEN, tls=tls)


@pytest.fixture(params=[False, True], ids=["token", "tls"])
def certificates(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tls, Tls] | tuple[None, None]:
    """Of the trainer and of a generator."""
    if not request.param:
        return None, None
    ca = Authority()
    trainer, generator = (
        Tls(mount(tmp_path / role, trusted=(ca,), leaf=ca.leaf(role))) for role in ("trainer", "generator")
    )
    return trainer, generator


def published(
    store: WeightStore, other: RankWeights, *, step: int, content: int | None = None, tls: Tls | None = None
) -> pb.VersionName:
    """A version of both ranks; `content`: the step whose bytes it has, absent = its own."""
    content = step if content is None else content
    store.retain(lambda version: version.step == step - 1)
    other.retain([(version.attempt, version.step) for version in store.versions()])
    other.publish(attempt=1, step=step, slices=slices(content, rank=1))
    ask = parts_of(other.address, tls=tls).ask
    return store.publish(attempt=1, step=step, slices=slices(content, rank=0), parts=lambda: ask(attempt=1, step=step))


@contextmanager
def on_its_way(other: RankWeights) -> Iterator[threading.Event]:
    """Part (1, 0), which ends once the event is set."""
    gate = threading.Event()

    def held() -> Iterator[SliceBytes]:
        assert gate.wait(60)
        yield from slices(0, rank=1)

    other.publish(attempt=1, step=0, slices=held())
    try:
        yield gate
    finally:
        gate.set()


def fetched(address: str, path: str, *, tls: Tls | None = None, **headers: str) -> bytes:
    context, kind = None, "http"
    if tls is not None:
        context, kind = tls.ssl_context(server=False), "https"
        context.check_hostname = False
    request = Request(f"{kind}://{address}{path}", headers={"Authorization": f"Bearer {TOKEN}", **headers})
    with urlopen(request, timeout=60, context=context) as answer:
        return bytes(answer.read())


def test_rank_0_joins_and_passes_on_what_another_rank_holds(
    tmp_path: Path, certificates: tuple[Tls | None, Tls | None]
) -> None:
    store, (trainer, generator) = WeightStore(newest_kept=3, deltas=DeltaStore()), certificates
    get = partial(fetched, tls=generator)
    with rank_1(replace(settings(tmp_path), variables=WorkerVariables(tls=trainer))) as other:
        server = PassingWeightServer(store, token=TOKEN, tls=trainer)
        try:
            for step in range(4):
                name = published(store, other, step=step, tls=trainer)
            manifest = pb.Manifest.FromString(get(server.address, versions_path(name)))
            check_manifest(manifest, version=name)
            assert list(manifest.holders) == [other.address]
            (entry,) = manifest.tensors
            assert [one.holder for one in entry.slices] == [0, 1]
            own, theirs = (get(server.address, content_path(one.hash)) for one in entry.slices)
            assert [bytes_hash(memoryview(data)) for data in (own, theirs)] == [one.hash for one in entry.slices]
            part = get(server.address, content_path(entry.slices[1].hash), Range="bytes=150000-299999")
            assert part == theirs[150_000:]
            served = [server, other.server]  # what is passed on is counted once; a piece is counted after it was sent
            counts = [len(own), len(theirs) + len(part)]
            wait_for(lambda: [one.served_bytes for one in served] == counts, what=f"{counts} bytes to be counted")
            assert len(store.versions()) == 2, "the announced one, and the one before"
            with pytest.raises(HTTPError, match="404"):
                get(server.address, content_path(bytes(32)))
        finally:
            server.close()


def test_a_version_that_is_pulled_from_rank_0_alone_stays_on_the_other_ranks(tmp_path: Path) -> None:
    """A generator of another cluster, or one that has not reached the other ranks yet, pulls for longer than a step."""
    given = replace(settings(tmp_path), spec=parsed_job(staleness=0).spec)
    store = WeightStore(newest_kept=given.memory_versions)
    with rank_1(given) as other, closing(PassingWeightServer(store, token=TOKEN, tls=None)) as server:
        name = published(store, other, step=0)
        with store.pulling(name) as manifest:
            assert manifest is not None
            for step in (1, 2, 3):
                published(store, other, step=step)
            (entry,) = manifest.tensors
            theirs = fetched(server.address, content_path(entry.slices[1].hash))
            assert bytes_hash(memoryview(theirs)) == entry.slices[1].hash
        published(store, other, step=4)
        assert [version.step for version in other.server.store.versions()] == [3, 4]


def test_what_is_passed_on_to_another_cluster_goes_by_its_link(tmp_path: Path) -> None:
    store = WeightStore()
    with rank_1(settings(tmp_path)) as other:
        server = PassingWeightServer(store, token=TOKEN, tls=None, remote_bytes_per_s=1_000_000)
        try:
            (entry,) = pb.Manifest.FromString(
                fetched(server.address, versions_path(published(store, other, step=0)))
            ).tensors
            (link,) = server.links("far")
            before_s = link.wait_s(0, now_s=0.0)
            fetched(server.address, content_path(entry.slices[1].hash), **{CLUSTER_HEADER: "far"})
            assert link.wait_s(0, now_s=0.0) - before_s >= 0.2  # 300 kB at 1 MB/s, after the first step
        finally:
            server.close()


def test_a_part_that_is_on_its_way_is_waited_for(tmp_path: Path) -> None:
    with rank_1(settings(tmp_path)) as other:
        found: list[Any] = []
        asked = threading.Thread(target=lambda: found.append(parts_of(other.address).ask(attempt=1, step=0)))
        with on_its_way(other):
            asked.start()
        asked.join(60)
        assert found[0][other.address].tensors[0].slices[0].first_row == ROWS


def test_a_rank_that_never_gives_its_part_has_a_deadline(tmp_path: Path) -> None:
    with rank_1(settings(tmp_path)) as other:
        late = r"rank 1 gave no part of version \(1, 0\) at .* within 0.3 s: it"
        with on_its_way(other), pytest.raises(RetryError, match=late):
            parts_of(other.address, timeout_s=0.3).ask(attempt=1, step=0)
        with pytest.raises(RetryError, match=r"rank 1 refuses its part of version \(1, 7\) at .* is not kept"):
            parts_of(other.address).ask(attempt=1, step=7)


def test_the_end_of_the_session_ends_the_wait(tmp_path: Path) -> None:
    with rank_1(settings(tmp_path)) as other, on_its_way(other), pytest.raises(RetryError, match="rank 2 is gone"):
        parts_of(other.address).ask(attempt=1, step=0, ending=lambda: RetryError("rank 2 is gone"))


def test_a_part_that_fails_ends_its_rank(tmp_path: Path) -> None:
    failed: list[BaseException] = []
    ended = threading.Event()
    weights = RankWeights(settings(tmp_path), failed=lambda error: (failed.append(error), ended.set())[0])
    try:
        weights.publish(attempt=1, step=0, slices=[SliceBytes("w", "no type", (1,), 0, memoryview(b"a"))])
        assert ended.wait(60)
        assert isinstance(failed[0], RetryError) and "weights: ValueError(" in str(failed[0]), "as rank 0 ends"
    finally:
        weights.close()


async def _read(url: str, version: pb.VersionName) -> pb.Manifest:
    source = await FolderSource.connect(url)
    try:
        return await source.manifest(version)
    finally:
        await source.close()


def test_a_folder_has_the_slices_of_all_ranks_and_rank_0_alone_deletes(tmp_path: Path) -> None:
    url = tmp_path / "weights"
    url.mkdir()
    trainer = FolderTrainer(str(url), run="run")
    given = settings(tmp_path / "run", folder=FolderWeights(url=str(url)))
    with rank_1(given) as other:
        contents = url / "run" / "weights" / "content"
        seen = []
        for step, content in enumerate((0, 1, 2, 3, 0, 1)):  # contents come back after rank 0 has deleted them
            name = published(trainer.store, other, step=step, content=content)
            assert trainer.server.offer(name, ended=lambda: False)
            trainer.now_s += 2 * TIMEOUT_S  # a pull of it would have ended
            manifest = asyncio.run(_read(trainer.server.address, name))
            needed = {one.hash.hex() for entry in manifest.tensors for one in entry.slices}
            there = {path.name for path in contents.iterdir()}
            assert needed <= there
            seen.append(there - needed)
        assert [len(old) for old in seen] == [0, 2, 2, 2, 2, 2]


def test_a_rank_writes_into_a_folder_what_generators_are_told_of(tmp_path: Path) -> None:
    """A supervised job's generators are told of versions that they evaluate; rank 0 deletes nothing of others."""
    url = tmp_path / "weights"
    url.mkdir()
    spec = trainer_spec(rule="supervised", steps=10)
    assert spec.task.evaluation.interval_steps > 2
    spec = spec.model_copy(update={"weights": Weights(folder=FolderWeights(url=str(url)))})
    given = replace(settings(tmp_path / "run"), spec=spec)
    store = WeightStore(newest_kept=given.memory_versions)
    with rank_1(given) as other:
        for step in (0, 1, 2):
            published(store, other, step=step)
    assert len([*(url / "run" / "weights" / "content").iterdir()]) == 1
