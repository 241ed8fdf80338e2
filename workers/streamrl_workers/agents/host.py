"""The agent host: one process that runs the agents of all samples and answers their requests with the model's turns.

```
  task pool ── a turn of the model ──▶ AgentHost ── starts, ends ──▶ program of a sample
            ◀── what follows it ─────     Session  ◀── request, reward ── Endpoint ◀── (loopback)
```
A session is a program and what it has asked. Its program waits in a request until the pool has the model's turn for it; what the
turn is answered with is the program's next request, or its end. Owns the sessions, and how many there are. Invariants:
- The user keeps this one: a program asks the same, given the same item, seed and answers. Where no session has heard exactly
  these turns (another host, an ended one) a new program hears them all again.
- Each wait for a program has a limit. One that waits for the model has none: it is idle, and may be ended for another's sake.
- A key is known to its program alone, and to what runs as the same user.

Loop of a session: consumes requests; produces texts; waits for the program; unblocked by a request, its end and its time limit.
"""

import asyncio
import heapq
import json
import os
import secrets
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from streamrl.errors import UserError
from streamrl.spec.task import AgentSpec
from streamrl_workers.agents.endpoint import Endpoint
from streamrl_workers.agents.program import OUTPUT_BYTES, Program, Programs
from streamrl_workers.agents.transcript import Answer, Ask, EditedError, RefusedError, Template, Transcript, Turn
from streamrl_workers.environments.base import Key, StepResult, digest_of, item_seed
from streamrl_workers.rewards.registry import BadValueError

MAX_STARTS = 2
"""Of a program that is killed from outside in a turn: what looks like that may be its own doing."""
STARTING_PER_CORE = 2
"""Programs that are starting at a time, for each core: a start is work for the processor."""
KEPT_FAULTS = 4096
"""Items whose first program did not ask anything."""
CONFLICT, GONE = 409, 410
PROMPTS_LAST = 1
_Place = TypeVar("_Place")
Begun = Callable[[], None]
"""Told each time before a program is waited for."""


AgentFailure = Literal["raised", "timeout", "died", "bad_value"]
"""Of the task pool's failure kinds."""


class AgentError(RuntimeError):
    """A program did not do its part."""

    def __init__(self, kind: AgentFailure, text: str) -> None:
        super().__init__(text)
        self.kind: AgentFailure = kind


class KilledError(AgentError):
    """A program was ended by a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSource:
    """What the agents of a job are made of."""

    spec: AgentSpec
    directory: Path
    """Where programs run."""
    seed: int
    """The job's."""
    template: Template
    stops: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentItem:
    """An item as its programs read it."""

    split: str
    index: int
    question: str
    answer: str | None
    metadata: Mapping[str, object]

    @property
    def place(self) -> tuple[str, int]:
        """Names the item."""
        return self.split, self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Turns of a sample, of which the last is to be answered."""

    key: Key
    prompt: str
    turns: Sequence[Turn]
    observations: Sequence[str]
    """What followed each turn but the last."""
    ended: bool
    """Whether the last turn ended with the model's end token."""


def open_agents(
    spec: AgentSpec | None, *, seed: int, base_dir: Path, template: Template, stops: Sequence[str]
) -> AgentSource | None:
    """The agents of a job with this seed; None if it has none. Raises `UserError` for a program that is not there."""
    if spec is None:
        return None
    if shutil.which(spec.command[0], path=_path()) is None and not (base_dir / spec.command[0]).is_file():
        raise UserError(
            field="spec.task.agent.command",
            rule="must begin with a program on the PATH or beside the job file",
            got=spec.command[0],
        )
    return AgentSource(spec=spec, directory=base_dir, seed=seed, template=template, stops=stops)


