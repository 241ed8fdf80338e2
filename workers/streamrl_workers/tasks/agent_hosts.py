"""Agent hosts in other processes or pods: which one plays which sample, what waits for a place, what is asked again.

```
  pool ── ask ──▶ AgentHosts ── send ──▶ link of host 0 ══ agent host         (`agent_link/`, over gRPC: `scheduler/server/agents.py`)
                     ▲  └──────────────▶ link of host 1 ══ agent host
                     └── joined, started, answered, leaving, left
```
Owns the queue, the hosts that are known, and who plays what. Does no I/O but by `send`.

Invariants:
- A request ends exactly once, by `finish`. What a host that is gone had is asked elsewhere; what it had started, `MAX_LOSSES` times at most; what it had
  not started, `MAX_LOSSES_UNSTARTED` times.
- A host has `sessions` requests at most. What has no place waits here, turns before prompts.
- A session stays with its host. A new one goes to the host that has made its item's prompt, else to the one with fewest sessions.
- A link whose connection breaks and comes back has lost nothing: it is asked all again under the same numbers.

Loop `run`: consumes time; produces a line while nobody is there to ask; waits for the next look; ended by `HOSTS_TIMEOUT_S` without a host.
"""

import asyncio
import json
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl_workers.process.silences import Silence
from streamrl_workers.tasks.protocol import agent_row, failure, request_message
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Request, Split, TaskPoolError
from streamrl_workers.tasks.worker_slots import Finish, WorkItem

MAX_LOSSES = 3
"""Hosts that a request may lose: what it does may be why they are gone."""
MAX_LOSSES_UNSTARTED = 10 * MAX_LOSSES
"""Before a program works on it: most of these hosts are gone for another reason, yet one request may end each in its first moment."""
RESUME_S = 30.0
"""In which a link comes back after its connection broke; later its requests are others'."""
LOOK_S = 30.0
"""Between two looks for whether anybody is there."""
HOSTS_TIMEOUT_S = 1800.0
"""For the first host, or the next one: a pod may have to be placed and its image pulled."""
KEPT_PROMPTS = 4096
"""Items of which it is known who has made the prompt."""
HOST_ENDS = ("left", "lost")
"""How a host comes to be no more: it has said that it leaves, or not."""

SampleKey = tuple[int, int]
"""Group and sample."""
ItemPlace = tuple[Split, int]
"""Split and index."""

log = logging.getLogger("streamrl.scheduler")


def item_place(request: Request) -> ItemPlace:
    """Of the item that a prompt or a turn is of."""
    assert isinstance(request, NeedPrompts | PlayTurn)
    return request.split, request.first_index if isinstance(request, NeedPrompts) else request.prompt_index


@dataclass(slots=True, kw_only=True, eq=False)
class HostedItem:
    """A request, and the item that it is of."""

    work: WorkItem
    item: str
    """JSON."""
    since_s: float
    """When it began to wait for a place."""
    started: bool = False
    """Whether a program works on it: then the end of its host may be its doing."""
    unstarted_losses: int = 0
    """Hosts that were lost with it before."""

    @property
    def key(self) -> SampleKey | None:
        """Of its session; None: a prompt is to be made."""
        request = self.work.request
        return (request.group_id, request.sample_index) if isinstance(request, PlayTurn) else None

    @property
    def place(self) -> ItemPlace:
        """Of its item."""
        return item_place(self.work.request)

    @property
    def turns(self) -> int:
        """Of the model so far."""
        request = self.work.request
        return len(request.completions) if isinstance(request, PlayTurn) else 0

    def message(self) -> bytes:
        """The request as JSON."""
        return json.dumps(request_message(self.work.request), separators=(",", ":")).encode()


