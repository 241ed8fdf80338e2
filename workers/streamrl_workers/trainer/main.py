"""The trainer process.

        Group, StepRecorded, Stop, ..         poll                      micro-steps, optimiser
     SCHEDULER ═══════▶ CONNECTION ──▶ SESSION ──▶ STEP LOOP (a thread) ──────────────────────▶ ENGINE
         ▲                 │            ▲  ▲          │ copy of the weights        │ save
         └── StepDone, ────┘            │  └─ name ─ PUBLISHING (a thread)         ▼
             Published, ..              │                │ bytes                CHECKPOINTS, on disk
                                     SIGTERM             ▼
                                                  WEIGHT STORE ◀══ server of weights ◀══ GENERATORS

Loops: connection (`scheduler_connection.py`), step loop and publishing (`step_loop.py`), bubble samples and status endpoint
(`status.py`). The step loop and each connection of the server of weights (`weights/http_server.py`) have a thread, everything else but
hashing is in the event loop of the main thread, so weights are served and heartbeats sent while a step is computed.

With several ranks this is rank 0, the coordinator; the others are `follower.py`, and serve the weights that they hold. ENGINE reaches them by `engines/process_group.py`.

Owns: wiring, exit codes (0 done or asked to end, 2 user error, 75 scheduler or a rank lost, or history rolled back, 76 a rank of another node lost). In a
pod (STREAMRL_STAY) it stays, idle, when the run has ended, and when it is started again then.
Invariant: what is not in a checkpoint is nowhere; a killed trainer costs the steps behind it, which are trained again.
"""

import asyncio
import logging
import os
from dataclasses import replace

from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.keys import DIR_CHECKPOINTS, FILE_RESULT
from streamrl.metrics import TRAINER
from streamrl.proto import stream_pb2 as pb
from streamrl.text import log_to_stderr, say
from streamrl_workers.process.daemon_thread import run_in_thread
from streamrl_workers.process.environment_variables import pin_to_cpus
from streamrl_workers.process.heartbeat import beat_from
from streamrl_workers.process.shutdown import on_terminate, serve_until_told, watch_parent
from streamrl_workers.stream.digests import History
from streamrl_workers.stream.run_folder import ModelTimeoutError, await_model_path, claim_run_folder
from streamrl_workers.stream.scheduler_link import SchedulerAddress
from streamrl_workers.trainer.checkpoint import CheckpointStore
from streamrl_workers.trainer.engines import create_engine
from streamrl_workers.trainer.engines.engine import RankLostError, RetryError
from streamrl_workers.trainer.engines.process_group import ProcessGroup
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.follower import run_follower
from streamrl_workers.trainer.rank_weights import rank_parts
from streamrl_workers.trainer.scheduler_connection import SchedulerConnection
from streamrl_workers.trainer.session import Session
from streamrl_workers.trainer.settings import TrainerSettings, read_settings
from streamrl_workers.trainer.status import TrainerStatus, weight_totals
from streamrl_workers.trainer.step_loop import StepLoop, offer_of
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.store import WeightStore
from streamrl_workers.weights.transports import TRANSPORTS, WeightServer

_MODEL_TIMEOUT_S = 600.0
"""For the model's place to be written: what writes it has ended before this process is started."""
_DISCONNECT_S = 2.0
"""For the connection's farewell when the step loop has ended."""
_SILENCE_S = 60.0
"""Without a scheduler for so long, a trainer is not healthy; its pod's sidecar is back within seconds."""

log = logging.getLogger(__name__)


def main() -> int:
    """Run a trainer as the environment says; returns the exit code."""
    log_to_stderr()
    try:
        pin_to_cpus(os.environ)
        watch_parent(os.environ)
        settings = read_settings(os.environ)
        return _lived(settings)
    except (UserError, UserErrors) as error:
        say(*error.lines)
        return EXIT_USER_ERROR


