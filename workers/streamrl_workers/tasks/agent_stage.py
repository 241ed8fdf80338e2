"""Prompts and turns of a job with an agent: of one agent host that the pool starts, or of agent hosts in processes or pods of their own.

```
    ──▶ ConcurrentSlot ══ agent host                            (agent_host.py)
    ──▶ ItemQueue ──▶ ConcurrentSlot ══ item reader ──▶ AgentHosts      (agent_hosts.py; with `task.agent.pool`)
```
Owns which of the two there is, and the items that were read for hosts which have no data.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from streamrl import names
from streamrl.spec.task import AgentSpec
from streamrl_workers.tasks.agent_hosts import AgentHosts, ItemPlace, item_place
from streamrl_workers.tasks.protocol import SPAWN_AGENT_HOST, SPAWN_ITEM_READER, agent_row, item_row, request_message
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, ScoreSample, TaskPoolError
from streamrl_workers.tasks.worker_slots import MAKE_ITEM_TIMEOUT_S, ConcurrentSlot, Finish, PoolProcess, WorkItem

READING = 4
"""Items that an item reader is asked for at a time: it is never idle for want of the next one."""
KEPT_ITEMS_BYTES = 64 << 20
"""Of items for agent hosts: many of a few kilobytes, some of the largest."""


class AgentStage:
    """Has prompts made and turns answered."""

    def __init__(
        self,
        agent: AgentSpec,
        *,
        job_name: str,
        process: Callable[[bytes], PoolProcess],
        finish: Finish,
        fail: Callable[[TaskPoolError], None],
    ) -> None:
        """`fail`: ends the pool."""
        self._finish = finish
        self._fail = fail
        self._texts = ItemTexts(most_bytes=KEPT_ITEMS_BYTES)
        self.hosts: AgentHosts | None = None
        """In processes or pods of their own; None: there are none."""
        self._host: ConcurrentSlot | None = None
        self._items: ItemQueue | None = None
        if agent.pool is None:
            self._host = ConcurrentSlot(
                process(SPAWN_AGENT_HOST),
                name="the agent host",
                timeout_s=agent.timeout_seconds,
                finish=finish,
                begins_at_once=False,
            )
            return
        reader = ConcurrentSlot(
            process(SPAWN_ITEM_READER),
            name="the item reader",
            timeout_s=MAKE_ITEM_TIMEOUT_S,
            finish=self._on_read,
            begins_at_once=False,
        )
        self._items = ItemQueue(reader)
        awaited = f"processes {names.AGENTS}-0, ... (pods of {names.pool(job_name, names.AGENTS)})"
        self.hosts = AgentHosts(
            sessions=agent.sessions, max_turns=agent.max_turns, awaited=awaited, finish=self._on_hosted
        )

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops of the processes, to be run."""
        loops = [self._host, None if self._items is None else self._items.reader, self.hosts]
        return [one.run() for one in loops if one is not None]

    def put(self, request: NeedPrompts | PlayTurn) -> None:
        """Ask for it."""
        for one in single_requests(request):
            work = WorkItem(request=one)
            if self._host is not None:
                self._host.ask(work, request_message(one), row_of=partial(agent_row, one))
            elif (text := self._texts.get(item_place(one))) is not None:
                self._on_item(work, text)
            else:
                assert self._items is not None, "there is a host, or hosts that need items"
                self._items.ask(work)

    def forget(self, request: ScoreSample) -> None:
        """The sample is finished: its host may forget it."""
        if self.hosts is not None:
            self.hosts.forget((request.group_id, request.sample_index))

    def _on_hosted(self, work: WorkItem, row: Any) -> None:  # noqa: ANN401 - a checked row of `protocol.py`
        """A prompt dies with its hosts alone, as what a program does is its samples' failure: another try may have it."""
        match work.request, row:
            case NeedPrompts(split=split, first_index=index), {"kind": "died", "error": text}:
                self._fail(TaskPoolError(f"{split} prompt {index} was not made: {text}"))
            case _:
                self._finish(work, row)

    def _on_read(self, work: WorkItem, row: Any) -> None:  # noqa: ANN401 - a checked row of `protocol.py`
        assert self._items is not None
        self._items.done()
        self._on_item(work, row)

    def _on_item(self, work: WorkItem, row: Any) -> None:  # noqa: ANN401 - as above
        if isinstance(row, str) and self.hosts is not None:
            self._texts.put(item_place(work.request), row)
            self.hosts.ask(work, item=row)
        else:
            self._finish(work, row)


def single_requests(request: NeedPrompts | PlayTurn) -> Iterator[NeedPrompts | PlayTurn]:
    """A range of prompts one by one; anything else as it is."""
    if not isinstance(request, NeedPrompts):
        yield request
        return
    for index in range(request.first_index, request.first_index + request.count):
        yield replace(request, first_index=index, count=1)


class ItemQueue:
    """What waits for an item reader, turns before prompts: a turn waits for `READING` items at most, however many are read ahead."""

    def __init__(self, reader: ConcurrentSlot) -> None:
        self.reader = reader
        self._turns: deque[WorkItem] = deque()
        self._prompts: deque[WorkItem] = deque()
        self._free = READING

    def ask(self, work: WorkItem) -> None:
        """Have its item read."""
        (self._turns if isinstance(work.request, PlayTurn) else self._prompts).append(work)
        self._fill()

    def done(self) -> None:
        """One was read."""
        self._free += 1
        self._fill()

    def _fill(self) -> None:
        while self._free and (line := self._turns or self._prompts):
            self._free -= 1
            work = line.popleft()
            self.reader.ask(work, item_place(work.request), row_of=item_row)


class ItemTexts:
    """The items that were asked for last, as text in ASCII: each turn of each sample of a group has the same one."""

    def __init__(self, *, most_bytes: int) -> None:
        self._free_bytes = most_bytes
        self._texts: OrderedDict[ItemPlace, str] = OrderedDict()

    def get(self, place: ItemPlace) -> str | None:
        """None: it is not kept."""
        if place in self._texts:
            self._texts.move_to_end(place)
        return self._texts.get(place)

    def put(self, place: ItemPlace, text: str) -> None:
        """Keep it; the one that nobody has asked for the longest goes."""
        if self.get(place) is None:
            self._texts[place] = text
            self._free_bytes -= len(text)
        while self._free_bytes < 0:
            self._free_bytes += len(self._texts.popitem(last=False)[1])
