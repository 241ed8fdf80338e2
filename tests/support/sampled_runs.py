"""Run folders with a journal and an archive, written by the scheduler's own journal."""

from pathlib import Path

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.storage import Archive
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal.archiver import Archiver
from streamrl_workers.stream.packing import pack_float32, pack_int32
from support.histories import attempt, plan, step
from support.hostile import write_json
from support.jobs import simulated_job
from support.journals import OpenJournal

REWARDS = ((0.25, 1.0), (0.0, None))
"""Of the samples of the two groups that each step takes."""
TOKENS = ((3, 9), (12, 4))


def stored(group_id: int, *, text: str) -> dict[str, tuple[bytes, ...] | bytes]:
    """Two samples of a group as a record has them."""
    rewards, tokens = REWARDS[group_id % 2], TOKENS[group_id % 2]
    samples = [
        pb.Sample(
            group_id=group_id,
            sample_index=index,
            prompt_tokens=pack_int32([1, 2]),
            tokens=pack_int32(range(count)),
            logprobs=pack_float32([-0.5] * count),
            spans=[pb.VersionSpan(tokens=count, step=group_id // 2, attempt=1)],
            finish_reason="stop",
            reward=reward,
            reward_parts={} if reward is None else {text: reward, "style": 0.0},
            reward_error=text if reward is None else "",
            generator_id=text,
            generate_s=0.5,
        )
        for index, (reward, count) in enumerate(zip(rewards, tokens, strict=True))
    ]
    written = [pb.SampleTexts(turns=[f"{text} {index}", "more"], observations=["wrong"]) for index in range(2)]
    reference = {"answer": "42", "metadata": '{"level": 1}'}
    texts = pb.GroupTexts(prompt=f"{text}?", samples=written, **reference).SerializeToString()
    return {"trajectories": tuple(sample.SerializeToString() for sample in samples), "texts": texts}


async def write_run(run_dir: Path, *, text: str = "text", share_percent: int = 100) -> Path:
    """A run of three steps of two groups; two steps are covered by a checkpoint, and one group was dropped."""
    _make_folder(run_dir, share_percent=share_percent)
    archiver = Archiver(run_dir, spec=Archive(sharePercent=share_percent)) if share_percent else None
    journal = OpenJournal(run_dir / "journal.sqlite", archiver=archiver)
    await journal.write([attempt(1, 0), *plan(0, 8)])
    for at in range(3):
        for group_id in (2 * at, 2 * at + 1):
            await journal.write(
                [rec.Scored(group_id=group_id, start_version=at, size_bytes=9, **stored(group_id, text=text))]
            )
        taken = step(at, (2 * at, 2 * at + 1))
        advantages = pack_float32([-1.0, 1.0, 0.5, float("nan")])
        await journal.write([rec.StepTaken(attempt=1, step=at, group_ids=taken.group_ids, advantages=advantages)])
    await journal.write([rec.Dropped(group_id=6, reason="zero_variance", **stored(6, text=text))])
    await journal.write([rec.Checkpointed(step=2, path="step-2")])
    journal.journal.close()
    return run_dir


def _make_folder(run_dir: Path, *, share_percent: int) -> None:
    run_dir.mkdir(exist_ok=True)
    job = simulated_job()
    job["spec"]["storage"]["archive"] = {"sharePercent": share_percent}
    write_json(run_dir / "job.json", job)
