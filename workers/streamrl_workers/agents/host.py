"""The agent host: one process that runs the agents of all samples and answers their requests with the model's turns.

```
  task pool ── a turn of the model ──▶ AgentHost ── starts, ends ──▶ program of a sample, or of many
            ◀── what follows it ─────     AgentSession ◀── request, reward ── Endpoint ◀── (loopback)
```
Owns the sessions, their number, and which program plays which. Invariants:
- The user keeps this one: a program asks the same, given the same item, seed and answers. Where no session has heard exactly
  these turns (another host, an ended one) a program hears them all again.
- A session whose program waits for the model is idle, and may be ended for another's sake.
- A key is known to its program alone, where the system has Landlock; else also to what runs as the same user.
- Where a program that plays several samples ends, each of them is played again in a program of its own: then its end is its own doing.

Loop of a turn: produces the model's answer; waits for the program; unblocked by its next request, its end and its time limit.
"""

import asyncio
import heapq
import json
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from streamrl.errors import UserError
from streamrl.spec.task import AgentSpec
from streamrl_workers.agents.endpoint import Endpoint
from streamrl_workers.agents.program import OUTPUT_BYTES, NoRoomError, Program, Programs
from streamrl_workers.agents.session import AgentError, AgentSession, AgentSource, KilledError, LostError
from streamrl_workers.agents.transcript import EditedError, MessageTemplate, Reading, Turn
from streamrl_workers.environments.base import Key, StepResult, digest_of, item_seed
from streamrl_workers.rewards.registry import BadValueError

MAX_STARTS = 2
"""Of a turn whose program ends in a way that may be its own doing or not."""
STARTING_PER_CORE = 2
"""Programs that are starting at a time, for each core: a start is work for the processor."""
STARTING_S = 2.0
"""After it a start counts no longer: it waits for something else than the processor."""
ROOM_TRIES, ROOM_S = 60, 1.0
"""A start for which the machine has no room: how often it is tried, how far apart."""
KEPT_FAULTS = 4096
"""Items whose first program did not ask anything."""
PROMPTS_LAST = 1
Begun = Callable[[], None]
"""Told each time before a program is waited for."""
_Place = TypeVar("_Place")
_Done = TypeVar("_Done")


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
    observations: Sequence[Reading]
    """What followed each turn but the last."""
    end: str
    """The end token of the last turn; "" if the turn ended otherwise."""


def open_agents(
    spec: AgentSpec | None, *, seed: int, base_dir: Path, template: MessageTemplate, stops: Sequence[str]
) -> AgentSource | None:
    """The agents of a job with this seed; None if it has none. Raises `UserError` for a program that is not there."""
    if spec is None:
        return None
    first, *rest = spec.command
    program = shutil.which(first, path=_path()) or shutil.which(str((base_dir / first).absolute()))
    if program is None:
        raise UserError(
            field="spec.task.agent.command",
            rule="must begin with a program on the PATH or beside the job file",
            got=first,
        )
    spec = spec.model_copy(update={"command": (program, *rest)})
    return AgentSource(spec=spec, directory=base_dir, seed=seed, template=template, stops=stops)


def _path() -> str:
    """`python` is the one that runs this."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


@dataclass(slots=True, kw_only=True, eq=False)
class _Player:
    """A program, and the sessions that it plays."""

    program: Program
    sessions: set[AgentSession] = field(default_factory=set)
    apart: bool = False
    """It plays one sample and no other, although it could."""
    given_up: str = ""
    """Why we have ended it, where that is another sample's doing."""

    def fault(self, code: int, *, alone: bool) -> AgentError | None:
        """What its end means for a session that waits for it; `alone`: it plays one sample, whose end this is."""
        said = f": {self.program.last_line}" if self.program.last_line else ""
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        if self.given_up:
            return LostError("died", self.given_up)
        if alone and self.program.flooded:
            return AgentError("bad_value", f"wrote more than {OUTPUT_BYTES >> 20} MiB of output{said}")
        if alone and code == 0:
            return None
        if not alone or code < 0:
            return KilledError("died", f"ended {how}{said}")
        return AgentError("raised", f"ended {how}{said}")


@dataclass(order=True)
class _Starter:
    """Somebody who waits to begin a session."""

    priority: int
    number: int
    turn: "asyncio.Future[None]" = field(compare=False)


