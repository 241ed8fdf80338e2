"""What the processes of the task pool do once they are forked.

- A worker (`serve`) makes prompts, answers turns and scores completions, one after the other. Whatever the user's functions do
  becomes a row or a failure of the one sample. What cannot be caught here (a hang, the end of the process) is seen by the
  pool from outside: it hears of each stage before it begins. Loop: consumes one request at a time; produces stages and one
  row; waits for the pool; unblocked by the end of its socket. If the fork server dies the kernel kills it.
- The endpoint client (`ask_endpoints`) asks `http` rewards, many samples at once on one event loop, and runs no code of the
  user's. How many are under way is the pool's to decide. Loop: consumes [number, [task, body]]; produces [number, values] or
  [number, failure]; ended by the end of its socket.
"""

import asyncio
import functools
import os
import resource
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import UserError
from streamrl_workers.environments.base import EnvironmentSource, Player
from streamrl_workers.process import framing
from streamrl_workers.rewards.base import Item, VerifierRaisedError
from streamrl_workers.rewards.registry import BadValueError, Part
from streamrl_workers.tasks import protocol
from streamrl_workers.tasks.dataset import MixedDataset
from streamrl_workers.tasks.protocol import MAKING_ITEM, PLAYING, failure, first_stage
from streamrl_workers.tasks.values import FailureKind, NeedPrompts, PlayTurn, Request, ScoreSample, Split

if TYPE_CHECKING:
    from streamrl_workers.agents.session import AgentSource

Row = list[Any] | dict[str, str]

ITEMS_KEPT = 1024
"""A group's samples come close together; an item that fell out is made again."""
MAX_ERROR_CHARS = 500
MAX_PLACE_CHARS = 100
"""Maximum characters of the path of a file with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSources:
    """What a job's tasks are opened as; mostly there is one."""

    dataset: MixedDataset
    parts: Sequence[Sequence[Part]]
    """Of the reward, by task."""
    environments: Sequence[EnvironmentSource | None] = ()
    """By task; None: it has none."""
    agents: "AgentSource | None" = None
    """None: the job has none."""


class Scoring:
    """The work of one worker."""

    def __init__(self, sources: TaskSources, *, entering: Callable[[int], None]) -> None:
        """`entering` is told each stage before it begins, but for `first_stage` if a request begins so."""
        self._dataset = sources.dataset
        self._parts = sources.parts
        self._entering = entering
        self._untold: int | None = None
        self._players = [
            Player(source, entering=lambda: self._enter(PLAYING)) if source else None for source in sources.environments
        ]
        self._item = functools.lru_cache(maxsize=ITEMS_KEPT)(self._make_item)
        self._where = ""
        """Whose code is running, as errors begin."""

    def answer(self, request: Request) -> Row:
        """Row of one request; never raises for what the user's code does."""
        self._untold = first_stage(request)
        try:
            return self._row_in_memory(request)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
            return failure_row(self._where, error)

    def _row_in_memory(self, request: Request) -> Row:
        """Environments of other samples may be what fills the memory: they go, and are made again when their turns come."""
        try:
            return self._row(request)
        except MemoryError:
            self._enter(MAKING_ITEM)  # gigabytes take seconds to go, which are not this sample's
            forgotten = [player.forget() for player in self._players if player is not None]
            if not any(forgotten):
                raise
        return self._row(request)

    def _row(self, request: Request) -> Row:
        self._where = ""
        match request:
            case NeedPrompts():
                return self._prompt(self._item(request.split, request.first_index))
            case PlayTurn():
                return self._play(self._item(request.split, request.prompt_index), request)
            case ScoreSample():
                item = self._item(request.split, request.prompt_index)
                item, task = replace(item, environment_reward=request.environment_reward), self._task(request)
                return self._score(item, request.completion, parts=self._parts[task])

    def _prompt(self, item: Item) -> Row:
        shown = self._dataset.demonstration(item)
        return protocol.prompt_row(item.prompt, answer=item.answer, metadata=item.metadata, shown=shown)

    def _task(self, request: PlayTurn | ScoreSample) -> int:
        return self._dataset.shares.task_of(request.prompt_index)

    def _score(self, item: Item, completion: str, *, parts: Sequence[Part]) -> Row:
        values: list[float | None] = []
        body = raised = None
        for stage, part in enumerate(parts):
            self._where = f"{part.name}: "
            if part.endpoint is None:
                self._enter(stage)
                try:
                    values.append(part.value(completion, item))
                except VerifierRaisedError as error:
                    values.append(0.0)
                    raised = f"{self._where}{_text(error)}"[:MAX_ERROR_CHARS]
            else:
                body = body or part.endpoint.body(completion, item)
                values.append(None)
        return [values, body, raised]

    def _play(self, item: Item, request: PlayTurn) -> Row:
        task = self._task(request)
        player = self._players[task]
        assert player is not None, "a turn was asked for, and the task has no environment"
        self._where = "environment: "
        answer = player.play(
            item,
            split=request.split,
            index=request.prompt_index,
            key=(request.group_id, request.sample_index),
            completions=request.completions,
        )
        chat, text = self._dataset.tasks[task].chat, answer.observation
        if chat is not None and not answer.done:
            self._enter(MAKING_ITEM)
            text = chat.observation(text, end=chat.ends.get(request.last_token, ""))
        return [text, float(answer.reward), bool(answer.done), False]

    def _make_item(self, split: Split, index: int) -> Item:
        self._enter(MAKING_ITEM)
        return self._dataset.item(split, index)

    def _enter(self, stage: int) -> None:
        if stage != self._untold:
            self._entering(stage)
        self._untold = None


