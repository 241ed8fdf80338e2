"""The step story: groups, micro-steps, optimiser step, record, publish, checkpoint.

Owns: the order of things in one trainer process, the thread that hashes and announces versions. Does not own: how a step is computed
(`engines/`), the conversation (`session.py`), writing checkpoints (`checkpointing.py`), serving weights. Runs in a thread of its own.
Evaluation is the scheduler's, but for the loss of held-out rows, which come behind the welcome.

One step:
1. take groups as they come; a micro-step starts when enough samples wait (in order: when that many tokens have come, whenever that is);
2. when the last group is there: the rest, then the optimiser;
3. copy the weights, each rank what it holds (the only part of publishing that the next step waits for);
4. say that the step is done; the journal records it, then the version is announced, while step k + 1 goes on;
5. every so often: copy the state; the checkpoint is written beside the next steps.

    consumes: groups    produces: steps, versions, checkpoints    waits for: groups, records, the journal
    unblocked by: the scheduler's messages, the end of the session, SIGTERM

Invariants:
- A version is announced only when the journal holds every step before it.
- One version is on its way at a time, so at most one copy of the weights waits here.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from streamrl.errors import UserError
from streamrl.keys import DIR_EXPORT
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.bubbles import Recorder, WallState, idle
from streamrl_workers.stream.digests import History
from streamrl_workers.stream.object_store import ObjectFolder
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore, discard_export, export_once
from streamrl_workers.trainer.checkpointing import Checkpointing
from streamrl_workers.trainer.engines.engine import RetryError, TrainEngine
from streamrl_workers.trainer.rank_weights import NO_PARTS, RankParts, ending_of
from streamrl_workers.trainer.session import Session, StoppedError, TerminatedError
from streamrl_workers.weights.hashing import SliceBytes, TensorBytes
from streamrl_workers.weights.hashing import size_bytes as size_of
from streamrl_workers.weights.store import WeightStore

_WAIT_REPORT_S = 60.0
"""A wait for groups is told in the log so often; it has no deadline of its own, as a long completion is no fault."""

Offer = Callable[..., bool]
"""As `WeightServer.offer` is."""


def _in_store(_version: pb.VersionName, *, ended: Callable[[], bool]) -> bool:
    """Who is served from the store itself can have it."""
    return True


IsNeeded = Callable[..., bool]
"""As `TrainerSettings.is_needed` is."""


def _newest(step: int, *, newest: int) -> bool:
    return step == newest


def offer_of(is_offered: Callable[[int], bool], *, server: Offer) -> Offer:
    """Versions that no generator is told of stay in the store. `is_offered`: as `TrainerSettings.is_offered` is."""

    def offer(version: pb.VersionName, *, ended: Callable[[], bool]) -> bool:
        return (server if is_offered(version.step) else _in_store)(version, ended=ended)

    return offer


log = logging.getLogger(__name__)


class Publishing:
    """Publishes in its own thread; use as a context."""

    def __init__(
        self, session: Session, *, store: WeightStore, offer: Offer, attempt: int, parts: RankParts = NO_PARTS
    ) -> None:
        """`parts`: what other ranks hold of each version."""
        self._session = session
        self._store = store
        self._offer = offer
        self._parts = parts
        self._attempt = attempt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer-publishing")
        self._current: Future[bytes] | None = None
        self.newest_hash = b""
        """Of the newest version that was waited for."""

    def begin(self, step: int, tensors: Mapping[str, TensorBytes], *, slices: Sequence[SliceBytes] = ()) -> None:
        """Publish version `step`: whole tensors and slices of this rank; the version before must have been waited for."""
        assert self._current is None, "one version at a time"
        self._current = self._thread.submit(self._publish, step, tensors, slices)

    def wait(self) -> None:
        """Until the version on its way is announced. It waits for the journal's record, which has a deadline."""
        if self._current is not None:
            current, self._current = self._current, None
            self.newest_hash = current.result()

    def _publish(self, step: int, tensors: Mapping[str, TensorBytes], slices: Sequence[SliceBytes]) -> bytes:
        """Its hash. Any error ends the session, and with it the step loop's wait for samples of this version."""
        try:
            return self._offered(step, tensors, slices)
        except (UserError, RetryError, StoppedError) as error:
            self._session.end(error)
            raise
        except Exception as error:
            ending = ending_of(error)
            self._session.end(ending)
            raise ending from error

    def _offered(self, step: int, tensors: Mapping[str, TensorBytes], slices: Sequence[SliceBytes]) -> bytes:
        """Announced when it can be had; not, where this process is asked to end before."""
        session = self._session
        name = self._store.publish(
            attempt=self._attempt,
            step=step,
            tensors=tensors,
            slices=slices,
            parts=lambda: self._parts.ask(attempt=self._attempt, step=step, ending=lambda: session.ending),
        )
        if self._offer(name, ended=lambda: session.terminated or session.ending is not None):
            with self._store.pulling(name) as manifest:
                size_bytes = sum(map(size_of, () if manifest is None else manifest.tensors))
            session.wait_recorded(step)
            session.publish(pb.Published(version=name, size_bytes=size_bytes))
        elif session.ending is not None:
            raise session.ending
        return name.hash

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=kind is None, cancel_futures=True)


