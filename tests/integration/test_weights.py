"""Pulling weights between real processes: breaks, corruption, versions that are gone, deadlines."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import SimulatedEngineSpec as Spec
from streamrl_workers.generator.engine_loop import EngineLoop
from streamrl_workers.generator.engines.simulated import SimulatedEngine
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.weights.address import Route, WeightsError
from streamrl_workers.weights.hashing import bytes_hash, tensors_hash
from streamrl_workers.weights.pull import HeldTensor, Nearby, VersionGoneError
from support.engine_requests import request
from support.ports import free_port
from support.weight_servers import SIZES, TOKEN, make_tensors, pull_along, pull_from, weight_server

SLICE_BYTES = 64 * 1024
"""Of a slowed server."""
TIMEOUT_S = 240.0
SHORT_S = 10.0
"""What is at hand comes within it on a busy machine, too."""


def version(step: int = 5, **changes) -> pb.VersionName:
    return pb.VersionName(**{"attempt": 1, "step": step, "hash": tensors_hash(make_tensors()), **changes})


async def pulled(
    address: str,
    *,
    timeout_s: float = TIMEOUT_S,
    token: str = TOKEN,
    arrived=lambda _: None,
    held=None,
    cache=None,
    **changes,
):
    return await pull_from(
        pb.WeightsAvailable(version=version(**changes), address=address),
        timeout_s=timeout_s,
        token=token,
        arrived=arrived,
        nearby=None if held is None else Nearby(held=held),
    )


async def test_what_arrives_is_what_was_published():
    with weight_server() as (address, _, _):
        tensors = await pulled(address)
    assert tensors == make_tensors()
    assert {name: tensor.data.nbytes for name, tensor in tensors.items()} == SIZES
    assert tensors_hash(tensors) == version().hash


async def test_what_is_held_is_not_fetched_again():
    held: dict[str, HeldTensor] = {}
    arrived: list[int] = []
    with weight_server() as (address, _, _):
        await pulled(address, held=held)
        assert await pulled(address, held=held, arrived=arrived.append) == make_tensors()
        assert not arrived
        del held["odd"]
        assert await pulled(address, held=held, arrived=arrived.append) == make_tensors()
    assert sum(arrived) == SIZES["odd"]
    assert {name: tensor.buffer for name, tensor in held.items()} == {
        name: tensor.data for name, tensor in make_tensors().items()
    }


async def test_what_is_held_stays_when_a_pull_fails():
    held: dict[str, HeldTensor] = {}
    with weight_server() as (address, _, _):
        await pulled(address, held=held)
    del held["odd"]
    before = dict(held)
    with weight_server("corrupting") as (address, _, _), pytest.raises(WeightsError, match="tensor odd: corrupt"):
        await pulled(address, held=held)
    assert held == before


async def test_a_manifest_with_another_base_is_refused():
    """Its hash is not what was announced, whatever the generator holds."""
    held: dict[str, HeldTensor] = {}
    with weight_server() as (address, _, _):
        await pulled(address, held=held)
    refused = pytest.raises(WeightsError, match=r"version \(1, 5\) .*its manifest hashes to .*, announced was")
    with weight_server("rebased") as (address, _, _), refused:
        await pulled(address, held=held)


async def test_a_killed_server_costs_no_byte_that_had_arrived():
    port = free_port()
    with weight_server("slowed", port=port, allowed=20) as (address, events, process):
        some = asyncio.Event()
        task = asyncio.create_task(pulled(address, arrived=lambda size: some.set() if size >= 2**20 else None))
        await asyncio.to_thread(_until_stuck, events)
        async with asyncio.timeout(TIMEOUT_S):
            await some.wait()  # of `big`: what is on its way at the kill is nobody's
        process.kill()
        process.join()
        with weight_server("slowed", port=port) as (_, again, _):
            assert await task == make_tensors()
            offsets = dict(_drain(again))
    assert 2**20 <= offsets["big"] <= 20 * SLICE_BYTES  # what was under way at the kill is asked for again, no more


def _until_stuck(events) -> None:
    while events.recv() != "stuck":
        pass


def _drain(events) -> list:
    found = []
    while events.poll(0):
        found.append(events.recv())
    return found


async def test_a_corrupt_chunk_is_an_error_that_names_the_tensor():
    expected = pytest.raises(WeightsError, match=r"version \(1, 5\) from .*tensor odd: corrupt: its bytes hash to")
    with weight_server("corrupting") as (address, _, _), expected:
        await pulled(address)


@asynccontextmanager
async def engine_loop():
    """A generator's engine loop with the pull that it has in a job."""
    engine = SimulatedEngine(spec=Spec.model_validate({"timeScale": 0.0}), slots=2, seed=0)
    outbox = GeneratorOutbox()

    async def pulled_over_http(route: Route):
        return await pulled(route.target.address, hash=route.target.version.hash)

    loop = EngineLoop(engine, pull=pulled_over_http, outbox=outbox, recorder=Recorder(sink=None, metrics=None))
    outbox.open()
    loop.connected()
    task = asyncio.create_task(loop.run(), name="engine-loop")
    try:
        yield loop, outbox, engine
    finally:
        task.cancel()
        await asyncio.wait({task})


