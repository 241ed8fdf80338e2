"""The scheduler's process: wires the parts, waits for the end, cleans up.

```
   generators ══ gRPC ══╗                          ┌── journal (writer thread) ── journal.sqlite
   trainer ═════ gRPC ══╬══ service ── executor ── core (pure)
   task pool ── taskdesk ╣        └── numbers ── metrics/*.jsonl, signals port
   ranker's process ─────╝
```
Owns the order of start and end, and the exit code. Decides nothing about groups.

Loops: one reader and one writer per connection (`service.py`, `shell/link.py`), tick, prompts and
scores (`shell/loops.py`), the journal's writer thread (`journal.py`). All calls of the core happen
on the event loop's thread.

Exit codes: 0 the run is over; 2 the user must change something; 75 start again, the journal has
everything; 1 a fault of our own. In a pod (STREAMRL_STAY) it stays when the run is over, and also when it is started
again then: ports, journal and task pool are closed, and the signals port shows how the run ended.
"""

import asyncio
import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.keys import FILE_JOB, FILE_JOURNAL
from streamrl.spec import RLJob, read_job
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.effects import Recovered
from streamrl_workers.scheduler.environment import Environment
from streamrl_workers.scheduler.journal import Journal, JournalListener
from streamrl_workers.scheduler.journal_store import JournalFaultError
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths
from streamrl_workers.scheduler.lengths.rankers.files import open_ranker
from streamrl_workers.scheduler.service import Parts, SchedulerService
from streamrl_workers.scheduler.settings import Settings
from streamrl_workers.scheduler.shell.ending import Ending, EndingBox
from streamrl_workers.scheduler.shell.executor import Executor
from streamrl_workers.scheduler.shell.front import Front
from streamrl_workers.scheduler.shell.loops import Loops, report
from streamrl_workers.scheduler.shell.model_files import ModelFiles
from streamrl_workers.scheduler.shell.ranker_desk import Answers, RankerDesk, in_a_run, opening_of
from streamrl_workers.scheduler.shell.result import (
    keep_numbers,
    last_numbers,
    read_result,
    remove_result,
    write_failure,
    write_success,
)
from streamrl_workers.scheduler.shell.signal_pages import Numbers
from streamrl_workers.scheduler.shell.switchboard import Switchboard
from streamrl_workers.scheduler.shell.taskdesk import TaskDesk, TaskSource
from streamrl_workers.stream.files import write_json_atomically
from streamrl_workers.stream.lifeline import watch_lifeline
from streamrl_workers.stream.model_place import model_place
from streamrl_workers.stream.staying import Place, stay
from streamrl_workers.stream.store_place import claim_run_folder
from streamrl_workers.tasks.pool import TaskPool
from streamrl_workers.tasks.values import TaskPoolError

LINGER_S = 10.0
"""At the end, for the trainer and the generators to hear of it."""
_GC_THRESHOLDS = (50_000, 20, 100)
"""A deep queue is many live objects: full collections at Python's default pace would stall dispatch for nothing."""
_LEASE_BITS = 20
"""Lease numbers start at milliseconds << this: above every lease of an earlier life."""


class Pool(TaskSource, Protocol):
    """The task pool as the scheduler uses it."""

    held_out_size: int | None

    async def start(self) -> None:
        """Start its processes."""

    async def close(self) -> None:
        """End its processes."""


MakePool = Callable[[RLJob, Path], Pool]


def main() -> int:
    """Run the scheduler; the exit code."""
    gc.set_threshold(*_GC_THRESHOLDS)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    try:
        environment = Environment.read(os.environ)
        watch_lifeline(os.environ)
        job = read_job(environment.job_file)
        ending = asyncio.run(_life(environment, job=job))
    except (UserError, UserErrors) as error:
        ending = Ending(exit_code=EXIT_USER_ERROR, line=str(error))
    except (JournalFaultError, TaskPoolError) as error:
        ending = Ending(exit_code=EXIT_RETRY, line=str(error))
    if ending.line:
        print(ending.line, file=sys.stderr, flush=True)  # noqa: T201 - the line that says why we end
    return ending.exit_code


def make_task_pool(job: RLJob, base_dir: Path) -> Pool:
    """The real task pool."""
    return TaskPool(job, base_dir=base_dir)


async def _life(environment: Environment, *, job: RLJob) -> Ending:
    """Until the process ends: the run, and what follows it in a pod."""
    claim_run_folder(environment.run_dir, store=environment.store_dir)
    staying = environment.around.stay
    if staying and read_result(environment.run_dir) is not None:
        await _stay(environment)
        return Ending(exit_code=EXIT_DONE)
    box = EndingBox()
    ending = await serve(environment, job=job, box=box)
    if staying and ending.exit_code == EXIT_DONE and not box.was_asked:
        await _stay(environment)
    return ending


async def _stay(environment: Environment) -> None:
    logging.getLogger("streamrl.scheduler").info("the run has ended; only the signals port is served")
    place = Place(
        run_dir=environment.run_dir,
        process=environment.process,
        host=environment.around.bind_host,
        port=environment.signals_port,
    )
    await stay(place, numbers=last_numbers(environment.run_dir))


