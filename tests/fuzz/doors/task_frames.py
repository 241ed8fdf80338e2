"""What a process of the task pool writes to its socket: a result that is in order, or a refusal; user code can write there, too.

An input is tried as the bytes that the pool reads, and as lines that are put in frames. Each frame is held against each kind of request.
"""

import asyncio
import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fuzz.harness import Door, Enter
from streamrl.errors import UserError
from streamrl.spec.tasks.rewards import Reward
from streamrl_workers.process import framing
from streamrl_workers.process.framing import ForeignBytesError, Frames
from streamrl_workers.tasks import protocol
from streamrl_workers.tasks.protocol import check_row, result_of
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Request, Score, ScoreSample, TurnAnswer

REWARDS = (Reward.model_validate({"name": "right", "verifier": {}}),)
WITH_ENDPOINT = (*REWARDS, Reward.model_validate({"name": "judge", "http": {"url": "http://judge/"}}))
REQUESTS: tuple[Request, ...] = (
    NeedPrompts(split="train", first_index=0, count=1),
    ScoreSample(group_id=0, sample_index=0, split="train", prompt_index=0, completion="a"),
    PlayTurn(group_id=0, sample_index=0, lease=0, split="train", prompt_index=0, completions=("a",), last_token=0),
)
ROWS: tuple[Any, ...] = (
    ["a prompt", ["an answer", "{}"], None],
    [[0.5], None, None],
    [[0.0], None, "right: the verifier raised"],
    [[0.5, None], "a body", None],
    ["an observation", 0.5, False, False],
    {"kind": "timeout", "error": "took longer"},
)
MARK = framing.encode(0)[:4]
PIECE_BYTES = 7


@contextmanager
def opened() -> Iterator[Enter]:
    """The pool's reader and its checks."""
    with asyncio.Runner() as runner:

        def enter(data: bytes) -> str:
            lines = b"".join(map(_framed, data.splitlines()))
            return f"{runner.run(_take(data))}; framed: {runner.run(_take(lines))}"

        yield enter


def _framed(body: bytes) -> bytes:
    return MARK + struct.pack("<I", len(body)) + body


async def _take(data: bytes) -> str:
    whole = await _frames(data, len(data) or 1)
    assert whole == await _frames(data, PIECE_BYTES), "how the bytes arrive must not matter"
    return " ".join(sorted({_answered(request, frame) for frame in whole for request in REQUESTS})) or "nothing"


async def _frames(data: bytes, size: int) -> list[Any]:
    """What is read; a refusal is the last of it."""
    reader, found = asyncio.StreamReader(), []
    for at in range(0, len(data), size):
        reader.feed_data(data[at : at + size])
    reader.feed_eof()
    frames = Frames(reader)
    try:
        while (frame := await frames.read(limit_s=60.0)) is not None:
            found.append(frame)
    except ForeignBytesError as error:
        found.append(str(error).partition(" ")[0])
    return [json.dumps(frame) for frame in found]  # NaN is NaN


def _answered(request: Request, text: str) -> str:
    return "/".join(_taken(request, json.loads(text), rewards=rewards) for rewards in (REWARDS, WITH_ENDPOINT))


def _taken(request: Request, row: Any, *, rewards: tuple[Reward, ...]) -> str:
    try:
        check_row(request, row, rewards=rewards)
        if isinstance(request, ScoreSample) and isinstance(row, list) and row[1] is not None:
            row[1].encode()
            return "for endpoints"
        result = result_of(request, row, rewards=rewards)
    except ForeignBytesError:
        return "foreign"
    except UserError as error:
        str(error).encode()
        return "no prompt"
    repr(result).encode()
    if isinstance(result, Score | TurnAnswer):
        assert result.reward is None or math.isfinite(result.reward), result
    return type(result).__name__


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number is taken for a reward."""
    monkeypatch.setattr(protocol, "is_finite", lambda value: isinstance(value, float))


LINES = [json.dumps(row).encode() for row in ROWS]
DOOR = Door(
    name="task_frames",
    opened=opened,
    honest=[*LINES, b"\n".join(LINES), b"".join(map(framing.encode, ROWS)), framing.encode(ROWS[1])],
    words=[b"NaN", b'"\\ud800"', b"null", b"true", b"\n", framing.encode(0), MARK, b"[[", b'{"kind":"died"'],
    most_input=1 << 16,
    most_held=32 << 20,
    plant=plant,
)
