"""The process of a trainer rank above 0: it computes what rank 0 says, in step with it.

      CALL, BUILD, END        one at a time
    RANK 0 ═════════▶ LINK ───────────────▶ FOLLOWING (a thread) ─▶ RankWorker ◀═ collectives ═▶ the other ranks
      ▲                │                       │
      └── ANSWER, ─────┘                       ▼
          ERROR                            RECORDER ─▶ signals port, metrics/trainer-<rank>.jsonl

Loops: following (here), the link's reader and beats (`engines/links.py`), bubble samples (`recorder.py`), signals port.

    following  consumes: frames    produces: answers    waits for: rank 0    unblocked by: END, a lost link

Owns: wiring, exit codes (0 rank 0 said so, or asked to end together with it; 2 user error; 75 rank 0 is gone, 76 if it is on another node).
Invariants: nothing is decided here, and nothing is kept but this rank's part of what rank 0 has saved. SIGTERM alone ends
nothing: rank 0 gets it too and may still need this rank for the last checkpoint.
"""

import asyncio
import importlib
import logging
import os
import uuid
from collections.abc import Callable
from typing import Any

from streamrl.errors import EXIT_DONE, UserError
from streamrl.keys import DIR_METRICS, FILE_RESULT
from streamrl_workers.metrics.bubbles import Part, State, idle
from streamrl_workers.metrics.prometheus import Metrics
from streamrl_workers.metrics.recorder import Recorder
from streamrl_workers.metrics.signals import Pages, SignalsServer
from streamrl_workers.metrics.sink import BubbleSink, Source
from streamrl_workers.stream.endpoint import write_endpoint
from streamrl_workers.stream.lifeline import on_terminate
from streamrl_workers.trainer.endings import RankLostError
from streamrl_workers.trainer.engines import EngineSetup, codec, failures
from streamrl_workers.trainer.engines.linked_ranks import Watch
from streamrl_workers.trainer.engines.links import Frame, Link, LostError
from streamrl_workers.trainer.engines.team import Kind, join
from streamrl_workers.trainer.leading import meeting
from streamrl_workers.trainer.settings import Settings
from streamrl_workers.trainer.thread import run_in_thread

_ROLE = "trainer"
_CREATOR = "streamrl_workers.trainer.engines.create"
"""Loads torch: not before rank 0 is there."""
_PARTS: dict[str, Part] = {"tensors": "weights", "save": "other", "load": "other", "export": "other"}
"""What a call counts as; all others are training."""

log = logging.getLogger(__name__)


class Following:
    """Does what rank 0 says until it says END."""

    def __init__(self, settings: Settings, *, recorder: Recorder) -> None:
        self._settings = settings
        self._recorder = recorder
        self._watch = Watch(exit_code=lambda _: settings.lost_code)
        self._link: Link | None = None
        self._worker: Any = None
        self.terminated = False

    @property
    def fault(self) -> str:
        """Why this rank cannot compute yet; "" if it can."""
        return "" if self._worker is not None else "the model is being loaded"

    def terminate(self) -> None:
        """SIGTERM: before rank 0 is there nothing is to be kept; afterwards it says when."""
        if self._link is None:
            log.info("asked to end before the first step: nothing to keep")
            logging.shutdown()
            os._exit(EXIT_DONE)
        self.terminated = True
        log.info("asked to end: rank 0 says when")

    def run(self) -> None:
        """Join and follow. Raises RankLostError when rank 0 is gone."""
        self._link = join(meeting(self._settings), on_lost=self._watch.lost)
        importlib.import_module(_CREATOR)  # seconds, while rank 0 does the same
        try:
            while (frame := self._next(self._link)).kind != Kind.END:
                self._obey(self._link, frame)
            self._link.close()
        except LostError as error:
            if not self.terminated:
                raise RankLostError(str(error)) from error
            log.info("asked to end, and rank 0 has ended")

    def _next(self, link: Link) -> Frame:
        with self._recorder.during(State(part="other") if self._worker is None else idle("no_samples")):
            return link.receive()  # a silent rank 0 is lost in time; a long idleness is no fault

    def _obey(self, link: Link, frame: Frame) -> None:
        value = codec.decode(frame.data)
        if frame.kind == Kind.BUILD:
            kind, answer = self._tried(lambda: self._build(value), part="other")
        else:
            method, payload = value
            kind, answer = self._tried(lambda: getattr(self._worker, method)(payload), part=_PARTS.get(method, "busy"))
        link.send(kind, codec.encode(answer))

    def _build(self, facts: Any) -> None:  # noqa: ANN401 - as rank 0 wrote them
        settings = self._settings
        setup = EngineSetup(
            spec=settings.spec, model_path=settings.model_path, threads=settings.threads, place=settings.place
        )
        self._worker = importlib.import_module(_CREATOR).create_follower(setup, facts)

    def _tried(self, work: Callable[[], Any], *, part: Part) -> tuple[Kind, Any]:
        """The answer, or the error as rank 0 is to hear it: it decides what follows."""
        try:
            with self._watch, self._recorder.during(part):
                return Kind.ANSWER, work()
        except (UserError, OSError) as error:
            return Kind.ERROR, failures.describe(error)
        except Exception as error:
            log.exception("a call of rank 0 has failed")
            return Kind.ERROR, failures.describe(error)


async def run_follower(settings: Settings) -> bool:
    """Follow rank 0 to the end; False: this process was asked to end."""
    if (settings.run_dir / FILE_RESULT).exists():
        log.info("the run has ended; there is nothing to train")
        return True
    source = Source(process=settings.process, role=_ROLE, instance=uuid.uuid4().hex)
    metrics = Metrics(role=_ROLE, process=settings.process)
    sink = BubbleSink(settings.run_dir / DIR_METRICS / f"{settings.process}.jsonl", source=source)
    recorder = Recorder(sink=sink, metrics=metrics)
    following = Following(settings, recorder=recorder)
    signals = SignalsServer(_pages(following, recorder=recorder, metrics=metrics, rank=settings.place.rank))
    samples = asyncio.create_task(recorder.run(), name="trainer-bubble-samples")
    on_terminate(asyncio.get_running_loop(), following.terminate)
    work = asyncio.create_task(run_in_thread(following.run, name="trainer-following"), name="trainer-following")
    try:
        host = settings.around.bind_host
        port = await signals.start(host=host, port=settings.signals_port)
        write_endpoint(settings.run_dir, process=settings.process, grpc=None, signals=f"{host}:{port}")
        await asyncio.wait([work, samples], return_when=asyncio.FIRST_COMPLETED)
        if samples.done():
            samples.result()  # its error is the cause
        await work
    finally:
        samples.cancel()
        await signals.close()
        _close(recorder)
    return not following.terminated


def _pages(following: Following, *, recorder: Recorder, metrics: Metrics, rank: int) -> Pages:
    def numbers() -> dict[str, Any]:
        wall_s, parts = recorder.totals()
        return {"rank": rank, "wall_s": wall_s, "parts": parts}

    def render() -> bytes:
        recorder.refresh()
        return metrics.render()

    return Pages(metrics=render, numbers=numbers, fault=lambda: following.fault)


def _close(recorder: Recorder) -> None:
    """The last sample is lost if it cannot be written; how the process ended stays as it is."""
    try:
        recorder.close()
    except (UserError, OSError):
        log.exception("the last bubble sample could not be written")
