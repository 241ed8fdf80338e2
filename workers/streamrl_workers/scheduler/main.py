"""The scheduler's process: wires its components, waits for the end, cleans up.

```
   generators ══ gRPC ══╗                          ┌── journal (writer thread) ── journal.sqlite
   trainer ═════ gRPC ══╬══ service ── executor ── core (pure)
   task pool ── client ══╣        └── status endpoint ── metrics/*.jsonl, signals port
   what some jobs use ───╝  (`server/guests.py`)
```
Owns the order of start and end, and the exit code. Decides nothing about groups.

Loops: one reader and one writer per connection (`server/service.py`, `server/connections.py`), tick and what the
task pool has done (`server/lifetime.py`), the journal's writer thread (`journal/writer.py`). All calls of the core happen
on the event loop's thread.

The loop's clock leaves out the time in which this process did not run (`process/awake_loop.py`).

Exit codes: 0 the run is over, and its own check finds every group once; 2 the user must change something, or that check
fails; 77 in a pod, the data has changed; 75 start again, the journal has everything; 1 a fault of our own. In a pod (STREAMRL_STAY) it ends once with 0 when the run is over, and leaves how it ended
as its container's last word. Started again it stays: ports, journal and task pool are closed, and the signals port shows how the run ended.
"""

import asyncio
import contextlib
import gc
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from streamrl.errors import EXIT_DATA_CHANGED, EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.keys import ENV_TASKS_SOCKET, FILE_ALLOW_CHANGED_DATA, FILE_JOB, FILE_JOURNAL
from streamrl.spec import RLJob, read_job
from streamrl.text import log_to_stderr, say
from streamrl_workers.plugins.sources import code_fingerprint
from streamrl_workers.process.awake_loop import AwakeLoop
from streamrl_workers.process.heartbeat import beat_from
from streamrl_workers.process.shutdown import first_of, serve_until_told, watch_parent
from streamrl_workers.process.silences import folders_of
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.journal.adoption import Adopted, adopt_from_volume, read_adopted
from streamrl_workers.scheduler.journal.archiver import Archiver
from streamrl_workers.scheduler.journal.check import Report, check_run
from streamrl_workers.scheduler.journal.fingerprint import changed_data
from streamrl_workers.scheduler.journal.store import JournalFaultError
from streamrl_workers.scheduler.journal.writer import JournalWriter
from streamrl_workers.scheduler.records import Recovered
from streamrl_workers.scheduler.server.connections import Connections
from streamrl_workers.scheduler.server.executor import Executor, TaskSource
from streamrl_workers.scheduler.server.guests import Guests
from streamrl_workers.scheduler.server.lifetime import ExitDecision, Loops, ProcessExit, report, tick_forever
from streamrl_workers.scheduler.server.peer_messages import Door
from streamrl_workers.scheduler.server.result import (
    failure_of,
    keep_numbers,
    last_numbers,
    leave_last_word,
    leave_line,
    read_result,
    remove_result,
    write_failure,
    write_success,
)
from streamrl_workers.scheduler.server.service import Ports, SchedulerService
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint
from streamrl_workers.scheduler.settings import SchedulerEnvironment, SchedulerSettings
from streamrl_workers.stream.run_folder import claim_run_folder, read_model_path, write_json_atomically
from streamrl_workers.tasks.agent_hosts import AgentHosts
from streamrl_workers.tasks.pool import TaskPool
from streamrl_workers.tasks.values import TaskPoolError

log = logging.getLogger("streamrl.scheduler")
LINGER_S = 10.0
"""At the end, for the trainer and the generators to hear of it."""
_GC_THRESHOLDS = (50_000, 20, 100)
"""A deep queue is many live objects: full collections at Python's default pace would stall dispatch for nothing."""
_LIFE_BITS, _LEASE_BITS = 42, 20
"""Lease numbers of a life begin at a random number << this: they are no earlier life's, whatever the clock says."""


class Pool(TaskSource, Protocol):
    """The task pool as the scheduler uses it."""

    held_out_size: int | None
    fingerprint: Mapping[str, str]
    """Of the data, once it has started."""
    reward_took: Callable[[str, float], None]
    """Told of each reward that was asked: its name, and the seconds that it took."""

    @property
    def agent_hosts(self) -> AgentHosts | None:
        """In processes or pods of their own; None: the job has no pool of agents."""

    async def start(self) -> None:
        """Start its processes."""

    async def close(self) -> None:
        """End its processes."""


