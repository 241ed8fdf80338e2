"""Compaction: the journal's verdict stays what it was, its size does not grow, a kill at any moment is harmless."""

import asyncio
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal import writer
from streamrl_workers.scheduler.journal.check import Report, Rules, check, read_facts, snapshot
from streamrl_workers.scheduler.journal.show import describe
from streamrl_workers.scheduler.journal.store import open_for_writing
from streamrl_workers.scheduler.journal.tables import CompactedSteps, compact_steps, read_compacted
from streamrl_workers.stream.digests import EMPTY_CHAIN, composition_digest, extend_chain, seal
from support.histories import attempt, histories, plan, step
from support.journals import DEADLINE_S, OpenJournal, read_back, scored, write_journal
from support.runs import wait_for

RULES = Rules(batch_groups=1, staleness=1_000, group_size=2)


def compact(run_dir: Path, *, keep_groups: int = 0) -> int:
    """Compact everything that can be; how many steps are then."""
    connection = open_for_writing(run_dir / "journal.sqlite")
    connection.execute("BEGIN")
    while compact_steps(connection, keep_groups=keep_groups, limit_steps=2):
        pass
    connection.execute("COMMIT")
    steps = read_compacted(connection).steps
    connection.close()
    return steps


def sizes(run_dir: Path) -> dict[str, int]:
    """Bytes of each file."""
    return {file.name: file.stat().st_size for file in run_dir.iterdir()}


def verdict(run_dir: Path, rules: Rules = RULES) -> Report:
    return check(read_facts(run_dir), rules=rules)


def write_checkpoint(run_dir: Path, digests: list[str], *, folded_steps: int = 0, number: int = 1) -> None:
    """A checkpoint after the steps with these digests, the first ones as a chain."""
    directory = run_dir / "checkpoints" / f"step-{len(digests):08d}"
    directory.mkdir(parents=True)
    chain = extend_chain(EMPTY_CHAIN, digests=digests[:folded_steps])
    meta = {"step": len(digests), "attempt": number, "history": digests[folded_steps:]}
    (directory / "meta.json").write_text(seal(meta | {"folded_steps": folded_steps, "chain": chain}))


def damage(records: list[rec.Record], kind: str) -> list[rec.Record]:
    """The same history with one thing wrong."""
    taken = [i for i, record in enumerate(records) if isinstance(record, rec.StepTaken)]
    spoilt = list(records)
    if kind == "twice" and len(taken) > 1:
        first = spoilt[taken[0]]
        spoilt[taken[-1]] = replace(spoilt[taken[-1]], group_ids=first.group_ids)
    elif kind == "dropped" and taken:
        spoilt.insert(taken[-1], rec.Dropped(group_id=spoilt[taken[-1]].group_ids[0], reason="reward_failed"))
    elif kind == "gap" and taken:
        del spoilt[taken[0]]
    elif kind == "never planned" and taken:
        spoilt[taken[0]] = replace(spoilt[taken[0]], group_ids=(999,))
    return spoilt


@settings(max_examples=60, deadline=None)
@given(
    histories(),
    st.sampled_from(["", "", "twice", "dropped", "gap", "never planned"]),
    st.integers(0, 3),
    st.data(),
)
def test_verdict_is_the_same_before_and_after(
    records: list[rec.Record], kind: str, keep_groups: int, data: st.DataObject
) -> None:
    with TemporaryDirectory() as directory:
        run_dir = Path(directory)
        asyncio.run(write_journal(run_dir / "journal.sqlite", damage(records, kind)))
        facts = read_facts(run_dir)
        if len(facts.steps) == facts.covered_steps > 0:  # contiguous: a checkpoint can name them all
            digests = [composition_digest(ids) for ids in facts.steps.values()]
            write_checkpoint(run_dir, digests, folded_steps=data.draw(st.integers(0, len(digests))), number=10**6)
        before, state = verdict(run_dir), read_back(run_dir / "journal.sqlite")
        compact(run_dir, keep_groups=keep_groups)
        after = verdict(run_dir)
        assert read_back(run_dir / "journal.sqlite") == state
    assert (before.violations == ()) == (after.violations == ()), (before.violations, after.violations)
    if not before.violations:
        assert replace(before, checkpoint=None) == replace(after, checkpoint=None)