async def serve(
    environment: Environment, *, job: RLJob, make_pool: MakePool = make_task_pool, box: EndingBox | None = None
) -> Ending:
    """Run the scheduler until the run or the process ends."""
    journal = Journal(environment.run_dir / FILE_JOURNAL)
    recovered = journal.open()
    try:
        ending = box or EndingBox()
        if environment.job_is_elsewhere:  # `streamrl journal` needs no more than the run folder
            write_json_atomically(
                environment.run_dir / FILE_JOB, job.model_dump(mode="json", by_alias=True, exclude_none=True)
            )
        pool = make_pool(job, environment.code_dir)
        front = await Front.open(environment, ending=ending)
        try:
            return await _run(
                Run(environment=environment, job=job, journal=journal, pool=pool, ending=ending), recovered, front
            )
        finally:
            await front.close()
            await pool.close()
    finally:
        journal.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run is made of before its core is there."""

    environment: Environment
    job: RLJob
    journal: Journal
    pool: Pool
    ending: EndingBox


async def _run(run: Run, recovered: Recovered, front: Front) -> Ending:
    """1 ranker and task pool, 2 core and parts, 3 journal and loops, 4 open the door, 5 wait, 6 end."""
    remove_result(run.environment.run_dir)
    try:
        choice = None if recovered.ended else run.job.spec.scheduling.ranker
        ranker = open_ranker(choice, base_dir=run.environment.code_dir)
    except UserError as error:
        return _failed(run, Ending(exit_code=EXIT_USER_ERROR, line=str(error)))
    early = None if recovered.ended else await _start_pool(run)
    if early is not None:
        return _failed(run, early)
    settings = _settings(run)
    history = LengthHistory(recovered.prompt_lengths)
    lengths = Lengths(history, signals=settings.length_signals, ranker=in_a_run(ranker))
    core = Core(settings, recovered, first_lease=time.time_ns() // 1_000_000 << _LEASE_BITS, lengths=lengths)
    switchboard = Switchboard()
    front.numbers = numbers = Numbers(core, switchboard=switchboard, run_dir=run.environment.run_dir)
    front.fault = run.journal.fault
    executor = Executor(core, journal=run.journal, switchboard=switchboard, numbers=numbers, ending=run.ending)
    desk = TaskDesk(run.pool, on_prompts=executor.on_prompts, on_scores=executor.on_scores, on_turns=executor.on_turns)
    around = run.environment
    opening = opening_of(choice, ranker=ranker, base_dir=around.code_dir, run_dir=around.run_dir)
    ranking = RankerDesk(Answers(on_scores=executor.on_ranked, on_portion=executor.on_rank_portion), opening=opening)
    executor.attach(desk, ranking=ranking)
    numbers.ranker = ranking.numbers
    listener = JournalListener(on_committed=executor.on_committed, on_fault=lambda fault: run.ending.retry(str(fault)))
    run.journal.start(listener)
    executor.run(core.start(time.monotonic()))
    loops = Loops(run.ending)
    loops.start(
        desk=desk,
        ranking=ranking,
        tick=lambda: executor.run(core.tick(time.monotonic())),
        lease_s=run.job.spec.scheduling.lease_seconds,
    )
    parts = Parts(
        core=core,
        executor=executor,
        journal=run.journal,
        switchboard=switchboard,
        ending=run.ending,
        lease_s=run.job.spec.scheduling.lease_seconds,
        clock_s=time.monotonic,
    )
    SchedulerService(parts, model_files=ModelFiles(lambda: model_place(os.environ))).add_to(front.server)
    await front.server.start()
    ending = await run.ending.wait()
    await loops.stop()
    return await _end(run, ending, switchboard=switchboard, numbers=numbers)


async def _start_pool(run: Run) -> Ending | None:
    """Start the task pool; an ending if one came first (asked to end, or the pool cannot start)."""
    start = asyncio.create_task(run.pool.start(), name="start task pool")
    end = asyncio.create_task(run.ending.wait(), name="early end")
    await asyncio.wait({start, end}, return_when=asyncio.FIRST_COMPLETED)
    if start.done() and start.exception() is not None:
        report(start.exception() or AssertionError(), ending=run.ending)
    for task in (start, end):
        task.cancel()
    await asyncio.gather(start, end, return_exceptions=True)
    return run.ending.ending


def _settings(run: Run) -> Settings:
    settings = Settings.from_job(run.job.spec)
    held_out = run.pool.held_out_size
    if held_out is None:
        return settings
    return replace(settings, evaluation_prompts=min(settings.evaluation_prompts, held_out))


async def _end(run: Run, ending: Ending, *, switchboard: Switchboard, numbers: Numbers) -> Ending:
    """Write how it ended, then tell everybody: whoever ends because of it finds the result."""
    if ending.exit_code not in (EXIT_DONE, EXIT_USER_ERROR):
        return ending
    last = dict(numbers.numbers())
    if run.environment.around.stay:
        with contextlib.suppress(OSError):  # a full disk may be why we end
            keep_numbers(run.environment.run_dir, last)
    run.journal.close()
    if ending.exit_code == EXIT_USER_ERROR:
        _failed(run, ending)
        switchboard.stop_all(ending.line)
        return ending
    checkpoint = last["checkpoint"]
    write_success(
        run.environment.run_dir,
        steps=ending.finished_step or 0,
        checkpoint=None if checkpoint is None else checkpoint["path"],
    )
    switchboard.stop_all("the run has ended")
    await switchboard.wait_until_told(timeout_s=LINGER_S)
    return ending


def _failed(run: Run, ending: Ending) -> Ending:
    if ending.exit_code == EXIT_USER_ERROR:
        with contextlib.suppress(OSError):  # a full disk may be why we end; standard error has the line in any case
            write_failure(run.environment.run_dir, reason=ending.line)
    return ending
