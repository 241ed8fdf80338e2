"""Settled groups on their way from the journal to the archive: exactly once across kills, and never in the run's way."""

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.storage import Archive
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal import archiver as archiving
from streamrl_workers.scheduler.journal import writer
from streamrl_workers.scheduler.journal.archiver import Archiver
from streamrl_workers.scheduler.journal.sample_store import StoredGroup, open_samples
from streamrl_workers.scheduler.journal.tables import read_compacted, settled_with_samples
from streamrl_workers.stream.archive import ArchiveWriter, is_archived, segment_path
from streamrl_workers.stream.packing import pack_float32
from support.histories import attempt, histories, plan, step
from support.journals import OpenJournal, scored, texts, trajectory
from support.runs import wait_for

ALL = Archive()


def opened(run_dir: Path, *, spec: Archive = ALL, keep_groups: int = 100) -> OpenJournal:
    return OpenJournal(run_dir / "journal.sqlite", keep_groups=keep_groups, archiver=Archiver(run_dir, spec=spec))


def stored(run_dir: Path) -> dict[int, StoredGroup]:
    """Every group that has samples, each once, with the samples that the journal was given."""
    with open_samples(run_dir) as store:
        groups = list(store.groups())
        for group in groups:
            samples = group.read().samples
            assert [sample.group_id for sample in samples] == [group.head.group_id] * len(group.head.samples)
    assert len({group.head.group_id for group in groups}) == len(groups)
    return {group.head.group_id: group for group in groups}


def in_archive(run_dir: Path) -> list[int]:
    with open_samples(run_dir) as store:
        return [group.head.group_id for group in store.groups() if not isinstance(group.source, pb.ArchivedSamples)]


def left_out(run_dir: Path) -> int:
    with open_samples(run_dir) as store:
        return store.account.left_out


def covered(steps: int) -> rec.Checkpointed:
    return rec.Checkpointed(step=steps, path=f"step-{steps}")


def trained(steps: int) -> list[rec.Record]:
    """A run of one group a step, all steps covered."""
    records: list[rec.Record] = [attempt(1, 0), *plan(0, steps), *map(scored, range(steps))]
    records += [replace(step(at, (at,)), advantages=pack_float32([at, -at])) for at in range(steps)]
    return [*records, covered(steps)]


async def test_what_a_checkpoint_covers_moves_to_the_archive_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    kept = tuple(trajectory(3, index) for index in range(2))
    dropped = rec.Dropped(group_id=3, reason="zero_variance", mean_tokens=3.0, trajectories=kept, texts=texts(3))
    await journal.write([*trained(3), rec.Planned(group_id=3, prompt_index=9), dropped])
    await journal.write([rec.Planned(group_id=4, prompt_index=4), scored(4)])
    journal.journal.close()
    assert sorted(in_archive(tmp_path)) == [0, 1, 2, 3]
    groups = stored(tmp_path)
    assert sorted(groups) == [0, 1, 2, 3, 4]
    head = groups[2].head
    assert (head.prompt_index, head.step, head.attempt, head.start_version) == (2, 2, 1, 0)
    assert head.advantages == pack_float32([2, -2])
    assert [(sample.reward, sample.tokens) for sample in head.samples] == [(1.0, 3)] * 2
    assert groups[2].read().samples[1].SerializeToString() == trajectory(2, 1)
    assert groups[2].read().texts.SerializeToString() == texts(2)
    assert (groups[3].head.drop_reason, groups[3].head.prompt_index) == ("zero_variance", 9)
    assert not groups[3].head.HasField("step")
    assert not groups[4].head.drop_reason


