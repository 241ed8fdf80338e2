"""The task pool: makes prompts, answers turns, scores completions in processes of its own, each stage under a time limit.

```
  scheduler ──put──▶ Backlog ──▶ WorkerSlot 0 ══ worker process 0      (worker.py)
      ▲                  │  └──▶ WorkerSlot 1 ══ worker process 1
      └─────results──────┼─────▶ EndpointStage         (endpoint_stage.py; only with `http` rewards)
                         └─────▶ AgentStage            (agent_stage.py; only with `task.agent`: prompts and turns)
```
Owns the backlog, the slots and the fork server. Does not import the data set or user code (the scheduler stays small), does
not pickle.
Invariant: every request gets exactly one result, whatever the user's functions do: raise, hang (also in C), print,
exit, fill the memory. Results come one by one, as they are there. Only a pool that cannot start processes, and a prompt that
cannot be made, end it: `results` then raises.

Loops: one per slot (`worker_slots.py`) and the fork server's listener (`fork_server.py`).
"""

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from streamrl.errors import UserError
from streamrl.keys import DIR_LOGS
from streamrl.spec import RLJob
from streamrl_workers.tasks.agent_hosts import AgentHosts
from streamrl_workers.tasks.agent_stage import AgentStage
from streamrl_workers.tasks.endpoint_stage import EndpointStage
from streamrl_workers.tasks.fork_server import ForkServer
from streamrl_workers.tasks.protocol import (
    SPAWN,
    result_of,
)
from streamrl_workers.tasks.values import (
    FailureKind,
    NeedPrompts,
    PlayTurn,
    Request,
    Result,
    ScoreSample,
    TaskPoolError,
    index_of,
)
from streamrl_workers.tasks.worker_slots import (
    PoolProcess,
    TaskDuties,
    Took,
    WorkerDuties,
    WorkerSlot,
    WorkItem,
    limits_of,
)

MEMORY_LIMIT_BYTES = 4 << 30
"""Growth of one worker's address space; generous, so that only leaks meet it."""
LEAST_PROCESSES, MOST_PROCESSES = 4, 8
"""Where the job names no number. Each takes some ten megabytes beyond what all share."""
CLOSED = "the task pool is closed"
TASKS_LOG = "tasks.log"
"""In the run folder's logs: what the processes print."""

log = logging.getLogger("streamrl.scheduler")