Send = Callable[[int, HostedItem], None]
"""Takes a request to a host, with its number."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Host:
    name: str
    instance: str
    send: Send | None
    """None: its connection is gone, and may come back."""
    asked: dict[int, HostedItem] = field(default_factory=dict)
    waiting: deque[HostedItem] = field(default_factory=deque)
    """For a place with it: their sessions are here."""
    sessions: OrderedDict[SampleKey, None] = field(default_factory=OrderedDict)
    """Least recently asked first."""
    prompts: int = 0
    """That it has made, whose programs wait for a sample."""
    leaving: bool = False
    given_up: asyncio.TimerHandle | None = None
    silences: Sequence[str] = ()
    """Messages of processes beside it that show no sign of life."""

    @property
    def takes_new(self) -> bool:
        return self.send is not None and not self.leaving

    @property
    def load(self) -> int:
        return len(self.sessions) + self.prompts + len(self.asked) + len(self.waiting)


class AgentHosts:
    """All hosts of a job."""

    def __init__(self, *, sessions: int, max_turns: int, awaited: str, finish: Finish) -> None:
        """`sessions`: of one host. `max_turns`: of a sample. `awaited`: who they are, for errors."""
        self._max_turns = max_turns
        self.sessions = sessions
        """Of one host."""
        self._awaited = awaited
        self._finish = finish
        self._hosts: dict[str, _Host] = {}
        self._homes: dict[SampleKey, _Host] = {}
        self._makers: OrderedDict[ItemPlace, _Host] = OrderedDict()
        """Who has asked for an item: that program goes on as the item's first sample."""
        self._turns: deque[HostedItem] = deque()
        self._prompts: deque[HostedItem] = deque()
        self._next_number = 0
        self.ended: Counter[str] = Counter(dict.fromkeys(HOST_ENDS, 0))
        """Hosts that are no more, by whether they said so before."""
        self.asked_again = 0
        """Requests that such hosts had."""
        self.waits = 0
        """Of requests for a place, so far."""
        self.waited_s = 0.0
        """Sum of these."""

    # ---- what is asked

    def ask(self, work: WorkItem, *, item: str) -> None:
        """Have a prompt made or a turn answered."""
        self._line(HostedItem(work=work, item=item, since_s=asyncio.get_running_loop().time()))
        self._dispatch()

    def started(self, name: str, number: int) -> None:
        """A program of a host works on it."""
        if (host := self._hosts.get(name)) is not None and number in host.asked:
            host.asked[number].started = True

    def answered(self, name: str, number: int, row: Any) -> None:  # noqa: ANN401 - JSON
        """A host has answered; what was asked elsewhere meanwhile counts no more."""
        host = self._hosts.get(name)
        asked = host.asked.pop(number, None) if host is not None else None
        if host is None or asked is None:
            return
        row = agent_row(asked.work.request, row)
        is_over = isinstance(row, dict) or (asked.key is not None and (row[2] or asked.turns >= self._max_turns))
        if asked.key is None and not is_over:
            self._taken(asked.place)
            self._makers[asked.place] = host
            host.prompts += 1
            if len(self._makers) > KEPT_PROMPTS:
                self._taken(next(iter(self._makers)))
        elif asked.key is not None and is_over:
            self.forget(asked.key)
        self._finish(asked.work, row)
        self._dispatch()

    def _line(self, asked: HostedItem, *, first: bool = False) -> None:
        """Put it where it waits; `first`: it has waited already."""
        home = self._homes.get(asked.key) if asked.key is not None else None
        if home is None and asked.key is not None and (maker := self._taken(asked.place)) is not None:
            home = None if maker.leaving else maker
        line = self._turns if asked.key is not None else self._prompts
        if home is not None:
            line = home.waiting
        (line.appendleft if first else line.append)(asked)

    def _dispatch(self) -> None:
        """Send what has a place."""
        for host in self._hosts.values():
            while host.waiting and host.send is not None and len(host.asked) < self.sessions:
                self._give(host, host.waiting.popleft())
        while line := self._turns or self._prompts:
            free = [one for one in self._hosts.values() if one.takes_new and len(one.asked) < self.sessions]
            if not free:
                return
            self._give(min(free, key=lambda one: one.load), line.popleft())

    def _give(self, host: _Host, asked: HostedItem) -> None:
        self._next_number += 1
        host.asked[self._next_number] = asked
        self.waits += 1
        self.waited_s += asyncio.get_running_loop().time() - asked.since_s
        if asked.key is not None and not host.leaving:
            self._homes[asked.key] = host
            host.sessions[asked.key] = None
            host.sessions.move_to_end(asked.key)
            if len(host.sessions) > self.sessions:
                self.forget(next(iter(host.sessions)))
        self._send(host, self._next_number, asked)

    def _send(self, host: _Host, number: int, asked: HostedItem) -> None:
        assert host.send is not None, f"{host.name} is connected"
        host.send(number, asked)

    def _taken(self, place: ItemPlace) -> _Host | None:
        """Who has made the item's prompt: the program that did is a sample's now."""
        maker = self._makers.pop(place, None)
        if maker is not None:
            maker.prompts -= 1
        return maker

    def forget(self, key: SampleKey) -> None:
        """A sample has ended: by an answer, by a limit of the scheduler, or with its group."""
        host = self._homes.pop(key, None)
        if host is not None:
            host.sessions.pop(key, None)

    def forget_group(self, group_id: int) -> None:
        """All samples of a group have ended."""
        for key in [key for key in self._homes if key[0] == group_id]:
            self.forget(key)

    # ---- who is there

    def joined(self, name: str, *, instance: str, send: Send) -> None:
        """A host's link has connected, perhaps again."""
        host = self._hosts.get(name)
        if host is None or host.instance != instance:
            if host is not None:
                self._lose(host)
            host = self._hosts[name] = _Host(name=name, instance=instance, send=send)
        if host.given_up is not None:
            host.given_up.cancel()
        host.send, host.leaving, host.silences = send, False, ()
        for number, asked in host.asked.items():
            self._send(host, number, asked)
        self._dispatch()

    def leaving(self, name: str) -> None:
        """A host takes nothing more; what it works on it finishes."""
        if (host := self._hosts.get(name)) is not None:
            host.leaving = True
            self._release(host)
            self._dispatch()

    def silent(self, name: str, messages: Sequence[str]) -> None:
        """Take over which processes beside a host show no sign of life."""
        if (host := self._hosts.get(name)) is not None:
            host.silences = tuple(messages)

    def silences(self) -> Iterator[Silence]:
        """Return the notices of all hosts that hold."""
        for host in self._hosts.values():
            yield from (Silence(message=f"{host.name}: {message}", holds=True) for message in host.silences)

    def left(self, name: str) -> None:
        """The connection of a host's link is gone."""
        host = self._hosts.get(name)
        if host is None:
            return
        host.send = None
        if host.leaving:
            self._lose(host)
        else:
            host.given_up = asyncio.get_running_loop().call_later(RESUME_S, self._lose, host)

    def _lose(self, host: _Host) -> None:
        """It does not come back: what it had is asked elsewhere."""
        if self._hosts.get(host.name) is host:
            del self._hosts[host.name]
        if host.given_up is not None:
            host.given_up.cancel()
        self._release(host)
        had, host.asked = list(host.asked.values()), {}
        self.ended["left" if host.leaving else "lost"] += 1
        self.asked_again += len(had)
        for asked in reversed(had):
            asked.work.deaths += asked.started and not host.leaving
            asked.unstarted_losses += not asked.started and not host.leaving
            asked.started, asked.since_s = False, asyncio.get_running_loop().time()
            if asked.work.deaths >= MAX_LOSSES or asked.unstarted_losses >= MAX_LOSSES_UNSTARTED:
                losses = asked.work.deaths + asked.unstarted_losses
                self._finish(asked.work, failure("died", f"agent: {losses} agent hosts were lost with it"))
            else:
                self._line(asked, first=True)
        if had:
            log.warning("agent host %s is gone; %d requests are asked again elsewhere", host.name, len(had))
        self._dispatch()

    def _release(self, host: _Host) -> None:
        """Its sessions are anybody's."""
        for key in list(host.sessions):
            self.forget(key)
        for place in [place for place, maker in self._makers.items() if maker is host]:
            self._taken(place)
        waiting, host.waiting = list(host.waiting), deque()
        for asked in reversed(waiting):
            self._line(asked, first=True)

    async def run(self) -> None:
        """Until cancelled. Raises `TaskPoolError` when requests wait and nobody came in time."""
        loop = asyncio.get_running_loop()
        seen_s = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            waiting = len(self._turns) + len(self._prompts)
            if not waiting or any(host.send is not None for host in self._hosts.values()):
                seen_s = loop.time()
                continue
            text = (
                f"{waiting} requests wait for an agent host for {loop.time() - seen_s:.0f} s: awaited {self._awaited}"
            )
            if loop.time() - seen_s >= HOSTS_TIMEOUT_S:
                raise TaskPoolError(text)
            log.warning(text)

    @property
    def numbers(self) -> Mapping[str, int]:
        """For the status: places of a host, hosts that are connected, sessions that they play, requests with them, turns and prompts that wait.

        The pool grows by sessions and turns: prompts are asked long before they are needed.
        """
        hosts = self._hosts.values()
        return {
            "places": self.sessions,
            "hosts": sum(host.send is not None for host in hosts),
            "sessions": len(self._homes),
            "asked": sum(len(host.asked) for host in hosts),
            "waiting": len(self._turns) + sum(len(host.waiting) for host in hosts),
            "waiting_prompts": len(self._prompts),
        }
