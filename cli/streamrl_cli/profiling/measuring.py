"""Runs the probes: a process for each pool and for each number of trainer processes, one after the other.

      JOB ─▶ run folder, initial model ─▶ MEASURING ══ probe decode   (one generator)
                                              ║   ══ probe train    (rank 0, beside the trainer's other ranks)
                                              ▼
                                           Profile

Loop: `_lines` consumes a probe's JSON lines; waits for each at most as long as the deadline lets a probe take, and longer
for the first (a model is loaded); unblocked by the line, the probe's end or the time limit, which ends the probe.

Invariant: no probe outlives this process (parent watch) or its part of the measurement. One stage at a time has the machine,
with the cores and GPUs that `streamrl run` would give it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl.errors import EXIT_DONE, UserError
from streamrl.spec import RLJob, parse_job
from streamrl.spec.generators import GeneratorPool
from streamrl_cli.profiling.record import (
    AnswerLengths,
    BatchPoint,
    PoolProfile,
    Profile,
    StepPoint,
    TrainerProfile,
    model_of,
)
from streamrl_cli.runner.folder import RunFolder, create_folder
from streamrl_cli.runner.lone_trainer import lone_environment, start_lone_trainer
from streamrl_cli.runner.plan import plan_run, usable_cpus, visible_gpus
from streamrl_cli.runner.prepare import prepare_model
from streamrl_cli.runner.workers import child, failed

_PROBE = "streamrl_cli.profiling.probe"
_START_S = 900.0
"""For a probe's first line beyond the deadline: a large model takes minutes to load."""
_GRACE_S = 60.0
"""For any later line beyond the deadline: one step that began within it must end."""
_LENGTHS_WITHOUT_ANSWERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringPlan:
    """What is measured, and for how long."""

    pools: tuple[str, ...]
    batches: tuple[int, ...]
    """Empty: powers of two up to the pool's slots, and all slots."""
    processes: tuple[int, ...]
    """Numbers of trainer processes; empty: the trainer is not measured."""
    windows: int
    repeats: int
    samples: int
    """Answers whose lengths are taken."""
    deadline_s: float
    """Of one point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where the measuring is done."""

    folder: Path
    """For run folders and logs."""
    base_dir: Path
    say: Callable[[str], None]
    prepared: Callable[[Mapping[str, Any]], None]
    """Progress of the model's preparation."""


async def measure(job: RLJob, *, wanted: MeasuringPlan, bench: Bench, known: Profile | None = None) -> Profile:
    """Measure what is wanted; `known` has the lengths of answers if only the trainer is measured.

    Raises `UserError` or `RunFailedError`: a probe refused the job, failed, or took too long.
    """
    run = create_folder(job, base_dir=bench.base_dir, parent=bench.folder, path=bench.folder / "job")
    model = await prepare_model(run, report=bench.prepared, say=bench.say) if job.spec.has_model else ""
    pools = [pool for pool in job.spec.generators if pool.name in wanted.pools]
    measured = [await _pool(pool, run=run, model=model, wanted=wanted, bench=bench) for pool in pools]
    profile = Profile(job=job.metadata.name, model=model_of(job), pools=tuple(measured))
    lengths = _lengths(job, profile if measured else known)
    points = [
        point
        for count in wanted.processes
        for point in await _trainer(job, count, lengths=lengths, model=model, wanted=wanted, bench=bench)
    ]
    trainer = TrainerProfile(engine=job.spec.trainer.engine.key, points=tuple(points)) if points else None
    return profile.model_copy(update={"trainer": trainer})


def batches_of(pool: GeneratorPool, *, given: Sequence[int] = ()) -> tuple[int, ...]:
    """Batch sizes to measure, rising. Raises `UserError` for one that the pool's engine has no slots for."""
    slots = int(pool.engine.value.slots)
    for batch in given:
        if not 1 <= batch <= slots:
            rule = f"must be from 1 to the {slots} slots of pool {pool.name}"
            raise UserError(field="--batches", rule=rule, got=batch)
    doubled = [2**power for power in range(slots.bit_length()) if 2**power <= slots]
    return tuple(sorted({*given} or {*doubled, slots}))


