"""A bit that flips on the disk: `journal check` never vouches for what was not written, and no scheduler goes on with it."""

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl_cli.main import main
from streamrl_workers.scheduler.journal.check import check_run
from streamrl_workers.scheduler.journal.integrity import row_digest
from streamrl_workers.scheduler.journal.store import JournalFaultError
from streamrl_workers.trainer.checkpoint import CheckpointStore
from support.changed_fields import other_cell, overwrite
from support.flips import EXACT, content, resumed, said, spoilt_copies
from support.journal_stories import JOURNAL, LOG, copy_of, finished, going_on, killed
from support.journals import OpenJournal

SEED = 17
COUNT = 120
SOAK_COUNT = 5_000

Make = Callable[[Path], Awaitable[Path]]


FILES = [(finished, JOURNAL), (killed, JOURNAL), (killed, LOG)]
IDS = ["finished", "killed", "killed, its log"]


async def campaign(
    make: Make, name: str, *, home: Path, capsys: pytest.CaptureFixture[str], count: int
) -> Counter[str]:
    """Flip by flip: refused, or harmless. What resumes after a flip in the log has lost the last commit at most."""
    run_dir = await make(home)
    assert said(run_dir, capsys) == EXACT
    written = content(run_dir)
    states = [resumed(_fresh(run_dir, home / "whole"))]
    if name == LOG:
        states.append(resumed(_without_last_commit(_fresh(run_dir, home / "whole"))))
    ends: Counter[str] = Counter()
    for flip, spoilt in spoilt_copies(run_dir, name, to=home / "spoilt", seed=SEED, count=count):
        same, verdict = content(spoilt) == written, said(spoilt, capsys)
        assert same or verdict != EXACT, f"{flip} is vouched for"
        ends["harmless" if verdict == EXACT else "refused"] += 1
        if verdict != EXACT:
            assert (found := resumed(spoilt)) is None or found in states, f"a scheduler goes on with {flip}: {verdict}"
    return ends


def _fresh(run_dir: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(run_dir, to))


def _without_last_commit(run_dir: Path) -> Path:
    """Cut off in its last frame, as a kill in the middle of writing leaves it."""
    log = run_dir / LOG
    log.write_bytes(log.read_bytes()[:-100])
    return run_dir