class TaskPool:
    """Prompts, turns and scores of one job."""

    def __init__(
        self,
        job: RLJob,
        *,
        base_dir: Path,
        processes: int | None = None,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        host: Path | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """What it is of.

        Args:
            job: the job.
            base_dir: where the job's modules and files are.
            processes: absent = as the job says.
            memory_limit_bytes: of one worker.
            host: socket of the container that has the processes; None: they are our children.
            run_dir: keeps what is spent of the judges' budgets, and what our processes print; None: nothing is bounded or kept.
        """
        self._job = job
        self._make_fork_server = partial(
            ForkServer,
            job,
            base_dir=base_dir,
            memory_limit_bytes=memory_limit_bytes,
            host=host,
            output=None if run_dir is None else run_dir / DIR_LOGS / TASKS_LOG,
        )
        self._count = processes or job.spec.task.processes or default_processes()
        self._shares = job.spec.task.shares
        self._duties = [TaskDuties(rewards=task.rewards, limits=limits_of(task)) for task in job.spec.task.tasks]
        tasks = job.spec.task.tasks
        self._run_dir = run_dir
        self._endpoints: EndpointStage | None = None
        if any(reward.http is not None for task in tasks for reward in task.rewards):
            self._endpoints = EndpointStage(tasks, process=self._process, finish=self._on_row, took=self._on_endpoints)
        most = None if self._endpoints is None else self._endpoints.most_at_once
        self._backlog = Backlog(slots=self._count, most_completions=most)
        self._agents: AgentStage | None = None
        if (agent := job.spec.task.agent) is not None:
            self._agents = AgentStage(
                agent,
                job_name=job.metadata.name,
                process=self._process,
                finish=self._on_row,
                fail=self._backlog.close,
            )
        self._fork_server: ForkServer | None = None
        self._fork_server_lock = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self.failures: Counter[str] = Counter(dict.fromkeys(get_args(FailureKind), 0))
        """Failures by kind, since the pool began."""
        self._logged: set[tuple[int, str]] = set()
        """Tasks, and kinds of failure of which the log has the first one."""
        self.held_out_size: int | None = None
        """Held-out items of the data set; None = endless (or not started)."""
        self.fingerprint: Mapping[str, str] = {}
        """Of the data, as `OpenedData` has it; empty while it was not opened."""
        self.reward_took: Took = lambda _name, _seconds: None

    @property
    def agent_hosts(self) -> AgentHosts | None:
        """In processes or pods of their own; None: there are none."""
        return None if self._agents is None else self._agents.hosts

    def _process(self, spawn: bytes) -> PoolProcess:
        return PoolProcess(spawn, fork_server=self._living_fork_server)

    async def start(self) -> None:
        """Open the data set and the rewards in the fork server, and have one worker say hello.

        Raises:
            UserError: the job's data set, rewards or functions cannot be used.
            TaskPoolError: the processes did not start in time.
        """
        if self._endpoints is not None:
            self._endpoints.open(self._run_dir)
        processes = [self._process(SPAWN) for _ in range(self._count)]
        try:
            await processes[0].connect()
        except BaseException:
            await self.close()
            raise
        duties = WorkerDuties(
            of=self._of,
            take=self._backlog.take,
            put_back=self._backlog.put_back,
            finish=self._on_row,
            took=lambda name, seconds: self.reward_took(name, seconds),  # noqa: PLW0108 - it is given later
        )
        running = [WorkerSlot(number, process=one, duties=duties).run() for number, one in enumerate(processes)]
        running += [] if self._endpoints is None else [self._endpoints.run()]
        running += [] if self._agents is None else self._agents.loops()
        self._tasks = [
            asyncio.create_task(self._keep(run), name=f"task-pool-slot-{number}") for number, run in enumerate(running)
        ]

    def put(self, request: Request) -> None:
        """Ask for something; its results come by `results`."""
        if self._agents is None:
            self._backlog.put(request)
        elif isinstance(request, ScoreSample):
            self._agents.forget(request)
            self._backlog.put(request)
        else:
            self._agents.put(request)

    async def results(self) -> Sequence[Result]:
        """What has been done since the last call, at least one; waits for it.

        Raises:
            UserError: an item cannot be made (its generator or the format function failed).
            TaskPoolError: the pool cannot work, or is closed. Never for what a reward or an environment does.
        """
        return await self._backlog.results()

    async def close(self) -> None:
        """End all processes; whoever waits for results gets a `TaskPoolError`. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._backlog.close(TaskPoolError(CLOSED))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._endpoints is not None:
            self._endpoints.close()
        if self._fork_server is not None:
            await self._fork_server.close()

    def _on_row(self, work: WorkItem, row: Any) -> None:  # noqa: ANN401 - a checked row of `protocol.py`
        """An item is done, or its endpoints are still to be asked."""
        try:
            match row:
                case [values, str(body), raised] if self._endpoints is not None:
                    task = self._shares.task_of(index_of(work.request))
                    self._endpoints.ask(work, task=task, body=body, values=values, raised=raised)
                    return
                case {"kind": kind, "error": text}:
                    self._count_failure(work.request, kind, text)
                case [_, None, str(raised)]:
                    self._count_failure(work.request, "verifier_raised", raised)
            self._backlog.finish(work, result_of(work.request, row, rewards=self._of(work.request).rewards))
        except UserError as error:
            self._backlog.close(error)

    def _count_failure(self, request: Request, kind: str, text: str) -> None:
        self.failures[kind] += 1
        key = self._shares.task_of(index_of(request)), kind
        if key not in self._logged:
            effect = "score 0" if kind == "verifier_raised" else "have no reward"
            log.warning("%s; such answers %s and are counted as %s, without a line for each", text, effect, kind)
        self._logged.add(key)

    def _on_endpoints(self, work: WorkItem, seconds: float) -> None:
        """They are asked at once and answer together."""
        for reward in self._of(work.request).rewards:
            if reward.http is not None:
                self.reward_took(reward.name, seconds)

    def _of(self, request: Request) -> TaskDuties:
        return self._duties[self._shares.task_of(index_of(request))]

    async def _keep(self, run: Coroutine[Any, Any, None]) -> None:
        """Run a slot; if its process cannot be had, the pool fails as a whole."""
        try:
            await run
        except (TaskPoolError, UserError) as error:
            self._backlog.close(error)
        except Exception as error:  # nobody may wait for this slot for ever
            self._backlog.close(TaskPoolError(f"a slot of the task pool failed: {error!r}"))
            raise

    async def _living_fork_server(self) -> ForkServer:
        async with self._fork_server_lock:
            if self._fork_server is not None and self._fork_server.alive:
                return self._fork_server
            if self._fork_server is not None:
                await self._fork_server.close()
            self._fork_server = self._make_fork_server()
            opened = await self._fork_server.start()
            if self.fingerprint not in ({}, opened.fingerprint):
                await self._fork_server.close()  # else a second try would take it
                raise TaskPoolError("the data of the job has changed since it was opened")
            self.held_out_size, self.fingerprint = opened
            return self._fork_server


def default_processes() -> int:
    """Return how many processes a job has that names no number: rewards may compute, and they may wait."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cpus, LEAST_PROCESSES), MOST_PROCESSES)


class Backlog:
    """What waits for a slot, and what is done. No I/O.

    A worker that is free takes a turn first (a generator's slot waits for it), then a completion, then a prompt: so a long
    look-ahead holds up nothing that is under way. All turns of a sample go to one worker slot, where its environment lives;
    anything else goes to whichever is free.

    Bounds: requests are those that the scheduler's core holds anyway, by reference; a range of prompts is one entry; copies are
    made of what is out alone, one item for each worker, or `most_completions` with the endpoints.
    Invariant: an item ends exactly once, by `finish`.
    """

    def __init__(self, *, slots: int = 1, most_completions: int | None = None) -> None:
        """`most_completions`: so many may be out at once; None: one for each slot."""
        self._prompts: deque[WorkItem] = deque()
        self._completions: deque[WorkItem] = deque()
        self._turns: tuple[deque[WorkItem], ...] = tuple(deque() for _ in range(slots))
        self._free_completions = slots if most_completions is None else most_completions
        self._idle: dict[int, asyncio.Future[None]] = {}
        """Slots that wait for work."""
        self._results: list[Result] = []
        self._arrived = asyncio.Event()
        self._error: TaskPoolError | UserError | None = None

    def put(self, request: Request) -> None:
        """Work to be done."""
        self._line(request).append(WorkItem(request=request))
        if isinstance(request, NeedPrompts):
            for slot in list(self._idle):
                self._wake(slot)
        else:
            self._wake(self._home(request))

    def put_back(self, work: WorkItem) -> None:
        """What a worker that ended had not done; it goes first."""
        self._returned(work)
        self._line(work.request).appendleft(work)
        self._wake(self._home(work.request))

    async def take(self, slot: int) -> WorkItem:
        """The next item for a slot; waits until there is one."""
        while (work := self._next(slot)) is None:
            self._idle[slot] = asyncio.get_running_loop().create_future()
            try:
                await self._idle[slot]
            finally:
                self._idle.pop(slot, None)
        return work

    def finish(self, work: WorkItem, result: Result) -> None:
        """The result of an item; dropped once the backlog is closed."""
        self._returned(work)
        if self._error is None:
            self._results.append(result)
            self._arrived.set()

    async def results(self) -> list[Result]:
        """What has been done since the last call; waits until there is something. Raises what the backlog was closed with, behind what was done before."""
        await self._arrived.wait()
        done, self._results = self._results, []
        if self._error is None:
            self._arrived.clear()
        elif not done:
            raise self._error
        return done

    def close(self, error: TaskPoolError | UserError) -> None:
        """Whoever waits for results, now or later, gets `error`; the first one counts."""
        self._error = self._error or error
        self._arrived.set()

    def _line(self, request: Request) -> deque[WorkItem]:
        if isinstance(request, PlayTurn):
            home = self._home(request)
            assert home is not None
            return self._turns[home]
        return self._completions if isinstance(request, ScoreSample) else self._prompts

    def _home(self, request: Request) -> int | None:
        """The slot that has to do it; None: any."""
        if isinstance(request, PlayTurn):
            return hash((request.group_id, request.sample_index)) % len(self._turns)
        return None

    def _next(self, slot: int) -> WorkItem | None:
        if self._turns[slot]:
            return self._turns[slot].popleft()
        if self._completions and self._free_completions:
            self._free_completions -= 1
            return self._completions.popleft()
        return self._next_prompt() if self._prompts else None

    def _next_prompt(self) -> WorkItem:
        work = self._prompts.popleft()
        need = work.request
        assert isinstance(need, NeedPrompts)
        if need.count == 1:
            return work
        self._prompts.appendleft(
            WorkItem(request=replace(need, first_index=need.first_index + 1, count=need.count - 1))
        )
        return WorkItem(request=replace(need, count=1))

    def _returned(self, work: WorkItem) -> None:
        """It is out no longer."""
        if isinstance(work.request, ScoreSample):
            self._free_completions += 1
            if self._completions:
                self._wake(None)

    def _wake(self, slot: int | None) -> None:
        """A slot that is idle, if any; it looks by itself what there is."""
        if slot is None:
            slot = next(iter(self._idle), None)
        future = None if slot is None else self._idle.pop(slot, None)
        if future is not None and not future.done():
            future.set_result(None)