def long_history(steps: int) -> list[rec.Record]:
    """One group a step, every third id dropped; a checkpoint covers all but the last step."""
    records: list[rec.Record] = [*plan(0, 3 * steps), attempt(1, 0)]
    for number in range(steps):
        ids = (3 * number, 3 * number + 1)
        records += [scored(group, start_version=number) for group in ids]
        records += [rec.Dropped(group_id=3 * number + 2, reason="zero_variance"), step(number, ids)]
    return [*records, rec.Checkpointed(step=steps - 1, path="c")]


PAIRS = replace(RULES, batch_groups=2)


@pytest.fixture
async def compacted_run(tmp_path: Path) -> Path:
    await write_journal(tmp_path / "journal.sqlite", long_history(10))
    write_checkpoint(tmp_path, [composition_digest((3 * k, 3 * k + 1)) for k in range(9)])
    assert compact(tmp_path) == 9
    return tmp_path


async def test_a_compacted_run_keeps_its_counts(compacted_run: Path) -> None:
    report = verdict(compacted_run, PAIRS)
    assert report.violations == ()
    assert (report.planned, report.consumed, report.dropped, report.steps) == (30, 20, {"zero_variance": 10}, 10)
    with snapshot(compacted_run) as connection:
        assert read_compacted(connection).settled == ((0, 25),)
        assert "compacted" in describe(connection, 4)[1]
    assert read_back(compacted_run / "journal.sqlite").next_group_id == 30


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda compacted: replace(compacted, chain="00" * 16), "other groups in the 9 oldest steps"),
        (lambda compacted: replace(compacted, consumed=17), "have 26 groups, but 25 were consumed or dropped"),
        (lambda compacted: replace(compacted, settled=((0, 4), (6, 26))), "group 5 is missing"),
        (
            lambda compacted: replace(compacted, settled=((0, 26),), consumed=19),
            "group 26 ended before step 9, but is there",
        ),
        (
            lambda compacted: replace(compacted, settled=((0, 27),), consumed=20),
            "group 27 is in step 9, but ended before",
        ),
        (lambda compacted: replace(compacted, step_groups=(1, 2)), "consumed 1 to 2 groups each, not 2"),
        (lambda compacted: replace(compacted, staleness=(0, 2_000)), "staleness 0 to 2000, allowed 1000"),
        (lambda compacted: replace(compacted, steps=8), "step 8 is missing"),
        (lambda compacted: replace(compacted, steps=10), "can no longer be taken back"),
    ],
)
async def test_each_damage_of_the_summary_is_named(compacted_run: Path, change, text: str) -> None:
    connection = open_for_writing(compacted_run / "journal.sqlite")
    compacted: CompactedSteps = change(read_compacted(connection))
    connection.execute("UPDATE meta SET value = ? WHERE key = 'folded'", (compacted.to_text(),))
    connection.close()
    assert any(text in violation for violation in verdict(compacted_run, PAIRS).violations)


async def test_size_is_level_however_long_the_run(tmp_path: Path) -> None:
    """After the first tenth, file and write-ahead log do not grow any more."""
    path = tmp_path / "journal.sqlite"
    wal = path.with_name(path.name + "-wal")
    opened = OpenJournal(path, keep_groups=200)
    await opened.write([attempt(1, 0)])
    sizes = []
    for number in range(400):
        groups = tuple(range(number * 8, number * 8 + 8))
        samples = [scored(group, start_version=number, padding=2_000) for group in groups]
        await opened.write(
            [*plan(groups[0], 8), *samples, step(number, groups), rec.Checkpointed(step=number, path="c")]
        )
        sizes.append(path.stat().st_size + wal.stat().st_size)
    opened.journal.close()
    assert max(sizes[200:]) <= 1.1 * max(sizes[:200])
    assert path.stat().st_size < 2**20  # 12 MiB went through; the 200 newest groups are 25 KiB
    rules = Rules(batch_groups=8, staleness=1, group_size=2)
    assert verdict(tmp_path, rules).violations == ()
    assert verdict(tmp_path, rules).planned == 3200


async def with_a_burst(path: Path) -> OpenJournal:
    """40 MB of samples of 100 steps."""
    opened = OpenJournal(path)
    burst = [scored(group, padding=200_000) for group in range(100)]
    await opened.write([attempt(1, 0), *plan(0, 100), *burst, *(step(number, (number,)) for number in range(100))])
    return opened


