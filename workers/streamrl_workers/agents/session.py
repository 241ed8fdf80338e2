"""A session: one sample's requests, from whichever program plays it, and the model's turns that answer them.

Its program waits in a request until there is a turn for it. What the turn is answered with is the next request, or the sample's end.
Owns what is between a program and the model. Does not own the program (`host.py`).

Invariants: one request waits at a time, and each is answered once. A refused request changes nothing. Each wait for a program has
a limit; a program that waits for the model has none. All requests behind the first add at most `maxTurns * maxObservationChars`.
"""

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streamrl.proto.literals import unmarked
from streamrl.spec.task import AgentSpec
from streamrl_workers.agents.transcript import (
    Answer,
    Ask,
    BadRequestError,
    EditedError,
    MessageTemplate,
    Reading,
    ToolsRefusedError,
    Transcript,
    Turn,
)
from streamrl_workers.environments.base import digest_of

CONFLICT, GONE = 409, 410
MAX_LINE_CHARS = 300

AgentFailure = Literal["raised", "timeout", "died", "bad_value"]
"""Of the task pool's failure kinds."""


class AgentError(RuntimeError):
    """A program did not do its part."""

    def __init__(self, kind: AgentFailure, text: str) -> None:
        super().__init__(text)
        self.kind: AgentFailure = kind


class KilledError(AgentError):
    """A program has ended in a way that may be nobody's doing: by a signal, or with other samples in it."""


class LostError(AgentError):
    """A program was ended for another sample's sake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSource:
    """What the agents of a job are made of."""

    spec: AgentSpec
    directory: Path
    """Where programs run."""
    seed: int
    """The job's."""
    template: MessageTemplate
    stops: Sequence[str]


class AgentSession:
    """One program and its requests."""

    def __init__(self, source: AgentSource) -> None:
        self._source = source
        self._transcript = Transcript(
            source.template, stops=source.stops, calls_in_thoughts=source.spec.calls_in_thoughts
        )
        self._waiting: asyncio.Future[Answer] | None = None
        self._asked = b""
        """Digest of the newest request that was taken."""
        self._answer: Answer | None = None
        """To it, if there is one."""
        self._following: asyncio.Future[Reading | None] = asyncio.get_running_loop().create_future()
        """What the next request has the model read; None: the program has ended."""
        self._ending: asyncio.Future[Reading | None] | None = None
        """The sample's end, where the program said it while a request waited: it follows the turn that was to answer that."""
        self._left_chars = source.spec.max_turns * source.spec.max_observation_chars
        """That requests behind the first may add."""
        self._reward = 0.0
        self.key = secrets.token_hex(16)
        self._alive = True
        self.prompt = ""
        self.heard: bytes = digest_of([])
        """Digest of the turns that it has heard."""
        self.full = False
        """It has asked for more turns than there are."""

    @property
    def idle(self) -> bool:
        """Its program waits for the model, or has ended the sample instead."""
        return self._alive and (self._waiting is not None or self._ending is not None)

    # ---- for the endpoint

    async def ask(self, ask: Ask, *, again: bool) -> Answer:
        """The model's answer to a request."""
        digest = ask.digest
        if again and digest == self._asked and self._answer is not None:
            return self._answer
        if self._waiting is not None:
            if digest != self._asked:
                raise BadRequestError(
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
        total = self._reward + reward
        if not math.isfinite(total):
            raise BadRequestError(f"the rewards of a turn must have a finite sum, got {total}", param="reward")
        self._reward = total

    def finish(self, error: str) -> None:
        """The program says that the sample has ended."""
        following = self._following
        if self._waiting is not None:
            self._refuse_waiting("this sample has ended", status=GONE)
            following = self._ending = asyncio.get_running_loop().create_future()
        if following.done():
            raise BadRequestError("this sample has ended", status=GONE)
        if error and not self.full:
            following.set_exception(AgentError("raised", error[:MAX_LINE_CHARS]))
            following.exception()  # its turn may be another session's to hear
        else:
            following.set_result(None)

    def _take(self, ask: Ask) -> None:
        if self._following.done():
            raise BadRequestError("this sample has ended", status=GONE)
        spec = self._source.spec
        try:
            reading = self._transcript.reading(ask, branches=spec.branches == "Train")
        except EditedError as error:
            self._following.set_exception(error)
            raise BadRequestError(str(error), code="history_edited") from None
        except ToolsRefusedError as error:
            self._following.set_exception(error.user_error)
            raise
        if self._transcript.answers:
            self._check_length(reading)
        if self._transcript.answers >= spec.max_turns:
            self.full = True
            raise BadRequestError(f"the sample has had its {spec.max_turns} turns", code="max_turns")
        self._left_chars -= len(unmarked(reading.text)) if self._transcript.answers else 0
        self._transcript.accept(ask)
        self._following.set_result(reading)

    def _check_length(self, reading: Reading) -> None:
        """A new context is longer than what a conversation gains, so its bound is what the sample has left."""
        most, chars = self._source.spec.max_observation_chars, len(unmarked(reading.text))
        if chars > most and not reading.context:
            rule = f"a request adds {chars} characters, and maxObservationChars is {most}"
        elif chars > self._left_chars:
            rule = (
                f"a request has {chars} characters, and {self._left_chars} are left of the sample's: "
                f"maxObservationChars, {most}, for each of its turns"
            )
        else:
            return
        raise BadRequestError(rule, param="messages", code="context_length_exceeded")

    def _refuse_waiting(self, text: str, *, status: int) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(BadRequestError(text, status=status))
            self._waiting.exception()  # its connection may be gone: nobody has to look
        self._waiting = None

    # ---- for the host

    def end(self, fault: AgentError | None) -> None:
        """Its program has ended."""
        self.close()
        if not self._following.done():
            if fault is None or self.full:
                self._following.set_result(None)
            else:
                self._following.set_exception(fault)

    def say(self, turn: Turn) -> None:
        """Answer the request that waits. Raises `KilledError` if its program has ended since."""
        if self._ending is not None:
            self._following, self._ending = self._ending, None
            return
        if self._waiting is None:
            raise KilledError("died", "ended while it waited for the model")
        self._answer = self._transcript.answer(turn)
        waiting, self._waiting = self._waiting, None
        self._following = asyncio.get_running_loop().create_future()
        waiting.set_result(self._answer)

    async def follows(self) -> Reading | None:
        """What the program's next request has the model read; None if it has ended well.

        Raises:
            AgentError: it has ended badly, or does nothing.
            EditedError: it has asked something else than a continuation, and no branch is trained.
            UserError: it has sent tools, and the model cannot use them by its chat template.
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
        reading = await self.follows()
        if reading is None:
            raise AgentError("bad_value", "ended before it asked for a turn")
        return reading.text

    def earned(self) -> float:
        """Reward since the last call."""
        reward, self._reward = self._reward, 0.0
        return reward

    def close(self) -> None:
        """Nobody is answered any more."""
        self._alive = False
        self._refuse_waiting("this sample has ended", status=GONE)
