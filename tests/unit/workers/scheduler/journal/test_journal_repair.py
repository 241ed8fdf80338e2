"""`streamrl journal repair`: damaged samples are given up, and nothing else is."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from streamrl_cli.main import main
from support.flips import EXACT, resumed, said
from support.journal_stories import JOURNAL, Story, finished, killed


def spoil(run_dir: Path, groups: Iterable[int]) -> None:
    """A flipped bit in a sample of each."""
    with closing(sqlite3.connect(run_dir / JOURNAL, isolation_level=None)) as connection:
        for group in groups:
            (data,) = connection.execute("SELECT data FROM trajectories WHERE key = ?", (group << 10,)).fetchone()
            flipped = bytes([data[0] ^ 1]) + data[1:]
            connection.execute("UPDATE trajectories SET data = ? WHERE key = ?", (flipped, group << 10))


def repaired(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["journal", "repair", str(run_dir)]) == 0
    return capsys.readouterr().out


async def test_a_group_in_no_step_is_generated_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await killed(tmp_path)
    spoil(run_dir, [30])
    before = said(run_dir, capsys)
    assert "`streamrl journal repair` has them generated again" in before
    assert resumed(run_dir) is None
    assert repaired(run_dir, capsys) == "1 groups will be generated again: 30\n"
    assert said(run_dir, capsys) == EXACT
    found = resumed(run_dir)
    assert found is not None
    assert {group.group_id: group.start_version for group in found.groups if group.group_id >= 24} == {
        24: 8, 25: 8, 27: 9, 28: 9, 30: None, 31: None,
    }  # fmt: skip
    assert found.step == 9


async def test_a_step_behind_the_checkpoint_is_taken_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await killed(tmp_path)
    spoil(run_dir, [25])
    assert resumed(run_dir) is None
    out = repaired(run_dir, capsys)
    assert out == "1 groups will be generated again: 25\nstep 8 and the steps behind it will be taken anew\n"
    assert said(run_dir, capsys) == EXACT
    found = resumed(run_dir)
    assert found is not None
    assert (found.step, found.checkpoint_step) == (8, 8)
    assert 8 not in found.compositions
    groups = {group.group_id: group for group in found.groups}
    assert groups[25].start_version is None
    assert len(groups[24].trajectories) == 2, "the other group of that step keeps its samples"


async def test_what_the_newest_checkpoint_covers_needs_no_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were kept for the case that the newest checkpoint cannot be read."""
    run_dir = await killed(tmp_path)
    spoil(run_dir, [18, 22])  # of steps 6 and 7; checkpoints of steps 6 and 8 are kept
    assert resumed(run_dir) is None
    assert repaired(run_dir, capsys) == "0 groups will be generated again\n"
    assert said(run_dir, capsys) == EXACT
    found = resumed(run_dir)
    assert found is not None
    assert (found.step, found.checkpoint_step) == (9, 8)


async def test_without_damage_nothing_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await killed(tmp_path)
    assert repaired(run_dir, capsys) == "0 groups will be generated again\n"
    found = resumed(run_dir)
    assert found is not None
    assert (found.step, found.checkpoint_step) == (9, 6)


async def test_what_cannot_be_repaired_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await finished(tmp_path)
    story = Story(tmp_path)
    data = (run_dir / JOURNAL).read_bytes()
    (run_dir / JOURNAL).write_bytes(data[:4096] + bytes(4096) + data[8192:])
    for folder, text in (
        (run_dir, "restore it from a copy, or start a new run"),
        (tmp_path, "is in use by another scheduler"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        assert main(["journal", "repair", str(folder)]) == 2
        err = capsys.readouterr().err
        assert text in err
        assert len(err.splitlines()) == 1
    story.opened.journal.close()
