"""Deltas between real processes: they are fetched where they lead from what is held, and whatever is wrong with them costs whole tensors alone."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.hashing import entry_of, tensors_hash
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.pull import HeldTensor, Nearby
from streamrl_workers.weights.store import NEWEST_KEPT, WeightStore
from support.jobs import simulated_job, write_prompts
from support.metric_pages import series
from support.ports import free_port
from support.runs import DEADLINE_S, wait_for
from support.weight_servers import SIZES, TOKEN, VERSIONS, make_tensors, pull_from, weight_server
from support.worker_processes import Workers

TOTAL = sum(SIZES.values())
FILLED = sum(size > 0 for size in SIZES.values())
FEW = 0.05
"""Of all bytes: what deltas take of these versions at most."""
NEWEST = VERSIONS[-1]


def held(step: int) -> dict[str, HeldTensor]:
    """What a generator has that has pulled this version."""
    found = {}
    for name, tensor in make_tensors(step).items():
        buffer = memoryview(bytearray(tensor.data))
        found[name] = HeldTensor(entry_of(name, tensor), buffer)
    return found


@dataclass
class Puller:
    """A generator's part; what it was told."""

    nearby: Nearby
    fetched: int = 0
    saved: int = 0
    failures: int = 0
    on_byte: Callable[[], None] = field(default=lambda: None)

    def __post_init__(self) -> None:
        self.nearby.delta_used, self.nearby.delta_failed = self._used, self._failed

    def _used(self, size: int) -> None:
        self.saved += size

    def _failed(self) -> None:
        self.failures += 1

    def _arrived(self, size: int) -> None:
        self.fetched += size
        self.on_byte()

    async def pull(self, address: str, *, step: int = NEWEST) -> None:
        version = pb.VersionName(attempt=1, step=step, hash=tensors_hash(make_tensors(step)))
        tensors = await pull_from(
            pb.WeightsAvailable(version=version, address=address),
            timeout_s=DEADLINE_S,
            arrived=self._arrived,
            nearby=self.nearby,
        )
        assert tensors == make_tensors(step)


@pytest.mark.parametrize("behind", [1, 2, 3])
async def test_who_is_behind_takes_a_delta_for_each_step(behind: int) -> None:
    before = held(NEWEST - behind)
    bytes_before = {name: bytes(tensor.buffer) for name, tensor in before.items()}
    puller = Puller(Nearby(held=dict(before)))
    with weight_server("deltas") as (address, _, _):
        await puller.pull(address)
    assert puller.fetched < FEW * TOTAL
    assert puller.saved == TOTAL - puller.fetched
    assert puller.failures == 0
    assert {name: bytes(tensor.buffer) for name, tensor in before.items()} == bytes_before, "a base was written to"


async def test_one_after_the_other() -> None:
    puller = Puller(Nearby())
    with weight_server("deltas") as (address, _, _):
        await puller.pull(address, step=NEWEST - 1)
        assert (puller.fetched, puller.saved) == (TOTAL, 0)
        await puller.pull(address)
    assert puller.saved == 2 * TOTAL - puller.fetched > (1 - FEW) * TOTAL


@pytest.mark.parametrize("behind", [None, 12])
async def test_a_late_joiner_takes_the_newest_version_whole_and_then_the_deltas_behind_it(behind: int | None) -> None:
    """The chain of deltas is far longer than what is kept of it: no version of long ago, and no anchor, is needed."""
    store = WeightStore(deltas=DeltaStore())
    last = 13
    for step in range(last):
        store.publish(attempt=1, step=step, tensors=make_tensors(step))
    assert len(store.versions()) == NEWEST_KEPT
    puller = Puller(Nearby(held={} if behind is None else held(last - 1 - behind)))
    server = HttpWeightServer(store, token=TOKEN, port=0)
    try:
        await puller.pull(server.address, step=last - 1)
        assert (puller.fetched, puller.saved) == (TOTAL, 0), "whole"
        store.publish(attempt=1, step=last, tensors=make_tensors(last))
        await puller.pull(server.address, step=last)
        assert puller.fetched < (1 + FEW) * TOTAL, "then what follows"
        assert puller.failures == 0
    finally:
        server.close()


async def test_who_holds_another_version_takes_the_tensors() -> None:
    puller = Puller(Nearby(held=held(99)))
    with weight_server("deltas") as (address, _, _):
        await puller.pull(address)
    assert (puller.fetched, puller.saved, puller.failures) == (TOTAL, 0, 0)


@pytest.mark.parametrize(
    ("kind", "failures"),
    [
        ("damaged-deltas", FILLED),
        ("gone-deltas", FILLED),
        ("lying-deltas", FILLED - 1),  # of `small` it names a longer one
        ("longer-deltas", FILLED),
    ],
)
async def test_deltas_that_cannot_be_used_cost_whole_tensors(
    kind: str, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    puller = Puller(Nearby(held=held(NEWEST - 1)))
    with weight_server(kind) as (address, _, _):
        await puller.pull(address)
    assert puller.fetched >= TOTAL
    assert (puller.saved, puller.failures) == (0, failures)
    told = [record.getMessage() for record in caplog.records if "no delta" in record.getMessage()]
    assert len(told) == 1
    assert "\n" not in told[0]
    assert "it is fetched whole" in told[0]


async def test_what_is_held_by_a_wrong_name_is_found_out() -> None:
    """Memory that has changed since it was verified: what a delta makes of it is not what is wanted."""
    puller = Puller(Nearby(held=held(NEWEST - 1)))
    puller.nearby.held["big"].buffer[77] ^= 1
    with weight_server("deltas") as (address, _, _):
        await puller.pull(address)
    assert puller.failures == 1
    assert SIZES["big"] <= puller.fetched < SIZES["big"] + FEW * TOTAL


async def test_a_server_that_dies_within_a_delta_is_followed_by_the_next() -> None:
    port = free_port()
    puller = Puller(Nearby(held=held(NEWEST - 1)))
    with weight_server("stuck-deltas", port=port) as (address, events, process):
        task = asyncio.create_task(puller.pull(address))
        assert await asyncio.to_thread(events.recv) == "stuck"
        process.kill()
        process.join()
        with weight_server("deltas", port=port):
            await task
    assert puller.failures == 0
    assert puller.fetched < FEW * TOTAL


def test_a_run_with_deltas_fetches_a_fraction_of_each_version(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=1_000_000)
    job["spec"]["trainer"]["engine"]["simulated"]["weightBytes"] = 1_000_000
    job["spec"]["weights"] = {"http": {"deltas": True}}
    workers = Workers.prepare(job, folder=tmp_path / "run")
    try:
        workers.start_all()
        wait_for(lambda: total(workers, "delta_saved_bytes") > 3_000_000, what="four versions by deltas")
        assert total(workers, "delta_failures") == 0
        versions = total(workers, "published_versions", process="trainer-0")
        assert 0 < total(workers, "delta_made_bytes", process="trainer-0") < 0.03 * 1_000_000 * (versions + 1)
        assert total(workers, "delta_seconds", process="trainer-0") > 0
    finally:
        workers.close()


def total(workers: Workers, name: str, *, process: str = "generator-sim-0") -> float:
    return series(workers.page("metrics", process=process).encode(), f"streamrl_weights_{name}_total")
