"""The journal through its public door: what comes back after a restart, what it refuses, how it stays small."""

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings

from streamrl.errors import UserError
from streamrl.keys import FILE_JOURNAL, FILE_RESULT
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal import writer
from streamrl_workers.scheduler.journal.check import Facts, Rules, check
from streamrl_workers.scheduler.journal.store import open_for_reading, verify
from streamrl_workers.scheduler.journal.writer import JournalWriter
from streamrl_workers.scheduler.server.result import write_success
from support.histories import attempt, equal, failed, histories, plan, step
from support.journals import OpenJournal, read_back, scored, write_journal
from support.replayed import replay


async def test_new_journal_is_empty(tmp_path: Path) -> None:
    recovered = read_back(tmp_path / "j.sqlite")
    assert recovered.next_group_id == 0
    assert recovered.groups == ()
    assert (recovered.attempt, recovered.step, recovered.checkpoint_step, recovered.ended) == (0, 0, 0, False)


async def test_everything_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    groups = [scored(0, tokens=4), scored(1, start_version=0, tokens=8)]
    evaluated = rec.Evaluated(step=1, mean_reward=0.5, prompts=8, failed=0, mean_tokens=4.0)
    dropped = [failed(2), equal(4, mean_tokens=7.5)]
    await write_journal(path, [*plan(0, 5), attempt(1, 0), *groups, *dropped, step(0, (0,)), evaluated])
    recovered = read_back(path)
    assert recovered.next_group_id == 5
    assert (recovered.attempt, recovered.instance, recovered.step) == (1, "trainer-1", 1)
    assert recovered.compositions == {0: (0,)}
    assert [group.group_id for group in recovered.groups] == [0, 1, 3]
    assert recovered.groups[1].trajectories == groups[1].trajectories
    in_a_step = recovered.groups[0]
    assert (in_a_step.trajectories, in_a_step.stats.tokens_sum, in_a_step.stats.samples) == ((), 8, 2)
    assert recovered.groups[2].start_version is None
    opened = OpenJournal(path)
    assert opened.journal.samples_of(0) == groups[0].trajectories
    opened.journal.close()
    assert recovered.evaluated_steps == {1}
    assert recovered.prompt_lengths == {100: 4.0, 101: 8.0, 104: 7.5}


async def test_whatever_stops_the_writer_is_told(tmp_path: Path) -> None:
    """Not only what SQLite or the disk says: without its journal a run must not go on."""
    opened = OpenJournal(tmp_path / "j.sqlite")
    await opened.write([rec.Planned(group_id=0, prompt_index=0)])
    await opened.write([rec.Planned(group_id=1, prompt_index=1 << 70), rec.Planned(group_id=2, prompt_index=2)])
    assert [type(fault) for fault in opened.faults] == [OverflowError]
    assert opened.acknowledged == 1
    await opened.journal.aclose()
    assert read_back(tmp_path / "j.sqlite").next_group_id == 1