def _lived(settings: TrainerSettings) -> int:
    try:
        asyncio.run(_life(settings))
    except (RetryError, ModelTimeoutError) as error:
        say(str(error))
        return settings.lost_code if isinstance(error, RankLostError) else EXIT_RETRY
    return EXIT_DONE


async def _life(settings: TrainerSettings) -> None:
    """Until the process ends: its work, and what follows it in a pod."""
    beat_from(asyncio.get_running_loop())
    settings = replace(settings, model_path=await _model_path(settings))
    if (settings.run_dir / FILE_RESULT).exists():
        log.info("the run has ended; there is nothing to train")
        ended = True
    else:
        ended = await (_run(settings) if settings.env.rank == 0 else run_follower(settings))
    if ended and settings.variables.serve_until_told:
        await serve_until_told(
            run_dir=settings.run_dir,
            process=settings.process,
            host=settings.variables.bind_host,
            port=settings.signals_port,
            status={"ended": True},
        )


async def _model_path(settings: TrainerSettings) -> str | None:
    """Where the initial model is; the simulated engine needs none."""
    if settings.model_path is not None or not settings.spec.has_model:
        return settings.model_path
    if (settings.run_dir / FILE_RESULT).exists():
        return None
    on_terminate(asyncio.get_running_loop(), _end_before_training)
    return await await_model_path(os.environ, timeout_s=_MODEL_TIMEOUT_S)


async def _run(settings: TrainerSettings) -> bool:
    """Whether the run has ended; False: this process was asked to end."""
    deltas = DeltaStore() if settings.spec.weights.has_deltas else None
    weights = WeightStore(newest_kept=settings.memory_versions, deltas=deltas)
    server = TRANSPORTS[settings.spec.weights.key].serve(weights, settings.server_setup)
    async with TrainerStatus(settings, table=TRAINER) as status:
        status.totals = lambda: {
            "weights_published_versions": weights.published,
            **weight_totals(served_bytes=server.served_bytes, deltas=deltas),
        }
        try:
            await status.serve(weights=server.address)
            session = await _lead(settings, weights=weights, server=server, status=status)
        finally:
            await asyncio.to_thread(server.close)
    return not session.terminated


async def _lead(
    settings: TrainerSettings, *, weights: WeightStore, server: WeightServer, status: TrainerStatus
) -> Session:
    """Train with the other ranks; they are told of every end but a loss."""
    ranks = ProcessGroup(settings.rendezvous, lost_code=settings.lost_code)
    try:
        on_terminate(asyncio.get_running_loop(), _end_before_training)
        loop = await run_in_thread(
            lambda: _prepare(settings, ranks=ranks, weights=weights, server=server, status=status),
            name="trainer-start",
        )
        on_terminate(asyncio.get_running_loop(), loop.session.terminate)
        ranks.on_lost(lambda reason: loop.session.end(RetryError(reason)))
        await _train(settings, loop=loop, status=status)
    except RetryError as error:
        if ranks.excused:
            raise RankLostError(str(error)) from error
        raise
    except BaseException:
        ranks.end()
        raise
    ranks.end()
    return loop.session


