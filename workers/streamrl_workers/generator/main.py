"""The generator process.

                        WeightsAvailable        pull (pieces, verified)
      SCHEDULER ──────────────┬───────────▶ PULLER ◀──────────────── TRAINER's server of weights
          ▲  │ commands       │                │ ready
   events │  ▼                ▼                ▼
        LINK reader ───▶ ENGINE LOOP ── one worker thread ──▶ ENGINE
        LINK writer ◀── OUTBOX ◀──┘ deltas

Loops: link reader and writer (`link.py`), engine loop (`engine_loop.py`), pull (`weights/pull.py`), bubble samples (`metrics/bubbles.py`),
signals port (`signals.py`). `weights.py` has what pulls them and passes them on. The first that ends, ends the process.

A generator without a model folder fetches configuration and tokenizer from the scheduler first (`stream/model_files.py`).

SIGTERM: leave in peace (`process/shutdown.py`). SIGINT, or a second SIGTERM: end now. In a pod (STREAMRL_STAY) it stays when the
scheduler has stopped it, until SIGTERM.

Owns: wiring, exit codes (0 stopped by the scheduler, or left; 2 user error; 75 scheduler lost, another process has the name, or ended now).
Invariant: nothing is stored here that anybody else relies on; a killed generator costs only time.
"""

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import Callable

from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.keys import DIR_METRICS, ENV_MODEL_PATH
from streamrl.liveness import liveness_s
from streamrl.metrics import GENERATOR
from streamrl.spec import RLJobSpec
from streamrl.text import log_to_stderr, say
from streamrl_workers.generator.engine_loop import EngineLoop
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Engine, EngineFailedError, EngineOptions
from streamrl_workers.generator.link import GeneratorLink
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.generator.settings import GeneratorSettings, read_settings
from streamrl_workers.generator.status import GeneratorStatus
from streamrl_workers.generator.weights import GeneratorWeights
from streamrl_workers.metrics.bubbles import BubbleSink, Recorder
from streamrl_workers.metrics.signals import SignalsServer, WallMetrics
from streamrl_workers.models.probe import Prover
from streamrl_workers.process.environment_variables import pin_to_cpus
from streamrl_workers.process.shutdown import GracefulShutdown, first_of, live, watch_parent
from streamrl_workers.stream.channel import SchedulerLostError
from streamrl_workers.stream.messages import ProtocolError, RefusedError
from streamrl_workers.stream.model_files import fetch_model
from streamrl_workers.stream.run_folder import write_endpoint

_ROLE = "generator"


def main() -> int:
    """Run a generator as the environment says; returns the exit code."""
    log_to_stderr()
    try:
        pin_to_cpus(os.environ)
        watch_parent(os.environ)
        return asyncio.run(_life(read_settings(os.environ)))
    except (UserError, UserErrors) as error:
        say(*error.lines)
        return EXIT_USER_ERROR
    except (SchedulerLostError, EngineFailedError) as error:
        say(str(error))
        return EXIT_RETRY
    except (RefusedError, ProtocolError) as error:
        say(f"scheduler and generator do not agree: {error}")
        return EXIT_RETRY


async def _life(settings: GeneratorSettings) -> int:
    """Until the process ends: its work, and what follows it in a pod."""
    return await live(
        _run(settings),
        stays=settings.variables.serve_until_told,
        run_dir=settings.run_dir,
        process=settings.process,
        host=settings.variables.bind_host,
        port=settings.signals_port,
    )


