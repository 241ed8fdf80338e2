"""A message that takes a slow line longer than the lease: its parts are signs of life, since no heartbeat can overtake it."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.journal.store import WriterLock, make_if_new, open_for_writing
from streamrl_workers.stream.messages import frames
from support.core_world import settings
from support.peer_world import PeerWorld, Stranger


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    path = tmp_path / "journal.sqlite"
    lock = WriterLock(path)
    lock.acquire()
    make_if_new(path, lock)
    lock.release()
    with closing(open_for_writing(path)) as connection:
        yield connection


async def _joined(world: PeerWorld) -> Stranger:
    """A generator that holds requests."""
    world.start_trainer()
    generator = world.call("generate")
    version = pb.VersionName(attempt=1, step=0)
    hello = pb.GeneratorHello(generator_id="far", instance="i", pool="p", slots=2, version=version)
    await _say(generator, pb.GeneratorEvent(hello=hello))
    await _say(generator, pb.GeneratorEvent(weights_loaded=pb.WeightsLoaded(version=version)))
    for _ in range(10):
        world.progress_once()
        await asyncio.sleep(0)
    return generator


async def _say(generator: Stranger, event: pb.GeneratorEvent) -> None:
    for frame in frames(event.SerializeToString()):
        await generator.say(frame.SerializeToString())


async def test_its_requests_are_not_taken_back(tables: sqlite3.Connection, tmp_path: Path) -> None:
    world = PeerWorld(settings(), slots=(), tables=tables, folder=tmp_path)
    generator = await _joined(world)
    assert "issue" in generator.told
    for _ in range(3):
        await generator.say(pb.Frame(data=b"x" * 1000, more=True).SerializeToString())
        world.now_s += 0.6 * world.job.lease_s
        world.core.tick(world.now_s)
    await asyncio.sleep(0)
    assert "cancel" not in generator.told

    world.now_s += 0.6 * world.job.lease_s  # and no part more
    world.core.tick(world.now_s)
    await asyncio.sleep(0)
    assert "cancel" in generator.told
    await generator.end()
    world.close()
