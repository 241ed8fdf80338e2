"""The trainer process.

        Group, StepRecorded, Stop, ..      poll                      micro-steps, optimiser
     SCHEDULER ═════════▶ LINK ──▶ SESSION ──▶ STEP LOOP (a thread) ──────────────────────▶ ENGINE
         ▲                 │         ▲  ▲          │ copy of the weights        │ save
         └── StepDone, ────┘         │  └─ name ─ PUBLISHING (a thread)         ▼
             Published, ..           │                │ bytes                CHECKPOINTS, on disk
                                  SIGTERM             ▼
                                               WEIGHT STORE ◀══ Weights service ◀══ GENERATORS

Loops: link (`link.py`), step loop (`loop.py`), publishing (`publishing.py`), bubble samples (`recorder.py`), signals
port (`signals.py`), Weights service (`weights/server.py`). The step loop runs in a thread, everything else but hashing in
the event loop of the main thread, so weights are served and heartbeats sent while a step is computed.

With several ranks this is rank 0; the others are `follower.py`. ENGINE then reaches them by links (`engines/linked_ranks.py`).

Owns: wiring, exit codes (0 done or asked to end, 2 user error, 75 scheduler or a rank lost, or history rolled back, 76 a rank of another node lost). In a
pod (STREAMRL_STAY) it stays, idle, when the run has ended, and when it is started again then.
Invariant: what is not in a checkpoint is nowhere; a killed trainer costs the steps behind it, which are trained again.
"""

import asyncio
import logging
import os
import sys
import uuid
from dataclasses import dataclass, replace

import grpc.aio

from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.keys import DIR_CHECKPOINTS, DIR_METRICS, FILE_RESULT
from streamrl_workers.metrics.prometheus import Metrics
from streamrl_workers.metrics.recorder import Recorder
from streamrl_workers.metrics.signals import SignalsServer
from streamrl_workers.metrics.sink import BubbleSink, Source
from streamrl_workers.stream.channel import bind, make_server
from streamrl_workers.stream.endpoint import write_endpoint
from streamrl_workers.stream.environ import pin_to_cpus
from streamrl_workers.stream.history import History
from streamrl_workers.stream.lifeline import on_terminate, watch_lifeline
from streamrl_workers.stream.model_place import ModelTimeoutError, await_model_place
from streamrl_workers.stream.staying import Place, stay
from streamrl_workers.stream.store_place import claim_run_folder
from streamrl_workers.stream.stream_pb2_grpc import add_WeightsServicer_to_server
from streamrl_workers.trainer.checkpoint import CheckpointStore
from streamrl_workers.trainer.endings import Ending, RankLostError, RetryError
from streamrl_workers.trainer.engine import TrainEngine
from streamrl_workers.trainer.engines import EngineSetup, engine_creator
from streamrl_workers.trainer.follower import run_follower
from streamrl_workers.trainer.leading import Leading
from streamrl_workers.trainer.link import Address, Link
from streamrl_workers.trainer.loop import Plan, StepLoop, Tools
from streamrl_workers.trainer.session import Identity, Session
from streamrl_workers.trainer.settings import Settings, read_settings
from streamrl_workers.trainer.signal_pages import TrainerPages
from streamrl_workers.trainer.thread import run_in_thread
from streamrl_workers.weights.publisher import WeightStore
from streamrl_workers.weights.server import WeightsService

_ROLE = "trainer"
_MODEL_TIMEOUT_S = 600.0
"""For the model's place to be written: what writes it has ended before this process is started."""
_UNLINK_S = 2.0
"""For the link's farewell when the step loop has ended."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A trainer at its checkpoint."""

    engine: TrainEngine
    checkpoints: CheckpointStore
    history: History
    checkpoint_path: str = ""  # of the checkpoint, from the store


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """What exists before the engine does."""

    settings: Settings
    store: WeightStore
    recorder: Recorder
    pages: TrainerPages
    samples: asyncio.Task[None]


