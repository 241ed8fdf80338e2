"""Moves settled groups from the journal to the archive, in a thread of its own beside the journal's writer.

Owns which groups are kept, the thread, and the rule for what it cannot take. Does not own the archive's format
(`stream/archive.py`), nor the journal's file: the writer deletes what is done.

    journal's writer -- put(settled groups) --> waiting --> archive thread -- sync --> on_done(groups, position) --> journal's writer

Archive thread: consumes ids, reads their samples from the journal, produces synced segments; waits for groups and for the disk.
The writer deletes the samples of what is done and writes the account, with the position behind them, in one transaction. So the
samples of a group are in the archive or in the journal, never in both: a start cuts off what stands behind the account's position.

Samples wait in the journal, never in memory, and at most as many bytes as the archive may have; beyond that the oldest are left out.
Where the disk or the journal refuses, everything is left out until the next start. Both are said once, and counted in the account.
"""

import contextlib
import json
import logging
import sqlite3
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from google.protobuf.message import DecodeError

from streamrl.errors import UserError
from streamrl.keys import DIR_ARCHIVE, FILE_JOURNAL
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.base import parse_bytes
from streamrl.spec.storage import Archive
from streamrl_workers.scheduler.journal.integrity import DamagedJournalError, DamagedSamplesError
from streamrl_workers.scheduler.journal.store import open_for_reading
from streamrl_workers.scheduler.journal.tables import read_samples, read_steps
from streamrl_workers.stream.archive import ArchivePosition, ArchiveWriter, is_archived
from streamrl_workers.stream.packing import unpack_int64
from streamrl_workers.stream.segments import completion_tokens

_PORTION = 64
"""Groups that are brought to the disk, and told, together."""
_GATHER_S = 0.5
"""For more of them to come: each portion costs the archive one write to the disk, and the journal another."""
_CLOSE_S = 5.0
"""For what still waits at the end; what is left then stays in the journal."""
_META_KEY = "archive"