async def _run(settings: GeneratorSettings) -> GracefulShutdown:
    """The work, until the scheduler stops it or somebody asks for its end."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _end_before_work)
    instance = uuid.uuid4().hex
    metrics = WallMetrics(GENERATOR, common=settings.metric_labels)
    sink = BubbleSink(
        settings.run_dir / DIR_METRICS / f"{settings.process}.jsonl",
        process=settings.process,
        role=_ROLE,
        instance=instance,
    )
    recorder = Recorder(sink=sink, metrics=metrics)
    status = GeneratorStatus(recorder, metrics=metrics)
    signals = SignalsServer(status.signals())
    host = settings.variables.bind_host
    port = await signals.start(host=host, port=settings.signals_port)
    try:
        model_path = await _model_path(settings)
        failure = EngineFailure(asyncio.get_running_loop())
        engine = await asyncio.to_thread(_create_engine, settings, model_path, failed=failure.tell)
        write_endpoint(settings.run_dir, process=settings.process, signals=f"{host}:{port}")
        try:
            return await _serve(
                settings, engine=engine, failure=failure, status=status, recorder=recorder, instance=instance
            )
        finally:
            await asyncio.to_thread(engine.close)
    finally:
        await signals.close()
        recorder.close()


def _end_before_work() -> None:
    """SIGTERM while the model is fetched or loaded: nothing is to be kept, and a loading thread cannot be interrupted."""
    logging.shutdown()
    os._exit(EXIT_DONE)


async def _serve(
    settings: GeneratorSettings,
    *,
    engine: Engine,
    failure: "EngineFailure",
    status: GeneratorStatus,
    recorder: Recorder,
    instance: str,
) -> GracefulShutdown:
    outbox = GeneratorOutbox()
    weights = GeneratorWeights(settings, status=status, instance=instance)
    prover = Prover(
        engine=f"engine {settings.pool.engine.key}",
        precision=settings.spec.trainer.number_format,
        quantized=settings.pool.engine.common.quantized,
    )
    loop = EngineLoop(engine, pull=weights.pull, outbox=outbox, recorder=recorder, prover=prover)
    link = GeneratorLink(
        loop, outbox=outbox, recorder=recorder, settings=settings, instance=instance, weights_address=weights.address
    )
    status.attach(loop, link=link)
    shutdown = GracefulShutdown(leave=link.leave)
    shutdown.listen(asyncio.get_running_loop())
    try:
        await first_of(
            link=link.run(), engine=loop.run(), failure=failure.wait(), samples=recorder.run(), shutdown=shutdown.wait()
        )
    finally:
        await weights.close()
    return shutdown


class EngineFailure:
    """Carries the failure of an engine that works by itself from its thread to this process's end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` is the one that waits."""
        self._loop = loop
        self._told: asyncio.Future[str] = loop.create_future()

    def tell(self, fault: str) -> None:
        """Called once, from any thread."""
        self._loop.call_soon_threadsafe(self._told.set_result, fault)

    async def wait(self) -> None:
        """Raises EngineFailedError when the engine has failed."""
        raise EngineFailedError(await self._told)


async def _model_path(settings: GeneratorSettings) -> str | None:
    """Where configuration and tokenizer are, with the weights where they are frozen; None: the engine needs none."""
    if settings.is_frozen:
        return await asyncio.to_thread(_frozen_path, settings)
    if settings.model_path is not None or not settings.pool.engine.common.needs_model:
        return settings.model_path
    return str(await fetch_model(settings.scheduler, run_dir=settings.run_dir))


def _frozen_path(settings: GeneratorSettings) -> str:
    """In a thread: its import takes seconds, and the heartbeat goes on."""
    from streamrl_workers.models.frozen import path_in_pod  # needs torch, which the engine loads

    return path_in_pod(settings.spec, model_path=settings.model_path, base_dir=settings.base_dir)


def _create_engine(settings: GeneratorSettings, model_path: str | None, *, failed: Callable[[str], None]) -> Engine:
    choice = settings.pool.engine
    if model_path is None and choice.common.needs_model:
        raise UserError(field=ENV_MODEL_PATH, rule=f"must be set for engine {choice.key}")
    options = EngineOptions(
        spec=choice.value,
        seed=settings.spec.seed,
        model_path=model_path,
        max_tokens=settings.spec.task.sampling.max_tokens,
        threads=settings.threads,
        add_special_tokens=not settings.spec.task.has_chat,
        precision=settings.spec.trainer.number_format,
        sherl=settings.spec.trainer.sherl,
        lora=settings.spec.trainer.unmerged_lora,
        failed=failed,
        traces_endpoint=_traces_endpoint(settings.spec),
        probe_timeout_s=liveness_s(os.environ),
        metric_labels=settings.metric_labels,
    )
    try:
        kind = engine_kind(choice.key)
        if settings.is_frozen:
            assert kind.create_frozen is not None  # its pool's engine `scores_frozen`
            return kind.create_frozen(options, pass_tokens=settings.spec.trainer.micro_batch_tokens)
        return kind.create(options)
    except UserError:
        raise
    except (ValueError, OSError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(field=f"model {model_path}", rule=f"cannot be loaded: {first_line}") from error


def _traces_endpoint(spec: RLJobSpec) -> str | None:
    return None if spec.tracing is None or not spec.tracing.share_percent else spec.tracing.endpoint