def step_sizes(batch_groups: int) -> tuple[int, ...]:
    """Groups of the steps to measure: a sixteenth, a quarter and the whole of the job's batch."""
    return tuple(sorted({max(1, batch_groups // part) for part in (16, 4, 1)}))


def _lengths(job: RLJob, known: Profile | None) -> tuple[int, ...]:
    """Lengths of the answers that training is timed with; where none were measured, evenly up to the longest allowed."""
    if known is not None and known.pools:
        return known.pools[0].lengths.tokens
    most = job.spec.task.sampling.max_tokens
    parts = range(1, _LENGTHS_WITHOUT_ANSWERS + 1)
    return tuple(max(1, most * part // _LENGTHS_WITHOUT_ANSWERS) for part in parts)


async def _pool(pool: GeneratorPool, *, run: RunFolder, model: str, wanted: MeasuringPlan, bench: Bench) -> PoolProfile:
    task = {
        "pool": pool.name,
        "batches": batches_of(pool, given=wanted.batches),
        "windows": wanted.windows,
        "samples": wanted.samples,
        "deadline_s": wanted.deadline_s,
    }
    plan = plan_run(run.job.spec, cpus=usable_cpus(), gpus=visible_gpus()).member(pool.name, ordinal=0)
    log = run.file(keys.DIR_LOGS, f"decode-{pool.name}.log")
    points: list[BatchPoint] = []
    answers: Mapping[str, Any] = {}
    env = lone_environment(plan, run=run, model=model)
    async with child(_PROBE, "decode", json.dumps(task), env=env, log=log) as process:
        async for what, fields in _lines(process, log=log, what=f"pool {pool.name}", deadline_s=wanted.deadline_s):
            if what == "answers":
                answers = fields
                bench.say(f"pool {pool.name}: {len(fields['tokens'])} answers, {fields['unfinished']} of them cut off")
            else:
                points.append(point := BatchPoint(**fields))
                bench.say(f"pool {pool.name}: batch {point.batch}, {point.milliseconds:.3g} ms a step")
    turns = max(1 if one.turns is None else one.turns.max_turns for one in run.job.spec.task.tasks)
    lengths = AnswerLengths(tokens=tuple(answers["tokens"]), unfinished=answers["unfinished"], turns=turns)
    return PoolProfile(
        name=pool.name,
        engine=pool.engine.key,
        devices=pool.engine.common.devices,
        latency=tuple(points),
        fill_milliseconds=answers["fill_milliseconds"],
        lengths=lengths,
    )


async def _trainer(
    job: RLJob, count: int, *, lengths: Sequence[int], model: str, wanted: MeasuringPlan, bench: Bench
) -> list[StepPoint]:
    """Steps with `count` processes."""
    run = create_folder(
        with_processes(job, count), base_dir=bench.base_dir, parent=bench.folder, path=bench.folder / f"train-{count}"
    )
    task = {
        "groups": step_sizes(job.spec.pipeline.batch_groups),
        "repeats": wanted.repeats,
        "lengths": list(lengths),
        "deadline_s": wanted.deadline_s,
    }
    log = run.file(keys.DIR_LOGS, "trainer-0.log")
    what = f"trainer with {count} {'process' if count == 1 else 'processes'}"
    points: list[StepPoint] = []
    async with start_lone_trainer(run, _PROBE, "train", json.dumps(task), model=model) as process:
        async for kind, fields in _lines(process, log=log, what=what, deadline_s=wanted.deadline_s):
            if kind == "step":
                points.append(point := StepPoint(processes=count, **fields))
                bench.say(f"{what}: {point.tokens} tokens, {point.seconds:.3g} s a step")
    return points


def with_processes(job: RLJob, count: int) -> RLJob:
    """The same job with so many trainer processes. Raises `UserErrors` where the specification does not allow them."""
    document = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["trainer"]["processesPerNode"] = count
    return parse_job(document)


async def _lines(
    process: asyncio.subprocess.Process, *, log: Path, what: str, deadline_s: float
) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
    """What a probe has measured, and its fields, until its good end."""
    assert process.stdout is not None
    limit_s = deadline_s + _START_S
    while True:
        try:
            async with asyncio.timeout(limit_s):
                line = await process.stdout.readline()
        except TimeoutError:
            rule = f"was overrun: {what} gave no number for {limit_s:g} s"
            raise UserError(field="--deadline-seconds", rule=rule, fix="raise it, or measure less at once") from None
        if not line:
            break
        kind, fields = json.loads(line)
        yield kind, fields
        limit_s = 2 * deadline_s + _GRACE_S  # a point warms up within one deadline and is measured within another
    code = await process.wait()
    if code != EXIT_DONE:
        raise failed(reason=f"{what} could not be measured (exit code {code})", exit_code=code, log=log)
