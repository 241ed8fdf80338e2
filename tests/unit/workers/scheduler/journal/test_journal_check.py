"""`streamrl journal check` and `show`: a good history passes, each kind of damage is found and named."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.spec import parse_job
from streamrl_cli.main import main
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.delivery import Why
from streamrl_workers.scheduler.journal.check import CheckpointFact, Facts, GroupFact, Rules, check
from streamrl_workers.scheduler.undelivered import delivery_of
from streamrl_workers.stream.digests import History, composition_digest, seal
from support.core_world import settings
from support.jobs import simulated_job
from support.journals import scored, write_journal
from support.replayed import replay
from support.runs import streamrl

RULES = Rules(batch_groups=2, staleness=1, group_size=2)
OTHER = History(digests=("0" * 32,))


def group(number: int, **changes) -> GroupFact:
    fact = GroupFact(group_id=number, start_version=0, drop_reason=None, settled=False, samples=2)
    return replace(fact, **changes)


def facts(*groups: GroupFact, **changes) -> Facts:
    """Two steps (the first one covered by a checkpoint), one dropped group, one live one."""
    base = Facts(
        groups={
            0: group(0, settled=True, samples=0),
            1: group(1, settled=True, samples=0),
            2: group(2),
            3: group(3),
            4: group(4, drop_reason="reward_failed", settled=True, samples=0),
            5: group(5, start_version=None, samples=0),
        },
        steps={0: (0, 1), 1: (2, 3)},
        covered_steps=1,
        ended=False,
        checkpoint=CheckpointFact(path="step-00000001", step=1, attempt=1, history=History().with_step([0, 1])),
    )
    return replace(base, groups={**base.groups, **{fact.group_id: fact for fact in groups}}, **changes)


def test_a_good_history_passes() -> None:
    report = check(facts(), rules=RULES)
    assert report.violations == ()
    assert (report.planned, report.consumed, report.dropped, report.live) == (6, 4, {"reward_failed": 1}, 1)


@pytest.mark.parametrize(
    ("spoilt", "text"),
    [
        (facts(steps={0: (0, 1), 1: (2, 0)}), "group 0 is in step 0 and in step 1"),
        (facts(steps={0: (0, 1), 1: (2, 9)}), "group 9 is in step 1 but was never planned"),
        (facts(steps={0: (0, 1), 1: (2,)}), "step 1 consumed 1 groups, not 2"),
        (facts(steps={0: (0, 1), 2: (2, 3)}), "step 1 is missing"),
        (facts(group(2, drop_reason="reward_failed")), r"group 2 is in step 1 and dropped \(reward_failed\)"),
        (facts(group(2, start_version=None)), "group 2 is in step 1 but was never scored"),
        (facts(group(2, start_version=-1)), "staleness 2, allowed 1"),
        (facts(group(2, start_version=2)), "staleness -1"),
        (facts(group(2, samples=1)), "group 2 has 1 stored samples, not 2"),
        (facts(group(2, damaged=True)), "group 2 has samples that are not what was written"),
        (facts(group(5, settled=True)), "group 5 is nowhere"),
        (facts(group(7)), "group 6 is missing"),
        (facts(ended=True), "group 5 is still live though the run has ended"),
        (facts(checkpoint=CheckpointFact(path="c", step=1, attempt=1, history=OTHER)), "other groups in step 0"),
        (facts(checkpoint=CheckpointFact(path="c", step=2, attempt=1, history=OTHER)), "names 1 steps, not 2"),
        (
            facts(steps={}, checkpoint=CheckpointFact(path="c", step=1, attempt=1, history=OTHER)),
            "journal does not know",
        ),
    ],
)
def test_each_damage_is_named(spoilt: Facts, text: str) -> None:
    violations = "\n".join(check(spoilt, rules=RULES).violations)
    assert re.search(text, violations), violations


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    """A run of batches of two groups, with a restart: step 1 of attempt 1 was taken back and taken again."""
    job = simulated_job(batch_groups=2)
    job["spec"]["task"]["groupSize"] = 2
    document = parse_job(job).model_dump(mode="json", by_alias=True, exclude_none=True)
    (tmp_path / "job.json").write_text(json.dumps(document))
    records: list[rec.Record] = [rec.Planned(group_id=i, prompt_index=10 + i) for i in range(6)]
    records += [rec.AttemptStarted(attempt=1, instance="a", step=0), *map(scored, range(4))]
    records += [
        rec.StepTaken(attempt=1, step=0, group_ids=(0, 1)),
        rec.Checkpointed(step=1, path="step-00000001"),
    ]
    records += [
        rec.StepTaken(attempt=1, step=1, group_ids=(2, 3)),
        rec.AttemptStarted(attempt=2, instance="b", step=1),
    ]
    records += [
        rec.StepTaken(attempt=2, step=1, group_ids=(2, 3)),
        rec.Dropped(group_id=4, reason="reward_failed"),
    ]
    await write_journal(tmp_path / "journal.sqlite", records)
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    meta = {"step": 1, "attempt": 1, "history": [composition_digest([0, 1])]}
    (checkpoint / "meta.json").write_text(seal(meta))
    return tmp_path


def journal(*args: object) -> subprocess.CompletedProcess[str]:
    return streamrl("journal", *map(str, args))


async def test_command_check(run_dir: Path) -> None:
    done = journal("check", run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "consumed   4 groups in 2 steps" in done.stdout
    assert "dropped    1 groups: reward_failed 1" in done.stdout
    assert "live       1 groups; the run has not ended" in done.stdout
    assert "step-00000001 of attempt 1" in done.stdout


async def test_command_check_finds_another_history(run_dir: Path) -> None:
    meta = run_dir / "checkpoints" / "step-00000001" / "meta.json"
    meta.write_text(seal({"step": 1, "attempt": 1, "history": [composition_digest([0, 2])]}))
    done = journal("check", run_dir)
    assert done.returncode == 1
    assert "VIOLATED" in done.stdout


async def test_command_check_does_not_vouch_for_a_damaged_checkpoint(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step-00000001" / "meta.json").write_text("{")
    done = journal("check", run_dir)
    assert done.returncode == 1
    assert "step-00000001: meta.json cannot be read" in done.stdout
    assert "a run that is resumed passes over it" in done.stdout


@pytest.mark.parametrize(
    ("number", "texts"),
    [
        (0, ["train prompt 10", "consumed by step 0", "a checkpoint covers them"]),
        (
            2,
            [
                "consumed by step 1, staleness 1",
                "attempt 1 step 1: taken back",
                "attempt 2 step 1: counts",
                "3 tokens, reward 1, stop",
            ],
        ),
        (4, ["train prompt 14\ndropped: reward_failed\n"]),
        (5, ["not scored yet", "live"]),
    ],
)
async def test_command_show(run_dir: Path, number: int, texts: list[str]) -> None:
    done = journal("show", run_dir, number)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in texts), done.stdout


PLANNED = [rec.Planned(group_id=number, prompt_index=number) for number in range(4)]
STARTED = [rec.AttemptStarted(attempt=1, instance="a", step=0)]


@pytest.mark.parametrize(
    ("pipeline", "later", "said"),
    [
        ({}, [scored(1)], "may be in step 0: a trainer that connects now gets it"),
        ({"mode": "Batch"}, [scored(1)], "not delivered in step 0: the batch is delivered as a whole, and some"),
        ({}, [*map(scored, (0, 2, 1))], "may be in step 0"),
        ({}, [*map(scored, (1, 2, 3)), rec.StepTaken(attempt=1, step=0, group_ids=(2, 3))], "may be in step 1"),
        (
            {"steps": 1},
            [*map(scored, (1, 2, 3)), rec.StepTaken(attempt=1, step=0, group_ids=(2, 3))],
            "not delivered in step 1: all steps are done",
        ),
        (
            {},
            [
                *map(scored, (1, 2)),
                rec.StepTaken(attempt=1, step=0, group_ids=(1, 2)),
                rec.AttemptStarted(attempt=2, instance="b", step=0),
            ],
            "step 0 is taken again, with this group",
        ),
        ({}, [scored(0)], None),
        ({}, [scored(1), rec.RunEnded(step=0)], None),
    ],
)
async def test_command_show_says_why_a_group_is_in_no_step(
    tmp_path: Path, pipeline: dict[str, str], later: list[rec.Record], said: str | None, capsys
) -> None:
    job = simulated_job(batch_groups=2)
    job["spec"]["task"]["groupSize"] = 2
    job["spec"]["pipeline"] |= pipeline
    (tmp_path / "job.json").write_text(json.dumps(job))
    await write_journal(tmp_path / "journal.sqlite", [*PLANNED, *STARTED, *later])
    assert main(["journal", "show", str(tmp_path), "1"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith(said or ("sample", "live")), line


def test_a_group_that_waits_for_a_lower_number_or_for_another_step() -> None:
    recovered, job = replay([*PLANNED, *STARTED, scored(1)]), settings(batch_groups=2, staleness=0, by_number=True)
    line = delivery_of(1, recovered=recovered, settings=job)
    assert line == f"not delivered in step 0: {Why.LOWER_NUMBER_FIRST.value}"
    full = replay([*PLANNED, *STARTED, *map(scored, range(3))])
    assert delivery_of(2, recovered=full, settings=job) == "dropped at the next start: too_stale"
    later = settings(batch_groups=2, staleness=1)
    assert delivery_of(2, recovered=full, settings=later) == f"not delivered in step 0: {Why.STEP_IS_FULL.value}"


async def test_mistakes_are_one_line(run_dir: Path) -> None:
    missing = journal("check", run_dir / "nowhere")
    unknown = journal("show", run_dir, 99)
    (run_dir / "journal.sqlite").unlink()
    gone = journal("check", run_dir)
    for done, text in (
        (missing, "is not a folder of a run"),
        (unknown, "it has groups 0 to 5"),
        (gone, "does not exist"),
    ):
        assert done.returncode == 2
        assert text in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