def _path() -> str:
    """`python` is the one that runs this."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


class Session:
    """One program and its requests."""

    def __init__(self, source: AgentSource) -> None:
        self._source = source
        self._transcript = Transcript(source.template, stops=source.stops)
        self._waiting: asyncio.Future[Answer] | None = None
        self._asked = b""
        """Digest of the newest request that was taken."""
        self._answer: Answer | None = None
        """To it, if there is one."""
        self._following: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """Text of the next request; None: the program has ended."""
        self._reward = 0.0
        self.key = secrets.token_hex(16)
        self.program: Program | None = None
        self.prompt = ""
        self.heard: bytes = digest_of([])
        """Digest of the turns that it has heard."""
        self.full = False
        """It has asked for more turns than there are."""

    @property
    def idle(self) -> bool:
        """Its program waits for the model."""
        return self._waiting is not None and self.program is not None and not self.program.killed

    # ---- for the endpoint

    async def ask(self, ask: Ask, *, again: bool) -> Answer:
        """The model's answer to a request."""
        digest = ask.digest
        if again and digest == self._asked and self._answer is not None:
            return self._answer
        if self._waiting is not None:
            if digest != self._asked:
                raise RefusedError(
                    "another request of this session waits; a session has one at a time", status=CONFLICT
                )
            self._refuse_waiting("the same request came again", status=CONFLICT)
        else:
            self._take(ask)
            self._asked, self._answer = digest, None
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting = waiting
        return await waiting

    def earn(self, reward: float) -> None:
        """Add to the reward of the turn."""
        self._reward += reward

    def _take(self, ask: Ask) -> None:
        if self._following.done():
            raise RefusedError("this sample has ended", status=GONE)
        most = self._source.spec.max_observation_chars
        try:
            text = self._transcript.text_of(ask)
        except EditedError as error:
            self._following.set_exception(error)
            raise RefusedError(str(error), code="history_edited") from None
        if self._transcript.answers and len(text) > most:
            rule = f"a request adds {len(text)} characters, and maxObservationChars is {most}"
            raise RefusedError(rule, param="messages", code="context_length_exceeded")
        if self._transcript.answers >= self._source.spec.max_turns:
            self.full = True
            raise RefusedError(f"the sample has had its {self._source.spec.max_turns} turns", code="max_turns")
        self._transcript.accept(ask)
        self._following.set_result(text)

    def _refuse_waiting(self, text: str, *, status: int) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(RefusedError(text, status=status))
            self._waiting.exception()  # its connection may be gone: nobody has to look
        self._waiting = None

    # ---- for the host

    def ended(self, code: int) -> None:
        """The program has ended."""
        assert self.program is not None
        self.program.killed = True
        self._refuse_waiting("the program has ended", status=GONE)
        if self._following.done():
            return
        fault = self._fault(self.program, code)
        if fault is None:
            self._following.set_result(None)
        else:
            self._following.set_exception(fault)

    def _fault(self, program: Program, code: int) -> AgentError | None:
        said = f": {program.last_line}" if program.last_line else ""
        if program.flooded:
            return AgentError("bad_value", f"wrote more than {OUTPUT_BYTES >> 20} MiB of output{said}")
        if self.full or code == 0:
            return None
        if code < 0:
            return KilledError("died", f"ended by signal {-code}{said}")
        return AgentError("raised", f"ended with status {code}{said}")

    def say(self, turn: Turn) -> None:
        """Answer the request that waits. Raises `KilledError` if its program has ended since."""
        if self._waiting is None:
            raise KilledError("died", "ended while it waited for the model")
        waiting, self._waiting = self._waiting, None
        self._following = asyncio.get_running_loop().create_future()
        self._answer = self._transcript.answer(turn)
        waiting.set_result(self._answer)

    async def follows(self) -> str | None:
        """Text of the program's next request; None if it has ended well.

        Raises:
            AgentError: it has ended badly, or does nothing.
            EditedError: it has asked something else than a continuation.
        """
        limit_s = self._source.spec.timeout_seconds
        try:
            async with asyncio.timeout(limit_s):
                return await self._following
        except TimeoutError:
            if self.full:
                return None
            after = f"after turn {self._transcript.answers}" if self._transcript.answers else "after its start"
            raise AgentError("timeout", f"neither asked nor ended within {limit_s:g} s {after}") from None

    async def first(self) -> str:
        """Text of its first request. Raises as `follows`, also where it ends before."""
        text = await self.follows()
        if text is None:
            raise AgentError("bad_value", "ended before it asked for a turn")
        return text

    def earned(self) -> float:
        """Reward since the last call."""
        reward, self._reward = self._reward, 0.0
        return reward

    def close(self) -> None:
        """End the program."""
        if self.program is not None:
            self.program.kill()
        self._refuse_waiting("this sample has ended", status=GONE)


