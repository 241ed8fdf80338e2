"""What a generator or a trainer says to the scheduler: refused, or the run stays sound and ends, whoever else is in it.

An input is messages between `MARK`s. `generate` and `train` open a connection; a message that is JSON is sent as the event that it names, in
frames; any other is sent as it is. After it the rest of the world must bring the run to its end, and its journal must be one to go on from.
"""

import asyncio
import json
import math
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from fuzz.harness import Door, Enter
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal.store import WriterLock, make_if_new, open_for_writing
from streamrl_workers.scheduler.journal.tables import load
from streamrl_workers.scheduler.server import peer_messages
from streamrl_workers.stream.messages import frames
from support.core_world import settings
from support.peer_world import PeerWorld

MARK = b"\n%%\n"
EVENTS = {b"generate": pb.GeneratorEvent, b"train": pb.TrainerEvent}
JOB = settings(batch_groups=2, dispatch="auto")
SLOTS = (2, 1)
MOST_MESSAGES = 64
"""The rest is not sent: the pages are read after each."""


@contextmanager
def opened() -> Iterator[Enter]:
    """A run in the middle, made anew for each input."""
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(_tables(Path(directory) / "journal.sqlite")) as tables,
        asyncio.Runner() as runner,
    ):
        yield lambda data: runner.run(_take(data, tables, Path(directory)))


def _tables(path: Path) -> sqlite3.Connection:
    lock = WriterLock(path)
    lock.acquire()
    make_if_new(path, lock)
    lock.release()
    return open_for_writing(path)


async def _take(data: bytes, tables: sqlite3.Connection, folder: Path) -> str:
    world = PeerWorld(JOB, slots=SLOTS, tables=tables, folder=folder)
    try:
        world.start_trainer()
        for name in ("a", "b"):
            world.join_generator(name)
        world.progress_once()
        world.progress_once()
        refusals = await _visit(world, data)
        outcome = f"{[_kind(refusal) for refusal in refusals]} {_facts(world)}"
        if not world.failed:
            _end(world)
        load(tables)
        return outcome
    finally:
        world.close()


async def _visit(world: PeerWorld, data: bytes) -> list[str]:
    """Say it all; why each connection was refused, or "". They stay open until the end, the newest speaks."""
    method, strangers = b"", []
    for message in data.split(MARK)[:MOST_MESSAGES]:
        if message in EVENTS:
            method = message
            strangers.append(world.call(method.decode()))
        for frame in _frames(method, message) if strangers and message != method else ():
            await strangers[-1].say(frame)
            world.look()
            world.progress_once()
        world.read_status()
    world.status.metrics()
    refusals = [await stranger.end() for stranger in strangers]
    world.look()
    return refusals


def _frames(method: bytes, message: bytes) -> list[bytes]:
    try:
        said = _sayable(json.loads(message))
        json.dumps(said, ensure_ascii=False).encode()  # a lone surrogate breaks protobuf's own reader
        event = json_format.ParseDict(said, EVENTS[method](), ignore_unknown_fields=True)
    except (ValueError, RecursionError, AttributeError, TypeError, json_format.ParseError):
        return [message]
    return [frame.SerializeToString() for frame in frames(event.SerializeToString())]


def _sayable(value: Any) -> Any:
    """Numbers that JSON has not, as protobuf writes them."""
    match value:
        case dict():
            return {key: _sayable(item) for key, item in value.items()}
        case list():
            return [_sayable(item) for item in value]
        case float() if not math.isfinite(value):
            return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    return value


def _end(world: PeerWorld) -> None:
    """The strangers are gone; a new trainer begins at the newest checkpoint that the journal knows."""
    world.commit(len(world.unsynced))
    told = [record.step for record in world.durable if isinstance(record, rec.Checkpointed)]
    if world.trainer is None or not world.trainer.connected:
        world.checkpoint = max(told, default=0)
        world.start_trainer()
    world.run_out()


def _kind(text: str) -> str:
    """Without what is of this input."""
    return "".join(letter for letter in text if not letter.isdigit())[:70]


def _facts(world: PeerWorld) -> str:
    view = world.core.view()
    records = sorted({type(record).__name__ for record in world.durable})
    return f"{records} {view.ignored_progress > 0} {view.reissued_samples > 0} {view.step} {view.checkpoint} {bool(world.failed)}"


def plant(patch: pytest.MonkeyPatch) -> None:
    """Any floating number passes."""
    check = peer_messages._check_value
    patch.setattr(peer_messages, "_check_value", lambda name, value: isinstance(value, float) or check(name, value))


def _made(lease: int, **more: Any) -> dict[str, Any]:
    """One token of version 0."""
    spans = [{"tokens": 1, "step": "0", "attempt": 1}]
    return {"lease": f"{lease}", "tokens": "AQAAAA==", "logprobs": "AACAvw==", "spans": spans, **more}


