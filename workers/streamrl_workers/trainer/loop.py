"""The step story: groups, micro-steps, optimiser step, record, publish, checkpoint.

Owns: the order of things in one trainer process. Does not own: how a step is computed (`engine.py`), the
conversation (`session.py`), files (`checkpoint.py`). Runs in a thread of its own. Evaluation is the scheduler's.

One step:
1. take groups as they come; a micro-step starts when enough samples wait;
2. when the last group is there: the rest, then the optimiser;
3. copy the weights (the only part of publishing that the next step waits for);
4. say that the step is done; the journal records it, then the version is announced, while step k + 1 goes on;
5. every so often: checkpoint.

    consumes: groups    produces: steps, versions, checkpoints    waits for: groups, records, the journal
    unblocked by: the scheduler's messages, the end of the session, SIGTERM
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamrl.keys import DIR_EXPORT
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.bubbles import State, idle
from streamrl_workers.metrics.recorder import Recorder
from streamrl_workers.stream.history import History
from streamrl_workers.trainer.checkpoint import CheckpointStore, Meta
from streamrl_workers.trainer.endings import RetryError, StoppedError, TerminatedError
from streamrl_workers.trainer.engine import TrainEngine
from streamrl_workers.trainer.export import export_once
from streamrl_workers.trainer.publishing import Publishing
from streamrl_workers.trainer.session import Session
from streamrl_workers.weights.publisher import WeightStore

_WAIT_REPORT_S = 60.0
"""A wait for groups is told in the log so often; it has no deadline of its own, as a long completion is no fault."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the job says about the run's length and its checkpoints."""

    steps: int
    checkpoint_interval_steps: int
    store_dir: Path  # holds the checkpoints, and the model in the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What the loop works with."""

    engine: TrainEngine
    session: Session
    checkpoints: CheckpointStore
    weights: WeightStore
    recorder: Recorder
    monotonic_s: Callable[[], float] = time.monotonic


class StepLoop:
    """Trains from the checkpoint's step to the end of the run."""

    def __init__(self, tools: Tools, *, plan: Plan, history: History) -> None:
        """`history`: the steps that the engine's state holds."""
        self._tools = tools
        self._plan = plan
        self._history = history
        self._saved_step = len(history)
        self.attempt = 0  # known with the scheduler's welcome
        self._batch_groups = 0

    @property
    def version(self) -> int:
        """Steps that the engine's parameters have taken."""
        return len(self._history)

    def run(self) -> None:
        """Train, finish, serve until stopped. Returns when the run ended or SIGTERM came; raises RetryError."""
        try:
            self._run()
        except StoppedError as stopped:
            log.info("stopped by the scheduler at step %d: %s", self.version, stopped)
        except TerminatedError:
            self._leave()
        except RetryError as error:
            if not self._tools.session.terminated:
                raise
            self._left_without_checkpoint(error)

    def _run(self) -> None:
        welcome = self._tools.session.wait_welcome()
        self.attempt, self._batch_groups = welcome.attempt, welcome.batch_groups
        log.info("attempt %d begins at step %d of %d", self.attempt, self.version, self._plan.steps)
        with Publishing(self._tools.session, store=self._tools.weights, attempt=self.attempt) as publishing:
            self._publish(publishing)
            while self.version < self._plan.steps:
                self._step(publishing)
            publishing.wait()
            self._finish()

    def _step(self, publishing: Publishing) -> None:
        step, begun_s = self.version, self._tools.monotonic_s()
        engine = self._tools.engine
        engine.begin_step(step, attempt=self.attempt)
        group_ids = self._gather(step)
        with self._tools.recorder.during("busy"):
            metrics = engine.finish_step()
        self._history = self._history.with_step(group_ids)
        metrics["step_seconds"] = self._tools.monotonic_s() - begun_s
        with self._tools.recorder.during("weights"):
            publishing.wait()
            self._tools.session.step_done(pb.StepDone(step=step, group_ids=group_ids, metrics=metrics))
        self._publish(publishing)
        if self.version % self._plan.checkpoint_interval_steps == 0 or self.version == self._plan.steps:
            self._checkpoint()

    def _gather(self, step: int) -> list[int]:
        """All groups of the step, trained as far as micro-steps became full."""
        session, engine = self._tools.session, self._tools.engine
        group_ids: list[int] = []
        told_s = self._tools.monotonic_s()
        while True:
            groups = session.poll()
            group_ids += [group.group_id for group in groups]
            with self._tools.recorder.during("busy"):
                engine.add(groups)
                if len(group_ids) >= self._batch_groups:
                    return group_ids
                worked = engine.advance(idle=not groups)
            if not worked and not groups:
                self._wait_groups()
            if self._tools.monotonic_s() - told_s >= _WAIT_REPORT_S:
                told_s = self._tools.monotonic_s()
                log.info(
                    "step %d has %d of %d groups (%s)", step, len(group_ids), self._batch_groups, session.idle_cause
                )

    def _wait_groups(self) -> None:
        cause = self._tools.session.idle_cause
        with self._tools.recorder.during(_waiting(cause)):
            self._tools.session.wait_change(seen_cause=cause, timeout_s=_WAIT_REPORT_S)

    def _publish(self, publishing: Publishing) -> None:
        with self._tools.recorder.during("weights"):
            publishing.begin(self.version, self._tools.engine.tensors())

    def _checkpoint(self) -> None:
        step = self.version
        meta = Meta.of(self._history, attempt=self.attempt)
        directory = self._tools.checkpoints.write(
            meta, save=self._tools.engine.save, sync=lambda: self._tools.session.sync_journal(step)
        )
        self._saved_step = step
        self._tools.session.checkpointed(self._checkpointed(step, directory))
        log.info("checkpoint of step %d: %s", step, directory)

    def _checkpointed(self, step: int, directory: Path, *, exported: bool = False) -> pb.Checkpointed:
        oldest_step = self._tools.checkpoints.oldest_step()
        return pb.Checkpointed(step=step, path=self._relative(directory), exported=exported, oldest_step=oldest_step)

    def _finish(self) -> None:
        """All steps are done: export, and serve the weights of the last evaluation."""
        export = export_once(self._tools.engine, directory=self._plan.store_dir / DIR_EXPORT)
        checkpoint = self._tools.checkpoints.path_of(self.version)
        log.info("all %d steps are done; the model is in %s", self._plan.steps, export)
        self._tools.session.checkpointed(self._checkpointed(self.version, checkpoint, exported=True))
        with self._tools.recorder.during(idle("no_samples")):
            self._tools.session.wait_stop()

    def _leave(self) -> None:
        """SIGTERM: keep the steps that are done; what was gathered of the next one is trained again."""
        if self.version == self._saved_step:
            log.info("asked to end: the checkpoint of step %d holds everything", self.version)
            return
        try:
            self._checkpoint()
        except (RetryError, StoppedError) as error:
            self._left_without_checkpoint(error)
            return
        log.info("asked to end: checkpoint of step %d written, the run resumes from there", self.version)

    def _left_without_checkpoint(self, error: Exception) -> None:
        log.warning(
            "asked to end: no checkpoint of step %d (%s); the run resumes from step %d",
            self.version,
            error,
            self._saved_step,
        )

    def _relative(self, directory: Path) -> str:
        return str(directory.relative_to(self._plan.store_dir))


def _waiting(cause: str) -> State:
    """A trainer without a scheduler waits for a fault to end, not for another stage."""
    return State(part="other") if cause == "disconnected" else idle(cause)
