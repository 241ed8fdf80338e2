"""All samples of a run that are still there: those of the archive, and those that the journal still has. Also while the run goes on.

Owns the view of both as one, at one instant. What it reads may be foreign: it is held against its digests, and bounded.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import DIR_ARCHIVE, FILE_JOURNAL
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.journal.archiver import Account, consumptions, read_account, read_stored
from streamrl_workers.scheduler.journal.check import snapshot
from streamrl_workers.scheduler.journal.store import SAMPLE_BITS
from streamrl_workers.scheduler.journal.tables import read_last_hash
from streamrl_workers.stream.archive import ArchivedEntry, read_archive, read_segment, segment_numbers

SamplePlace = tuple[int, int]
"""Segment and place in it; of a group in the journal `_JOURNAL` and its id."""
_JOURNAL = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group whose samples are there."""

    head: pb.ArchivedGroup
    source: ArchivedEntry | pb.ArchivedSamples
    """Where they are: in the archive, or in the journal, out of which they have been read."""

    @property
    def place(self) -> "SamplePlace":
        """Where it stands in the order of `SampleStore.newest`."""
        return self.source.place if isinstance(self.source, ArchivedEntry) else (_JOURNAL, self.head.group_id)

    def read(self) -> pb.ArchivedSamples:
        """Its samples. Raises `UserError`: they are not what was written."""
        found = self.source.samples() if isinstance(self.source, ArchivedEntry) else self.source
        if len(found.samples) != len(self.head.samples) or not all(map(_is_whole, found.samples)):
            raise UserError(
                field=f"group {self.head.group_id}", rule="has samples that are none", fix="restore it from a copy"
            )
        return found


def _is_whole(sample: pb.Sample) -> bool:
    return not (len(sample.tokens) | len(sample.logprobs) | len(sample.prompt_tokens)) % 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStore:
    """The samples of a run at one instant."""

    run_dir: Path
    account: Account
    last_hash: bytes
    """Of the version that the run has ended with; empty: it is not known."""
    _connection: sqlite3.Connection

    def groups(self) -> Iterator[StoredGroup]:
        """Every group once: the archive's in the order in which they settled, then the journal's by their ids.

        Raises:
            UserError: a segment is not what was written.
            DamagedJournalError: the journal's samples are not.
        """
        for entry in read_archive(self.run_dir / DIR_ARCHIVE, beneath=self.run_dir, end=self.account.position):
            yield StoredGroup(head=entry.head, source=entry)
        yield from self._of_journal("ASC")

    def newest(self, *, before: SamplePlace | None = None) -> Iterator[StoredGroup]:
        """Groups from the newest on, the journal's first, from behind `before` on. Of the archive no more segments are read than are asked for.

        Raises: as `groups`.
        """
        yield from (group for group in self._of_journal("DESC") if before is None or group.place < before)
        folder, end = self.run_dir / DIR_ARCHIVE, self.account.position
        for number in reversed(segment_numbers(folder, end=end)):
            if before is not None and number > before[0]:
                continue
            for entry in reversed(read_segment(folder, number, beneath=self.run_dir, end=end)):
                if before is None or entry.place < before:
                    yield StoredGroup(head=entry.head, source=entry)

    def _of_journal(self, order: str) -> Iterator[StoredGroup]:
        consumed = consumptions(self._connection)
        ids = self._connection.execute(f"SELECT DISTINCT key >> {SAMPLE_BITS} FROM trajectories ORDER BY 1 {order}")  # noqa: S608 - constants
        for (group_id,) in ids.fetchall():
            stored = read_stored(self._connection, group_id, consumed=consumed)
            if stored is not None:
                head, samples = stored
                yield StoredGroup(head=head, source=samples)


@contextmanager
def open_samples(run_dir: Path) -> Iterator[SampleStore]:
    """The store of a run folder.

    Raises:
        UserError: the folder or its journal cannot be read, or is not what was written.
    """
    journal = run_dir / FILE_JOURNAL
    if journal.is_symlink():
        raise UserError(
            field=str(journal), rule="must not be a symbolic link", fix="name the folder that has the journal"
        )
    with snapshot(run_dir) as connection:
        account, last_hash = read_account(connection), read_last_hash(connection)
        yield SampleStore(run_dir=run_dir, account=account, last_hash=last_hash, _connection=connection)