def _ended(lease: int) -> dict[str, Any]:
    return _made(lease, finishReason="stop", text="t", promptTokens="AAAAAAAAAAA=", generateS=0.5)


FIRST_LEASE = 1_000_003
"""Of those that the stranger gets."""


def _heartbeat(number: int) -> dict[str, Any]:
    """The one after `number` others."""
    times = {f"{2 * batch}": {"steps": 40 * number, "tokens": 80 * number, "seconds": 0.5 * number} for batch in (1, 2)}
    parts = {"busy": 1.0 * number, "pipeline_staleness": 0.5 * number}
    return {
        "heartbeat": {
            "active": 1,
            "bubbleSeconds": parts,
            "wallSeconds": 2.0 * number,
            "tokens": 9 * number,
            "stepTimes": times,
        }
    }


VERSION = {"attempt": 1, "step": "0", "hash": "aA=="}
GENERATOR = [
    {"hello": {"generatorId": "c", "instance": "x", "pool": "p", "slots": 4, "version": VERSION}},
    {"progress": {"items": [_made(FIRST_LEASE), _ended(FIRST_LEASE + 1)]}},
    _heartbeat(1),
    {"progress": {"items": [_ended(FIRST_LEASE), _made(FIRST_LEASE + 2, finishReason="error", error="it broke")]}},
    {"weightsFailed": {"version": {"attempt": 1, "step": "1"}, "error": "gone"}},
    {"weightsLoaded": {"version": {"attempt": 1, "step": "1", "hash": "aA=="}, "engineHash": "aA==", "loadS": 0.5}},
    {"leaving": {}},
    {"drained": {}},
]
OTHER = {"hello": {"generatorId": "d", "instance": "x", "pool": "q", "slots": 1}}
STEP = {"step": "0", "groupIds": ["0", "1"], "metrics": {"loss": 0.5, "reward_std": 0.1}}
TRAINER = [
    {"hello": {"trainerId": "trainer-0", "instance": "x", "step": "0", "weightsAddress": "h:1"}},
    {"credit": {"bytes": "100000"}},
    {"published": {"version": VERSION | {"attempt": 2}, "sizeBytes": "1"}},
    {"heartbeat": {"bubbleSeconds": {"busy": 1.0}, "wallSeconds": 2.0}},
    {"stepDone": STEP},
    {"published": {"version": {"attempt": 2, "step": "1", "hash": "aA=="}, "sizeBytes": "1"}},
    {"syncJournal": {"step": "1"}},
    {"checkpointed": {"step": "1", "path": "step-1", "oldestStep": "1"}},
]
SAME = {
    "hello": {"trainerId": "trainer-0", "instance": "t1", "step": "0", "heldGroups": ["0"], "weightsAddress": "h:1"}
}
AGAIN = {
    "hello": {"trainerId": "trainer-0", "instance": "x", "step": "1", "unrecordedStep": STEP, "checkpointStep": "1"}
}


def _talk(method: bytes, events: Iterable[Any], *, raw: bool = False) -> bytes:
    """One connection as an input; `raw`: in frames."""
    texts = [json.dumps(event).encode() for event in events]
    frames_of = [frame for text in texts for frame in _frames(method, text)]
    return MARK.join([method, *(frames_of if raw else texts)])


HONEST = [
    _talk(b"generate", [GENERATOR[0], _heartbeat(1)]),
    _talk(b"train", [TRAINER[0], TRAINER[3]]),
    *(
        _talk(method, events, raw=raw)
        for raw in (False, True)
        for method, events in ((b"generate", GENERATOR), (b"train", TRAINER))
    ),
    _talk(b"train", [SAME, *TRAINER[1:4]]),
    _talk(b"train", TRAINER[:5]) + MARK + _talk(b"train", [AGAIN, *TRAINER[1:4]]),
    _talk(b"generate", GENERATOR[:2]) + MARK + _talk(b"generate", GENERATOR[:3]),
    _talk(b"generate", [GENERATOR[0], *map(_heartbeat, range(4))])
    + MARK
    + _talk(b"generate", [OTHER, *map(_heartbeat, range(4))]),
]
DOOR = Door(
    name="protocol",
    opened=opened,
    honest=HONEST,
    words=[
        *(MARK, MARK + b"generate" + MARK, MARK + b"train" + MARK, MARK + b"{}" + MARK),
        *(
            b'"a"',
            b'"t1"',
            b'"9223372036854775807"',
            b'"18446744073709551615"',
            b"1000003",
            b'"attempt":2',
            b"\x10\x01",
            b"\n\xff\xff\xff\x7f",
        ),
    ],
    most_input=1 << 20,
    most_held=48 << 20,
    plant=plant,
)