def main() -> int:
    """Run a trainer as the environment says; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        pin_to_cpus(os.environ)
        watch_lifeline(os.environ)
        settings = read_settings(os.environ)
        return _lived(settings)
    except (UserError, UserErrors) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER_ERROR


def _lived(settings: Settings) -> int:
    try:
        asyncio.run(_life(settings))
    except (RetryError, ModelTimeoutError) as error:
        sys.stderr.write(f"{error}\n")
        return settings.lost_code if isinstance(error, RankLostError) else EXIT_RETRY
    return EXIT_DONE


async def _life(settings: Settings) -> None:
    """Until the process ends: its work, and what follows it in a pod."""
    settings = replace(settings, model_path=await _model_path(settings))
    ended = await (_run(settings) if settings.place.rank == 0 else run_follower(settings))
    if ended and settings.around.stay:
        place = Place(
            run_dir=settings.run_dir,
            process=settings.process,
            host=settings.around.bind_host,
            port=settings.signals_port,
        )
        await stay(place, numbers={"ended": True})


async def _model_path(settings: Settings) -> str | None:
    """Where the initial model is; the simulated engine needs none."""
    if settings.model_path is not None or settings.spec.trainer.engine.key == "simulated":
        return settings.model_path
    if (settings.run_dir / FILE_RESULT).exists():
        return None
    on_terminate(asyncio.get_running_loop(), _end_before_training)
    return await await_model_place(os.environ, timeout_s=_MODEL_TIMEOUT_S)


async def _run(settings: Settings) -> bool:
    """Whether the run has ended; False: this process was asked to end."""
    if (settings.run_dir / FILE_RESULT).exists():
        log.info("the run has ended; there is nothing to train")
        return True
    instance = uuid.uuid4().hex
    source = Source(process=settings.process, role=_ROLE, instance=instance)
    metrics = Metrics(role=_ROLE, process=settings.process)
    sink = BubbleSink(settings.run_dir / DIR_METRICS / f"{settings.process}.jsonl", source=source)
    recorder = Recorder(sink=sink, metrics=metrics)
    store = WeightStore(newest_kept=settings.versions_kept)
    server = make_server(settings.token, tls=settings.around.tls)
    add_WeightsServicer_to_server(WeightsService(store), server)  # type: ignore[no-untyped-call] # generated
    pages = TrainerPages(recorder, metrics=metrics)
    signals = SignalsServer(pages.pages())
    samples = asyncio.create_task(recorder.run(), name="trainer-bubble-samples")
    wired = Wired(settings=settings, store=store, recorder=recorder, pages=pages, samples=samples)
    try:
        identity = await _open_ports(settings, server=server, signals=signals, instance=instance)
        session = await _lead(wired, identity=identity)
    except RetryError:
        if samples.done():
            samples.result()  # its error is the cause
        raise
    finally:
        samples.cancel()
        await signals.close()
        await server.stop(None)
        _close(recorder)
    return not session.terminated


def _close(recorder: Recorder) -> None:
    """The last sample is lost if it cannot be written; how the process ended stays as it is."""
    try:
        recorder.close()
    except (UserError, OSError):
        log.exception("the last bubble sample could not be written")


async def _open_ports(
    settings: Settings, *, server: grpc.aio.Server, signals: SignalsServer, instance: str
) -> Identity:
    host = settings.around.bind_host
    address = bind(server, port=settings.grpc_port, host=host, tls=settings.around.tls)
    await server.start()
    port = await signals.start(host=host, port=settings.signals_port)
    write_endpoint(settings.run_dir, process=settings.process, grpc=address, signals=f"{host}:{port}")
    return Identity(trainer_id=settings.process, instance=instance, weights_address=settings.weights_address or address)


async def _lead(wired: Wired, *, identity: Identity) -> Session:
    """Train with the other ranks; they are told of every end but a loss."""
    leading = Leading(wired.settings)
    try:
        session = await _train(wired, identity=identity, leading=leading)
    except RetryError as error:
        if leading.excused:
            raise RankLostError(str(error)) from error
        raise
    except BaseException:
        leading.end()
        raise
    leading.end()
    return session


async def _train(wired: Wired, *, identity: Identity, leading: Leading) -> Session:
    """Prepare, connect, train until the end; the first part that fails ends the process."""
    settings, recorder, samples = wired.settings, wired.recorder, wired.samples
    on_terminate(asyncio.get_running_loop(), _end_before_training)
    prepared = await run_in_thread(lambda: _prepare(settings, leading), name="trainer-start")
    session = Session(
        identity,
        step=len(prepared.history),
        window_bytes=settings.window_bytes,
        checkpoint_path=prepared.checkpoint_path,
    )
    on_terminate(asyncio.get_running_loop(), session.terminate)
    leading.on_lost(lambda reason: session.end(Ending(kind="retry", reason=reason)))
    tools = Tools(
        engine=prepared.engine,
        session=session,
        checkpoints=prepared.checkpoints,
        weights=wired.store,
        recorder=recorder,
    )
    loop = StepLoop(tools, plan=_plan(settings), history=prepared.history)
    wired.pages.attach(loop, session=session)
    address = Address(scheduler=settings.scheduler_address, token=settings.token, tls=settings.around.tls)
    link = Link(session, address=address, recorder=recorder)
    linking = asyncio.create_task(link.run(), name="trainer-link")
    linking.add_done_callback(lambda task: _part_ended(task, session, what="the link to the scheduler"))
    samples.add_done_callback(lambda task: _part_ended(task, session, what="the bubble samples"))
    try:
        await run_in_thread(loop.run, name="trainer-steps")
    finally:
        await _unlink(link, linking)
    return session


async def _unlink(link: Link, linking: asyncio.Task[None]) -> None:
    """Say the last words. Raises the link's own error: it is the cause of what ended the step loop."""
    link.close()
    await asyncio.wait([linking], timeout=_UNLINK_S)
    linking.cancel()
    await asyncio.wait([linking])
    if not linking.cancelled():
        linking.result()


