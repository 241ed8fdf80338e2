"""What the archive costs by itself: processor microseconds for each sample of the README's job.

    python benchmarks/archive_cost.py [--pairs 10] [--steps 40]

Groups, steps and checkpoints of the job's shape go through the real journal, with the archive and without, by turns, in one process.
Whole runs (`observability_cost.py`) differ by some percent between themselves; this resolves microseconds.
"""

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from run_folders import EXAMPLE

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.storage import Archive
from streamrl_cli.jobfile import load_job
from streamrl_cli.reporting.comparison import mean
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal.archiver import Archiver
from streamrl_workers.stream.packing import pack_float32, pack_int32

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.histories import attempt, plan
from support.journals import OpenJournal

_TOKENS = 12
"""Of a prompt, and of an answer of the job."""
_MAIN_JOB_S = 1.9e-3
"""Processor seconds of all processes for a sample of the job under way (`observability_cost.py`)."""


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    spec = load_job(EXAMPLE).spec
    size, batch = spec.task.group_size, spec.pipeline.batch_groups
    every = spec.storage.checkpoints.interval_steps
    steps = [_step(number, batch=batch, size=size, every=every) for number in range(args.steps)]
    costs = []
    for number in range(args.pairs):
        used = {which: asyncio.run(_used_s(steps, archived=which)) for which in _turn(number)}
        costs.append(1e6 * (used[True] - used[False]) / (args.steps * batch * size))
    found = mean(costs)
    assert found is not None, "there is a pair"
    share = found.value / (1e4 * _MAIN_JOB_S)
    print(f"archive: {found.value:.1f} ± {found.half_width or 0:.1f} us a sample, {share:.2f} % of the main job's")


def _turn(number: int) -> tuple[bool, bool]:
    """Who comes first finds the caches as the other left them."""
    return (True, False) if number % 2 else (False, True)


def _step(number: int, *, batch: int, size: int, every: int) -> list[rec.Record]:
    chance = random.Random(number)
    ids = range(number * batch, (number + 1) * batch)
    made: list[rec.Record] = list(plan(ids[0], batch))
    made += [_scored(group_id, step=number, size=size, chance=chance) for group_id in ids]
    advantages = pack_float32([chance.gauss(0, 1) for _ in range(batch * size)])
    made.append(rec.StepTaken(attempt=1, step=number, group_ids=tuple(ids), advantages=advantages))
    if (number + 1) % every == 0:
        made.append(rec.Checkpointed(step=number, path=f"step-{number:08d}"))
    return made


def _scored(group_id: int, *, step: int, size: int, chance: random.Random) -> rec.Scored:
    samples = tuple(
        pb.Sample(
            group_id=group_id,
            sample_index=index,
            prompt_tokens=pack_int32(chance.choices(range(20), k=_TOKENS)),
            tokens=pack_int32(chance.choices(range(20), k=_TOKENS)),
            logprobs=pack_float32([-chance.expovariate(1) for _ in range(_TOKENS)]),
            spans=[pb.VersionSpan(tokens=_TOKENS, step=step, attempt=1)],
            finish_reason="stop",
            reward=chance.random(),
            reward_parts={"answer": chance.random()},
            generator_id="generator-local-0",
            generate_s=chance.random(),
            ended_at=1.7e9 + chance.random(),
        ).SerializeToString()
        for index in range(size)
    )
    turns = [pb.SampleTexts(turns=["".join(chance.choices("0123456789+-=", k=_TOKENS))]) for _ in range(size)]
    texts = pb.GroupTexts(prompt="7 - 3 + 8 = ", samples=turns).SerializeToString()
    size_bytes = sum(map(len, samples))
    return rec.Scored(group_id=group_id, start_version=step, trajectories=samples, size_bytes=size_bytes, texts=texts)


async def _used_s(steps: Sequence[Sequence[rec.Record]], *, archived: bool) -> float:
    """Processor seconds of all threads."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        archiver = Archiver(folder, spec=Archive()) if archived else None
        gc.collect()
        begun_s = time.process_time()
        journal = OpenJournal(folder / "journal.sqlite", archiver=archiver)
        await journal.write([attempt(1, 0)])
        for records in steps:
            await journal.write([_without_texts(one) for one in records] if archiver is None else records)
        journal.journal.close()
        assert not journal.faults, journal.faults
        return time.process_time() - begun_s


def _without_texts(record: rec.Record) -> rec.Record:
    return replace(record, texts=b"") if isinstance(record, rec.Scored) else record


if __name__ == "__main__":
    main()