@dataclass(order=True)
class _Starter:
    """Somebody who waits to start a program."""

    priority: int
    number: int
    turn: "asyncio.Future[None]" = field(compare=False)


class AgentHost:
    """The sessions of a job. `start` and `close` frame its life."""

    def __init__(self, source: AgentSource) -> None:
        self._source = source
        self._programs = Programs()
        self._endpoint = Endpoint(self._session_of)
        self._sessions: dict[str, Session] = {}
        """By key."""
        self._spares: OrderedDict[tuple[str, int], Session] = OrderedDict()
        """Programs that gave an item its prompt and go on as its first sample, by the item's place."""
        self._idle: OrderedDict[Key, Session] = OrderedDict()
        """Those between two turns, least recently used first."""
        self._faults: OrderedDict[tuple[str, int], Exception] = OrderedDict()
        self._starters: list[_Starter] = []
        self._starts = 0
        self._starting = 0
        self._admitted = 0
        """Starters whose turn it is and whose program is not there yet."""
        self._most_starting = STARTING_PER_CORE * (os.cpu_count() or 1)
        self._environment: dict[str, str] = {}
        self.replayed = 0
        """Turns played again."""

    async def start(self) -> None:
        """Open the endpoint."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
        past = ",".join(filter(None, (os.environ.get("NO_PROXY", os.environ.get("no_proxy")), "127.0.0.1")))
        address = await self._endpoint.start()
        self._environment = kept | {"PATH": _path(), "OPENAI_BASE_URL": address, "NO_PROXY": past, "no_proxy": past}

    async def close(self) -> None:
        """End everything."""
        await self._endpoint.close()
        self._programs.close()

    def _session_of(self, key: str) -> Session | None:
        return self._sessions.get(key)

    # ---- what the pool asks

    async def prompt(self, item: AgentItem, *, begun: Begun) -> str | None:
        """The first request of a program that is started for an item. None: it asked nothing; that its samples will hear."""
        try:
            session = await self._begin(item, priority=PROMPTS_LAST, begun=begun)
        except (AgentError, BadValueError) as error:
            self._faults[item.place] = error
            if len(self._faults) > KEPT_FAULTS:
                self._faults.popitem(last=False)
            return None
        self._keep(self._spares, item.place, session)
        return session.prompt

    async def play(self, item: AgentItem, play: Play, *, begun: Begun) -> StepResult:
        """What follows the last turn.

        Raises:
            AgentError: the program ended badly, or does nothing.
            BadValueError: it does not ask as it should.
        """
        for start in range(1, MAX_STARTS + 1):
            try:
                return await self._play(item, play, begun=begun)
            except KilledError:
                if start == MAX_STARTS:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _play(self, item: AgentItem, play: Play, *, begun: Begun) -> StepResult:
        session = await self._session(item, play, begun=begun)
        try:
            begun()
            session.say(play.turns[-1])
            text = await session.follows()
        except BaseException:
            self._end(session)
            raise
        reward = session.earned()
        if text is None:
            self._end(session)
            return StepResult(observation="", reward=reward, done=not session.full)
        session.heard = digest_of([turn.text for turn in play.turns])
        self._keep(self._idle, play.key, session)
        glue = self._source.template.without_end(text) if play.ended else text
        return StepResult(observation=glue, reward=reward, done=False)

    async def _session(self, item: AgentItem, play: Play, *, begun: Begun) -> Session:
        """One that has heard all turns but the last."""
        before = play.turns[:-1]
        session = self._idle.pop(play.key, None)
        if session is None and not before:
            session = self._spares.pop(item.place, None)
        if session is not None:
            heard = session.heard == digest_of([turn.text for turn in before])
            if session.idle and heard and session.prompt == play.prompt:
                return session
            self._end(session)
        if fault := self._faults.get(item.place):
            raise fault
        session = await self._begin(item, priority=0, begun=begun)
        try:
            await self._replay(session, play, begun=begun)
        except BaseException:
            self._end(session)
            raise
        return session

    async def _replay(self, session: Session, play: Play, *, begun: Begun) -> None:
        if session.prompt != play.prompt:
            where = _difference(session.prompt, play.prompt)
            raise EditedError(f"its first request differs from that of the item's first program: {where}")
        for number, (turn, observation) in enumerate(zip(play.turns, play.observations, strict=False), start=1):
            self.replayed += 1
            begun()
            session.say(turn)
            text = await session.follows()
            if text is None:
                raise EditedError(
                    f"started again, it ended at turn {number} of {len(play.turns)}, which it had not done before"
                )
            if observation not in (text, self._source.template.without_end(text)):
                raise EditedError(
                    f"started again, it went on otherwise behind turn {number}: {_difference(text, observation)}"
                )
            session.earned()

    # ---- programs

    async def _begin(self, item: AgentItem, *, priority: int, begun: Begun) -> Session:
        """A session whose program has asked for its first turn."""
        self._starts += 1
        starter = _Starter(priority, self._starts, asyncio.get_running_loop().create_future())
        heapq.heappush(self._starters, starter)
        self._pump()
        await starter.turn
        self._admitted -= 1
        session = Session(self._source)
        try:
            begun()
            self._run(session, item)
            session.prompt = await session.first()
        except BaseException:
            self._end(session)
            raise
        finally:
            self._starting -= 1
            self._pump()
        return session

    def _run(self, session: Session, item: AgentItem) -> None:
        seed = item_seed(self._source.seed, split=item.split, index=item.index)
        said = {"question": item.question, "answer": item.answer, "metadata": dict(item.metadata), "seed": seed}

        def ended(code: int) -> None:
            session.ended(code)
            self._pump()

        self._sessions[session.key] = session
        try:
            session.program = self._programs.start(
                self._source.spec.command,
                directory=self._source.directory,
                environment=self._environment | {"OPENAI_API_KEY": session.key},
                said=json.dumps(said, default=str).encode() + b"\n",
                on_end=ended,
            )
        except OSError as error:
            raise AgentError("raised", f"cannot be started: {error.strerror}: {error.filename}") from error

    def _keep(self, kept: OrderedDict[_Place, Session], place: _Place, session: Session) -> None:
        other = kept.pop(place, None)
        if other is not None:
            self._end(other)
        kept[place] = session
        self._pump()

    def _end(self, session: Session) -> None:
        self._sessions.pop(session.key, None)
        session.close()
        self._pump()

    def _pump(self) -> None:
        """Let those start who can."""
        while self._starters and self._starting < self._most_starting and self._has_room():
            starter = heapq.heappop(self._starters)
            if not starter.turn.done():
                self._starting += 1
                self._admitted += 1
                starter.turn.set_result(None)

    def _has_room(self) -> bool:
        """Whether one more program may run; an idle one is ended for it: the newest spare, or else the least recently used."""
        if self._programs.running + self._admitted < self._source.spec.sessions:
            return True
        if not self._spares and not self._idle:
            return False
        _, session = self._spares.popitem() if self._spares else self._idle.popitem(last=False)
        self._sessions.pop(session.key, None)
        session.close()
        return True


def _difference(text: str, before: str) -> str:
    """Where two texts part."""
    place = next(
        (place for place, (one, other) in enumerate(zip(text, before, strict=False)) if one != other),
        min(len(text), len(before)),
    )
    return f"character {place} on, {text[place : place + 40]!r} where {before[place : place + 40]!r} was"