async def heard(outbox: GeneratorOutbox):
    while True:
        async with asyncio.timeout(TIMEOUT_S):
            await outbox.filled.wait()
        for event in outbox.pop(running=False):
            yield event


async def test_no_engine_is_given_a_flipped_bit():
    async with engine_loop() as (loop, outbox, engine):
        events = heard(outbox)
        loop.issue([request(7)])
        with weight_server("corrupting") as (address, _, _):
            loop.announce(pb.WeightsAvailable(version=version(), address=address))
            event = await anext(events)
            assert "tensor odd: corrupt: its bytes hash to" in event.weights_failed.error
            assert (engine.version, loop.status().version) == (None, None)
        with weight_server() as (address, _, _):
            loop.announce(pb.WeightsAvailable(version=version(), address=address))
            while not (event := await anext(events)).HasField("weights_loaded"):
                assert event.HasField("weights_failed") or event.HasField("weights_stalled"), "of the first server"
            assert event.weights_loaded.engine_hash == version().hash
            assert [(item.lease, item.spans[0].step) for item in (await anext(events)).progress.items] == [(7, 5)]


async def test_what_was_being_verified_when_the_connection_broke_is_verified_again(monkeypatch):
    port, hashed = free_port(), []
    begun, go = threading.Event(), threading.Event()

    def gated(data: bytearray) -> bytes:
        hashed.append(len(data))
        if len(data) == SIZES["odd"] and not begun.is_set():
            begun.set()
            assert go.wait(TIMEOUT_S)
        return bytes_hash(data)

    monkeypatch.setattr("streamrl_workers.weights.pull.bytes_hash", gated)
    try:
        with weight_server("slowed", port=port, allowed=3) as (address, events, process):
            task = asyncio.create_task(pulled(address))
            await asyncio.to_thread(_until_stuck, events)
            assert await asyncio.to_thread(begun.wait, TIMEOUT_S)
            process.kill()
            process.join()
        with weight_server("slowed", port=port):
            assert await task == make_tensors()
    finally:
        go.set()
    assert hashed.count(SIZES["odd"]) == 2


@pytest.mark.parametrize(
    ("kind", "ours", "text"),
    [
        ("older", "blake3", "refused: the trainer hashes weights by 'blake2b', this generator verifies blake3"),
        ("plain", "blake2b", "refused: 400: this server hashes .* by blake3, the generator verifies blake2b"),
    ],
)
async def test_a_peer_that_hashes_otherwise_is_refused_by_the_algorithms_name(kind, ours, text, monkeypatch):
    monkeypatch.setattr("streamrl_workers.weights.hashing.HASH_ALGORITHM", ours)
    monkeypatch.setattr("streamrl_workers.weights.http_server.HASH_ALGORITHM", ours)
    with weight_server(kind) as (address, _, _), pytest.raises(WeightsError, match=text + "; run one release"):
        await pulled(address)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"step": 4}, VersionGoneError, r"version \(1, 4\).*is not kept; kept: \(1, 5\)"),
        ({"hash": b"another"}, VersionGoneError, "is not kept"),
        ({"token": "wrong"}, WeightsError, "refused: 401: this call does not carry the token"),
    ],
)
async def test_what_no_retry_can_help_fails_at_once(changes, error, text):
    with weight_server() as (address, _, _):
        begun_s = time.monotonic()
        with pytest.raises(error, match=text):
            await pulled(address, **changes)
        assert time.monotonic() - begun_s < TIMEOUT_S / 2, "not at its deadline"


async def test_the_deadline_says_what_was_awaited():
    expected = pytest.raises(WeightsError, match=r"not complete after 10 s; awaited tensor big, \d+ of \d+ bytes")
    with weight_server("slowed", allowed=3) as (address, _, _), expected:
        await pulled(address, timeout_s=SHORT_S)


async def test_nobody_there_is_a_deadline_too():
    with pytest.raises(WeightsError, match=r"not complete after 0\.5 s; awaited its manifest"):
        await pulled(f"127.0.0.1:{free_port()}", timeout_s=0.5)


async def test_a_pull_can_be_cancelled():
    with weight_server("slowed", allowed=3) as (address, events, _):
        task = asyncio.create_task(pulled(address))
        await asyncio.to_thread(_until_stuck, events)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(TIMEOUT_S):
                await task


async def test_a_server_of_something_else_is_refused_at_once():
    async def greets(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail at your service\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greets, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(WeightsError, match=r"refused: this is no server of weights: 220 mail"):
            await pulled(f"127.0.0.1:{port}")


async def test_a_pull_goes_on_from_somebody_else_with_what_has_arrived():
    with weight_server("slowed", allowed=20) as (address, events, _), weight_server("slowed") as (other, again, _):
        route, some = Route(pb.WeightsAvailable(version=version(), address=address)), asyncio.Event()
        told = lambda size: some.set() if size >= 2**20 else None  # noqa: E731 - of one line
        task = asyncio.create_task(pull_along(route, timeout_s=TIMEOUT_S, arrived=told))
        await asyncio.to_thread(_until_stuck, events)
        async with asyncio.timeout(TIMEOUT_S):
            await some.wait()
        route.move(pb.WeightsAvailable(version=version(), address=other))
        assert await task == make_tensors()
        offsets = dict(_drain(again))
    assert 2**20 <= offsets["big"] <= 20 * SLICE_BYTES
