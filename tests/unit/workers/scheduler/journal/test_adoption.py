"""A run that begins with another one's checkpoint: what is taken over, what the new journal proves, what is refused."""

from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.keys import DIR_CHECKPOINTS, DIR_EXPORT, FILE_ADOPTED, FILE_JOURNAL
from streamrl.spec.storage import ResumeFrom
from streamrl_workers.scheduler.journal.adoption import adopt_from_volume, read_adopted
from streamrl_workers.scheduler.journal.check import Rules, check, read_facts
from streamrl_workers.scheduler.journal.writer import JournalWriter
from streamrl_workers.scheduler.records import Recovered
from streamrl_workers.stream.digests import History
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore

RULES = Rules(batch_groups=2, staleness=1, group_size=2)
CLAIM = ResumeFrom(claimName="kept")
NEW = "new-11111111"


def run_with(volume: Path, name: str, *, steps: int) -> History:
    """A run of so many steps, and its checkpoint."""
    history = History()
    for step in range(steps):
        history = history.with_step([2 * step, 2 * step + 1])
    store = CheckpointStore(volume / name / DIR_CHECKPOINTS, keep_last=2)
    meta = CheckpointMeta.of(history, attempt=3)
    store.write(meta, save=lambda folder: _fill(folder, name), sync=lambda: None)
    return history


def _fill(folder: Path, name: str) -> None:
    (folder / "weights").write_text(f"of {name}")


def begin(volume: Path, *, given: ResumeFrom = CLAIM, groups: int = 10, steps: int = 9) -> Recovered:
    """The scheduler of the new run starts; its run folder is its store here."""
    store = volume / NEW
    store.mkdir(exist_ok=True)
    adopt_from_volume(given, store=store, steps=steps)
    journal = JournalWriter(store / FILE_JOURNAL)
    recovered = journal.open(read_adopted(store), first_group=groups)
    journal.close()
    return recovered


def test_steps_go_on_behind_those_of_the_other_run(tmp_path: Path) -> None:
    run_with(tmp_path, "old-00000000", steps=4)
    run_with(tmp_path, "old-00000000", steps=5)
    recovered = begin(tmp_path)
    assert (recovered.step, recovered.checkpoint_step, recovered.next_group_id, recovered.attempt) == (5, 5, 10, 0)
    (kept,) = (tmp_path / NEW / DIR_CHECKPOINTS).iterdir()
    assert (kept.name, (kept / "weights").read_text()) == ("step-00000005", "of old-00000000")
    other = tmp_path / "old-00000000" / DIR_CHECKPOINTS / kept.name / "weights"
    assert other.samefile(kept / "weights"), "no byte is copied on one volume"
    assert CheckpointStore(kept.parent, keep_last=2).newest() is not None
    assert begin(tmp_path) == recovered, "a start that is made again changes nothing"


def test_the_check_proves_that_it_is_that_history(tmp_path: Path) -> None:
    run_with(tmp_path, "old-00000000", steps=5)
    begin(tmp_path)
    report = check(read_facts(tmp_path / NEW), rules=RULES)
    assert (report.violations, report.steps, report.planned) == ((), 5, 0)
    foreign = History().with_step([7, 8])
    for _ in range(4):
        foreign = foreign.with_step([9])
    store = CheckpointStore(tmp_path / NEW / DIR_CHECKPOINTS, keep_last=2)
    store.write(CheckpointMeta.of(foreign, attempt=3), save=lambda folder: _fill(folder, "x"), sync=lambda: None)
    (violation,) = check(read_facts(tmp_path / NEW), rules=RULES).violations
    assert "trained other groups in the 5 oldest steps than the journal says" in violation


def test_a_start_that_was_interrupted_is_made_again(tmp_path: Path) -> None:
    run_with(tmp_path, "old-00000000", steps=5)
    recovered = begin(tmp_path)
    (tmp_path / NEW / FILE_JOURNAL).unlink()
    (tmp_path / NEW / f"{FILE_JOURNAL}.lock").unlink()
    (tmp_path / NEW / FILE_ADOPTED).unlink()
    assert begin(tmp_path) == recovered


@pytest.mark.parametrize(
    ("runs", "given", "line"),
    [
        ((), CLAIM, "resumeFrom.run: must name a run on the volume, got '0 runs'; runs with checkpoints there: none"),
        (
            ("a-1", "b-2"),
            CLAIM,
            "resumeFrom.run: must name a run on the volume, got '2 runs'; runs with checkpoints there: a-1, b-2",
        ),
        (("a-1",), ResumeFrom(claimName="kept", run="b-2"), "got 'b-2'; runs with checkpoints there: a-1"),
    ],
    ids=["none", "several", "another"],
)
def test_a_run_that_is_not_clear_is_refused(
    tmp_path: Path, runs: tuple[str, ...], given: ResumeFrom, line: str
) -> None:
    for name in runs:
        run_with(tmp_path, name, steps=1)
    with pytest.raises(UserError) as refused:
        begin(tmp_path, given=given)
    assert line in str(refused.value)


def test_one_of_several_runs_is_named(tmp_path: Path) -> None:
    for name in ("a-1", "b-2"):
        run_with(tmp_path, name, steps=len(name))
    begin(tmp_path, given=ResumeFrom(claimName="kept", run="b-2"))
    adopted = read_adopted(tmp_path / NEW)
    assert adopted is not None
    assert adopted.run == "b-2"


@pytest.mark.parametrize(("steps", "has_ended"), [(4, False), (5, True)])
def test_a_run_without_a_step_left_to_train_is_refused(tmp_path: Path, steps: int, *, has_ended: bool) -> None:
    """Its weights alone can be taken once it has exported them."""
    run_with(tmp_path, "old-00000000", steps=5)
    when = "" if has_ended else ", once that run has ended"
    if has_ended:
        (tmp_path / "old-00000000" / DIR_EXPORT).mkdir()
    with pytest.raises(UserError) as refused:
        begin(tmp_path, steps=steps)
    assert str(refused.value) == (
        f"spec.pipeline.steps: must be above the 5 steps of the run that it goes on from, which count, got {steps}; "
        f"give more steps; or take its weights alone and count from 0{when}: "
        "storage.checkpoints.weightsFrom in place of resumeFrom"
    )
    assert not (tmp_path / NEW / DIR_CHECKPOINTS).exists()
    assert begin(tmp_path, steps=6).step == 5


def test_a_checkpoint_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    run_with(tmp_path, "old-00000000", steps=5)
    (tmp_path / "old-00000000" / DIR_CHECKPOINTS / "step-00000005" / "meta.json").write_text("{}")
    with pytest.raises(UserError, match="has no checkpoint that can be read"):
        begin(tmp_path)