log = logging.getLogger("streamrl.scheduler.archive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """How far the archive goes, as the journal has it."""

    position: ArchivePosition = field(default_factory=ArchivePosition)
    left_out: int = 0
    """Groups that it was to have, and has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Groups whose samples can go."""

    group_ids: tuple[int, ...]
    left_out: int
    """So many of them are not in the archive, and should be."""
    position: ArchivePosition | None = None
    """Behind those that are; None: no more have come in."""


def read_account(connection: sqlite3.Connection) -> Account:
    """The newest account; that of an archive without anything where there is none."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_META_KEY,)).fetchone()
    if row is None:
        return Account()
    try:
        said = json.loads(row[0])
        position = ArchivePosition(
            segment=int(said["segment"]), offset=int(said["offset"]), chain=bytes.fromhex(said["chain"])
        )
        return Account(position=position, left_out=int(said["left_out"]))
    except (ValueError, KeyError, TypeError):
        raise DamagedJournalError("what it says of the archive is not what was written") from None


def write_done(connection: sqlite3.Connection, done: Done) -> None:
    """Take it into the account. The caller commits, with the deletion of the groups' samples."""
    account = read_account(connection)
    position = done.position or account.position
    account = replace(account, left_out=account.left_out + done.left_out)
    said = {
        "segment": position.segment,
        "offset": position.offset,
        "chain": position.chain.hex(),
        "left_out": account.left_out,
    }
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_META_KEY, json.dumps(said)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """The step that a group is in."""

    step: int
    attempt: int
    advantages: bytes
    position: int
    """Among the step's groups."""
    micro_step: int
    version_hash: bytes
    """Of the version that the step began with; of position 0 alone."""
    cuts: bytes
    """Of the step, a `pb.PassCuts`; of position 0 alone."""


def consumptions(
    connection: sqlite3.Connection, *, first: int = 0, wanted: Collection[int] | None = None
) -> dict[int, Consumption]:
    """Group -> the step that counts, of the steps from `first` on; of all groups, or of `wanted`."""
    counting = {step: attempt for step, attempt, _ in read_steps(connection, first=first)}
    rows = connection.execute(
        "SELECT step, attempt, group_ids, advantages, version_hash, micro_steps, cuts FROM steps WHERE step >= ?",
        (first,),
    )
    found = {}
    for step, attempt, packed, advantages, version_hash, packed_micro_steps, cuts in rows:
        if counting.get(step) != attempt:
            continue
        group_ids, micro_steps = unpack_int64(packed), unpack_int64(packed_micro_steps)
        each = len(advantages or b"") // max(1, len(group_ids))
        for position, group_id in enumerate(group_ids):
            if wanted is None or group_id in wanted:
                own = advantages[position * each : (position + 1) * each] if each else b""
                found[group_id] = Consumption(
                    step=step,
                    attempt=attempt,
                    advantages=own,
                    position=position,
                    micro_step=bisect_right(micro_steps, position),
                    version_hash=b"" if position else version_hash,
                    cuts=b"" if position else cuts,
                )
    return found


def read_stored(
    connection: sqlite3.Connection, group_id: int, *, consumed: Mapping[int, Consumption]
) -> tuple[pb.ArchivedGroup, pb.ArchivedSamples] | None:
    """A group as it goes to the archive; None: the journal has no samples of it.

    Raises:
        DamagedJournalError: its samples are not what was written.
    """
    row = connection.execute(
        "SELECT prompt_index, begun_step, drop_reason FROM groups WHERE group_id = ?", (group_id,)
    ).fetchone()
    stored = read_samples(connection, group_id) if row is not None else ()
    if row is None or not stored:
        return None
    prompt_index, start_version, drop_reason = row
    texts = connection.execute("SELECT data FROM texts WHERE group_id = ?", (group_id,)).fetchone()
    samples, group_texts = _parsed(stored, texts[0] if texts else b"", group_id=group_id)
    step = consumed.get(group_id)
    head = pb.ArchivedGroup(
        group_id=group_id,
        prompt_index=prompt_index,
        start_version=start_version,
        step=None if step is None else step.step,
        attempt=0 if step is None else step.attempt,
        drop_reason=drop_reason or "",
        advantages=b"" if step is None else step.advantages,
        position=None if step is None else step.position,
        micro_step=0 if step is None else step.micro_step,
        version_hash=b"" if step is None else step.version_hash,
        cuts=pb.PassCuts.FromString(step.cuts) if step is not None and step.cuts else None,
        samples=[
            pb.ArchivedSample(
                reward=sample.reward if sample.HasField("reward") else None,
                tokens=completion_tokens(sample),
                failed=bool(sample.reward_error),
            )
            for sample in samples
        ],
    )
    return head, pb.ArchivedSamples(samples=samples, texts=group_texts)


def _parsed(stored: Sequence[bytes], texts: bytes, *, group_id: int) -> tuple[list[pb.Sample], pb.GroupTexts]:
    try:
        return [pb.Sample.FromString(data) for data in stored], pb.GroupTexts.FromString(texts)
    except DecodeError:
        raise DamagedSamplesError(f"the samples of group {group_id} are none") from None


class Archiver:
    """The archive of one run, while a scheduler writes its journal."""

    def __init__(self, run_dir: Path, *, spec: Archive) -> None:
        self._folder = run_dir / DIR_ARCHIVE
        self._journal_path = run_dir / FILE_JOURNAL
        self._max_bytes = parse_bytes(spec.max_bytes)
        self._share_percent = spec.share_percent
        self._wake = threading.Condition()
        self._waiting: deque[tuple[int, int]] = deque()
        self._waiting_bytes = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._on_done: Callable[[Done], None] = lambda done: None
        self._position = ArchivePosition()
        self._opened: tuple[sqlite3.Connection, ArchiveWriter] | None = None
        self._fault = False
        self._is_behind = False
        self._step = 0
        """Groups settle in the order of their steps: no later one is of a step before this."""

    def start(self, position: ArchivePosition, *, on_done: Callable[[Done], None]) -> None:
        """Go on at `position`. Each group that `put` takes is in one `on_done`, which comes in the archive's thread or within `put`."""
        self._position, self._on_done = position, on_done
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    def put(self, groups: Iterable[tuple[int, int]]) -> None:
        """Take settled groups, each with the bytes of its samples in the journal."""
        left_out = []
        with self._wake:
            for group_id, size_bytes in groups:
                self._waiting.append((group_id, size_bytes))
                self._waiting_bytes += size_bytes
            while self._waiting_bytes > self._max_bytes:
                left_out.append(self._pop())
            self._wake.notify()
        for begin in range(0, len(left_out), _PORTION):
            portion = tuple(left_out[begin : begin + _PORTION])
            self._on_done(Done(group_ids=portion, left_out=sum(map(self._keeps, portion))))
        if left_out:
            if not self._is_behind:
                log.warning("the archive falls behind: the oldest samples that wait for it are left out")
            self._is_behind = True

    def close(self) -> None:
        """End; what waits is archived first, where that is quick."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _pop(self) -> int:
        group_id, size_bytes = self._waiting.popleft()
        self._waiting_bytes -= size_bytes
        return group_id

    def _keeps(self, group_id: int) -> bool:
        return is_archived(group_id, share_percent=self._share_percent)

    # ---- archive thread

    def _run(self) -> None:
        while portion := self._next_portion():
            self._on_done(self._done(portion))
        if self._opened is not None:
            connection, writer = self._opened
            connection.close()
            with contextlib.suppress(OSError):  # of what the disk has refused before
                writer.close()

    def _next_portion(self) -> list[int]:
        """Empty at the end."""
        with self._wake:
            while not (self._waiting or self._closing):
                self._wake.wait()
            self._wake.wait_for(lambda: self._closing or len(self._waiting) >= _PORTION, timeout=_GATHER_S)
            return [self._pop() for _ in range(min(_PORTION, len(self._waiting)))]

    def _done(self, portion: Sequence[int]) -> Done:
        kept = [group_id for group_id in portion if self._keeps(group_id)]
        position, written = None, 0
        if kept and not self._fault:
            try:
                position, written = self._archive(kept)
            except (OSError, sqlite3.Error, UserError) as error:
                self._fault = True
                log.warning("no more samples are archived until the next start: %s", error)
            except Exception:  # a mistake of our own: the run goes on without its archive
                self._fault = True
                log.exception("no more samples are archived until the next start")
        return Done(group_ids=tuple(portion), left_out=len(kept) - written, position=position)

    def _archive(self, group_ids: Sequence[int]) -> tuple[ArchivePosition, int]:
        """The position behind these groups, and how many of them had samples and stand there, or had none."""
        connection, writer = self._opened = self._opened or self._open()
        consumed = consumptions(connection, first=self._step, wanted=frozenset(group_ids))
        self._step = max((found.step for found in consumed.values()), default=self._step)
        lost = 0
        for group_id in group_ids:
            try:
                stored = read_stored(connection, group_id, consumed=consumed)
            except DamagedJournalError as error:
                log.warning("the archive leaves out group %d: %s", group_id, error)
                lost += 1
                continue
            if stored is not None:
                lost += not writer.append(*stored)
        return writer.sync(), len(group_ids) - lost

    def _open(self) -> tuple[sqlite3.Connection, ArchiveWriter]:
        connection = open_for_reading(self._journal_path)
        return connection, ArchiveWriter(self._folder, max_bytes=self._max_bytes, at=self._position)