class AgentHost:
    """The sessions of a job. `start` and `close` frame its life."""

    def __init__(self, source: AgentSource) -> None:
        self._source = source
        self._places = source.spec.sessions_per_program or 1
        self._alone = source.spec.sessions_per_program is None
        self._programs = Programs()
        self._programs_of_many: list[_Player] = []
        """Those that play several samples; also with none just now they stay."""
        self._players: dict[AgentSession, _Player] = {}
        self._sessions: dict[str, AgentSession] = {}
        """All that have a program, by key."""
        self._endpoint = Endpoint(self._sessions.get)
        self._spares: OrderedDict[tuple[str, int], AgentSession] = OrderedDict()
        """Those that gave an item its prompt and go on as its first sample, by the item's place."""
        self._idle: OrderedDict[Key, AgentSession] = OrderedDict()
        """Those between two turns, least recently used first."""
        self._faults: OrderedDict[tuple[str, int], Exception] = OrderedDict()
        self._starters: list[_Starter] = []
        self._starts = 0
        self._starting = 0
        self._admitted = 0
        """Starters whose turn it is and whose session is not there yet."""
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

    # ---- what the pool asks

    async def prompt(self, item: AgentItem, *, begun: Begun) -> str | None:
        """The first request of a program that is given an item. None: it asked nothing; that the item's samples will hear."""

        async def begin(apart: bool) -> AgentSession:  # noqa: FBT001 - as `_again` calls it
            try:
                return await self._begin(item, priority=PROMPTS_LAST, begun=begun, apart=apart)
            except AgentError as error:
                if error.kind == "timeout":  # of a busy machine or its own: once more, as all samples hang on it
                    raise KilledError(error.kind, str(error)) from error
                raise

        try:
            session = await _again(begin)
        except (AgentError, BadValueError) as error:
            self._faults[item.place] = error
            if len(self._faults) > KEPT_FAULTS:
                self._faults.popitem(last=False)
            return None
        self._faults.pop(item.place, None)
        self._keep(self._spares, item.place, session)
        return session.prompt

    async def play(self, item: AgentItem, play: Play, *, begun: Begun) -> StepResult:
        """What follows the last turn.

        Raises:
            AgentError: the program ended badly, or does nothing.
            BadValueError: it does not ask as it should.
        """
        return await _again(lambda apart: self._play(item, play, begun=begun, apart=apart))

    async def _play(self, item: AgentItem, play: Play, *, begun: Begun, apart: bool) -> StepResult:
        session = await self._session(item, play, begun=begun, apart=apart)
        reading = await self._answered(session, play.turns[-1], begun=begun)
        reward = session.earned()
        if reading is None:
            if player := self._players.get(session):
                player.program.forget_output()
            self._end(session)
            return StepResult(observation="", reward=reward, done=not session.full)
        session.heard = digest_of([turn.text for turn in play.turns])
        self._keep(self._idle, play.key, session)
        text = reading.text
        if play.end and not reading.context:
            text = self._source.template.without_end(text, end=play.end)
        return StepResult(observation=text, reward=reward, done=False, context=reading.context)

    async def _session(self, item: AgentItem, play: Play, *, begun: Begun, apart: bool) -> AgentSession:
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
        session = await self._begin(item, priority=0, begun=begun, apart=apart)
        if session.prompt != play.prompt:
            self._end(session)
            where = _difference(session.prompt, play.prompt)
            raise EditedError(f"its first request differs from that of the item's first program: {where}")
        await self._replay(session, play, begun=begun)
        return session

    async def _replay(self, session: AgentSession, play: Play, *, begun: Begun) -> None:
        for number, (turn, observation) in enumerate(zip(play.turns, play.observations, strict=False), start=1):
            self.replayed += 1
            reading = await self._answered(session, turn, begun=begun)
            session.earned()
            if reading is not None and self._is_same(reading, observation):
                continue
            self._end(session)
            how = (
                "it ended"
                if reading is None
                else f"it went on otherwise: {_difference(reading.text, observation.text)}"
            )
            raise EditedError(f"started again, at turn {number} of {len(play.turns)} {how}")

    def _is_same(self, reading: Reading, before: Reading) -> bool:
        """Whether a request has the model read what it read `before`, maybe without the end of its turn."""
        if reading.context or before.context:
            return reading == before
        template = self._source.template
        ended = {template.without_end(reading.text, end=end) for end in template.ends.values()}
        return before.text in ended | {reading.text}

    async def _answered(self, session: AgentSession, turn: Turn, *, begun: Begun) -> Reading | None:
        """Give the program a turn of the model; what follows it. A session whose program fails has ended."""
        try:
            begun()
            session.say(turn)
            return await session.follows()
        except BaseException as error:
            self._end(session, error=error)
            raise

    # ---- programs

    async def _begin(self, item: AgentItem, *, priority: int, begun: Begun, apart: bool) -> AgentSession:
        """A session whose program has asked for its first turn."""
        self._starts += 1
        starter = _Starter(priority, self._starts, asyncio.get_running_loop().create_future())
        heapq.heappush(self._starters, starter)
        self._pump()
        await starter.turn
        session = AgentSession(self._source)
        over = asyncio.get_running_loop().call_later(STARTING_S, self._started)
        try:
            try:
                await self._give(session, item, begun=begun, apart=apart)
            finally:
                self._admitted -= 1
            session.prompt = await session.first()
        except BaseException as error:
            self._end(session, error=error)
            raise
        finally:
            if over.when() > asyncio.get_running_loop().time():
                over.cancel()
                self._started()
        return session

    def _started(self) -> None:
        self._starting -= 1
        self._pump()

    async def _give(self, session: AgentSession, item: AgentItem, *, begun: Begun, apart: bool) -> None:
        """Have a program play the item; `apart`: in one of its own."""
        seed = item_seed(self._source.seed, split=item.split, index=item.index)
        line = {"question": item.question, "answer": item.answer, "metadata": dict(item.metadata), "seed": seed}
        if not self._alone:
            line["api_key"] = session.key
        for tries_left in reversed(range(ROOM_TRIES)):
            begun()
            try:
                player = self._player(session, apart=apart or self._alone)
                break
            except NoRoomError as error:
                if not tries_left:
                    raise AgentError("raised", f"cannot be started: {error.strerror}") from error
                self._drop_idle()
                await asyncio.sleep(ROOM_S)
        player.sessions.add(session)
        self._players[session] = player
        self._sessions[session.key] = session
        player.program.say(json.dumps(line, default=str).encode() + b"\n", last=self._alone)
        if player.program.deaf and not player.apart:
            raise KilledError("died", "its program reads no more items")

    def _player(self, session: AgentSession, *, apart: bool) -> _Player:
        """One that has a place for the session; else a new one."""
        for player in () if apart else self._programs_of_many:
            if not (player.program.killed or player.program.deaf) and len(player.sessions) < self._places:
                return player
        player = self._new_player({"OPENAI_API_KEY": session.key} if self._alone else {})
        player.apart = apart
        if not apart:
            self._programs_of_many.append(player)
        return player

    def _new_player(self, variables: Mapping[str, str]) -> _Player:
        def ended(code: int) -> None:
            if player in self._programs_of_many:
                self._programs_of_many.remove(player)
            for session in list(player.sessions):
                fault = player.fault(code, alone=self._alone)
                if session.idle:
                    self._forget(session)
                session.end(fault)
            self._pump()

        try:
            program = self._programs.start(
                self._source.spec.command,
                directory=self._source.directory,
                environment={**self._environment, **variables},
                on_end=ended,
            )
        except NoRoomError:
            raise
        except OSError as error:
            raise AgentError("raised", f"cannot be started: {error.strerror}: {error.filename}") from error
        player = _Player(program=program)
        return player

    def _keep(self, kept: OrderedDict[_Place, AgentSession], place: _Place, session: AgentSession) -> None:
        other = kept.pop(place, None)
        if other is not None:
            self._end(other)
        kept[place] = session
        self._pump()

    def _end(self, session: AgentSession, *, error: BaseException | None = None) -> None:
        """No more of it; its place is another's."""
        self._drop(session, error=error)
        self._pump()

    def _drop(self, session: AgentSession, *, error: BaseException | None = None) -> None:
        """A program that plays no other sample and never will, or that has overrun its time, ends too."""
        self._sessions.pop(session.key, None)
        player = self._players.pop(session, None)
        if player is not None:
            player.sessions.discard(session)
            overran = isinstance(error, AgentError) and error.kind == "timeout"
            if overran:
                player.given_up = "its program was ended: another sample overran its time"
            if overran or player.apart or (player.program.deaf and not player.sessions):
                player.program.kill()
        session.close()

    def _forget(self, session: AgentSession) -> None:
        """It will be begun again when its next turn comes."""
        for place in [place for place, other in self._spares.items() if other is session]:
            del self._spares[place]
        for key in [key for key, other in self._idle.items() if other is session]:
            del self._idle[key]
        self._drop(session)

    def _pump(self) -> None:
        """Let those begin who can."""
        while self._starters and self._starting < self._most_starting and self._has_room():
            starter = heapq.heappop(self._starters)
            if not starter.turn.done():
                self._starting += 1
                self._admitted += 1
                starter.turn.set_result(None)

    def _has_room(self) -> bool:
        """Whether there may be one more session; idle ones are ended for it."""
        while (full := len(self._sessions) + self._admitted >= self._source.spec.sessions) and self._drop_idle():
            pass
        return not full

    def _drop_idle(self) -> bool:
        """End an idle session, if there is one: the newest spare, or else the least recently used."""
        if not (self._spares or self._idle):
            return False
        _, session = self._spares.popitem() if self._spares else self._idle.popitem(last=False)
        self._drop(session)
        return True


async def _again(do: Callable[[bool], Awaitable[_Done]]) -> _Done:
    """Once more, and apart, where a program has ended that may have been ended from outside; as often as others are the reason."""
    starts = 0
    while True:
        try:
            return await do(starts > 0)
        except LostError:
            pass
        except KilledError:
            starts += 1
            if starts == MAX_STARTS:
                raise


def _difference(text: str, before: str) -> str:
    """Where two texts part."""
    pairs = enumerate(zip(text, before, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(text), len(before)))
    return f"character {place} on, {text[place : place + 40]!r} where {before[place : place + 40]!r} was"