@dataclass(kw_only=True)
class StepLoop:
    """Trains from the checkpoint's step to the end of the run."""

    engine: TrainEngine
    session: Session
    checkpoints: CheckpointStore
    weights: WeightStore
    offer: Offer = _in_store
    parts: RankParts = NO_PARTS  # of versions, which other ranks hold
    is_needed: IsNeeded = _newest
    recorder: Recorder
    history: History  # the steps that the engine's state holds
    copies: ObjectFolder | None = None  # of what is in `store_dir`
    steps: int  # of the run
    checkpoint_interval_steps: int
    evaluation_interval_steps: int
    store_dir: Path  # holds the checkpoints, and the model in the end
    in_order: bool = False  # groups come by their numbers, and micro-steps follow from these alone
    attempt: int = 0  # known with the scheduler's welcome
    saved_s: InitVar[float | None] = None  # when the checkpoint that it begins with was written, since 1970

    def __post_init__(self, saved_s: float | None) -> None:
        self._checkpointing = Checkpointing(
            self.checkpoints,
            session=self.session,
            step=len(self.history),
            saved_s=saved_s,
            event=self._checkpointed,
        )
        self._copy_s = 0.0
        """Of the version that the next step begins with."""
        self.weight_stall_s = {"copy": 0.0, "wait": 0.0}
        """Of all versions since this process began."""
        self._batch_groups = 0
        self._cuts: Mapping[int, pb.PassCuts] = {}
        """Of the steps that this attempt repeats."""
        self._held_out: Sequence[pb.Sample] = ()

    @property
    def version(self) -> int:
        """Steps that the engine's parameters have taken."""
        return len(self.history)

    @property
    def checkpoint_s(self) -> float | None:
        """When the newest checkpoint was written, since 1970."""
        return self._checkpointing.saved_s

    def run(self) -> None:
        """Train, finish, serve until stopped. Returns when the run ended or SIGTERM came; raises RetryError."""
        try:
            self._run()
        except StoppedError as stopped:
            log.info("stopped by the scheduler at step %d: %s", self.version, stopped)
            with suppress(StoppedError, RetryError):  # its steps may be in the journal already: then it is completed
                self._checkpointing.wait()
        except TerminatedError:
            self._leave()
        except RetryError as error:
            if not self.session.terminated:
                raise
            self._left_without_checkpoint(error)

    def _run(self) -> None:
        welcome = self.session.wait_welcome()
        self.attempt, self._batch_groups = welcome.attempt, welcome.batch_groups
        self._cuts = dict(welcome.cuts)
        log.info("attempt %d begins at step %d of %d", self.attempt, self.version, self.steps)
        with Publishing(
            self.session, store=self.weights, offer=self.offer, attempt=self.attempt, parts=self.parts
        ) as publishing:
            self._publish(publishing)
            if self.version < self.steps:
                discard_export(self.store_dir / DIR_EXPORT, copies=self.copies)  # of a run that was to end before
                self._held_out = self.session.wait_held_out()
            while self.version < self.steps:
                self._step(publishing)
            publishing.wait()
            self._finish()

    def _step(self, publishing: Publishing) -> None:
        step, begun_s = self.version, time.monotonic()
        engine = self.engine
        initial = self._held_out_loss(0) if step == 0 else {}
        engine.begin_step(step, attempt=self.attempt, cuts=self._cuts.get(step))
        group_ids, micro_steps = self._gather(step)
        with self.recorder.during("busy"):
            metrics = engine.finish_step()
        metrics |= engine.throughput()  # before the held-out loss, whose passes are not the step's
        metrics |= {f"initial_{name}": loss for name, loss in initial.items()} | self._held_out_loss(step + 1)
        self.history = self.history.with_step(group_ids)
        metrics["step_seconds"] = time.monotonic() - begun_s
        with self.recorder.during("weights"):
            metrics |= self._stalls(publishing)
            done = pb.StepDone(
                step=step,
                group_ids=group_ids,
                metrics=metrics,
                advantages=engine.advantages(group_ids),
                version_hash=publishing.newest_hash,
                micro_steps=micro_steps,
                cuts=engine.cuts(),
                states=engine.states(),
            )
            self.session.step_done(done)
        self._publish(publishing)
        if self.version % self.checkpoint_interval_steps == 0 or self.version == self.steps:
            self._checkpoint()

    def _stalls(self, publishing: Publishing) -> dict[str, float]:
        """Wait for the version that the step began with; return how long its copy and this wait kept the step loop."""
        begun_s = time.monotonic()
        publishing.wait()
        stalls = {"copy": self._copy_s, "wait": time.monotonic() - begun_s}
        for part, seconds in stalls.items():
            self.weight_stall_s[part] += seconds
        return {f"weights_{part}_seconds": seconds for part, seconds in stalls.items()}

    def _held_out_loss(self, version: int) -> dict[str, float]:
        """Of the weights as they are, where it is due; evaluations of a version come as often."""
        is_due = version % self.evaluation_interval_steps == 0 or version == self.steps
        if not (self._held_out and is_due):
            return {}
        with self.recorder.during("busy"):
            return {"held_out_loss": self.engine.held_out_loss(self._held_out)}

    def _gather(self, step: int) -> tuple[list[int], list[int]]:
        """All groups of the step, trained as far as micro-steps became full; how many had come when each of these began."""
        session, engine = self.session, self.engine
        group_ids: list[int] = []
        micro_steps: list[int] = []
        told_s = time.monotonic()
        while True:
            groups, worked = session.poll(), False
            for portion in [[group] for group in groups] if self.in_order else [groups]:
                group_ids += [group.group_id for group in portion]
                with self.recorder.during("busy"):
                    engine.add(portion)
                    if len(group_ids) >= self._batch_groups:
                        return group_ids, micro_steps
                    # Replayed groups wait for the step's first. A replay of the run knows micro-steps by their groups: one for each number.
                    is_due = len(group_ids) not in {0, *micro_steps[-1:]}
                    worked = is_due and engine.advance(idle=not portion)
                if worked:
                    micro_steps.append(len(group_ids))
            if not worked and not groups:
                self._wait_groups()
            if time.monotonic() - told_s >= _WAIT_REPORT_S:
                told_s = time.monotonic()
                log.info(
                    "step %d has %d of %d groups (%s)", step, len(group_ids), self._batch_groups, session.idle_cause
                )

    def _wait_groups(self) -> None:
        cause = self.session.idle_cause
        with self.recorder.during(_waiting(cause)):
            self.session.wait_change(seen_cause=cause, timeout_s=_WAIT_REPORT_S)

    def _publish(self, publishing: Publishing) -> None:
        """Begin to publish the newest version. Of those before, the announced one stays in memory, and what an evaluation may hold."""
        begun_s = time.monotonic()
        with self.recorder.during("weights"):
            kept = self.weights.retain(lambda version: self.is_needed(version.step, newest=self.version - 1))
            slices = self.engine.slices(
                attempt=self.attempt, step=self.version, kept=[(version.attempt, version.step) for version in kept]
            )
            publishing.begin(self.version, self.engine.probe(), slices=slices)
        self._copy_s = time.monotonic() - begun_s

    def _checkpoint(self) -> None:
        meta = CheckpointMeta.of(self.history, attempt=self.attempt)
        began_s = time.monotonic()
        self._checkpointing.begin(meta, save=self.engine.save)
        log.info("checkpoint of step %d: copied in %.2f s", meta.step, time.monotonic() - began_s)

    def _checkpointed(self, step: int, directory: Path, *, exported: bool = False) -> pb.Checkpointed:
        oldest_step = self.checkpoints.oldest_step()
        return pb.Checkpointed(step=step, path=self._relative(directory), exported=exported, oldest_step=oldest_step)

    def _finish(self) -> None:
        """All steps are done: export, and serve the weights of the last evaluation."""
        self._checkpointing.wait()
        export = export_once(self.engine, directory=self.store_dir / DIR_EXPORT, copies=self.copies)
        checkpoint = self.checkpoints.path_of(self.version)
        log.info("all %d steps are done; the model is in %s", self.steps, export)
        self.session.checkpointed(self._checkpointed(self.version, checkpoint, exported=True))
        with self.recorder.during(idle("no_samples")):
            self.session.wait_stop()

    def _leave(self) -> None:
        """SIGTERM: keep the steps that are done; what was gathered of the next one is trained again."""
        try:
            self._checkpointing.wait()
            if self.version == self._checkpointing.saved_step:
                log.info("asked to end: the checkpoint of step %d holds everything", self.version)
                return
            self._checkpoint()
            self._checkpointing.wait()
        except (RetryError, StoppedError) as error:
            self._left_without_checkpoint(error)
            return
        log.info("asked to end: checkpoint of step %d written, the run resumes from there", self.version)

    def _left_without_checkpoint(self, error: Exception) -> None:
        log.warning(
            "asked to end: no checkpoint of step %d (%s); the run resumes from step %d",
            self.version,
            error,
            self._checkpointing.saved_step,
        )

    def _relative(self, directory: Path) -> str:
        return str(directory.relative_to(self.store_dir))


def _waiting(cause: str) -> WallState:
    """A trainer without a scheduler waits for a fault to end, not for another stage."""
    return WallState(part="other") if cause == "disconnected" else idle(cause)
