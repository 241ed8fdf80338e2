"""What can go wrong between an operator and an API server, one class for each kind; and a mixture of them drawn by a seed.

A real API server never silently leaves one event out of a watch: what it cannot tell any more it ends with 410, and the client lists
again. So `Swallow` loses events and then ends the watch that way, as a watch cache that fell behind does.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.campaign.proxy import Call, Cut, Fault, Reply, refusal

REASONS = {
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}
_GONE = json.dumps({"type": "ERROR", "object": json.loads(refusal(410, reason="Expired").body)}).encode()


class KillAt(Fault):
    """The operator dies after write `number` was done: before its answer arrives, or once it has used the answer."""

    def __init__(self, number: int, kill: Callable[[], None], *, has_answer: bool) -> None:
        self._number, self._kill, self._has_answer = number, kill, has_answer
        self.fired = False

    async def before(self, call: Call) -> Reply | None:
        """With its answer it goes as far as to its next write, which does not arrive."""
        if self.fired:
            raise Cut
        if self._has_answer and call.number > self._number:
            self.fire()
            raise Cut
        return None

    async def after(self, call: Call, reply: Reply) -> Reply:
        """The write is done; the answer never arrives."""
        if call.number == self._number and not self._has_answer:
            self.fire()
            raise Cut
        return reply

    def fire(self) -> None:
        """Kill it now: also where no other write follows the last one."""
        self.fired = True
        self._kill()


class LoseReply(Fault):
    """Write `number` is done, its answer is lost, the operator lives."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.fired = False

    def __str__(self) -> str:
        return f"answer to write {self._number} lost"

    async def after(self, call: Call, reply: Reply) -> Reply:
        """Break the connection instead of the answer."""
        if call.number == self._number and not self.fired:
            self.fired = True
            raise Cut
        return reply


class RefuseAt(Fault):
    """Write `number` is not done: an error is answered."""

    def __init__(self, number: int, status: int) -> None:
        self._number, self._status = number, status

    def __str__(self) -> str:
        return f"write {self._number} refused with {self._status}"

    async def before(self, call: Call) -> Reply | None:
        """Refuse it."""
        return _error(self._status) if call.number == self._number else None


class _Share(Fault):
    """Harm to so many percent of what it sees."""

    what: str

    def __init__(self, percent: int, rng: random.Random) -> None:
        self._percent, self._rng = percent, rng

    def __str__(self) -> str:
        return f"{self._percent} % of {self.what}"

    def _is_hit(self) -> bool:
        return self._rng.uniform(0, 100) < self._percent


class RefuseShare(_Share):
    """So many percent of all requests are answered by an error: reads, watches and the Lease too."""

    what = "requests refused"

    def __init__(self, percent: int, statuses: Sequence[int], rng: random.Random) -> None:
        super().__init__(percent, rng)
        self._statuses = statuses

    async def before(self, call: Call) -> Reply | None:
        """Refuse some."""
        if not self._is_hit():
            return None
        status = self._rng.choice(self._statuses)
        # 409 is an answer to writes alone, 410 to reads that go on from somewhere.
        if (status == 409 and not call.number) or (status == 410 and not call.is_watch):
            status = 500
        return _error(status)


class LoseShare(_Share):
    """So many percent of all requests are done, and the answers lost."""

    what = "answers lost"

    async def after(self, call: Call, reply: Reply) -> Reply:
        """Lose some."""
        del call
        if self._is_hit():
            raise Cut
        return reply


