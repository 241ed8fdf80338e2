"""The process of a trainer rank above 0: it computes what rank 0 says, in step with it.

      CALL, END               one at a time
    RANK 0 ═════════▶ LINK ──────────▶ FOLLOWER RANK (a thread) ─▶ RankWorker ◀═ collectives ═▶ the other ranks
      ▲                │                       │
      └── ANSWER, ─────┘                       ▼
          ERROR                            RECORDER ─▶ status endpoint, metrics/trainer-<rank>.jsonl

Its slices of each version are published by a thread (`rank_weights.py`), and served from here.

Loops: following (here), the link's reader and beats (`engines/rank_link.py`), bubble samples and status endpoint (`status.py`).

    following  consumes: frames    produces: answers    waits for: rank 0    unblocked by: END, a lost link

Owns: wiring, exit codes (0 rank 0 said so, or asked to end together with it; 2 user error; 75 rank 0 is gone, or memory ran out once, 76 if it is on another node).
Invariants: nothing is decided here but the end of a rank whose memory ran out in a pass, and nothing is kept but this rank's part of what rank 0 has saved. SIGTERM alone ends
nothing: rank 0 gets it too and may still need this rank for the last checkpoint.
"""

import asyncio
import importlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from streamrl.errors import EXIT_DONE, UserError
from streamrl_workers.metrics.bubbles import Part, Recorder, WallState, idle
from streamrl_workers.process.daemon_thread import run_in_thread
from streamrl_workers.process.shutdown import on_terminate
from streamrl_workers.trainer.engines.engine import RankLostError, RetryError
from streamrl_workers.trainer.engines.process_group import BUILD, PASSES, READY, HangGuard, join, send_later
from streamrl_workers.trainer.engines.rank_link import (
    Frame,
    FrameKind,
    Payload,
    PeerLostError,
    RankLink,
    decode,
    describe_error,
    encode,
)
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.rank_weights import RankWeights
from streamrl_workers.trainer.settings import TrainerSettings
from streamrl_workers.trainer.status import LOADING, TrainerStatus, weight_totals

_ENGINE = "streamrl_workers.trainer.engines.torch_engine"
"""Loads torch: not before rank 0 is there."""
_SLICES = "slices"
_PARTS: dict[str, Part] = {_SLICES: "weights", **dict.fromkeys((READY, BUILD, "save", "load", "export"), "other")}
"""What a call counts as; all others are training."""

log = logging.getLogger(__name__)


class FollowerRank:
    """Does what rank 0 says until it says END."""

    def __init__(self, settings: TrainerSettings, *, recorder: Recorder, weights: RankWeights) -> None:
        self._settings = settings
        self._weights = weights
        self._recorder = recorder
        self._guard = HangGuard(exit_code=lambda _: settings.lost_code)
        self._link: RankLink | None = None
        self._make_worker: Any = None
        self._worker: Any = None
        self._failed: UserError | RetryError | None = None
        """Why the last call has failed, where that says how this process ends."""
        self.terminated = False

    @property
    def fault(self) -> str:
        """Why this rank cannot compute yet; "" if it can."""
        return "" if self._worker is not None else LOADING

    def terminate(self) -> None:
        """SIGTERM: before rank 0 is there nothing is to be kept; afterwards it says when."""
        if self._link is None:
            log.info("asked to end before the first step: nothing to keep")
            logging.shutdown()
            os._exit(EXIT_DONE)
        self.terminated = True
        log.info("asked to end: rank 0 says when")

    def run(self) -> None:
        """Join and follow.

        Raises:
            RankLostError: rank 0 is gone.
            UserError, RetryError: this rank failed within a pass; its end wakes the others, which wait in a collective.
        """
        self._link = join(self._settings.rendezvous, on_lost=self._guard.lost)
        importlib.import_module(_ENGINE)  # seconds, while rank 0 does the same
        try:
            while (frame := self._next(self._link)).kind != FrameKind.END:
                self._obey(self._link, frame)
            self._link.close()
        except PeerLostError as error:
            if not self.terminated:
                raise RankLostError(str(error)) from error
            log.info("asked to end, and rank 0 has ended")

    def _next(self, link: RankLink) -> Frame:
        with self._recorder.during(WallState(part="other") if self._worker is None else idle("no_samples")):
            return link.receive()  # a silent rank 0 is lost in time; a long idleness is no fault

    def _obey(self, link: RankLink, frame: Frame) -> None:
        method, payload = decode(frame.data)
        called = getattr(self if method in (READY, BUILD, _SLICES) else self._worker, method)
        kind, answer = self._tried(lambda: called(payload), part=_PARTS.get(method, "busy"))
        if isinstance(answer, Future):
            send_later(link, answer)
            answer = None
        link.send(kind, encode(answer))
        if self._failed is not None and method in PASSES:
            raise self._failed

    def get_ready(self, payload: None) -> None:
        """As far as this rank can come alone."""
        del payload
        settings = self._settings
        setup = EngineSetup(
            spec=settings.spec,
            model_path=settings.model_path,
            base_dir=settings.base_dir,
            plugin_dir=settings.plugin_dir,
            threads=settings.threads,
            run_dir=settings.run_dir,
            env=settings.env,
        )
        self._make_worker = importlib.import_module(_ENGINE).create_follower(setup)

    def build(self, facts: Payload) -> str:
        """Make the worker, at the same time as all other ranks; return where this rank serves its weights."""
        self._worker = self._make_worker(facts)
        return self._weights.address

    def slices(self, payload: Payload) -> None:
        """Copy this rank's slices of a version, and begin to publish them."""
        attempt, step, kept = payload
        self._weights.retain([(attempt, step) for attempt, step in kept])
        self._weights.publish(attempt=attempt, step=step, slices=self._worker.slices(None))

    def _tried(self, work: Callable[[], Any], *, part: Part) -> tuple[FrameKind, Any]:
        """The answer, or the error as rank 0 is to hear it: it decides what follows."""
        try:
            with self._guard, self._recorder.during(part):
                return FrameKind.ANSWER, work()
        except (UserError, RetryError) as error:
            self._failed = error
            return FrameKind.ERROR, describe_error(error)
        except OSError as error:
            return FrameKind.ERROR, describe_error(error)
        except Exception as error:
            log.exception("a call of rank 0 has failed")
            return FrameKind.ERROR, describe_error(error)


async def run_follower(settings: TrainerSettings) -> bool:
    """Follow rank 0 to the end; False: this process was asked to end."""
    status, loop = TrainerStatus(settings), asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()

    def fail(error: UserError | RetryError) -> None:
        loop.call_soon_threadsafe(_fail, failed, error)

    weights = RankWeights(settings, failed=fail)
    follower = FollowerRank(settings, recorder=status.recorder, weights=weights)
    status.show(numbers=lambda: {"rank": settings.env.rank}, fault=lambda: follower.fault)
    status.totals = lambda: weight_totals(served_bytes=weights.server.served_bytes, deltas=weights.deltas)
    try:
        async with status:
            on_terminate(loop, follower.terminate)
            work = asyncio.create_task(run_in_thread(follower.run, name="trainer-following"), name="trainer-following")
            await status.serve(weights=weights.address)
            await asyncio.wait([work, status.samples, failed], return_when=asyncio.FIRST_COMPLETED)
            for part in (status.samples, failed):
                if part.done():
                    part.result()  # its error is the cause
            await work
    finally:
        failed.cancel()
        await asyncio.to_thread(weights.close)
    return not follower.terminated


def _fail(future: "asyncio.Future[None]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