@pytest.mark.parametrize(("make", "name"), FILES, ids=IDS)
async def test_no_flipped_bit_is_vouched_for(
    make: Make, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = await campaign(make, name, home=tmp_path, capsys=capsys, count=COUNT)
    assert ends["refused"] > COUNT // 4, ends


@pytest.mark.soak
@pytest.mark.parametrize(("make", "name"), FILES, ids=IDS)
async def test_no_flipped_bit_is_vouched_for_in_thousands(
    make: Make, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = await campaign(make, name, home=tmp_path, capsys=capsys, count=SOAK_COUNT)
    assert ends["refused"] > SOAK_COUNT // 4, ends


async def test_no_flipped_bit_of_a_checkpoint_is_vouched_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every digest and number of `meta.json`: damaged, or the same for who reads it."""
    run_dir = await finished(tmp_path)
    name = "checkpoints/step-00000014/meta.json"
    written = CheckpointStore(run_dir / "checkpoints", keep_last=2).newest()
    assert written is not None
    for flip, spoilt in spoilt_copies(run_dir, name, to=tmp_path / "spoilt", seed=SEED, count=COUNT):
        found = CheckpointStore(spoilt / "checkpoints", keep_last=2).newest()
        assert found is not None
        assert found.meta.step == 12 or found.meta == written.meta, flip
        assert (said(spoilt, capsys) == EXACT) == (found.meta == written.meta), flip


def _broken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens it gets `/proc/self/mem`, whose first byte is EIO."""
    really_open, number = os.open, file.stat().st_ino

    def opening(path: str, flags: int, **options: Any) -> int:
        handle = really_open(path, flags, **options)
        if os.fstat(handle).st_ino != number:
            return handle
        os.close(handle)
        return really_open("/proc/self/mem", os.O_RDONLY)

    monkeypatch.setattr(os, "open", opening)


async def test_a_disk_that_does_not_answer_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the newest checkpoint; one that is older is not needed."""
    run_dir = await finished(tmp_path)
    *_, older, newest = sorted(run_dir.glob("checkpoints/step-*/meta.json"))
    with monkeypatch.context() as patch:
        _broken(older, patch)
        assert check_run(run_dir).violations == ()
    _broken(newest, monkeypatch)
    with pytest.raises(UserError, match=r"step-00000014/meta.json: cannot be read: Input/output error"):
        check_run(run_dir)
    assert "cannot be read: Input/output error" in said(run_dir, capsys)


async def test_a_damaged_row_is_never_written_over(tmp_path: Path) -> None:
    """Else its new digest would vouch for what was not written."""
    run_dir = await finished(tmp_path)
    overwrite(run_dir / JOURNAL, table="groups", cell="begun_step", value=3)
    with closing(sqlite3.connect(run_dir / JOURNAL, isolation_level=None)) as connection:
        connection.create_function("row_digest", -1, row_digest, deterministic=True)
        for statement in ("UPDATE groups SET settled = 1", "DELETE FROM groups"):
            with pytest.raises(sqlite3.IntegrityError, match="a row of groups is not what was written"):
                connection.execute(statement)


async def test_damaged_samples_are_not_delivered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk fails while the run goes on: the step that would train them ends the scheduler, and none goes on."""
    run_dir = await killed(tmp_path)
    opened = OpenJournal(run_dir / JOURNAL)
    assert len(opened.journal.samples_of(24)) == 2
    with closing(sqlite3.connect(run_dir / JOURNAL, isolation_level=None)) as connection:
        (data,) = connection.execute("SELECT data FROM trajectories WHERE key = ?", (24 << 10,)).fetchone()
        connection.execute("UPDATE trajectories SET data = ? WHERE key = ?", (other_cell(data), 24 << 10))
    with pytest.raises(JournalFaultError, match="the samples of group 24 are not what was written"):
        opened.journal.samples_of(24)
    opened.journal.close()
    assert "group 24 has samples that are not what was written" in said(run_dir, capsys)
    assert main(["journal", "show", str(run_dir), "24"]) == 0
    assert "samples: not what was written" in capsys.readouterr().out
    assert resumed(run_dir) is None


async def test_a_sample_under_another_index_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though no other sample of its group is in its place, and their order is what it was."""
    run_dir = await killed(tmp_path)
    with closing(sqlite3.connect(run_dir / JOURNAL, isolation_level=None)) as connection:
        connection.execute("UPDATE trajectories SET key = key | 16 WHERE key = ?", (24 << 10 | 1,))
    assert "group 24 has samples that are not what was written" in said(run_dir, capsys)
    assert resumed(run_dir) is None


async def test_a_copy_of_a_live_run_is_checked_with_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = await going_on(tmp_path)
    assert said(copy_of(story, to=tmp_path / "copy"), capsys) == EXACT
    assert said(story.run_dir, capsys) == EXACT, "while its scheduler holds it"
    story.opened.journal.close()


async def test_a_log_that_is_cut_off_is_not_vouched_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of a commit: as after a kill, so the run goes on, but nobody says that all is there."""
    cut = _without_last_commit(await killed(tmp_path))
    assert "resume the run: it goes on from the commit before" in said(cut, capsys)
    found = resumed(cut)
    assert found is not None
    assert [group.start_version for group in found.groups if group.group_id == 30] == [None]


async def test_a_file_that_is_cut_off_is_not_vouched_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await finished(tmp_path)
    data = (run_dir / JOURNAL).read_bytes()
    for size in (1, 100, 4096, len(data) // 2, len(data) - 4096):
        (run_dir / JOURNAL).write_bytes(data[:size])
        assert said(run_dir, capsys) != EXACT, size
        assert resumed(run_dir) is None, size
