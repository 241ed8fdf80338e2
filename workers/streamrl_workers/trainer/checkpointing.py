"""Checkpoints beside the training: the step loop waits for the engine's copy alone, a thread does the rest.

Owns: that one checkpoint is under way at a time, the order of what follows its files: journal, name, object store, the scheduler.
Does not own: files (`checkpoint.py`), what is copied (the engine), when it is due (`step_loop.py`).

    checkpointing  consumes: copies    produces: checkpoints, Checkpointed    waits for: disks, the journal    unblocked by: the end of the session

Invariant: the scheduler hears of a checkpoint when it is whole, on the disk and in the object store.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.trainer.checkpoint import Checkpoint, CheckpointMeta, CheckpointStore, Save, StartedCheckpoint
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.session import Session, StoppedError

log = logging.getLogger(__name__)


class Checkpointing:
    """Writes the checkpoints of one trainer process."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        session: Session,
        step: int,
        saved_s: float | None,
        event: Callable[[int, Path], pb.Checkpointed],
    ) -> None:
        """`step`: of the checkpoint that this process began with, written `saved_s` after 1970; `event`: what the scheduler is to know of one."""
        self._store = store
        self._session = session
        self._event = event
        self._current: Future[None] | None = None
        self.saved_step, self.saved_s = step, saved_s

    def begin(self, meta: CheckpointMeta, *, save: Save) -> None:
        """Return when the state is copied; waits first for the checkpoint before. Raises what that failed by."""
        self.wait()
        started = self._store.begin(meta, save=save)
        self._current = begin_in_thread(partial(self._complete, started), name="trainer-checkpoint")

    def wait(self) -> None:
        """Return when none is under way. Raises what it failed by."""
        if self._current is not None:
            current, self._current = self._current, None
            current.result()

    def _complete(self, started: StartedCheckpoint) -> None:
        """Any error ends the session, and with it what the step loop waits for."""
        try:
            self._completed(started)
        except (UserError, RetryError, StoppedError) as error:
            self._session.end(error)
            raise
        except Exception as error:
            ending = RetryError(f"checkpoint: {error!r}")
            self._session.end(ending)
            raise ending from error

    def _completed(self, started: StartedCheckpoint) -> None:
        step, meta = started.meta.step, started.meta
        directory = self._store.complete(started, sync=lambda: self._session.sync_journal(step))
        self.saved_step, self.saved_s = step, Checkpoint(directory=directory, meta=meta).written_s
        self._session.checkpointed(self._event(step, directory))
        log.info("checkpoint of step %d: %s", step, directory)