class Delay(Fault):
    """Watches tell everything so much later; order is kept."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __str__(self) -> str:
        return f"events {self._seconds} s late, each"

    async def event(self, call: Call, line: bytes) -> bytes | None:
        """Hold the watch."""
        del call
        await asyncio.sleep(self._seconds)
        return line


class Swallow(_Share):
    """With this probability an event, and all after it for a moment, are lost; then the watch ends with 410."""

    what = "events begin a gap that ends with 410"

    async def event(self, call: Call, line: bytes) -> bytes | None:
        """What arrives while this waits goes down with the watch."""
        del call
        if not self._is_hit():
            return line
        await asyncio.sleep(self._rng.uniform(0.05, 0.8))
        return _GONE


class CloseWatches(_Share):
    """A watch ends after an event with this probability, without an error."""

    what = "events cut their watch"

    async def event(self, call: Call, line: bytes) -> bytes | None:
        """Cut it instead of the event."""
        del call
        if self._is_hit():
            raise Cut
        return line


class ExpireWatches(_Share):
    """A watch that begins is answered by 410 with this probability: as a status, or as its first event."""

    what = "watches begin with 410"

    async def before(self, call: Call) -> Reply | None:
        """Refuse it."""
        if not call.is_watch or not self._is_hit():
            return None
        if self._rng.random() < 0.5:
            return _error(410)
        return Reply(status=200, body=_GONE + b"\n", headers={"Content-Type": "application/json"})


class StaleLists(Fault):
    """Lists are answered as they were once (path -> answer), and the watches that go on from there are late too."""

    def __init__(self, old: Mapping[str, Reply], delay_s: float) -> None:
        self._old, self._delay_s = dict(old), delay_s

    async def before(self, call: Call) -> Reply | None:
        """The past, once for each kind: what is listed again is new."""
        if call.is_list and call.path in self._old:
            return self._old.pop(call.path)
        if call.is_watch:
            await asyncio.sleep(self._delay_s)
        return None


class Stopped(Fault):
    """Nobody answers: every connection breaks."""

    def __init__(self, seconds: float, after_s: float = 0.0) -> None:
        self._after_s = after_s
        self._from_s = time.monotonic() + after_s
        self._until_s = self._from_s + seconds

    def __str__(self) -> str:
        return f"API server gone for 3 s after {self._after_s} s"

    async def before(self, call: Call) -> Reply | None:
        """Break it."""
        del call
        if self._from_s <= time.monotonic() < self._until_s:
            raise Cut
        return None

    async def after(self, call: Call, reply: Reply) -> Reply:
        """What was under way is lost too."""
        await self.before(call)
        return reply

    async def event(self, call: Call, line: bytes) -> bytes | None:
        """Watches break when they would tell something."""
        await self.before(call)
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What goes wrong in one case."""

    faults: tuple[Fault, ...]
    window_s: float
    """So long from the mark; then all is well again."""
    kill_at: int
    """The operator dies after this write too; 0: it does not."""
    travels: bool
    """It dies, and the next one is told old lists first."""
    steals: bool
    """In the middle of it the Lease is another's for two seconds."""


def drawn(rng: random.Random, *, writes: int) -> Mixture:
    """One to three kinds of harm, which begin now, and in every third case a death. `writes`: of an undisturbed run."""
    kinds = rng.sample(sorted(_KINDS), k=rng.choice((1, 2, 2, 3)))
    made = tuple(_KINDS[kind](rng, max(writes, 1)) for kind in kinds)
    dies = rng.random() < 0.35
    return Mixture(
        faults=made,
        window_s=round(rng.uniform(1.0, 4.0), 1),
        kill_at=rng.randint(1, max(writes, 1)) if dies else 0,
        travels=dies and rng.random() < 0.5,
        steals=rng.random() < 0.25,
    )


def _fork(rng: random.Random) -> random.Random:
    return random.Random(rng.random())


_KINDS: Mapping[str, Callable[[random.Random, int], Fault]] = {
    "write refused": lambda rng, writes: RefuseAt(rng.randint(1, writes), rng.choice((409, 429, 500, 503))),
    "answer lost": lambda rng, writes: LoseReply(rng.randint(1, writes)),
    "refusals": lambda rng, _: RefuseShare(rng.choice((5, 15, 30, 60)), sorted(REASONS), _fork(rng)),
    "losses": lambda rng, _: LoseShare(rng.choice((5, 15, 30)), _fork(rng)),
    "late events": lambda rng, _: Delay(rng.choice((0.05, 0.3, 1.0))),
    "lost events": lambda rng, _: Swallow(rng.choice((5, 20, 50)), _fork(rng)),
    "cut watches": lambda rng, _: CloseWatches(rng.choice((10, 40)), _fork(rng)),
    "expired watches": lambda rng, _: ExpireWatches(rng.choice((30, 80)), _fork(rng)),
    "stopped": lambda rng, _: Stopped(3.0, round(rng.uniform(0, 0.5), 2)),
}


def _error(status: int) -> Reply:
    return refusal(status, reason=REASONS[status], retry_after_s=1 if status == 429 else None)
