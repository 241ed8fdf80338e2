"""The engine loop: commands in, engine steps, deltas out.

Owns the waiting list, cancels, weight swaps, the transitions of bubble clock and step times; it alone calls the engine, always in one
worker thread. Does not own the connection (`link.py`), fetching bytes (`weights/pull.py`), messages (`outbox.py`).

Consumes: commands (the methods called by the link), pulled weights. Produces: progress and control events in the outbox.
Waits for: commands, when it has nothing to do (the link has the deadline); an engine's own pace. Unblocked by: `_wake`.

Invariants:
- Nothing is generated before verified weights are in the engine, or its own where it is frozen; weights change between two steps only.
- A paused generator keeps what is active and calls no step; weights are swapped all the same.
- Weights are not swapped while a pinned request is active or waiting: all its tokens come from one version.
- The first version in the engine gives the trainer's log-probs of the probe that came with it, or the process ends (`models/probe.py`).
- An engine is given bytes that a pull has verified, maybe with adapters merged into them, and no others (invariant 4); until they are ready it generates on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engines.base import Delta, Engine, KvLoad, LoadPart
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.metrics.bubbles import GeneratorState, Recorder, generator_wall
from streamrl_workers.metrics.step_times import StepCounts, StepTimes
from streamrl_workers.models.probe import Prover, take_probe
from streamrl_workers.stream.messages import ERROR_CHARS
from streamrl_workers.weights.puller import Pull, Pulled, Puller

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_MIN_WAIT_S = 0.002
"""An engine that only takes time is asked at most so often; it gives everything that became due."""
_DEFAULT_CAUSE = "no_prompts"
"""Why an idle generator is idle when the scheduler has not (yet) said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What heartbeat and gauges tell."""

    active: int
    waiting: int
    tokens: int
    version: pb.VersionName | None  # in the engine, verified
    weights_fault: str  # why it is not a newer one: the last that should have come failed; "": none did
    kv: KvLoad | None  # None: without a bound


class EngineLoop:
    """Runs one engine. All methods but `run` are called by the link, in the same event loop."""

    def __init__(
        self, engine: Engine, *, pull: Pull, outbox: GeneratorOutbox, recorder: Recorder, prover: Prover | None = None
    ) -> None:
        """`prover`: compares the first load with the trainer; None: as for engine hf in float32."""
        self._prover = prover or Prover()
        self.slots = engine.slots
        self._engine = engine
        self._outbox = outbox
        self._recorder = recorder
        self._step_times = StepTimes()
        self._puller = Puller(pull, wake=self._awake, failed=self._tell_failed, stalled=self._tell_stalled)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._wake = asyncio.Event()
        self._waiting: dict[int, pb.SampleRequest] = {}  # by lease, oldest first
        self._cancelled: set[int] = set()  # in the engine, to be cancelled before its next step
        self._leases: set[int] = set()  # in the engine
        self._version = None if engine.version is None else pb.VersionName(step=engine.version)
        """In the engine; one that has weights from its start has version 0 of no attempt."""
        self._weights_fault = ""
        self._active = 0
        self._connected = self._draining = self._swapping = self._queued = self._paused = False
        self.on_weights: Callable[[float, float, Mapping[LoadPart, float]], None] = lambda *_: None
        """The engine has taken a version."""
        self.on_weights_failed: Callable[[], None] = lambda: None
        self.leaving = False
        """Everything accepted is finished, then this generator goes."""
        self._idle_cause = _DEFAULT_CAUSE

    # ---- commands

    def connected(self) -> None:
        """The scheduler has welcomed us."""
        self._connected = True
        self._awake()

    def disconnected(self) -> None:
        """The scheduler is gone: it will issue what it wants anew."""
        self._connected = self._draining = self._queued = self._paused = False
        self._idle_cause = _DEFAULT_CAUSE
        self._waiting.clear()
        self._cancelled |= self._leases
        self._awake()

    def issue(self, requests: Sequence[pb.SampleRequest]) -> None:
        """Take requests in order; they enter the engine when slots are free."""
        self._idle_cause = _DEFAULT_CAUSE
        self._waiting.update({request.lease: request for request in requests})
        self._awake()

    def cancel(self, leases: Sequence[int]) -> None:
        """Forget these requests, wherever they are."""
        for lease in leases:
            self._waiting.pop(lease, None)
        self._outbox.forget(leases)
        self._cancelled |= self._leases.intersection(leases)
        self._awake()

    def announce(self, target: pb.WeightsAvailable) -> None:
        """Pull and swap in these weights; supersedes earlier announcements."""
        if self._version == target.version:
            self._puller.drop()
            self._weights_fault = ""
            self._outbox.post(_loaded(target.version))
        else:
            self._puller.announce(target)
        self._awake()

    def idle(self, cause: str) -> None:
        """Why nothing is issued."""
        self._idle_cause = cause
        self._awake()

    def queue_state(self, *, waiting: bool) -> None:
        """Whether samples wait for a slot somewhere."""
        self._queued = waiting
        self._awake()

    def pause(self, *, paused: bool) -> None:
        """The trainer computes on these devices, or does no more."""
        self._paused = paused
        self._awake()

    def drain(self) -> None:
        """Say `Drained` when everything accepted has ended."""
        self._draining = True
        self._awake()

    def leave(self) -> None:
        """Say `Leaving`. The scheduler answers `Drain`, behind all that it had issued before it knew."""
        self.leaving = True
        self._outbox.post(pb.GeneratorEvent(leaving=pb.Leaving()))

    def sent(self) -> None:
        """The writer has taken what was in the outbox."""
        self._awake()

    def status(self) -> EngineStatus:
        """The numbers of now."""
        return EngineStatus(
            active=self._active,
            waiting=len(self._waiting),
            tokens=self._outbox.tokens,
            version=self._version,
            weights_fault=self._weights_fault,
            kv=self._engine.kv_load(),
        )

    def step_times(self) -> dict[int, StepCounts]:
        """How long steps took, by batch."""
        return self._step_times.counts()

    def engine_metrics(self) -> bytes:
        """The engine's own metrics, as text."""
        return self._engine.metrics()

    # ---- the loop

    async def run(self) -> None:
        """Until cancelled: cancel, swap, admit, step."""
        try:
            while True:
                self._puller.check()
                await self._round()
        finally:
            await self._puller.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _round(self) -> None:
        await self._apply_cancels()
        if self._puller.ready and (self._version is None or not self._pinned()):
            await self._swap()
        self._engine.pause(paused=self._paused)
        await self._admit()
        self._tell_drained()
        self._note()
        if self._paused or not self._leases or self._version is None or self._outbox.full:
            await self._wait(None)
            return
        delay_s = self._engine.step_seconds()
        if delay_s > 0 and await self._wait(max(delay_s, _MIN_WAIT_S)):
            return  # a command has come
        deltas = await self._in_engine(self._engine.step)
        self._step_times.stepped((len(delta.tokens) for delta in deltas), now_s=time.monotonic())
        self._take(deltas)

    async def _apply_cancels(self) -> None:
        if self._cancelled:
            cancelled, self._cancelled = self._cancelled, set()
            self._leases -= cancelled
            await self._in_engine(lambda: self._engine.cancel(cancelled))

    async def _admit(self) -> None:
        """Move waiting requests into free slots."""
        free = self._engine.free()
        if self._paused or not self._waiting or not free or self._version is None:
            return
        requests = [self._waiting.pop(lease) for lease in list(self._waiting)[:free]]
        leases = [request.lease for request in requests]
        self._leases.update(leases)
        self._outbox.admit(leases, now_s=time.monotonic())
        self._note()
        self._take(await self._in_engine(lambda: self._engine.add(requests)))
        if self._waiting:
            self._awake()  # some may have ended at once: look again for free slots

    def _pinned(self) -> bool:
        """Whether a request must still end under the weights in the engine."""
        return self._engine.pinned_active() > 0 or any(request.pinned for request in self._waiting.values())

    async def _swap(self) -> None:
        """Put the pulled weights into the engine."""
        pulled = self._puller.take()
        begun_s = time.monotonic()
        self._swapping = True
        self._note()
        try:
            late, fault = await self._in_engine(lambda: self._load(pulled))
        finally:
            self._swapping = False
        if late:  # made under the old weights
            self._take(late)
        if fault:
            self._tell_failed(pulled.version, fault)
        else:
            self._version, load_s = pulled.version, time.monotonic() - begun_s
            self._weights_fault = ""
            self.on_weights(pulled.fetch_s, load_s, self._engine.load_parts)
            times = {"fetch_s": pulled.fetch_s, "waited_s": begun_s - pulled.at_s, "load_s": load_s}
            parts = {str(part): seconds for part, seconds in self._engine.load_parts.items()}
            self._outbox.post(_loaded(pulled.version, load_parts=parts, **times))

    def _load(self, pulled: Pulled) -> tuple[list[Delta], str]:
        """Runs in the engine's thread. Returns the last deltas of the old weights, and "" or what went wrong.

        Raises:
            UserError: the engine refuses the first weights of all, computes other log-probs with them than the trainer, or cannot keep the
                old ones; it would do so with the next ones too.
        """
        try:
            tensors, probe = take_probe(pulled.tensors)
            late = self._engine.load_weights(version=pulled.version.step, tensors=tensors)
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            if self._engine.version is None:
                raise UserError(
                    field="spec.generators[].engine",
                    rule=f"cannot run the weights of spec.model: {error}",
                    fix="take a model that this engine supports, and the same one as the trainer",
                ) from error
            return [], f"the engine refuses them: {error}"  # and keeps the old ones
        if self._version is None and probe is not None:
            self._prover.prove(self._engine, probe)
        return late, ""

    async def _in_engine(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _wait(self, limit_s: float | None) -> bool:
        """Wait for a wake-up; False when `limit_s` was over first."""
        try:
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    # ---- what becomes of it

    def _take(self, deltas: Sequence[Delta]) -> None:
        """Deltas of one engine call go into the outbox; ended requests leave."""
        assert self._version is not None
        self._outbox.take(deltas, version=self._version, now_s=time.monotonic())
        self._leases.difference_update(delta.lease for delta in deltas if delta.finish_reason is not None)

    def _note(self) -> None:
        """Tell the clocks what is the case from now on."""
        self._active = len(self._leases)
        now = GeneratorState(
            connected=self._connected,
            usable=self._version is not None,
            swapping=self._swapping,
            pulling=self._puller.pulling or self._puller.ready,
            blocked=self._outbox.full,
            active=0 if self._paused else self._active,
            slots=self.slots,
            queued=self._queued or bool(self._waiting),
            idle_cause="phase" if self._paused else self._idle_cause,
        )
        state = generator_wall(now)
        self._recorder.enter(state)
        self._step_times.enter(generating=state.part == "busy", now_s=time.monotonic())

    def _tell_drained(self) -> None:
        if self._draining and not self._leases and not self._waiting and not self._outbox.has_ended:
            self._draining = False
            self._outbox.post(pb.GeneratorEvent(drained=pb.Drained()))

    def _tell_failed(self, version: pb.VersionName, error: str) -> None:
        self._weights_fault = f"weights of version ({version.attempt}, {version.step}) failed: {error}"
        _log.error("%s", self._weights_fault)
        self.on_weights_failed()
        self._outbox.post(
            pb.GeneratorEvent(weights_failed=pb.WeightsFailed(version=version, error=error[:ERROR_CHARS]))
        )

    def _tell_stalled(self, target: pb.WeightsAvailable) -> None:
        _log.warning("nothing of version %d comes from %s", target.version.step, target.address)
        stalled = pb.WeightsStalled(version=target.version, address=target.address)
        self._outbox.post(pb.GeneratorEvent(weights_stalled=stalled))

    def _awake(self) -> None:
        self._wake.set()


def _loaded(
    version: pb.VersionName, *, load_parts: Mapping[str, float] | None = None, **seconds: float
) -> pb.GeneratorEvent:
    """Only said when the engine has the verified bytes of `version`."""
    loaded = pb.WeightsLoaded(version=version, engine_hash=version.hash, load_parts=load_parts, **seconds)
    return pb.GeneratorEvent(weights_loaded=loaded)
