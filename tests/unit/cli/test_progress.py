"""The status endpoint as the runner reads it: whatever answers there, the run goes on; and when no progress is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrl import keys
from streamrl.spec import parse_job
from streamrl_cli.runner import progress
from streamrl_cli.runner.folder import RunFolder, create_folder
from streamrl_cli.runner.progress import RunProgress, StallWatch, fetch_status
from streamrl_workers.process.silences import Silence, announce
from support.jobs import simulated_job

FIRST_S = 300.0
STATES = ("planned", "issued", "running", "finished", "scored", "delivered", "consumed", "dropped")


def page(
    *, step: int = 0, tokens: int = 0, trainer: dict[str, float] | None = None, wait_s: float = 0.0, **groups: int
) -> dict[str, Any]:
    return {
        "attempt": 1,
        "step": step,
        "checkpoint_step": None,
        "last_evaluation": None,
        "groups": dict.fromkeys(STATES, 0) | groups,
        "generators": [
            {"id": "generator-a-0", "tokens": tokens, "bubbles": {"busy": 5.0, "pipeline_staleness": wait_s}}
        ],
        "trainer": None if trainer is None else {"id": "trainer-0", "bubbles": trainer},
    }


class Watched:
    """A watch and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.watch = StallWatch(first_s=FIRST_S, looked_s=0.0)

    def seconds(self, count: float, numbers: dict[str, Any], *, step_s: float | None = None) -> list[str]:
        """A look each second; what was said, with the second."""
        said = []
        for _ in range(round(count)):
            self.now_s += 1.0
            if line := self.watch.look(numbers, now_s=self.now_s, step_s=step_s):
                said.append(line)
        return said


def test_each_process_and_what_it_waits_for() -> None:
    run = Watched()
    run.seconds(1, page(trainer={"busy": 1.0, "pipeline_no_samples": 9.0}, handed=4))
    said = run.seconds(FIRST_S, page(trainer={"busy": 280.0, "pipeline_no_samples": 10.0}, wait_s=299.0, handed=4))
    assert said == [
        "no progress for 300 s, though every process is alive: trainer-0 is at work (busy); "
        "generator-a-0 waits (staleness); groups: 4 handed"
    ]


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({}, "the scheduler has not answered yet"),
        (page(), "the trainer is not connected"),
        ({**page(trainer={"busy": 1.0}), "generators": []}, "no generator is connected"),
    ],
)
def test_who_is_missing_is_named(numbers: dict[str, Any], says: str) -> None:
    (line,) = Watched().seconds(FIRST_S + 1, numbers)
    assert says in line


@pytest.mark.parametrize("moved", [page(step=1), page(tokens=1), page(finished=1), page(dropped=1)])
def test_any_progress_begins_anew(moved: dict[str, Any]) -> None:
    run = Watched()
    assert not run.seconds(FIRST_S, page())
    assert not run.seconds(FIRST_S, moved)
    assert len(run.seconds(1, moved)) == 1


def test_what_is_only_done_again_is_no_progress() -> None:
    run = Watched()
    run.seconds(1, page(step=5, tokens=100, finished=3))
    said = [
        line for _ in range(20) for line in run.seconds(10, page(step=4, tokens=50)) + run.seconds(10, page(step=5))
    ]
    assert len(said) == 1


def test_the_next_line_comes_after_twice_the_time() -> None:
    run = Watched()
    run.seconds(1, page())
    assert len(run.seconds(7 * FIRST_S, page())) == 3


def test_steps_that_always_take_long_are_no_stall() -> None:
    run = Watched()
    run.seconds(1, page())
    assert not run.seconds(3 * 200 - 1, page(), step_s=200.0)
    assert run.seconds(1, page(), step_s=200.0)


def test_a_machine_that_slept_has_not_waited() -> None:
    run = Watched()
    run.seconds(1, page())
    run.now_s += 8 * 3600
    assert not run.seconds(FIRST_S - 10, page())


DEADLINE_S = 120
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


async def endless(piece: bytes) -> AsyncIterator[bytes]:
    yield HEAD
    while True:
        yield piece


async def trickle(pause_s: float) -> AsyncIterator[bytes]:
    yield HEAD
    while True:
        yield b" "
        await asyncio.sleep(pause_s)


async def whole(body: bytes) -> AsyncIterator[bytes]:
    yield HEAD + body


@asynccontextmanager
async def answering(tmp_path: Path, answer: Callable[[], AsyncIterator[bytes]]) -> AsyncIterator[RunFolder]:
    """A run folder whose scheduler answers so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            async with aclosing(answer()) as pieces:
                async for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    folder = create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path / "runs")
    endpoint = folder.file(keys.DIR_ENDPOINTS, "scheduler.json")
    endpoint.parent.mkdir(exist_ok=True)
    endpoint.write_text(json.dumps({"signals": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"}))
    async with server:
        yield folder


async def test_numbers_are_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(progress, "STATUS_TIMEOUT_S", DEADLINE_S)
    async with answering(tmp_path, lambda: whole(b'{"step": 3}')) as folder:
        assert await fetch_status(folder) == {"step": 3}


@pytest.mark.parametrize(
    "answer",
    [
        lambda: endless(b" " * 65536),
        lambda: trickle(0.01),
        lambda: whole(b"[" * 1_000_000),
        lambda: whole(b'[["step", 3]]'),
        lambda: whole(b'{"step": 3'),
        lambda: whole(b'{"step": ' + b"9" * 5000 + b"}"),
        lambda: whole(b"\xff\xfe"),
    ],
    ids=["endless", "trickle", "nested", "list", "half", "digits", "bytes"],
)
async def test_what_is_no_page_is_none(tmp_path: Path, monkeypatch, answer: Callable[[], AsyncIterator[bytes]]) -> None:
    monkeypatch.setattr(progress, "STATUS_TIMEOUT_S", 0.5)
    async with answering(tmp_path, answer) as folder, asyncio.timeout(DEADLINE_S):
        assert await fetch_status(folder) is None


def test_how_long_a_step_takes_does_not_follow_the_wall_clock(tmp_path: Path) -> None:
    folder = create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path / "runs")
    run = RunProgress(folder=folder)
    for step, jump_s in enumerate((0.0, -3600.0, 3.15e8)):
        line = {"step": step, "reward_mean": 0.0, "elapsed_s": 2.0 * step, "time_s": 1.7e9 + 2 * step + jump_s}
        run.take_page({"last_step": line})
    assert run.step_s() == 2.0


def test_notices_of_an_earlier_life_of_the_run_are_not_announced(tmp_path: Path) -> None:
    folder = create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path / "runs")
    heartbeat = folder.file(keys.DIR_HEARTBEATS, "trainer-0")
    announce(heartbeat, Silence(message="trainer-0 has shown no sign of life for 9 s", holds=True))
    run = RunProgress(folder=folder)
    assert list(run.silence_lines()) == []
    announce(heartbeat, Silence(message="trainer-0 shows signs of life again", holds=False))
    assert list(run.silence_lines()) == ["trainer-0 shows signs of life again"]
