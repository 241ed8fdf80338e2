"""The journal: the durable truth about every group, written by one thread with group commit.

Owns the queue of records between the scheduler's loop and the disk, the writer thread, and the
order in which records become durable. Does not own what records mean (`tables.py`).

    scheduler's loop -- append --> queue (bounded in bytes) --> writer thread -- one commit for all
           ^                                                        |          that is waiting
           +------------- on_committed(highest sequence) <----------+

Writer thread: consumes the queue; produces durable records and acknowledgements; waits for records
(unblocked by `append` and `close`) and for the disk.

Invariants: records become durable in the order of their sequences; an acknowledged record survives
the death of the process and of the machine; after a fault nothing is acknowledged any more.
"""

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from streamrl.errors import UserError
from streamrl_workers.scheduler.effects import Write
from streamrl_workers.scheduler.journal import tables
from streamrl_workers.scheduler.journal.adoption import Adopted
from streamrl_workers.scheduler.journal.archiver import Archiver, Done, read_account, write_done
from streamrl_workers.scheduler.journal.fingerprint import Fingerprint, write_fingerprint
from streamrl_workers.scheduler.journal.integrity import DamagedJournalError
from streamrl_workers.scheduler.journal.store import (
    JournalFaultError,
    WriterLock,
    make_if_new,
    open_for_reading,
    open_for_writing,
    translated,
)
from streamrl_workers.scheduler.journal.tables import (
    apply_record,
    begin_behind,
    compact_steps,
    delete_samples,
    load,
    read_samples,
    release_pages,
    settled_with_samples,
    sizes_of,
)
from streamrl_workers.scheduler.records import Checkpointed, Dropped, Recovered, Scored

QUEUE_LIMIT_BYTES = 64 * 2**20
"""Records that wait for the disk; above this the scheduler stops reading from its links."""
_RECORD_BYTES = 128
"""What a record without samples counts for in the queue."""
_GARBAGE_PORTION = 64
"""Groups whose samples are deleted in one transaction, beside one for each record that it writes: keeps the pause
between two commits short, and ahead of what comes."""
_COMPACT_PORTION = 4
"""Steps that are compacted in one transaction, for the same reason."""
_CLOSE_TIMEOUT_S = 30.0
_STALL_S = 30.0
"""Without an answer of the disk for so long, a journal is not writable."""


