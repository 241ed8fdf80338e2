"""What the scheduler and this trainer know of each other: the conversation without the connection.

Owns: the groups that wait for the step loop, what is recorded and what is not, what has to be said again after a
break. Does not own: gRPC (`scheduler_connection.py`), training (`step_loop.py`). Thread-safe: the connection calls from its event loop, the
step loop from its thread; every wait has a deadline or ends with the connection, which has one.

Invariants:
- A group is handed to the step loop once, also when the scheduler sends it again.
- Bytes of groups that wait stay within the window: credit is given when the step loop takes a group.
- At most one step is done and not recorded.
- What is said while no scheduler listens is not queued: `welcome` says the whole state again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.trainer.engines.engine import RetryError

_ANSWER_TIMEOUT_S = 300.0
"""For an answer: a journal on a busy disk takes seconds, a new scheduler a minute; beyond this none will come."""
_LAST_ANSWER_S = 5.0
"""The same once this process is asked to end, of each wait: what it writes before may take longer."""

Send = Callable[[Sequence[pb.TrainerEvent]], None]


class StoppedError(Exception):
    """The scheduler has ended the run: exit code 0."""


class TerminatedError(Exception):
    """Somebody asked this process to end (SIGTERM)."""


def _drop(_events: Sequence[pb.TrainerEvent]) -> None:
    """Nobody listens."""


class Session:
    """One trainer process's side of the conversation."""

    def __init__(self, identity: pb.TrainerHello, *, step: int, window_bytes: int, checkpoint_path: str = "") -> None:
        """`identity`: who this process is, without its state; `step`: version of the checkpoint that it starts from, at `checkpoint_path`."""
        self._identity = identity
        self._window_bytes = window_bytes
        self._changed = threading.Condition()
        self._send: Send = _drop
        self._step = step  # the one being done, or done next
        self._checkpoint = pb.Checkpointed(step=step, path=checkpoint_path)
        self._inbox: deque[pb.Group] = deque()
        self._partial: pb.Group | None = None  # whose last part has not come
        self._held: set[int] = set()  # groups of `_step`, taken or not
        self._unrecorded: pb.StepDone | None = None
        self._told_unrecorded: pb.StepDone | None = None  # what the last hello said of it
        self._published: pb.Published | None = None
        self._syncing: int | None = None
        self._synced = step
        self._welcome: pb.TrainerWelcome | None = None
        self._held_out: Sequence[pb.Sample] = ()
        self._listening = self._waits = False
        self._silent_since_s = time.monotonic()
        self._cause = "no_samples"
        self._ending: StoppedError | RetryError | UserError | None = None
        self._terminated_s: float | None = None

    # ---------------------------------------------------------------- called by the connection

    def hello(self) -> pb.TrainerHello:
        """The first message of a connection."""
        with self._changed:
            self._told_unrecorded = self._unrecorded
            hello = pb.TrainerHello(
                step=self._step,
                held_groups=sorted(self._held),
                unrecorded_step=self._unrecorded,
                checkpoint_step=self._checkpoint.step,
            )
            hello.MergeFrom(self._identity)
            return hello

    def received(self, command: pb.TrainerCommand, *, send: Send) -> None:
        """Take one command; `send` reaches the scheduler that it came from."""
        kind = command.WhichOneof("command")
        with self._changed:
            if kind == "welcome":
                self._welcomed(command.welcome, send)
            elif kind == "held_out":
                self._held_out = command.held_out.samples
            elif kind == "group":
                self._arrived(command.group)
            elif kind == "step_recorded":
                self._recorded(command.step_recorded.step)
            elif kind == "journal_synced":
                self._synced = max(self._synced, command.journal_synced.step)
                self._syncing = None
            elif kind == "idle":
                self._cause = command.idle.cause
            elif kind == "stop":
                self._end(StoppedError(command.stop.reason))
            elif kind == "restart":
                self._end(RetryError(f"the scheduler asks to go back to the checkpoint: {command.restart.reason}"))
            self._changed.notify_all()

    def disconnected(self) -> None:
        """Nobody listens until the next welcome."""
        with self._changed:
            self._send = _drop
            self._partial = None
            if self._listening:
                self._silent_since_s = time.monotonic()
            self._listening = False
            self._changed.notify_all()

    def end(self, ending: StoppedError | RetryError | UserError) -> None:
        """End all waits, now and later, with `ending`; the first one counts."""
        with self._changed:
            self._end(ending)
            self._changed.notify_all()

    def terminate(self) -> None:
        """The process is asked to end: no more groups, short deadlines."""
        with self._changed:
            if self._terminated_s is None:
                self._terminated_s = time.monotonic()
            self._changed.notify_all()

    @property
    def terminated(self) -> bool:
        """Whether the process was asked to end."""
        return self._terminated_s is not None

    @property
    def silent_s(self) -> float:
        """Seconds without a scheduler that listens; 0 with one."""
        return 0.0 if self._listening else time.monotonic() - self._silent_since_s

    @property
    def waiting_groups(self) -> int:
        """Groups that the step loop has not taken yet."""
        return len(self._inbox)

    @property
    def ending(self) -> StoppedError | RetryError | UserError | None:
        """Why it is over, or None."""
        return self._ending

    # ---------------------------------------------------------------- called by the step loop

    def wait_welcome(self) -> pb.TrainerWelcome:
        """The first welcome. As long as there is no connection, the connection's own deadline counts."""
        self._wait(lambda: self._welcome is not None, what="the scheduler's welcome", until_terminated=True)
        assert self._welcome is not None, "waited for it"
        return self._welcome

    def wait_held_out(self) -> Sequence[pb.Sample]:
        """The rows whose loss is measured, behind the first welcome. To make them may take long: the wait ends with the connection, which has
        a deadline."""
        with self._changed:
            assert self._welcome is not None, "they come behind it"
            while len(self._held_out) < self._welcome.held_out_samples:
                self._raise_ending(until_terminated=True)
                self._changed.wait()
            return self._held_out

    def poll(self) -> list[pb.Group]:
        """The groups that have come, maybe none. Raises what ended the session."""
        with self._changed:
            self._raise_ending(until_terminated=True)
            groups = list(self._inbox)
            self._inbox.clear()
            taken_bytes = sum(group.size_bytes for group in groups)
            if taken_bytes:
                self._send([pb.TrainerEvent(credit=pb.Credit(bytes=taken_bytes))])
        return groups

    def wait_change(self, *, seen_cause: str, timeout_s: float) -> None:
        """Until a group is there, the cause is no longer `seen_cause`, the end, or `timeout_s`."""
        with self._changed, self._telling_that_it_waits():
            self._changed.wait_for(
                lambda: self._inbox or self.idle_cause != seen_cause or self._ending or self.terminated, timeout_s
            )

    @property
    def idle_cause(self) -> str:
        """Why no group comes; `disconnected` when nobody listens."""
        return self._cause if self._listening else "disconnected"

    def step_done(self, done: pb.StepDone) -> None:
        """Say that the step is done; waits until the one before is recorded."""
        self.wait_recorded(done.step)
        with self._changed:
            assert done.step == self._step, f"step {done.step} done while doing {self._step}"
            assert not self._inbox, "groups left over"
            self._unrecorded = done
            self._step += 1
            self._held.clear()
            self._cause = "no_samples"
            self._send([pb.TrainerEvent(step_done=done)])

    def wait_recorded(self, version: int) -> None:
        """Until every step before `version` is in the journal."""
        self._wait(
            lambda: self._unrecorded is None or self._unrecorded.step >= version,
            what=f"the record of step {version - 1} in the journal",
        )

    def publish(self, published: pb.Published) -> None:
        """Announce a version that can be pulled."""
        with self._changed:
            self._published = published
            self._send([pb.TrainerEvent(published=published)])

    def sync_journal(self, step: int) -> None:
        """Until everything before version `step` is durable in the journal."""
        self.wait_recorded(step)
        with self._changed:
            self._syncing = step
            self._synced = min(self._synced, step - 1)
            self._send([pb.TrainerEvent(sync_journal=pb.SyncJournal(step=step))])
        self._wait(lambda: self._synced >= step, what=f"the journal on disk up to step {step}")

    def checkpointed(self, checkpointed: pb.Checkpointed) -> None:
        """Say that a checkpoint is on disk."""
        with self._changed:
            self._checkpoint = checkpointed
            self._send([pb.TrainerEvent(checkpointed=checkpointed)])

    def wait_stop(self) -> None:
        """Until the scheduler ends the run; returns by raising only. Ends with the connection, which has a deadline."""
        with self._changed, self._telling_that_it_waits():
            while True:
                self._raise_ending(until_terminated=True)
                self._changed.wait()

    # ---------------------------------------------------------------- inside, under the lock

    def _welcomed(self, welcome: pb.TrainerWelcome, send: Send) -> None:
        if self._welcome is not None and self._welcome.attempt != welcome.attempt:
            text = f"the scheduler takes this trainer for attempt {welcome.attempt}, it is {self._welcome.attempt}"
            self._end(RetryError(text))
            return
        self._welcome, self._listening, self._send = welcome, True, send
        send(self._whole_state())

    def _whole_state(self) -> list[pb.TrainerEvent]:
        waiting_bytes = sum(group.size_bytes for group in self._inbox)
        events = [pb.TrainerEvent(credit=pb.Credit(bytes=max(0, self._window_bytes - waiting_bytes)))]
        if self._unrecorded is not None and self._unrecorded is not self._told_unrecorded:
            events.append(pb.TrainerEvent(step_done=self._unrecorded))
        if self._published is not None:
            events.append(pb.TrainerEvent(published=self._published))
        if self._checkpoint.path:
            events.append(pb.TrainerEvent(checkpointed=self._checkpoint))
        if self._syncing is not None:
            events.append(pb.TrainerEvent(sync_journal=pb.SyncJournal(step=self._syncing)))
        if self._waits:
            events.append(self._that_it_waits())
        return events

    @contextmanager
    def _telling_that_it_waits(self) -> Iterator[None]:
        """Inside, the step loop has nothing to compute unless a group is in the inbox."""
        self._waits = True
        if not self._inbox:
            self._send([self._that_it_waits()])
        try:
            yield
        finally:
            self._waits = False

    def _that_it_waits(self) -> pb.TrainerEvent:
        return pb.TrainerEvent(waits=pb.TrainerWaits(step=self._step, groups=len(self._held) - len(self._inbox)))

    def _arrived(self, part: pb.Group) -> None:
        group = part
        if self._partial is not None:
            group = self._partial
            group.MergeFrom(part)  # the next samples
        self._partial = group if part.more else None
        if not part.more:
            self._whole(group)

    def _whole(self, group: pb.Group) -> None:
        if group.step != self._step:
            self._end(RetryError(f"got group {group.group_id} of step {group.step} while doing step {self._step}"))
            return
        if group.group_id in self._held:
            self._send([pb.TrainerEvent(credit=pb.Credit(bytes=group.size_bytes))])
            return
        self._held.add(group.group_id)
        self._inbox.append(group)
        self._cause = "no_samples"

    def _recorded(self, step: int) -> None:
        if self._unrecorded is not None and self._unrecorded.step <= step:
            self._unrecorded = None

    def _end(self, ending: StoppedError | RetryError | UserError) -> None:
        self._ending = self._ending or ending

    def _raise_ending(self, *, until_terminated: bool = False) -> None:
        if self._ending is not None:
            raise self._ending
        if until_terminated and self.terminated:
            raise TerminatedError

    def _wait(self, arrived: Callable[[], bool], *, what: str, until_terminated: bool = False) -> None:
        """Wait for the scheduler, also over breaks of the connection: one that breaks again and again brings no answer."""
        with self._changed:
            begun_s = time.monotonic()
            while not arrived():
                self._raise_ending(until_terminated=until_terminated)
                end_s = begun_s + _ANSWER_TIMEOUT_S
                if self._terminated_s is not None:
                    end_s = min(end_s, max(begun_s, self._terminated_s) + _LAST_ANSWER_S)
                limit_s = end_s - time.monotonic()
                if limit_s <= 0:
                    raise RetryError(f"waited in vain for {what}")
                self._changed.wait(limit_s)
