"""Builds journals for tests, by running records through the real journal until they are durable; reads the samples of a run's."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from streamrl import keys
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal.archiver import Archiver
from streamrl_workers.scheduler.journal.store import open_for_reading
from streamrl_workers.scheduler.journal.tables import KEEP_GROUPS, read_samples
from streamrl_workers.scheduler.journal.writer import JournalWriter
from streamrl_workers.stream.packing import pack_int32
from support.runs import DEADLINE_S


def trajectory(group_id: int, index: int, *, tokens: int = 3, padding: int = 0) -> bytes:
    """A stored sample."""
    message = pb.Sample(
        group_id=group_id,
        sample_index=index,
        tokens=pack_int32(range(tokens)),
        logprobs=bytes(padding),
        finish_reason="stop",
        reward=1.0,
        spans=[pb.VersionSpan(tokens=tokens, step=0, attempt=1)],
        generator_id="generator-a-0",
        generate_s=0.25,
    )
    return message.SerializeToString()


def scored(group_id: int, *, start_version: int = 0, samples: int = 2, tokens: int = 3, padding: int = 0) -> rec.Scored:
    """A group's samples."""
    blobs = tuple(trajectory(group_id, index, tokens=tokens, padding=padding) for index in range(samples))
    return rec.Scored(
        group_id=group_id,
        start_version=start_version,
        trajectories=blobs,
        size_bytes=sum(map(len, blobs)),
        texts=texts(group_id, samples=samples),
    )


def texts(group_id: int, *, samples: int = 2) -> bytes:
    """What a group's samples read and wrote."""
    written = [pb.SampleTexts(turns=[f"answer {index} of {group_id}"]) for index in range(samples)]
    return pb.GroupTexts(prompt=f"prompt {group_id}", samples=written).SerializeToString()


def trajectories(folder: Path, *, groups: int) -> list[pb.Sample]:
    """The samples of a run's first groups, as far as its journal has them."""
    connection = open_for_reading(folder / keys.FILE_JOURNAL)
    try:
        samples = [data for group in range(groups) for data in read_samples(connection, group)]
    finally:
        connection.close()
    return [pb.Sample.FromString(data) for data in samples]


class OpenJournal:
    """A journal with its writer running; `write` returns when the records are durable or the disk refused them."""

    def __init__(self, path: Path, *, keep_groups: int = KEEP_GROUPS, archiver: Archiver | None = None) -> None:
        self.journal = JournalWriter(path, keep_groups=keep_groups, archiver=archiver)
        self.recovered = self.journal.open()
        self.faults: list[BaseException] = []
        self.acknowledged = 0
        self._sequence = 0
        self._news = asyncio.Event()
        self.journal.start(on_committed=self._committed, on_fault=self._fault)

    def _committed(self, sequence: int) -> None:
        assert sequence > self.acknowledged
        self.acknowledged = sequence
        self._news.set()

    def _fault(self, fault: BaseException) -> None:
        self.faults.append(fault)
        self._news.set()

    def append(self, record: rec.Record) -> None:
        """Append."""
        self._sequence += 1
        self.journal.append(fx.Write(sequence=self._sequence, record=record))

    async def write(self, records: Sequence[rec.Record]) -> None:
        """Append and wait."""
        for record in records:
            self.append(record)
        async with asyncio.timeout(DEADLINE_S):
            while self.acknowledged < self._sequence and not self.faults:
                await self._news.wait()
                self._news.clear()


async def write_journal(path: Path, records: Sequence[rec.Record]) -> None:
    """A closed journal that holds `records`."""
    opened = OpenJournal(path)
    await opened.write(records)
    opened.journal.close()
    assert not opened.faults


def read_back(path: Path) -> rec.Recovered:
    """What the journal gives a scheduler that starts again."""
    journal = JournalWriter(path)
    try:
        return journal.open()
    finally:
        journal.close()
