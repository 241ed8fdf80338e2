"""Callers without the run's token: what they cost the servers before they are refused."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from support.jobs import simulated_job, write_prompts
from support.runs import wait_for
from support.worker_processes import Workers

DOORS = [
    ("scheduler", "/streamrl.v1alpha1.Scheduler/Generate"),
    ("scheduler", "/streamrl.v1alpha1.Scheduler/GetModel"),
]
CALLS = 12
MESSAGE_BYTES = 60 * 2**20
GROWTH_BYTES = 100 * 2**20
"""Twelve messages of this size would take seven times as much; what is refused early takes next to nothing."""
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("strangers")
    write_prompts(folder / "prompts.jsonl")
    started = Workers.prepare(simulated_job(), folder=folder / "run")
    started.start_scheduler()
    started.start("trainer-0")
    wait_for(lambda: started.numbers().get("attempt"), what="the trainer's attempt")
    yield started
    started.close()


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(peak.split()[1]) * 1024


async def _call(address: str, *, method: str, data: bytes) -> str:
    """The status of one call with one large message, on a connection of its own."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        try:
            if method.endswith("Generate"):
                call = channel.stream_stream(method)()
                await call.write(data)
            else:
                call = channel.unary_stream(method)(data)
            await call.read()
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return str((await call.code()).name)


@pytest.mark.parametrize(("process", "method"), DOORS)
async def test_large_messages_without_a_token_take_no_memory(workers: Workers, process: str, method: str) -> None:
    address = workers.endpoint(process)["grpc"]
    pid = workers.processes[process].pid
    before_bytes = _peak_bytes(pid)
    data = b"\x0a" + b"\x80\x80\x80\x1e" + bytes(MESSAGE_BYTES)  # field 1, so many bytes
    async with asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*(_call(address, method=method, data=data) for _ in range(CALLS)))
    assert set(answers) <= {"UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "INTERNAL"}, answers
    assert _peak_bytes(pid) - before_bytes < GROWTH_BYTES
    assert not workers.ended(process)


@pytest.mark.parametrize("head", [b"GET /weights/v1/blake3/content/", b"GET / HTTP/1.1\r\nX: ", b""])
def test_endless_requests_for_weights_take_no_memory(workers: Workers, head: bytes) -> None:
    """Each is closed when it is too long, or not whole in time."""
    host, _, port = workers.endpoint("trainer-0")["weights"].rpartition(":")
    pid = workers.processes["trainer-0"].pid
    before_bytes = _peak_bytes(pid)
    piece = bytes(2**20).replace(b"\0", b"x")
    for _ in range(CALLS):
        with socket.create_connection((host, int(port)), DEADLINE_S) as stranger, suppress(OSError):
            stranger.sendall(head)
            for _ in range(MESSAGE_BYTES // len(piece)):
                stranger.sendall(piece)
    assert _peak_bytes(pid) - before_bytes < GROWTH_BYTES
    assert not workers.ended("trainer-0")