@settings(max_examples=25, deadline=None)
@given(records=histories(), kills=st.sets(st.integers(0, 60), max_size=4), share_percent=st.sampled_from([100, 50]))
def test_whatever_a_run_does_its_groups_have_samples_once(
    records: list[rec.Record], kills: set[int], share_percent: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A kill is a copy of the folder at any moment between two records: the archive may be ahead of the journal's account."""
    run_dir = tmp_path_factory.mktemp("run")
    spec = Archive(sharePercent=share_percent)

    async def play() -> Path:
        here, journal = run_dir / "0", None
        here.mkdir()
        for number, record in enumerate(records):
            journal = journal or opened(here, spec=spec, keep_groups=4)
            await journal.write([record])
            if number in kills:
                copied = Path(shutil.copytree(here, run_dir / str(number + 1), ignore=shutil.ignore_patterns("*-shm")))
                journal.journal.close()
                here, journal = copied, None
        (journal or opened(here, spec=spec)).journal.close()
        opened(here, spec=spec).journal.close()
        return here

    here = asyncio.run(play())
    with open_samples(here) as store:
        leftover = settled_with_samples(store._connection)
    ended = {record.group_id for record in records if isinstance(record, rec.Dropped)}
    scored_ids = {record.group_id for record in records if isinstance(record, rec.Scored)}
    expected = {group_id for group_id in scored_ids - ended if is_archived(group_id, share_percent=share_percent)}
    found = stored(here)
    assert leftover == []
    assert left_out(here) == 0
    assert expected <= set(found) <= scored_ids
    for group_id in in_archive(here):
        assert found[group_id].head.HasField("step")


async def test_what_was_synced_behind_the_account_is_not_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the archive's disk and the journal's: the archive has the groups, and the journal has them too."""
    copies = tmp_path / "copies"
    append = ArchiveWriter.sync
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    def sync_and_copy(writer: ArchiveWriter):
        position = append(writer)
        if not copies.exists():
            shutil.copytree(run_dir, copies, ignore=shutil.ignore_patterns("*-shm"))
        return position

    monkeypatch.setattr(ArchiveWriter, "sync", sync_and_copy)
    journal = opened(run_dir)
    await journal.write(trained(5))
    journal.journal.close()
    assert segment_path(copies / "archive", 0).stat().st_size > 500
    assert in_archive(copies) == []
    assert sorted(stored(copies)) == [0, 1, 2, 3, 4]
    opened(copies).journal.close()
    assert sorted(in_archive(copies)) == [0, 1, 2, 3, 4]
    assert sorted(stored(copies)) == [0, 1, 2, 3, 4]


async def test_steps_are_compacted_only_when_their_groups_have_gone(tmp_path: Path) -> None:
    journal = opened(tmp_path, keep_groups=0)
    await journal.write(trained(40))
    journal.journal.close()
    journal = opened(tmp_path, keep_groups=0)
    await journal.write([*plan(40, 1), scored(40, start_version=40), step(40, (40,)), covered(41)])
    wait_for(lambda: compacted(tmp_path) == 40, what="compaction behind the archive")
    journal.journal.close()
    assert sorted(in_archive(tmp_path)) == list(range(41))


def compacted(run_dir: Path) -> int:
    with open_samples(run_dir) as store:
        return read_compacted(store._connection).steps


# ---- never in the run's way


def no_folder(run_dir: Path) -> None:
    (run_dir / "archive").write_text("a file lies where the folder should be")


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), RuntimeError("a mistake of our own")])
async def test_a_disk_that_refuses_costs_the_archive_alone(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, counted; the next start goes on."""
    journal = opened(tmp_path)
    await journal.write(trained(3))
    journal.journal.close()
    with monkeypatch.context() as patched:
        patched.setattr(ArchiveWriter, "append", failing(fault))
        journal = opened(tmp_path)
        for at in (3, 4):
            await journal.write([*plan(at, 1), scored(at, start_version=at), step(at, (at,)), covered(at + 1)])
            wait_for(lambda at=at: left_out(tmp_path) == at - 2, what="the account of what is left out")
        journal.journal.close()
        assert not journal.faults
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "no more samples are archived until the next start"
    ]
    journal = opened(tmp_path)
    await journal.write([*plan(5, 1), scored(5, start_version=5), step(5, (5,)), covered(6)])
    journal.journal.close()
    assert sorted(stored(tmp_path)) == [0, 1, 2, 5]
    assert left_out(tmp_path) == 2


def failing(fault: Exception) -> Callable[..., bool]:
    def append(*_: object) -> bool:
        raise fault

    return append


async def test_no_folder_is_as_no_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    no_folder(tmp_path)
    journal = opened(tmp_path)
    await journal.write(trained(2))
    journal.journal.close()
    assert not journal.faults
    assert "no more samples are archived until the next start" in caplog.text
    (tmp_path / "archive").unlink()
    assert (stored(tmp_path), left_out(tmp_path)) == ({}, 2)


async def test_what_waits_for_a_disk_that_hangs_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal goes on, and gives up the oldest of what waits; when the disk answers again the rest is archived."""
    answers, asked = threading.Event(), threading.Event()
    append = ArchiveWriter.append

    def slow(writer: ArchiveWriter, *group: pb.ArchivedGroup | pb.ArchivedSamples) -> bool:
        asked.set()
        assert answers.wait(60)
        return append(writer, *group)  # type: ignore[arg-type]

    monkeypatch.setattr(ArchiveWriter, "append", slow)
    monkeypatch.setattr(archiving, "_PORTION", 1)
    monkeypatch.setattr(archiving, "parse_bytes", lambda text: 40_000)
    journal = opened(tmp_path)
    await journal.write([attempt(1, 0), *plan(0, 9), *(scored(group, padding=5_000) for group in range(9))])
    await journal.write([step(0, (0,)), covered(1)])
    assert await asyncio.to_thread(asked.wait, 60)
    for at in range(1, 9):
        await journal.write([step(at, (at,)), covered(at + 1)])
    wait_for(lambda: left_out(tmp_path) == 5, what="the oldest to be left out")
    answers.set()
    journal.journal.close()
    assert not journal.faults
    assert in_archive(tmp_path) == [0, 6, 7, 8]
    assert caplog.text.count("the archive falls behind") == 1


async def test_a_commit_deletes_a_portion_of_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a large model has gigabytes of samples: records that come meanwhile wait for one portion, not for all."""
    groups, uncommitted = 500, []
    written = 0

    def noted(connection: sqlite3.Connection, done: archiving.Done) -> None:
        nonlocal written
        written += len(done.group_ids)
        uncommitted.append(written - left_out(tmp_path))
        archiving.write_done(connection, done)

    monkeypatch.setattr(writer, "write_done", noted)
    monkeypatch.setattr(archiving, "parse_bytes", lambda text: 0)
    journal = opened(tmp_path)
    await journal.write(trained(groups))
    journal.journal.close()
    assert left_out(tmp_path) == groups
    assert max(uncommitted) <= 128


async def test_without_an_archive_settled_samples_are_deleted(tmp_path: Path) -> None:
    journal = OpenJournal(tmp_path / "journal.sqlite")
    await journal.write(trained(3))
    journal.journal.close()
    assert stored(tmp_path) == {}
    assert not (tmp_path / "archive").exists()
