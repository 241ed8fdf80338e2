"""A run folder by somebody who knows the digests: `journal check`, `show` and `repair` take it, or refuse it in a line."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrl_cli.main import main
from streamrl_workers.scheduler.journal.integrity import row_digest
from streamrl_workers.stream.digests import read_sealed, seal
from support.flips import EXACT, said
from support.hostile import ACTS
from support.journal_stories import JOURNAL, finished
from support.runs import streamrl


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"step": 10**12, "folded_steps": 10**12, "history": [], "attempt": 9},
            "trained step 14, which the journal does not know",
        ),
        ({"step": 10**30, "folded_steps": 10**30}, f"its step is 1{'0' * 30}"),
        ({"step": float("inf")}, "its step is inf"),
        ({"step": True}, "its step is true"),
        ({"step": -1}, "its step is -1"),
        ({"attempt": "1"}, "its attempt is '1'"),
        ({"files": {"a": "b"}}, EXACT),
        ({"files": ["a"]}, EXACT),
        ({"files": {"x\x1b[2J": {"size_bytes": 1, "hash": 1}}}, EXACT),
        ({"folded_steps": -9}, "its folded_steps is -9"),
        ({"history": "00" * 16}, "its history is no list"),
        ({"history": ["0" * 31]}, "for a digest"),
        ({"history": [["0"]]}, "for a digest"),
        ({"chain": None}, "its history has None for a digest"),
        ({"chain": "x\x1b[2J"}, "its history has 'x\\x1b[2J' for a digest"),
    ],
    ids=str,
)
async def test_a_sealed_checkpoint_may_say_anything(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = await finished(tmp_path)
    file = run_dir / "checkpoints" / "step-00000014" / "meta.json"
    file.write_text(seal({**read_sealed(file), **changes}))
    assert told in said(run_dir, capsys)
    assert main(["journal", "repair", str(run_dir)]) == 0


async def test_what_a_command_warns_of_is_plain(tmp_path: Path) -> None:
    run_dir = await finished(tmp_path)
    file = run_dir / "checkpoints" / "step-00000014" / "meta.json"
    file.write_text(seal({**read_sealed(file), "files": {"x\x1b[2J": {"size_bytes": 1, "hash": "h"}}}))
    done = streamrl("journal", "repair", str(run_dir))
    assert "is damaged (x\\x1b[2J is missing)" in done.stderr
    assert not ACTS.search(done.stdout + done.stderr)


async def test_no_link_to_another_checkpoint_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await finished(tmp_path)
    folder = run_dir / "checkpoints" / "step-00000014"
    folder.rename(tmp_path / "elsewhere")
    folder.mkdir()
    (folder / "meta.json").symlink_to(tmp_path / "elsewhere" / "meta.json")
    assert "must not be a symbolic link" in said(run_dir, capsys)


@pytest.mark.parametrize("name", [JOURNAL, f"{JOURNAL}.lock"])
async def test_a_journal_is_no_link_to_another_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, target = await finished(tmp_path), tmp_path / "elsewhere"
    (run_dir / name).rename(target)
    (run_dir / name).symlink_to(target)
    if name == JOURNAL:
        assert "is not a regular file" in said(run_dir, capsys)
    target.write_bytes(written := b"")
    assert main(["journal", "repair", str(run_dir)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert target.read_bytes() == written


@contextmanager
def opened(run_dir: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(run_dir / JOURNAL, isolation_level=None)) as connection:
        connection.create_function("row_digest", -1, row_digest, deterministic=True)
        yield connection


SPOILT = {
    "group_ids are not whole numbers": ("UPDATE steps SET group_ids = ? WHERE step = 13", b"abc"),
    "a version is a text": ("UPDATE groups SET begun_step = ? WHERE group_id = 39", "one"),
    "a reason is of bytes": ("UPDATE groups SET drop_reason = ? WHERE group_id = 41", b"\xff"),
    "a step is a text": ("UPDATE steps SET step = ? WHERE step = 13", "last"),
    "a reward is a text": ("UPDATE evaluations SET mean_reward = ? WHERE step = 14", "high"),
    "an id has 62 bits": ("UPDATE groups SET group_id = ? WHERE group_id = 41", 2**62),
    "an id is negative": ("UPDATE groups SET group_id = ? WHERE group_id = 41", -7),
    "no summary": ("UPDATE meta SET value = ? WHERE key = 'folded'", "[[["),
    "an empty summary": ("UPDATE meta SET value = ? WHERE key = 'folded'", "{}"),
    "a deep summary": ("UPDATE meta SET value = ? WHERE key = 'folded'", "[" * 100_000),
    "a summary of texts": (
        "UPDATE meta SET value = ? WHERE key = 'folded'",
        json.dumps({"steps": "x", "settled": [["a", "b"]], "step_groups": None, "staleness": ["a", "b"]}),
    ),
    "a step of millions of groups": ("UPDATE steps SET group_ids = ? WHERE step = 13", b"\xff" * 160_000),
}


@pytest.mark.parametrize("change", SPOILT.values(), ids=SPOILT)
async def test_rows_with_their_digests_may_say_anything(
    change: tuple[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statement, value = change
    run_dir = await finished(tmp_path)
    with opened(run_dir) as connection:
        assert connection.execute(statement, (value,)).rowcount == 1
    assert said(run_dir, capsys) != EXACT
    for command in (["show", str(run_dir), "39"], ["repair", str(run_dir)]):
        assert main(["journal", *command]) in (0, 2)
        assert len(capsys.readouterr().err.splitlines()) <= 1


@pytest.mark.parametrize("group", [2**64, -(2**63) - 1, 10**4000, -1])
async def test_any_number_may_be_asked_for(group: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await finished(tmp_path)
    assert main(["journal", "show", str(run_dir), "--", str(group)]) == 2
    assert "is not in this journal; it has groups 0 to 41" in capsys.readouterr().err