MakePool = Callable[[RLJob, SchedulerEnvironment], Pool]


def main() -> int:
    """Run the scheduler; the exit code."""
    gc.set_threshold(*_GC_THRESHOLDS)
    log_to_stderr()
    try:
        environment = SchedulerEnvironment.read(os.environ)
        watch_parent(os.environ)
        job = read_job(environment.job_file)
        with asyncio.Runner(loop_factory=AwakeLoop) as runner:
            ending = runner.run(_life(environment, job=job))
    except (UserError, UserErrors) as error:
        ending = ProcessExit(exit_code=EXIT_USER_ERROR, line=str(error))
    except (JournalFaultError, TaskPoolError) as error:
        ending = ProcessExit(exit_code=EXIT_RETRY, line=str(error))
    if ending.line:
        say(*ending.line.splitlines())
    return ending.exit_code


def make_task_pool(job: RLJob, environment: SchedulerEnvironment) -> Pool:
    """The real task pool."""
    host = os.environ.get(ENV_TASKS_SOCKET)
    return TaskPool(job, base_dir=environment.code_dir, host=Path(host) if host else None, run_dir=environment.run_dir)


async def _life(environment: SchedulerEnvironment, *, job: RLJob) -> ProcessExit:
    """Until the process ends: the run, and what follows it in a pod."""
    beat_from(asyncio.get_running_loop())
    claim_run_folder(environment.run_dir, store=environment.store_dir)
    staying = environment.variables.serve_until_told
    if staying and read_result(environment.run_dir) is not None:
        await _tell_end(environment)
        return ProcessExit(exit_code=EXIT_DONE)
    box = ExitDecision()
    ending = await serve(environment, job=job, box=box)
    if staying and ending.exit_code == EXIT_DATA_CHANGED:
        leave_line(ending.line, os.environ)
    if staying and ending.exit_code == EXIT_DONE and not box.was_asked:
        await _tell_end(environment)
    return ending


async def _tell_end(environment: SchedulerEnvironment) -> None:
    """By the container's last word, for which it ends once; started again, by the signals port until told to end."""
    if leave_last_word(environment.run_dir, os.environ):
        return
    log.info("the run has ended; only the signals port is served")
    await serve_until_told(
        run_dir=environment.run_dir,
        process=environment.process,
        host=environment.variables.bind_host,
        port=environment.signals_port,
        status=last_numbers(environment.run_dir),
    )


async def serve(
    environment: SchedulerEnvironment,
    *,
    job: RLJob,
    make_pool: MakePool = make_task_pool,
    box: ExitDecision | None = None,
) -> ProcessExit:
    """Run the scheduler until the run or the process ends."""
    archive = job.spec.storage.archive
    archiver = Archiver(environment.run_dir, spec=archive) if archive.share_percent else None
    journal = JournalWriter(environment.run_dir / FILE_JOURNAL, archiver=archiver)
    adopted = await asyncio.to_thread(_adopted, environment, job)
    first_group = 0 if adopted is None else adopted.step * job.spec.pipeline.batch_groups
    # It reads all of it; the process lives meanwhile.
    recovered = await asyncio.to_thread(partial(journal.open, adopted, first_group=first_group))
    try:
        ending = box or ExitDecision()
        if environment.job_is_elsewhere:  # `streamrl journal` needs no more than the run folder
            write_json_atomically(
                environment.run_dir / FILE_JOB, job.model_dump(mode="json", by_alias=True, exclude_none=True)
            )
        guests = Guests(environment, job=job, recovered=recovered)
        pool = make_pool(job, environment)
        ports = await Ports.open(environment, ending=ending)
        run = Run(
            environment=environment,
            job=job,
            journal=journal,
            pool=pool,
            ending=ending,
            guests=guests,
        )
        try:
            ended = await _run(run, recovered, ports)
            await guests.end(ended)
            return ended
        finally:
            await guests.end(None)
            await ports.close()
            await pool.close()
            await guests.close()
    finally:
        await journal.aclose()