def _prepare(settings: Settings, leading: Leading) -> Prepared:
    """Engine at the newest good checkpoint; the slow part of a start."""
    claim_run_folder(settings.run_dir, store=settings.store)
    checkpoints = CheckpointStore(
        settings.store / DIR_CHECKPOINTS, keep_last=settings.spec.storage.checkpoints.keep_last
    )
    checkpoints.clean()
    found = checkpoints.newest()
    setup = EngineSetup(
        spec=settings.spec,
        model_path=settings.model_path,
        threads=settings.threads,
        place=settings.place,
        ranks=leading.gather(),
    )
    engine = engine_creator(settings.spec.trainer.engine.key)(setup)
    if found is None:
        return Prepared(engine=engine, checkpoints=checkpoints, history=History())
    engine.load(found.directory)
    log.info("goes on from %s", found.directory)
    return Prepared(
        engine=engine,
        checkpoints=checkpoints,
        history=found.meta.past,
        checkpoint_path=str(found.directory.relative_to(settings.store)),
    )


def _plan(settings: Settings) -> Plan:
    spec = settings.spec
    return Plan(
        steps=spec.pipeline.steps,
        checkpoint_interval_steps=spec.storage.checkpoints.interval_steps,
        store_dir=settings.store,
    )


def _part_ended(task: asyncio.Task[None], session: Session, *, what: str) -> None:
    """Wake the step loop and the publishing thread: without this part they are not to go on."""
    error = None if task.cancelled() else task.exception()
    reason = f"{what} ended" if error is None else f"{what} failed: {error}"
    session.end(Ending(kind="retry", reason=reason))


def _end_before_training() -> None:
    """SIGTERM while the model is loaded: nothing is to be kept, and a loading thread cannot be interrupted."""
    log.info("asked to end before the first step: nothing to keep")
    logging.shutdown()
    os._exit(EXIT_DONE)