async def test_the_loop_goes_on_while_the_journal_waits_for_the_disk(tmp_path: Path) -> None:
    opened = OpenJournal(tmp_path / "j.sqlite")
    await opened.write([rec.Planned(group_id=0, prompt_index=0)])
    with contextlib.closing(sqlite3.connect(tmp_path / "j.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # stands for a slow disk
        opened.append(rec.Planned(group_id=1, prompt_index=1))
        closing = asyncio.create_task(opened.journal.aclose())
        for _ in range(100):
            await asyncio.sleep(0)
        other.execute("ROLLBACK")  # never reached if closing held up the loop
        await closing
    assert not opened.faults
    assert read_back(tmp_path / "j.sqlite").next_group_id == 2


async def test_an_evaluation_without_any_result_stays_one(tmp_path: Path) -> None:
    evaluated = rec.Evaluated(step=0, mean_reward=None, prompts=8, failed=8, mean_tokens=0.0)
    await write_journal(tmp_path / FILE_JOURNAL, [evaluated])
    nothing = Facts(groups={}, steps={}, covered_steps=0, ended=True, checkpoint=None)
    report = check(nothing, rules=Rules(batch_groups=1, staleness=0, group_size=1))
    write_success(tmp_path, steps=1, report=report)
    result = json.loads((tmp_path / FILE_RESULT).read_text())
    assert (result["final_reward"], result["evaluations"][0]["mean_reward"]) == (None, None)


async def test_rollback_keeps_the_recorded_composition(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    records = [*plan(0, 4), attempt(1, 0), *map(scored, range(4)), step(0, (0,)), step(1, (2,)), step(2, (1,))]
    await write_journal(path, [*records, rec.Checkpointed(step=1, path="c"), attempt(2, 1), step(1, (2,), attempt=2)])
    recovered = read_back(path)
    assert (recovered.step, recovered.checkpoint_step) == (2, 1)
    assert recovered.compositions == {1: (2,), 2: (1,)}
    assert [group.group_id for group in recovered.groups] == [1, 2, 3]
    assert [bool(group.trajectories) for group in recovered.groups] == [False, False, True]
    opened = OpenJournal(path)
    assert all(len(opened.journal.samples_of(group)) == 2 for group in (1, 2))
    opened.journal.close()


@settings(max_examples=60, deadline=None)
@given(histories())
def test_file_means_what_its_records_mean(records: list[rec.Record]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "j.sqlite"
        asyncio.run(write_journal(path, records))
        found, meant = read_back(path), replay(records)
    assert found.prompt_lengths == pytest.approx(meant.prompt_lengths)
    assert replace(found, prompt_lengths={}) == replace(meant, prompt_lengths={})


async def test_end_drops_what_lives(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    await write_journal(path, [*plan(0, 3), attempt(1, 0), scored(0), scored(1), step(0, (0,)), rec.RunEnded(step=1)])
    recovered = read_back(path)
    assert recovered.ended
    assert [group.group_id for group in recovered.groups] == [0]


async def test_file_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    opened = OpenJournal(path)
    await opened.write([attempt(1, 0)])
    sizes = []
    for number in range(60):
        groups = tuple(range(number * 8, number * 8 + 8))
        samples = [scored(group, start_version=number, padding=20_000) for group in groups]
        await opened.write(
            [*plan(groups[0], 8), *samples, step(number, groups), rec.Checkpointed(step=number + 1, path="c")]
        )
        sizes.append(path.stat().st_size)
    opened.journal.close()
    assert max(sizes[30:]) <= 1.5 * max(sizes[:30])
    assert path.stat().st_size < 16 * 2**20  # 19 MiB of samples went through


async def test_close_writes_what_is_queued(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    opened = OpenJournal(path)
    for number, record in enumerate(plan(0, 500), start=1):
        opened.journal.append(fx.Write(sequence=number, record=record))
    opened.journal.close()
    assert read_back(path).next_group_id == 500


async def test_second_scheduler_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    opened = OpenJournal(path)
    with pytest.raises(UserError, match="in use by another scheduler"):
        JournalWriter(path).open()
    opened.journal.close()
    read_back(path)


def _of_schema(version: int) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        read_back(path)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {version}")

    return spoil


def _hang_in_a_view(path: Path) -> None:
    """Whoever reads `meta` reads for ever."""
    read_back(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE meta")
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i), 1 FROM n"
        connection.execute(f"CREATE VIEW meta(key, value) AS {endless}")


def _add_a_table(path: Path) -> None:
    read_back(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE more (key)")


def _lose(path: Path) -> None:
    read_back(path)
    path.unlink()


def _empty(path: Path) -> None:
    read_back(path)
    path.write_bytes(b"")


def _fifo_for_its_log(path: Path) -> None:
    read_back(path)
    os.mkfifo(path.with_name(path.name + "-wal"))


def _cut(path: Path) -> None:
    read_back(path)
    path.write_bytes(path.read_bytes()[:5000] + bytes(3000))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            lambda path: path.write_text("no database at all, but long enough to be looked at" * 40),
            "not a journal or is damaged",
        ),
        (_cut, "damaged|malformed"),
        (_of_schema(99), "schema 99"),
        (_of_schema(0), "schema 2 or older"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
        (_fifo_for_its_log, "is not a regular file"),
        (_hang_in_a_view, "its tables are not those of a journal"),
        (_add_a_table, "its tables are not those of a journal"),
        (_lose, "is missing, and this run had one"),
        (_empty, "is empty"),
    ],
    ids=["foreign", "cut", "newer", "older", "directory", "fifo", "fifo log", "view", "table", "lost", "empty"],
)
def test_what_cannot_be_used_is_one_clear_line(tmp_path: Path, spoil, text: str) -> None:
    path = tmp_path / "j.sqlite"
    spoil(path)
    with pytest.raises(UserError, match=text) as caught:
        read_back(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value), "it says what to do"
    if path.exists():  # also to those who only read
        with pytest.raises(UserError, match=text):
            _read(path)


def _read(path: Path) -> None:
    with closing(open_for_reading(path)) as connection:
        verify(connection, path)


def test_missing_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        read_back(tmp_path / "no" / "j.sqlite")


_FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from support.histories import attempt, histories, plan, step
from support.journals import OpenJournal, scored
from streamrl_workers.scheduler.records import Planned

async def fill():
    opened = OpenJournal(Path(sys.argv[1]))
    for group in range(1000):
        before = opened.acknowledged
        await opened.write([Planned(group_id=group, prompt_index=0), scored(group, padding=50_000)])
        if opened.faults:
            print(group, opened.faults[0])
            return
        print(group)

resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, 3 * 2**20))
asyncio.run(fill())
"""


def test_full_disk_is_loud_and_loses_nothing(tmp_path: Path) -> None:
    """A limit on file size is what a full disk looks like from inside the process."""
    path = tmp_path / "j.sqlite"
    child = subprocess.run(
        ["prlimit", f"--fsize={3 * 2**20}", sys.executable, "-c", _FULL_DISK, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=Path(__file__).parents[4],
    )
    *durable, last = child.stdout.splitlines()
    assert str(path) in last
    assert "cannot be written" in last
    assert durable
    recovered = read_back(path)
    kept = [group for group in recovered.groups if len(group.trajectories) == 2]
    assert [group.group_id for group in kept] == [int(line) for line in durable]


async def test_a_disk_that_takes_nothing_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenJournal(tmp_path / "j.sqlite")
    await opened.write([*plan(0, 2)])
    assert opened.journal.fault() == ""
    monkeypatch.setattr(writer, "_STALL_S", 0.0)
    assert opened.journal.fault() == "", "nothing waits"
    with opened.journal._wake:  # the writer cannot take it
        opened.journal.append(fx.Write(sequence=100, record=plan(2, 3)[0]))
        assert opened.journal.fault().startswith("the disk has taken nothing of j.sqlite for 0 s")
    opened.journal.close()