def _adopted(environment: SchedulerEnvironment, job: RLJob) -> Adopted | None:
    """What the run has taken over; in a pod it is taken over here, locally by the runner."""
    resume_from = job.spec.storage.checkpoints.resume_from
    has_begun = (
        environment.run_dir / FILE_JOURNAL
    ).exists()  # what it took over may be gone with a volume: the copies have it
    if resume_from is not None and environment.job_is_elsewhere and not has_begun:
        adopt_from_volume(resume_from, store=environment.store_dir, steps=job.spec.pipeline.steps)
    return read_adopted(environment.store_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run is made of before its core is there."""

    environment: SchedulerEnvironment
    job: RLJob
    journal: JournalWriter
    pool: Pool
    ending: ExitDecision
    guests: Guests


async def _run(run: Run, recovered: Recovered, ports: Ports) -> ProcessExit:
    """1 checks and task pool, 2 core and parts, 3 journal and loops, 4 open the door, 5 wait, 6 end."""
    remove_result(run.environment.run_dir)
    try:
        run.guests.check()
    except (UserError, UserErrors) as error:
        return _failed(run, ProcessExit(exit_code=EXIT_USER_ERROR, line=str(error)))
    early = None if recovered.ended else await _start_pool(run) or _check_data(run, recovered)
    if early is not None:
        return _failed(run, early)
    settings = _settings(run)
    clock_s = asyncio.get_running_loop().time  # that of the deadlines on this loop
    first_lease = secrets.randbits(_LIFE_BITS) << _LEASE_BITS
    core = Core(settings, recovered, first_lease=first_lease, epoch_s=time.time() - clock_s())
    connections = Connections()
    ports.status = status = StatusEndpoint(
        core,
        job=run.job,
        connections=connections,
        run_dir=run.environment.run_dir,
        process=run.environment.process,
        heartbeats=folders_of(os.environ),
    )
    run.pool.reward_took = status.reward_took
    ports.fault = run.journal.fault
    executor = Executor(core, journal=run.journal, connections=connections, status=status, ending=run.ending)
    executor.attach(run.pool)
    guests = run.guests.join(
        executor, core=core, connections=connections, status=status, agent_hosts=run.pool.agent_hosts
    )
    run.journal.start(on_committed=executor.on_committed, on_fault=lambda error: report(error, ending=run.ending))
    lease_s = run.job.spec.scheduling.lease_seconds
    executor.call(core.start, clock_s())
    run.guests.start()
    loops = Loops(run.ending)
    tick = _tick(executor, core=core, journal=run.journal, clock_s=clock_s, lease_s=lease_s)
    loops.start(
        {
            "tick": tick_forever(tick, lease_s=lease_s),
            "tasks": executor.run_tasks(run.pool),
            **guests,
        }
    )
    service = SchedulerService(
        core=core,
        executor=executor,
        journal=run.journal,
        connections=connections,
        door=Door(
            max_tokens=run.job.spec.task.sampling.max_tokens,
            batch_groups=run.job.spec.pipeline.batch_groups,
            resamples=settings.extensions.resampled_percent > 0,
            newest_step=lambda: core.newest_step,
        ),
        ending=run.ending,
        lease_s=lease_s,
        clock_s=clock_s,
        model_path=lambda: read_model_path(os.environ),
        agent_hosts=run.pool.agent_hosts,
    )
    service.add_to(ports.server)
    await ports.server.start()
    ending = await run.ending.wait()
    await loops.stop()
    return await _end(run, ending, connections=connections, status=status)


def _tick(
    executor: Executor, *, core: Core, journal: JournalWriter, clock_s: Callable[[], float], lease_s: float
) -> Callable[[], None]:
    """A tick of the core. While the journal has no room nothing is read from generators: nobody is judged by silence then, nor within a lease of it."""
    judged_from_s = -math.inf

    def tick() -> None:
        nonlocal judged_from_s
        now_s = clock_s()
        if not journal.has_room:
            judged_from_s = now_s + lease_s
        if now_s >= judged_from_s:
            executor.call(core.tick, now_s)

    return tick


async def _start_pool(run: Run) -> ProcessExit | None:
    """Start the task pool; an ending if one came first (asked to end, or the pool cannot start)."""
    try:
        await first_of(start=run.pool.start(), early_end=run.ending.wait())
    except Exception as error:  # noqa: BLE001 - as of any loop, it decides the end
        report(error, ending=run.ending)
    return run.ending.ending


def _check_data(run: Run, recovered: Recovered) -> ProcessExit | None:
    """Compare the data, and the code of plug-ins, with the journal's, which takes it if it has none or may; an ending if it may not.

    In a pod the job waits for its data: the process is started again, and looks again. Nothing of the run is changed before.
    """
    code = code_fingerprint(run.job.spec, directory=run.environment.plugin_dir)
    found, recorded = {**run.pool.fingerprint, **code}, recovered.fingerprint
    allowance = run.environment.run_dir / FILE_ALLOW_CHANGED_DATA
    if found == recorded:
        allowance.unlink(missing_ok=True)  # it allows a change that this start would have found, and no later one
        return None
    if recorded is not None:
        changed = str(changed_data(recorded, found))
        if not (allowance.exists() or run.job.spec.task.allow_changed_data):
            waits = run.environment.variables.serve_until_told
            return ProcessExit(exit_code=EXIT_DATA_CHANGED if waits else EXIT_USER_ERROR, line=changed)
        log.warning("goes on with other data, as is allowed: %s", changed)
    elif recovered.attempt:
        taken = "; ".join(f"{field}: {data}" for field, data in found.items())
        log.warning("the journal has no fingerprint of the data yet, and takes that of now: %s", taken)
    run.journal.take_fingerprint(found)
    allowance.unlink(missing_ok=True)
    return None


def _settings(run: Run) -> SchedulerSettings:
    settings = SchedulerSettings.from_job(run.job.spec)
    if (own := run.guests.dispatch_policy) is not None:
        settings = replace(settings, dispatch=replace(settings.dispatch, options=own))
    if run.environment.job_is_elsewhere:  # in pods, which have devices of their own
        settings = replace(settings, extensions=replace(settings.extensions, shared_pools=frozenset()))
    held_out = run.pool.held_out_size
    if held_out is None:
        return settings
    evaluation = replace(settings.evaluation, prompts=min(settings.evaluation.prompts, held_out))
    return replace(settings, evaluation=evaluation)


async def _end(run: Run, ending: ProcessExit, *, connections: Connections, status: StatusEndpoint) -> ProcessExit:
    """Write how it ended, then tell everybody: whoever ends because of it finds the result. A run whose own check fails has failed."""
    if ending.exit_code not in (EXIT_DONE, EXIT_USER_ERROR):
        return ending
    last = dict(status.status())
    if run.environment.variables.serve_until_told:
        with contextlib.suppress(UserError):  # a full disk may be why we end
            keep_numbers(run.environment.run_dir, last)
    await run.journal.aclose()
    checked: Report | None = None
    try:
        checked = await asyncio.to_thread(check_run, run.environment.run_dir)
    except (UserError, UserErrors) as error:
        # Of the disk, perhaps for a moment; what is damaged is refused at the next start.
        if ending.exit_code == EXIT_DONE:
            return ProcessExit(exit_code=EXIT_RETRY, line=f"the run cannot be checked: {error}")
    if ending.exit_code == EXIT_DONE and checked is not None and (failure := failure_of(checked)):
        ending = ProcessExit(exit_code=EXIT_USER_ERROR, line=failure)
    if ending.exit_code == EXIT_USER_ERROR:
        _failed(run, ending, checked=checked)
        connections.stop_all(ending.line)
        return ending
    assert checked is not None, "a run that is done has been checked"
    checkpoint = last["checkpoint"]
    write_success(
        run.environment.run_dir,
        steps=ending.finished_step or 0,
        checkpoint=None if checkpoint is None else checkpoint["path"],
        report=checked,
    )
    connections.stop_all("the run has ended")
    await connections.wait_until_told(timeout_s=LINGER_S)
    return ending


def _failed(run: Run, ending: ProcessExit, *, checked: Report | None = None) -> ProcessExit:
    if ending.exit_code == EXIT_USER_ERROR:
        with contextlib.suppress(UserError):  # a full disk may be why we end; standard error has the line in any case
            write_failure(run.environment.run_dir, reason=ending.line, report=checked)
    return ending
