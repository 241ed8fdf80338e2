"""`streamrl profile JOB.yaml`: measures how fast the job's engines decode and train on this machine, and writes profile.json.

`streamrl plan --optimize --profile profile.json` chooses numbers of generators and trainer processes by it. Where the two
stages run on different hardware, measure each there: --generator on one machine, --trainer on the other, into the same
file. Not named `profile`: that is a module of the standard library.
"""

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.files import check_output
from streamrl.spec import RLJob
from streamrl_cli import console
from streamrl_cli.cluster.output import columns
from streamrl_cli.jobfile import add_overrides, base_dir_of, load_job
from streamrl_cli.profiling.measuring import Bench, MeasuringPlan, batches_of, measure
from streamrl_cli.profiling.record import Profile, model_of, read_profile, write_profile
from streamrl_cli.runner.workers import RunFailedError

DEFAULT_OUT = "profile.json"
MOST_PROCESSES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl profile`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="job file")
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), help=f"file to write (default: {DEFAULT_OUT})")
    add_overrides(parser, example="spec.pipeline.batchGroups=16")
    parser.add_argument("--generator", action="store_true", help="measure generators alone; the rest of --out is kept")
    parser.add_argument("--trainer", action="store_true", help="measure the trainer alone; the rest of --out is kept")
    parser.add_argument("--pool", help="measure this pool alone")
    parser.add_argument(
        "--batches", type=_numbers, default=(), metavar="N,N", help="batch sizes (default: 1, 2, 4, .. and all slots)"
    )
    parser.add_argument(
        "--processes",
        type=_numbers,
        default=(),
        metavar="N,N",
        help="numbers of trainer processes (default: the job's)",
    )
    parser.add_argument("--windows", type=int, default=5, help="measurements of each batch size (default: 5)")
    parser.add_argument("--repeats", type=int, default=3, help="measured training steps of each size (default: 3)")
    parser.add_argument("--samples", type=int, default=64, help="answers whose lengths are taken (default: 64)")
    parser.add_argument(
        "--deadline-seconds", type=float, default=60.0, help="longest time of one point, in seconds (default: 60)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, show, write."""
    job = load_job(args.file, overrides=args.set)
    wanted = _wanted(job, args)
    part = args.generator != args.trainer or args.pool is not None
    check_output(args.out, field="--out")
    known = _known(job, args.out) if part else None
    if not args.out.parent.is_dir():
        raise UserError(field="--out", rule="must lie in a directory that exists", got=str(args.out))
    folder = Path(tempfile.mkdtemp(prefix="streamrl-profile-"))
    bench = Bench(folder=folder, base_dir=base_dir_of(args.file), say=console.err, prepared=_prepared)
    names_a_log = False
    try:
        measured = asyncio.run(measure(job, wanted=wanted, bench=bench, known=known))
    except RunFailedError as failure:
        console.err(f"streamrl: {failure}")
        names_a_log = failure.exit_code != EXIT_USER_ERROR
        return failure.exit_code
    finally:
        if not names_a_log:
            shutil.rmtree(folder)
    profile = measured if known is None else known.with_part(measured)
    write_profile(profile, path=args.out)
    console.out(*lines(measured), "", f"written: {args.out}")
    return EXIT_DONE


def lines(profile: Profile) -> list[str]:
    """The profile for people."""
    found: list[str] = []
    for pool in profile.pools:
        lengths = pool.lengths
        found += [
            f"POOL {pool.name}, engine {pool.engine}" + (f" on {pool.devices} devices" if pool.devices > 1 else ""),
            f"  answers: {len(lengths.tokens)}, {lengths.mean_tokens:.4g} tokens on average, the longest {max(lengths.tokens)}"
            + (f", {lengths.unfinished} cut off by the deadline" if lengths.unfinished else ""),
            f"  admitting a sample: {pool.fill_milliseconds:.3g} ms",
            *_table(
                ("BATCH", "MS A STEP", "LOWEST", "HIGHEST", "STEPS", "TOKENS/S"),
                [
                    (
                        str(one.batch),
                        *_spread(one.milliseconds, one.lowest_milliseconds, one.highest_milliseconds),
                        *(str(one.steps), f"{1e3 * one.batch / one.milliseconds:,.0f}"),
                    )
                    for one in pool.latency
                ],
            ),
        ]
    if profile.trainer is not None:
        found += [
            f"TRAINER, engine {profile.trainer.engine}",
            *_table(
                ("PROCESSES", "SAMPLES", "TOKENS", "S A STEP", "LOWEST", "HIGHEST", "TOKENS/S"),
                [
                    (
                        *(str(one.processes), str(one.samples), str(one.tokens)),
                        *_spread(one.seconds, one.lowest_seconds, one.highest_seconds),
                        f"{one.tokens / one.seconds:,.0f}",
                    )
                    for one in profile.trainer.points
                ],
            ),
        ]
    return found


def _spread(*times: float) -> tuple[str, ...]:
    return tuple(f"{time:.4g}" for time in times)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in columns(head, rows)]


def _numbers(text: str) -> tuple[int, ...]:
    """`1,2,4`; argparse makes a ValueError one line."""
    return tuple(sorted({int(part) for part in text.split(",")}))


_numbers.__name__ = "numbers separated by commas"  # as argparse names the type in its line


def _wanted(job: RLJob, args: argparse.Namespace) -> MeasuringPlan:
    """What is to be measured; all that is wrong with it, before anything starts."""
    for flag in ("windows", "repeats", "samples"):
        if getattr(args, flag) < 1:
            raise UserError(field=f"--{flag}", rule="must be at least 1", got=getattr(args, flag))
    if not args.deadline_seconds > 0:
        raise UserError(field="--deadline-seconds", rule="must be above 0", got=args.deadline_seconds)
    both = args.generator == args.trainer
    pools = _pools(job, args) if both or args.generator else ()
    processes = (args.processes or (job.spec.trainer.processes_per_node,)) if both or args.trainer else ()
    for count in processes:
        if not 1 <= count <= MOST_PROCESSES:
            raise UserError(field="--processes", rule=f"must be from 1 to {MOST_PROCESSES}", got=count)
        engine = job.spec.trainer.engine
        if count > 1 and not engine.common.several_ranks:
            raise UserError(field="--processes", rule=f"must be 1 with trainer engine {engine.key}", got=count)
    return MeasuringPlan(
        pools=pools,
        batches=args.batches,
        processes=processes,
        windows=args.windows,
        repeats=args.repeats,
        samples=args.samples,
        deadline_s=args.deadline_seconds,
    )


def _pools(job: RLJob, args: argparse.Namespace) -> tuple[str, ...]:
    names = [pool.name for pool in job.spec.generators if pool != job.spec.frozen_pool]  # that one generates nothing
    if args.pool is not None and args.pool not in names:
        rule = f"must be one of {', '.join(names)}" if names else "must be absent: the job has no generators"
        raise UserError(field="--pool", rule=rule, got=args.pool)
    chosen = [pool for pool in job.spec.generators if pool.name in names and args.pool in (None, pool.name)]
    mistakes = []
    for pool in chosen:
        batches_of(pool, given=args.batches)
        if pool.engine.simulated is not None and pool.engine.simulated.time_scale == 0:
            field = f"spec.generators[{names.index(pool.name)}].engine.simulated.timeScale"
            mistakes.append(UserError(field=field, rule="must be above 0: such an engine takes no time", got=0))
    if mistakes:
        raise UserErrors(mistakes)
    return tuple(pool.name for pool in chosen)


def _known(job: RLJob, path: Path) -> Profile | None:
    """What the file holds already, of the same model."""
    if not path.exists():
        return None
    known = read_profile(path)
    if known.model != model_of(job):
        raise UserError(field="--out", rule="holds the profile of another model", got=str(path), fix="name a new file")
    return known


def _prepared(event: Mapping[str, Any]) -> None:
    if event["event"] == "ready":
        console.err(f"model: {event['parameters']:,} parameters")
