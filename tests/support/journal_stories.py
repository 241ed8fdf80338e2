"""Runs of a few steps, told to the real journal and the real store of checkpoints, for tests of damage and repair."""

import json
import shutil
from pathlib import Path

from streamrl.spec import parse_job
from streamrl_workers.scheduler import records as rec
from streamrl_workers.stream.digests import History
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore
from support.histories import attempt, plan
from support.jobs import simulated_job
from support.journals import OpenJournal, scored

JOURNAL, LOG = "journal.sqlite", "journal.sqlite-wal"


class Story:
    """Writes a run of two groups a step, every third group dropped, the newest two checkpoints kept."""

    def __init__(self, run_dir: Path) -> None:
        job = simulated_job(batch_groups=2)
        job["spec"]["task"]["groupSize"] = 2
        document = parse_job(job).model_dump(mode="json", by_alias=True, exclude_none=True)
        (run_dir / "job.json").write_text(json.dumps(document))
        self.opened = OpenJournal(run_dir / JOURNAL, keep_groups=12)
        self.run_dir = run_dir
        self.history = History()
        self.planned = 0

    async def prepare(self, step: int) -> None:
        """Groups of one step, scored."""
        first = 3 * step
        await self.opened.write(plan(first, 3))
        dropped = rec.Dropped(group_id=first + 2, reason="zero_variance", mean_tokens=4.5)
        await self.opened.write(
            [*(scored(group, start_version=step, padding=300) for group in (first, first + 1)), dropped]
        )

    async def take(self, step: int, *, number: int = 1) -> None:
        """The step consumes them."""
        ids = (3 * step, 3 * step + 1)
        self.history = self.history.with_step(ids)
        taken = rec.StepTaken(
            attempt=number,
            step=step,
            group_ids=ids,
            metrics={"loss": 0.25 * step},
            advantages=bytes(16),
            version_hash=bytes(32),
            micro_steps=(1,),
        )
        await self.opened.write([taken])

    async def cover(self, step: int, *, number: int = 1) -> None:
        """A checkpoint of the newest weights, and the journal hears of it."""
        store = CheckpointStore(self.run_dir / "checkpoints", keep_last=2)
        path = store.write(CheckpointMeta.of(self.history, attempt=number), save=_save, sync=lambda: None)
        evaluated = rec.Evaluated(step=step, mean_reward=0.5, prompts=4, failed=0, mean_tokens=3.0)
        await self.opened.write([evaluated, rec.Checkpointed(step=store.oldest_step(), path=path.name)])

    async def steps(self, first: int, last: int, *, number: int = 1) -> None:
        """Steps with a checkpoint after every second one."""
        for step in range(first, last):
            await self.prepare(step)
            await self.take(step, number=number)
            if step % 2:
                await self.cover(step + 1, number=number)


def _save(directory: Path) -> None:
    (directory / "tensors").write_bytes(b"weights")


async def finished(run_dir: Path) -> Path:
    """A run that has ended: its journal is one file, old steps are folded."""
    run_dir = run_dir / "run"
    run_dir.mkdir()
    story = Story(run_dir)
    await story.opened.write([attempt(1, 0)])
    await story.steps(0, 14)
    await story.opened.write([rec.RunEnded(step=14)])
    story.opened.journal.close()
    assert not (run_dir / LOG).exists()
    return run_dir


async def killed(run_dir: Path) -> Path:
    """A run that was killed in the middle: a file and a write-ahead log, groups live, steps to be repeated."""
    story = await going_on(run_dir)
    copy = copy_of(story, to=run_dir / "copy")
    story.opened.journal.close()
    return copy


async def going_on(run_dir: Path) -> Story:
    """In its second life."""
    (run_dir / "life").mkdir()
    story = Story(run_dir / "life")
    await story.opened.write([attempt(1, 0)])
    await story.steps(0, 9)
    await story.prepare(9)
    story.opened.journal.close()  # all of it goes into the file
    story.opened = OpenJournal(story.run_dir / JOURNAL, keep_groups=12)
    await story.opened.write([attempt(2, 8)])
    story.history = History(digests=story.history.digests[:8])
    await story.take(8, number=2)
    await story.opened.write(plan(30, 2))
    await story.opened.write([scored(30, start_version=9)])
    return story


def copy_of(story: Story, *, to: Path) -> Path:
    """The folder as a kill leaves it."""
    return Path(shutil.copytree(story.run_dir, to, ignore=shutil.ignore_patterns("*-shm")))
