"""The scheduler's process on its own: how light it starts, whom it lets in, and how it ends when something is wrong."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from streamrl import keys
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.auth import await_admission, call_metadata
from streamrl_workers.stream.channel import SCHEDULER, client, connect
from streamrl_workers.stream.messages import Joiner, write
from support.jobs import simulated_job, write_prompts
from support.runs import DEADLINE_S, wait_for
from support.worker_processes import Workers

HEAVY = ("torch", "numpy", "transformers", "reasoning_gym", "rich", "pandas", "scipy")
RSS_LIMIT_BYTES = 84e6


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    write_prompts(tmp_path / "prompts.jsonl")
    started = Workers.prepare(simulated_job(), folder=tmp_path / "run")
    yield started
    started.close()


def test_starts_light(workers: Workers) -> None:
    child = workers.start_scheduler()
    process = psutil.Process(child.pid)
    wait_for(lambda: workers.page("healthz").strip() == "ok", what="the scheduler to be ready")
    assert process.memory_info().rss < RSS_LIMIT_BYTES
    mapped = [Path(entry.path).parts for entry in process.memory_maps()]
    assert not [parts for parts in mapped if set(parts) & set(HEAVY)]


def test_imports_nothing_heavy() -> None:
    code = "import sys, streamrl_workers.scheduler.main; print(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    modules = set(child.stdout.split())
    assert "streamrl_workers.scheduler.main" in modules
    assert not modules & set(HEAVY)


async def _first_answer(workers: Workers, *, token: str, event: pb.GeneratorEvent) -> pb.GeneratorCommand:
    channel = await connect(f"127.0.0.1:{workers.scheduler_port}", timeout_s=DEADLINE_S, who="the scheduler")
    try:
        call = client(channel, SCHEDULER).Generate(metadata=call_metadata(token))
        async with asyncio.timeout(DEADLINE_S):
            await await_admission(call)
            await write(call, event)
            answer = await Joiner(pb.GeneratorCommand).read(call)
            if answer is None:
                raise grpc.aio.AioRpcError(await call.code(), None, None, details=await call.details())
            return answer
    finally:
        await channel.close()


HELLO = pb.GeneratorEvent(hello=pb.GeneratorHello(generator_id="g", instance="i", pool="sim", slots=4))


async def test_token_and_hello_are_demanded(workers: Workers) -> None:
    workers.start_scheduler()
    answer = await _first_answer(workers, token=workers.token, event=HELLO)
    assert answer.WhichOneof("command") == "welcome"
    with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
        await _first_answer(workers, token="wrong", event=HELLO)
    with pytest.raises(grpc.aio.AioRpcError, match="must be its hello"):
        await _first_answer(workers, token=workers.token, event=pb.GeneratorEvent(heartbeat=pb.Heartbeat()))
    with pytest.raises(grpc.aio.AioRpcError, match="at least one slot"):
        hello = pb.GeneratorHello(generator_id="g", instance="j", pool="sim", slots=0)
        await _first_answer(workers, token=workers.token, event=pb.GeneratorEvent(hello=hello))
    assert workers.token not in workers.text("scheduler")


async def test_second_hello_loses_the_connection_alone(workers: Workers) -> None:
    workers.start_scheduler()
    channel = await connect(f"127.0.0.1:{workers.scheduler_port}", timeout_s=DEADLINE_S, who="the scheduler")
    call = client(channel, SCHEDULER).Generate(metadata=call_metadata(workers.token))
    await write(call, HELLO)
    await write(call, HELLO)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            while await call.read() is not grpc.aio.EOF:
                pass
    await channel.close()
    assert "hello twice" in workers.text("scheduler")
    assert not workers.ended("scheduler")


def _fails(workers: Workers, **environment: str) -> str:
    child = workers.start("scheduler", **environment)
    assert child.wait(DEADLINE_S) == 2, workers.text("scheduler")
    lines = workers.text("scheduler").strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_bad_surroundings_are_one_line_each(workers: Workers) -> None:
    assert keys.ENV_TOKEN in _fails(workers, **{keys.ENV_TOKEN: ""})


def test_bad_port_number(workers: Workers) -> None:
    assert "must be a port" in _fails(workers, **{keys.ENV_GRPC_PORT: "99999"})


@pytest.mark.parametrize("key", [keys.ENV_GRPC_PORT, keys.ENV_SIGNALS_PORT])
def test_port_in_use(workers: Workers, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert port in _fails(workers, **{key: port})


def test_missing_job(workers: Workers) -> None:
    (workers.folder / keys.FILE_JOB).unlink()
    assert "job.json: cannot be read" in _fails(workers)


def test_spoilt_journal(workers: Workers) -> None:
    (workers.folder / keys.FILE_JOURNAL).write_bytes(b"no journal" * 1000)
    assert "not a journal" in _fails(workers)


def test_missing_data_set(workers: Workers) -> None:
    (workers.folder.parent / "prompts.jsonl").unlink()
    assert "prompts.jsonl" in _fails(workers)
    assert json.loads((workers.folder / keys.FILE_RESULT).read_text())["status"] == "failed"


def test_second_scheduler_of_the_run(workers: Workers) -> None:
    first = workers.start_scheduler()
    assert "in use by another scheduler" in _fails(workers)
    assert first.poll() is None
    first.kill()
    first.wait(DEADLINE_S)


def test_ends_when_its_parent_is_gone(workers: Workers) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    try:
        child = _start_with_pipe(workers, reader)
        os.close(writer)
        assert child.wait(DEADLINE_S) == os.EX_TEMPFAIL
    finally:
        os.close(reader)


def _start_with_pipe(workers: Workers, reader: int):
    child = workers.start("scheduler", pass_fds=(reader,), **{keys.ENV_PARENT_WATCH_FD: str(reader)})
    workers.endpoint("scheduler")
    return child
