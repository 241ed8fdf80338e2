"""Run folders whose steps a real engine has taken, with groups in any order and micro-steps at any moment."""

import random
from collections.abc import Callable
from pathlib import Path

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.storage import Archive
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal.archiver import Archiver
from streamrl_workers.trainer.engines.engine import TrainEngine
from streamrl_workers.weights.hashing import tensors_hash
from support.histories import attempt, plan
from support.hostile import write_json
from support.jobs import simulated_job
from support.journals import OpenJournal
from support.trainer_groups import make_group

STEPS = 3
BATCH = 4
Change = Callable[[pb.Sample], None]


async def write_history(
    run_dir: Path,
    engine: TrainEngine,
    *,
    seed: int = 0,
    change: Change = lambda sample: None,
    share_percent: int = 100,
    ends: bool = True,
) -> list[bytes]:
    """Hashes of all versions. `seed`: of the order in which groups come, and when micro-steps begin; `change`: of any sample, before it is trained.

    `ends`: the run has ended, and has recorded its last version.
    """
    rng = random.Random(seed)
    _make_folder(run_dir, share_percent=share_percent)
    archiver = Archiver(run_dir, spec=Archive(sharePercent=share_percent)) if share_percent else None
    opened = OpenJournal(run_dir / "journal.sqlite", archiver=archiver)
    await opened.write([attempt(1, 0), *plan(0, STEPS * BATCH)])
    hashes = [tensors_hash(engine.tensors() | engine.probe())]
    for step in range(STEPS):
        groups = [_group(step * BATCH + place, step=step, change=change) for place in range(BATCH)]
        await opened.write([_scored(group, step=step) for group in groups])
        rng.shuffle(groups)
        micro_steps = _taken(engine, groups, step=step, rng=rng)
        taken = rec.StepTaken(
            attempt=1,
            step=step,
            group_ids=tuple(group.group_id for group in groups),
            version_hash=hashes[-1],
            micro_steps=tuple(micro_steps),
            cuts=engine.cuts().SerializeToString(),
        )
        await opened.write([taken])
        hashes.append(tensors_hash(engine.tensors() | engine.probe()))
    await opened.write([rec.Checkpointed(step=STEPS - 1, path="step-2")])
    if ends:
        await opened.write([rec.RunEnded(step=STEPS, version_hash=hashes[-1])])
    opened.journal.close()
    return hashes


def _make_folder(run_dir: Path, *, share_percent: int) -> None:
    run_dir.mkdir()
    job = simulated_job(steps=STEPS, batch_groups=BATCH)
    job["spec"]["storage"]["archive"] = {"sharePercent": share_percent}
    write_json(run_dir / "job.json", job)


def _group(group_id: int, *, step: int, change: Change) -> pb.Group:
    group = make_group(group_id, step=step)
    for sample in group.samples:
        change(sample)
    return group


def _scored(group: pb.Group, *, step: int) -> rec.Scored:
    blobs = tuple(sample.SerializeToString() for sample in group.samples)
    texts = pb.GroupTexts(prompt="prompt").SerializeToString()
    return rec.Scored(group_id=group.group_id, start_version=step, trajectories=blobs, size_bytes=9, texts=texts)


def _taken(engine: TrainEngine, groups: list[pb.Group], *, step: int, rng: random.Random) -> list[int]:
    """As the step loop takes a step, with the scheduler and its moments left out."""
    micro_steps = []
    engine.begin_step(step, attempt=1)
    for count, group in enumerate(groups, start=1):
        engine.add([group])
        if count < len(groups) and rng.random() < 0.7 and engine.advance(idle=True):
            micro_steps.append(count)
    engine.finish_step()
    return micro_steps