async def test_pages_go_back_to_the_disk(tmp_path: Path) -> None:
    """A burst of long samples does not hold the disk for ever."""
    opened = await with_a_burst(tmp_path / "journal.sqlite")
    for number in range(1, 101):
        await opened.write([rec.Checkpointed(step=number, path="c")])
    opened.journal.close()
    left = sizes(tmp_path)
    assert left["journal.sqlite"] < 20 * 2**20, left


async def test_pages_go_back_though_records_always_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under steady load: while a record is written the next one comes."""
    opened = await with_a_burst(tmp_path / "journal.sqlite")
    taken, queued = threading.Semaphore(0), threading.Semaphore(0)
    apply = writer.apply_record

    def apply_when_the_next_waits(connection: sqlite3.Connection, record: rec.Record) -> list[int]:
        taken.release()
        assert queued.acquire(timeout=DEADLINE_S)
        return apply(connection, record)

    monkeypatch.setattr(writer, "apply_record", apply_when_the_next_waits)
    for number in range(1, 101):
        opened.append(rec.Checkpointed(step=number, path="c"))
        if number > 1:
            queued.release()
        assert taken.acquire(timeout=DEADLINE_S)
    queued.release()
    opened.journal.close()
    assert not opened.faults
    left = sizes(tmp_path)
    assert left["journal.sqlite"] < 20 * 2**20, left


_WRITER = """
import asyncio, sys
from pathlib import Path
from streamrl_workers.scheduler import records as rec
from streamrl_workers.stream.digests import EMPTY_CHAIN, composition_digest, extend_chain
from streamrl_workers.stream.digests import seal, unseal
from support.journals import OpenJournal, scored

async def main(run_dir):
    checkpoint = run_dir / "checkpoints" / "step-00000000" / "meta.json"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    saved = unseal(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "chain": EMPTY_CHAIN}
    opened = OpenJournal(run_dir / "journal.sqlite", keep_groups=20)
    found = opened.recovered
    attempt, next_id, at, chain = found.attempt + 1, found.next_group_id, saved["step"], saved["chain"]
    await opened.write([rec.AttemptStarted(attempt=attempt, instance=str(attempt), step=at)])
    print("ready", flush=True)
    while True:
        records, ids = [], found.compositions.get(at)
        if ids is None:
            ids = (next_id, next_id + 2)
            records = [rec.Planned(group_id=next_id + k, prompt_index=0) for k in range(3)]
            records += [scored(group, start_version=at) for group in ids]
            records += [rec.Dropped(group_id=next_id + 1, reason="zero_variance")]
            next_id += 3
        await opened.write([*records, rec.StepTaken(attempt=attempt, step=at, group_ids=ids)])
        at, chain = at + 1, extend_chain(chain, digests=[composition_digest(ids)])
        if at % 3 == 0:
            meta = {"step": at, "attempt": attempt, "history": [], "folded_steps": at, "chain": chain}
            partial = checkpoint.with_name("partial")
            partial.write_text(seal(meta))
            partial.rename(checkpoint)
            await opened.write([rec.Checkpointed(step=at, path="c")])

asyncio.run(main(Path(sys.argv[1])))
"""


def test_killed_at_any_moment_of_compaction_it_checks_exactly(tmp_path: Path) -> None:
    """A real writer is killed again and again and goes on each time; live groups of a killed life are its last ones."""
    chance = random.Random(7)
    compacted = 0
    for _ in range(10):
        goal = compacted + chance.randint(1, 6)
        _write_until(lambda goal=goal: _compacted_steps(tmp_path) >= goal, run_dir=tmp_path)
        try:
            report = verdict(tmp_path, PAIRS)
        except UserError as error:  # within a commit: the next life goes on from the one before
            assert "cut off while it was written" in str(error)
            continue
        assert report.violations == ()
        assert report.planned == report.consumed + sum(report.dropped.values()) + report.live
        assert report.live <= 30  # at most one step of each life
        compacted = _compacted_steps(tmp_path)
    assert compact(tmp_path) >= compacted
    assert verdict(tmp_path, PAIRS).violations == ()


def _write_until(condition: Callable[[], bool], *, run_dir: Path) -> None:
    """A writer in a process of its own, killed when `condition` holds."""
    command = [sys.executable, "-c", _WRITER, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4]) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == "ready"
            wait_for(condition, what="compacted steps")
        finally:
            child.kill()


def _compacted_steps(run_dir: Path) -> int:
    with snapshot(run_dir) as connection:
        return read_compacted(connection).steps