def failure_row(where: str, error: BaseException) -> dict[str, str]:
    """The row of an item at which `error` was raised."""
    kind: FailureKind = "raised"
    if isinstance(error, MemoryError):
        _lift_memory_limit()
        return failure("memory", f"{where}ran out of memory")
    if isinstance(error, BadValueError):
        kind, text = "bad_value", _text(error)
    elif isinstance(error, TimeoutError):
        kind, text = "timeout", _text(error)
    elif isinstance(error, UserError):
        text = _text(error)
    else:
        text = f"raised {type(error).__name__}: {_text(error)}"
    return failure(kind, f"{where}{text}"[:MAX_ERROR_CHARS] + _place(error))


_NOT_THE_USERS = tuple(
    {str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)
"""Directories whose code is not the user's own."""


def _place(error: BaseException) -> str:
    """Return ` (FILE, line N)`: the innermost line of the user's own code; empty if the error has none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(("<", *_NOT_THE_USERS))]
    if not own:
        return ""
    path = Path(own[-1].filename)
    shown = next((path.relative_to(entry) for entry in sys.path if entry and path.is_relative_to(entry)), path)
    place = f"{shown}"[-MAX_PLACE_CHARS:].encode("utf-8", "replace").decode("utf-8")
    return f" ({place}, line {own[-1].lineno})"


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split()).encode("utf-8", "replace").decode("utf-8")  # no message carries surrogates
    except Exception:  # noqa: BLE001 - the user's own exception may fail to print
        return "(its text cannot be made)"


def _lift_memory_limit() -> None:
    """Room to report what happened; the worker ends after it."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def serve(connection: socket.socket, sources: TaskSources) -> int:
    """Answer requests until the pool closes the socket. Returns the exit status."""
    scoring = Scoring(sources, entering=lambda stage: connection.sendall(framing.encode(stage)))
    worker_pid = os.getpid()
    while (message := framing.receive(connection)) is not None:
        row = scoring.answer(protocol.decode_request(message))
        if os.getpid() != worker_pid:
            return 0  # a fork that the user's code made and returned from; its parent answers
        connection.sendall(framing.encode(row))
    return 0


def ask_endpoints(connection: socket.socket, sources: TaskSources) -> int:
    """Ask endpoints until the pool closes the socket. Returns the exit status."""
    asked = [[part for part in parts if part.endpoint is not None] for parts in sources.parts]
    return asyncio.run(_ask_endpoints(connection, asked))


async def _ask_endpoints(connection: socket.socket, parts: Sequence[Sequence[Part]]) -> int:
    transport, frames = await framing.open_frames(connection)
    async with asyncio.TaskGroup() as asking:
        while (message := await frames.read(limit_s=framing.FOREVER_S)) is not None:
            number, (task, body) = message
            asking.create_task(_ask(number, body, parts=parts[task], transport=transport), name=f"ask-{number}")
    for part in chain.from_iterable(parts):
        assert part.endpoint is not None, "only such parts are asked here"
        await part.endpoint.close()
    return 0


async def _ask(number: int, body: str, *, parts: Sequence[Part], transport: asyncio.Transport) -> None:
    row: Any = await asyncio.gather(*(_value(part, body) for part in parts))
    failed = [value for value in row if isinstance(value, dict)]
    framing.send(transport, [number, failed[0] if failed else row])


async def _value(part: Part, body: str) -> float | dict[str, str]:
    try:
        return await part.ask(body)
    except Exception as error:  # noqa: BLE001 - whatever an endpoint answers is a failure of the sample
        return failure_row(f"{part.name}: ", error)
