"""Pulling weights between real processes: breaks, corruption, versions that are gone, deadlines."""

import asyncio
import time

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import tensors_hash
from streamrl_workers.weights.pull import VersionGoneError, WeightsError, pull
from support.ports import free_port
from support.weight_servers import SIZES, TOKEN, make_tensors, weight_server

CHUNK_BYTES = 64 * 1024
TIMEOUT_S = 240.0
SHORT_S = 10.0
"""What is at hand comes within it on a busy machine, too."""


def version(step: int = 5, **changes) -> pb.VersionName:
    return pb.VersionName(**{"attempt": 1, "step": step, "hash": tensors_hash(make_tensors()), **changes})


async def pulled(address: str, *, timeout_s: float = TIMEOUT_S, token: str = TOKEN, arrived=lambda _: None, **changes):
    return await pull(
        address,
        version=version(**changes),
        timeout_s=timeout_s,
        chunk_bytes=CHUNK_BYTES,
        token=token,
        arrived=arrived,
    )


async def test_what_arrives_is_what_was_published():
    with weight_server() as (address, _, _):
        tensors = await pulled(address)
    assert tensors == make_tensors()
    assert {name: tensor.data.nbytes for name, tensor in tensors.items()} == SIZES
    assert tensors_hash(tensors) == version().hash


async def test_a_killed_server_costs_no_byte_that_had_arrived():
    port = free_port()
    with weight_server("slowed", port=port, allowed=20) as (address, events, process):
        some = asyncio.Event()
        task = asyncio.create_task(pulled(address, arrived=lambda size: some.set() if size == CHUNK_BYTES else None))
        await asyncio.to_thread(_until_stuck, events)
        async with asyncio.timeout(TIMEOUT_S):
            await some.wait()  # of `big`: what is on its way at the kill is nobody's
        process.kill()
        process.join()
        with weight_server("slowed", port=port) as (_, again, _):
            assert await task == make_tensors()
            offsets = dict(_drain(again))
    assert 0 < offsets["big"] <= 20 * CHUNK_BYTES  # what was under way at the kill is asked for again, no more


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


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"step": 4}, VersionGoneError, r"version \(1, 4\).*is not kept; kept: \(1, 5\)"),
        ({"hash": b"another"}, VersionGoneError, "is not kept"),
        ({"token": "wrong"}, WeightsError, "refused: UNAUTHENTICATED"),
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