class JournalWriter:
    """One run's journal, opened for writing by one scheduler."""

    def __init__(
        self,
        path: Path,
        *,
        limit_bytes: int = QUEUE_LIMIT_BYTES,
        keep_groups: int = tables.KEEP_GROUPS,
        archiver: Archiver | None = None,
    ) -> None:
        """`keep_groups`: the newest groups that compaction leaves in full. `archiver`: takes settled samples; None: they are deleted."""
        self._path = path
        self._archiver = archiver
        self._keep_groups = keep_groups
        self._limit_bytes = limit_bytes
        self._lock = WriterLock(path)
        self._connection: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        self._clock_s: Callable[[], float] = time.monotonic
        self._wake = threading.Condition()
        self._queue: deque[Write] = deque()
        self._queue_bytes = 0
        self._unsettled = 0
        """Records queued, not known to be durable."""
        self._waiting_since_s: float | None = None
        """Since when the disk has settled none of them."""
        self._closing = False
        self._garbage: deque[int] = deque()
        """Settled groups whose samples are to be deleted; with an archiver, are to be given to it."""
        self._archived: deque[Done] = deque()
        self._archiving: set[int] = set()
        """Groups that the archiver has."""
        self._compactable = False
        """A checkpoint has come, or an earlier writer did not end compaction."""
        self._surplus = False
        """Compaction has ended: there may be pages to give back."""
        self._room = asyncio.Event()

    def open(self, adopted: Adopted | None = None, *, first_group: int = 0) -> Recovered:
        """Open the file, or make it for a new run, and read what it holds.

        Args:
            adopted: what a new run begins with.
            first_group: number of its first group then.

        Raises:
            UserError: it cannot be used: not writable, missing, damaged, of another schema, or in use by another scheduler.
        """
        self._lock.acquire()
        try:
            make_if_new(self._path, self._lock)
            self._connection = open_for_writing(self._path)
            with translated(self._path):
                if adopted is not None:
                    step, chain, path = adopted.step, adopted.chain, adopted.path
                    begin_behind(self._connection, step=step, chain=chain, path=path, first_group=first_group)
                self._garbage.extend(settled_with_samples(self._connection))
                self._compactable = True
                return load(self._connection)
        except BaseException:
            self.close()
            raise

    def take_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Make the data with this fingerprint the journal's own, before the writer starts. Raises `UserError` as `open`."""
        assert self._connection is not None, "the journal is open when the data is"
        with translated(self._path):
            write_fingerprint(self._connection, fingerprint)

    def start(self, *, on_committed: Callable[[int], None], on_fault: Callable[[BaseException], None]) -> None:
        """Start the writer thread. Call on the scheduler's loop: there it tells what happens.

        Args:
            on_committed: all records up to this sequence are durable.
            on_fault: nothing more becomes durable: `JournalFaultError` if the disk refuses, else a mistake of our own.
        """
        loop = asyncio.get_running_loop()
        self._clock_s = loop.time  # where a stall of our own is none of the disk's
        self._room.set()
        if self._archiver is not None:
            assert self._connection is not None, "the journal is open when its writer starts"
            self._archiver.start(read_account(self._connection).position, on_done=self._on_archived)
            self._give_to_archiver(self._connection)
        self._thread = threading.Thread(
            target=self._write_all, args=(loop, on_committed, on_fault), name="journal", daemon=True
        )
        self._thread.start()

    def fault(self) -> str:
        """Why nothing can be written now; "" if it can."""
        if self._waiting_since_s is None or (waited_s := self._clock_s() - self._waiting_since_s) < _STALL_S:
            return ""
        return f"the disk has taken nothing of {self._path.name} for {waited_s:.0f} s"

    def append(self, write: Write) -> None:
        """Queue a record. Never blocks; callers that produce many wait with `wait_for_room`."""
        with self._wake:
            if not self._unsettled:
                self._waiting_since_s = self._clock_s()
            self._unsettled += 1
            self._queue.append(write)
            self._queue_bytes += _cost_bytes(write)
            if self._queue_bytes > self._limit_bytes:
                self._room.clear()
            self._wake.notify()

    def samples_of(self, group_id: int) -> tuple[bytes, ...]:
        """Serialized samples of a group whose record is durable, by index. Called on the scheduler's loop: one group is
        read within a millisecond for each megabyte, and only what a trainer is sent once more is read at all.

        Raises:
            JournalFaultError: the disk does not give them, or they are not what was written.
        """
        try:
            if self._reader is None:
                self._reader = open_for_reading(self._path)
            samples = read_samples(self._reader, group_id)
        except (sqlite3.Error, UserError, DamagedJournalError) as error:
            raise JournalFaultError(f"{self._path}: group {group_id} cannot be read: {error}") from None
        assert samples, f"group {group_id} is to be delivered again, but its samples are gone"
        return samples

    @property
    def has_room(self) -> bool:
        """Whether `wait_for_room` returns at once."""
        return self._room.is_set()

    async def wait_for_room(self, *, timeout_s: float = 60.0) -> None:
        """Return once the queue is below its bound.

        Raises:
            JournalFaultError: the disk did not take the records in time.
        """
        if self.has_room:
            return
        try:
            await asyncio.wait_for(self._room.wait(), timeout_s)
        except TimeoutError:
            raise JournalFaultError(
                f"{self._path}: the disk did not take {self._queue_bytes} bytes within {timeout_s:g} s"
            ) from None

    async def aclose(self) -> None:
        """`close`, while the loop goes on."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Write what is queued, write the log into the file, give up the lock. Waits for the disk."""
        if self._archiver is not None:
            self._archiver.close()
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise JournalFaultError(f"{self._path}: the disk did not finish writing within {_CLOSE_TIMEOUT_S:g} s")
            self._thread = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._lock.release()

    # ---- writer thread

    def _write_all(
        self,
        loop: asyncio.AbstractEventLoop,
        on_committed: Callable[[int], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._commit(batch)
                if batch:
                    _tell(loop, self._settle, batch, on_committed)
                self._release()
        except (sqlite3.Error, OSError) as error:
            fault = JournalFaultError(f"{self._path}: cannot be written: {error}; what was acknowledged is safe")
            _tell(loop, on_fault, fault)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the run must not go on without its journal
            _tell(loop, on_fault, error)

    def _next_batch(self) -> list[Write] | None:
        """What is queued; empty if there is only something to tidy; None at the end."""
        with self._wake:
            while not (self._queue or self._garbage or self._archived or self._may_compact or self._closing):
                self._wake.wait()
            if self._closing and not (self._queue or self._archived):
                return None
            batch = list(self._queue)
            self._queue.clear()
            return batch

    def _commit(self, batch: list[Write]) -> None:
        connection = self._connection
        assert connection is not None, "the journal is open while its writer runs"
        connection.execute("BEGIN IMMEDIATE")
        try:
            for write in batch:
                self._garbage.extend(apply_record(connection, write.record))
                self._compactable |= isinstance(write.record, Checkpointed)
            self._tidy(connection, garbage_groups=_GARBAGE_PORTION + len(batch))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._give_to_archiver(connection)

    def _give_to_archiver(self, connection: sqlite3.Connection) -> None:
        """What is settled and committed, so that the archiver finds it."""
        if self._archiver is not None and self._garbage:
            groups, self._garbage = list(self._garbage), deque()
            self._archiving.update(groups)
            self._archiver.put(sizes_of(connection, groups))

    def _tidy(self, connection: sqlite3.Connection, *, garbage_groups: int) -> None:
        """A portion of what nobody needs. Only groups without samples are compacted: a later writer could not find them."""
        if self._archiver is None:
            delete_samples(
                connection, [self._garbage.popleft() for _ in range(min(garbage_groups, len(self._garbage)))]
            )
        while self._archived and garbage_groups > 0:
            done = self._archived.popleft()
            write_done(connection, done)
            delete_samples(connection, done.group_ids)
            self._archiving.difference_update(done.group_ids)
            garbage_groups -= len(done.group_ids)
        if self._may_compact:
            below = min((*self._garbage, *self._archiving), default=None)
            self._compactable = compact_steps(
                connection, keep_groups=self._keep_groups, limit_steps=_COMPACT_PORTION, below=below
            )
            self._surplus = not self._compactable

    @property
    def _may_compact(self) -> bool:
        return self._compactable and (self._archiver is not None or not self._garbage)

    def _on_archived(self, done: Done) -> None:
        """In the archiver's thread, or in this one."""
        with self._wake:
            self._archived.append(done)
            self._wake.notify()

    def _release(self) -> None:
        """Once after each round of compaction, between two commits: under steady load somebody always waits for the next one."""
        if self._surplus:
            assert self._connection is not None, "the journal is open while its writer runs"
            self._surplus = False
            release_pages(self._connection)

    def _settle(self, batch: list[Write], on_committed: Callable[[int], None]) -> None:
        """On the scheduler's loop: the batch is durable."""
        with self._wake:
            self._unsettled -= len(batch)
            self._waiting_since_s = self._clock_s() if self._unsettled else None
            self._queue_bytes -= sum(map(_cost_bytes, batch))
            if self._queue_bytes <= self._limit_bytes:
                self._room.set()
        on_committed(batch[-1].sequence)


def _cost_bytes(write: Write) -> int:
    record = write.record
    if not isinstance(record, Scored | Dropped):
        return _RECORD_BYTES
    return _RECORD_BYTES + sum(map(len, record.trajectories)) + len(record.texts)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # the loop is closed: the process is ending and nobody waits for the news
        assert loop.is_closed()
