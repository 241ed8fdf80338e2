"""What the tracer costs by itself: processor microseconds for each sample of the README's job.

    python benchmarks/tracing_cost.py [--share-percent 10] [--times 4]

It is told of groups of the job's shape and sends what it makes of them to a collector. Whole runs (`observability_cost.py`) differ by some percent
between themselves; this resolves microseconds.
"""

import argparse
import tempfile
import time
from pathlib import Path

from observability_cost import collector
from run_folders import EXAMPLE

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJob
from streamrl_cli.jobfile import load_job
from streamrl_cli.reporting.comparison import mean
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.records import Planned, Record, Recovered, Scored, StepTaken
from streamrl_workers.scheduler.traces.tracer import Tracer, make_tracer
from streamrl_workers.tasks.values import Score, ScoreSample

_GROUPS = 4096
_TOKENS = 12
_MAIN_JOB_S = 1.9e-3
"""Processor seconds of all processes for a sample of the job under way (`observability_cost.py`)."""


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share-percent", type=int, default=10)
    parser.add_argument("--times", type=int, default=4)
    args = parser.parse_args()
    with collector() as endpoint:
        direct(endpoint, share_percent=args.share_percent, times=args.times)


def direct(endpoint: str, *, share_percent: int, times: int) -> None:
    """The tracer alone."""
    changes = [f"spec.tracing.endpoint={endpoint}", f"spec.tracing.sharePercent={share_percent}"]
    job = load_job(EXAMPLE, overrides=changes)
    costs = []
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(times):
            tracer = make_tracer(job, run_dir=Path(scratch), recovered=Recovered())
            assert tracer is not None
            costs.append(1e6 * _told_s(tracer, job) / (_GROUPS * job.spec.task.group_size))
    found = mean(costs)
    assert found is not None
    share = found.value / (1e4 * _MAIN_JOB_S)
    print(
        f"tracing of {share_percent} %: {found.value:.1f} ± {found.half_width or 0:.1f} us a sample, {share:.2f} % of the main job's"
    )


def _told_s(tracer: Tracer, job: RLJob) -> float:
    """Processor seconds, those of the sending thread too, of all groups; less what making the messages takes."""
    size, batch = job.spec.task.group_size, job.spec.pipeline.batch_groups
    used_s = []
    for told in (None, tracer):
        begun_s = time.process_time()
        for first in range(0, _GROUPS, batch):
            for group_id in range(first, first + batch):
                _group(told, group_id, size=size)
            _effect(
                told, _write(StepTaken(attempt=1, step=first // batch, group_ids=tuple(range(first, first + batch))))
            )
        if told is not None:
            told.close()
        used_s.append(time.process_time() - begun_s)
    return used_s[1] - used_s[0]


def _group(tracer: Tracer | None, group_id: int, *, size: int) -> None:
    _effect(tracer, _write(Planned(group_id=group_id, prompt_index=group_id)))
    command = pb.GeneratorCommand()
    leases = range(group_id * size, (group_id + 1) * size)
    for index, lease in enumerate(leases):
        command.issue.items.add(lease=lease, group_id=group_id, sample_index=index, prompt="1 + 2 = ")
    _effect(tracer, fx.ToGenerator(generator_id="generator-local-0", command=command))
    for reason in ("", "stop"):
        span = pb.VersionSpan(tokens=_TOKENS, step=1, attempt=1)
        items = [pb.Progress(lease=lease, spans=[span], finish_reason=reason, generate_s=0.1) for lease in leases]
        if tracer is not None:
            event = pb.GeneratorEvent(progress=pb.ProgressBatch(items=items))
            tracer.event("generator-local-0", event)
    for index in range(size):
        asked = ScoreSample(group_id=group_id, sample_index=index, split="train", prompt_index=0, completion="3")
        _effect(tracer, asked)
        if tracer is not None:
            tracer.result(Score(group_id=group_id, sample_index=index, reward=1.0, parts={}))
    _effect(tracer, _write(Scored(group_id=group_id, start_version=1, trajectories=(), size_bytes=0)))
    _effect(tracer, fx.DeliverGroup(group_id=group_id, step=1, trajectories=(), size_bytes=0))


def _write(record: Record) -> fx.Write:
    return fx.Write(sequence=1, record=record)


def _effect(tracer: Tracer | None, effect: object) -> None:
    if tracer is not None and type(effect) in tracer.effects:
        tracer.effects[type(effect)](effect)


if __name__ == "__main__":
    main()
