"""The generator process.

                        WeightsAvailable        pull (chunks, verified)
      SCHEDULER ──────────────┬───────────▶ PULLER ◀──────────────── TRAINER's Weights service
          ▲  │ commands       │                │ ready
   events │  ▼                ▼                ▼
        LINK reader ───▶ ENGINE LOOP ── one worker thread ──▶ ENGINE
        LINK writer ◀── OUTBOX ◀──┘ deltas

Loops: link reader and writer (`link.py`), engine loop (`loop.py`), pull (`puller.py`), bubble samples (`recorder.py`),
signals port (`signals.py`). The first that ends, ends the process.

A generator without a model folder fetches configuration and tokenizer from the scheduler first (`model_fetch.py`).

SIGTERM: leave in peace (`leaving.py`). SIGINT, or a second SIGTERM: end now. In a pod (STREAMRL_STAY) it stays when the
scheduler has stopped it, until SIGTERM.

Owns: wiring, exit codes (0 stopped by the scheduler, or left; 2 user error; 75 scheduler lost, or ended now).
Invariant: nothing is stored here that anybody else relies on; a killed generator costs only time.
"""

import asyncio
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.keys import DIR_METRICS, ENV_MODEL_PATH
from streamrl.spec import parse_bytes
from streamrl_workers.generator.engine import Engine
from streamrl_workers.generator.engines import engine_creator
from streamrl_workers.generator.leaving import Departure
from streamrl_workers.generator.link import Identity, Link, SchedulerLostError
from streamrl_workers.generator.loop import EngineLoop
from streamrl_workers.generator.model_fetch import Source as ModelSource
from streamrl_workers.generator.model_fetch import fetch_model
from streamrl_workers.generator.outbox import Outbox
from streamrl_workers.generator.puller import Announced, Pull
from streamrl_workers.generator.settings import Settings, read_settings
from streamrl_workers.generator.signal_pages import GeneratorPages
from streamrl_workers.metrics.prometheus import Metrics
from streamrl_workers.metrics.recorder import Recorder
from streamrl_workers.metrics.signals import SignalsServer
from streamrl_workers.metrics.sink import BubbleSink, Source
from streamrl_workers.stream.endpoint import write_endpoint
from streamrl_workers.stream.environ import pin_to_cpus
from streamrl_workers.stream.lifeline import watch_lifeline
from streamrl_workers.stream.staying import Place, stay
from streamrl_workers.weights.client import pull
from streamrl_workers.weights.hashing import TensorBytes

_ROLE = "generator"


def main() -> int:
    """Run a generator as the environment says; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        pin_to_cpus(os.environ)
        watch_lifeline(os.environ)
        return asyncio.run(_life(read_settings(os.environ)))
    except (UserError, UserErrors) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER_ERROR
    except SchedulerLostError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_RETRY


async def _life(settings: Settings) -> int:
    """Until the process ends: its work, and what follows it in a pod."""
    end = await _run(settings)
    if end.stopped and settings.around.stay:
        place = Place(
            run_dir=settings.run_dir,
            process=settings.process,
            host=settings.around.bind_host,
            port=settings.signals_port,
        )
        await stay(place, numbers={"ended": True})
    return end.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How the work has ended."""

    exit_code: int
    stopped: bool  # by the scheduler: there is nothing more to do


async def _run(settings: Settings) -> _End:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _end_before_work)
    instance = uuid.uuid4().hex
    source = Source(process=settings.process, role=_ROLE, instance=instance)
    metrics = Metrics(role=_ROLE, process=settings.process)
    sink = BubbleSink(settings.run_dir / DIR_METRICS / f"{settings.process}.jsonl", source=source)
    recorder = Recorder(sink=sink, metrics=metrics)
    pages = GeneratorPages(recorder, metrics=metrics)
    signals = SignalsServer(pages.pages())
    host = settings.around.bind_host
    port = await signals.start(host=host, port=settings.signals_port)
    try:
        model_path = await _model_path(settings)
        engine = await asyncio.to_thread(_create_engine, settings, model_path)
        write_endpoint(settings.run_dir, process=settings.process, grpc=None, signals=f"{host}:{port}")
        return await _serve(settings, engine=engine, pages=pages, recorder=recorder, instance=instance)
    finally:
        await signals.close()
        recorder.close()


def _end_before_work() -> None:
    """SIGTERM while the model is fetched or loaded: nothing is to be kept, and a loading thread cannot be interrupted."""
    logging.shutdown()
    os._exit(EXIT_DONE)


async def _serve(
    settings: Settings, *, engine: Engine, pages: GeneratorPages, recorder: Recorder, instance: str
) -> _End:
    outbox = Outbox()
    loop = EngineLoop(engine, pull=_pull(settings, pages.weights_arrived), outbox=outbox, recorder=recorder)
    link = Link(loop, outbox=outbox, recorder=recorder, identity=_identity(settings, instance=instance))
    pages.attach(loop, link=link)
    departure = Departure(leave=link.leave)
    departure.listen(asyncio.get_running_loop())
    await _first_of(link=link.run(), engine=loop.run(), samples=recorder.run(), departure=departure.wait())
    return _End(exit_code=EXIT_RETRY if departure.cut_short else EXIT_DONE, stopped=not departure.was_asked)


async def _first_of(**parts: Coroutine[Any, Any, Any]) -> None:
    """Run all until the first ends, maybe with an error, which is raised. The others are cancelled and awaited."""
    tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


def _identity(settings: Settings, *, instance: str) -> Identity:
    return Identity(
        generator_id=settings.process,
        instance=instance,
        pool=settings.pool.name,
        scheduler_address=settings.scheduler_address,
        token=settings.token,
        lease_s=settings.spec.scheduling.lease_seconds,
        tls=settings.around.tls,
    )


def _pull(settings: Settings, arrived: Callable[[int], None]) -> Pull:
    """How this job moves weights; `arrived` is told of all bytes."""
    transport = settings.spec.weights.value

    async def over_grpc(target: Announced) -> dict[str, TensorBytes]:
        return await pull(
            target.address,
            version=target.version,
            timeout_s=transport.timeout_seconds,
            chunk_bytes=parse_bytes(transport.chunk_bytes),
            token=settings.token,
            tls=settings.around.tls,
            arrived=arrived,
        )

    return over_grpc


async def _model_path(settings: Settings) -> str | None:
    """Where configuration and tokenizer are; None: the engine needs none."""
    if settings.pool.engine.key == "simulated" or settings.model_path is not None:
        return settings.model_path
    source = ModelSource(address=settings.scheduler_address, token=settings.token, tls=settings.around.tls)
    return str(await fetch_model(source, run_dir=settings.run_dir))


def _create_engine(settings: Settings, model_path: str | None) -> Engine:
    choice = settings.pool.engine
    create = engine_creator(choice.key)
    if choice.key == "simulated":
        return create(spec=choice.value, slots=choice.value.slots, seed=settings.spec.seed)
    if model_path is None:
        raise UserError(field=ENV_MODEL_PATH, rule=f"must be set for engine {choice.key}")
    try:
        return create(
            model_path=model_path,
            slots=choice.value.slots,
            max_total_tokens=None,
            threads=settings.threads,
            add_special_tokens=settings.spec.task.chat is None,  # a chat template has put them in
            precision=settings.spec.trainer.precision,
        )
    except (ValueError, OSError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(field=f"model {model_path}", rule=f"cannot be loaded: {first_line}") from error