def _prepare(
    settings: TrainerSettings, *, ranks: ProcessGroup, weights: WeightStore, server: WeightServer, status: TrainerStatus
) -> StepLoop:
    """The step loop at the newest good checkpoint; the slow part of a start."""
    claim_run_folder(settings.run_dir, store=settings.store)
    spec = settings.spec
    copies = settings.copies
    checkpoints = CheckpointStore(
        settings.store / DIR_CHECKPOINTS,
        keep_last=spec.storage.checkpoints.keep_last,
        copies=copies and copies.child(DIR_CHECKPOINTS),
    )
    gathered = ranks.gather()  # those that are met wait without a deadline for what the object store takes
    checkpoints.clean()
    found = checkpoints.newest()
    engine = create_engine(
        EngineSetup(
            spec=spec,
            model_path=settings.model_path,
            base_dir=settings.base_dir,
            plugin_dir=settings.plugin_dir,
            threads=settings.threads,
            run_dir=settings.run_dir,
            env=settings.env,
            ranks=gathered,
        )
    )
    history, checkpoint_path = History(), ""
    if found is not None:
        engine.load(found.directory)
        log.info("goes on from %s", found.directory)
        history, checkpoint_path = found.meta.past, str(found.directory.relative_to(settings.store))
    identity = pb.TrainerHello(
        trainer_id=settings.process,
        instance=status.instance,
        weights_address=settings.weights_address or server.address,
    )
    return StepLoop(
        engine=engine,
        session=Session(
            identity, step=len(history), window_bytes=settings.window_bytes, checkpoint_path=checkpoint_path
        ),
        checkpoints=checkpoints,
        saved_s=None if found is None else found.written_s,
        weights=weights,
        offer=offer_of(settings.is_offered, server=server.offer),
        parts=rank_parts(settings, ranks=ranks),
        is_needed=settings.is_needed,
        recorder=status.recorder,
        history=history,
        steps=spec.pipeline.steps,
        in_order=spec.pipeline.delivery == "Logical",
        checkpoint_interval_steps=spec.storage.checkpoints.interval_steps,
        evaluation_interval_steps=spec.task.evaluation.interval_steps,
        store_dir=settings.store,
        copies=copies,
    )


async def _train(settings: TrainerSettings, *, loop: StepLoop, status: TrainerStatus) -> None:
    """Connect, train until the end; the first part that fails ends the process."""
    session = loop.session
    status.show(numbers=lambda: _numbers(loop), fault=lambda: _fault(session))
    totals = status.totals
    status.totals = lambda: {**totals(), **{f"weights_{part}_seconds": s for part, s in loop.weight_stall_s.items()}}
    address = SchedulerAddress(scheduler=settings.scheduler_address, token=settings.token, tls=settings.variables.tls)
    connection = SchedulerConnection(session, address=address, recorder=status.recorder)
    conversing = asyncio.create_task(connection.run(), name="trainer-connection")
    conversing.add_done_callback(lambda task: _part_ended(task, session, what="the link to the scheduler"))
    status.samples.add_done_callback(lambda task: _part_ended(task, session, what="the bubble samples"))
    try:
        await run_in_thread(loop.run, name="trainer-steps")
    finally:
        await _disconnect(connection, conversing)


async def _disconnect(connection: SchedulerConnection, conversing: asyncio.Task[None]) -> None:
    """Say the last words. Raises the connection's own error: it is the cause of what ended the step loop."""
    connection.close()
    await asyncio.wait([conversing], timeout=_DISCONNECT_S)
    conversing.cancel()
    await asyncio.wait([conversing])
    if not conversing.cancelled():
        conversing.result()


def _numbers(loop: StepLoop) -> dict[str, float | None]:
    return {
        "step": loop.version,
        "attempt": loop.attempt,
        "waiting_groups": loop.session.waiting_groups,
        "checkpoint_timestamp_seconds": loop.checkpoint_s,
    }


def _fault(session: Session) -> str:
    """A scheduler that comes back costs nothing; for one that does not, the connection ends the process."""
    return "" if session.silent_s < _SILENCE_S else f"no scheduler for {session.silent_s:.0f} s"


def _part_ended(task: asyncio.Task[None], session: Session, *, what: str) -> None:
    """Wake the step loop and the publishing thread: without this part they are not to go on."""
    error = None if task.cancelled() else task.exception()
    reason = f"{what} ended" if error is None else f"{what} failed: {error}"
    session.end(RetryError(reason))


def _end_before_training() -> None:
    """SIGTERM while the model is loaded: nothing is to be kept, and a loading thread cannot be interrupted."""
    log.info("asked to end before the first step: nothing to keep")
    logging.shutdown()
    os._exit(EXIT_DONE)
