"""`streamrl plan --optimize`: numbers of generators and trainer processes by a profile, and why these.

Owns the way from a job and a profile to the two stages of Alg. 1, and from its choice back to the job and to a text. Does not
own the choice (`streamrl_operator.allocation`), nor the profile (`streamrl profile`). Asks no cluster, changes no file.

A device is what one trainer process runs on. A generator takes as many as its engine (`tensorParallelSize`) or its pod's limits name
GPUs, whichever is more.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import inf
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.gpus import gpus_of_any_maker
from streamrl_cli.cluster.output import columns
from streamrl_cli.cluster.sizes.stages import (
    MEASURE,
    bound_line,
    changed_job,
    count_of,
    extrapolated,
    measured_of,
    pool_profile,
    process_sizes,
    replica_of,
    replica_sizes,
    replicas_path,
    to_use,
    trainer_changes,
    trainer_profile,
)
from streamrl_cli.profiling.record import PoolProfile, Profile
from streamrl_operator.allocation.choice import (
    TOLERANCE,
    Allocation,
    Stage,
    neighbours,
    one_datacenter,
    two_datacenters,
)
from streamrl_operator.allocation.stage_times import Replica, floor_seconds, generation_curve, training_curve

_OPTIONS = ("profile", "pool", "devices", "generator_devices", "trainer_devices", "device_memory")
_OF_CLUSTERS = ("pool_devices", "link", "version_bytes")
COSTED_SAMPLES = 1000
_HEAD = (
    *("GENERATORS", "PROCESSES", "GENERATION", "TRAINING", "STEP", "COST AN HOUR"),
    *(f"COST OF {COSTED_SAMPLES} SAMPLES", ""),
)
_TOO_MANY = "more devices than there are"
PERCENT = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `--optimize`."""
    group = parser.add_argument_group("choosing sizes")
    group.add_argument(
        "--optimize", action="store_true", help="choose the numbers of generators and trainer processes by a profile"
    )
    group.add_argument("--profile", type=Path, metavar="FILE", help="what `streamrl profile` has measured")
    group.add_argument("--devices", type=int, metavar="N", help="devices of one kind for both stages")
    group.add_argument("--generator-devices", type=int, metavar="M", help="devices that can generate, of another kind")
    group.add_argument("--trainer-devices", type=int, metavar="N", help="devices that can train")
    group.add_argument(
        "--pool-devices",
        action="append",
        default=[],
        metavar="POOL=N",
        help="devices that there are for this pool; given for each pool, all of them and their clusters are chosen",
    )
    group.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="CLUSTER=BYTES",
        help="what a cluster's link takes in a second, such as 50M (default: what spec.weights.http bounds)",
    )
    group.add_argument(
        "--version-bytes",
        metavar="BYTES",
        help="of a version on the way to a cluster (default: all weights of the model)",
    )
    group.add_argument("--pool", help="the pool whose size is chosen, where there are several")
    group.add_argument("--device-memory", metavar="BYTES", help="of one device, such as 80Gi: fewest trainer processes")
    group.add_argument(
        "--tolerance-percent",
        type=float,
        default=TOLERANCE * PERCENT,
        help="a step may take so much longer if that costs less (default: %(default)g)",
    )
    group.add_argument(
        "--length-factor", type=float, default=1.0, help="plan for answers so many times as long (default: 1)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What Alg. 1 chooses for."""

    pool: GeneratorPool
    """Whose size is chosen."""
    samples: int
    """Of a step."""
    generation: Stage
    training: Stage
    replica_devices: int
    fixed_cost_per_hour: float
    floor_s: float
    """Of generation, with any number of replicas."""
    notes: Sequence[str]
    """What to know about the times."""
    measured_processes: tuple[int, ...]


def check(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    if not args.optimize:
        given = next((name for name in (*_OPTIONS, *_OF_CLUSTERS) if getattr(args, name) not in (None, [])), None)
        if given is not None:
            raise UserError(field=f"--{given.replace('_', '-')}", rule="is used with --optimize", fix="add --optimize")
        return
    if args.profile is None:
        fix = f"{MEASURE.format(file=args.file)}, then give --profile profile.json"
        raise UserError(field="--optimize", rule="needs a profile of the job", fix=fix)
    _check_devices(args)
    for field, value in (("--tolerance-percent", args.tolerance_percent), ("--length-factor", args.length_factor)):
        if not 0 <= value < inf or (field == "--length-factor" and value == 0):
            raise UserError(
                field=field, rule="must be above 0" if "factor" in field else "must be at least 0", got=value
            )


def _check_devices(args: argparse.Namespace) -> None:
    if args.pool_devices:
        given = [
            f"--{name.replace('_', '-')}" for name in ("devices", "generator_devices", "pool") if getattr(args, name)
        ]
        if given or args.trainer_devices is None:
            rule = f"is not used with {given[0]}" if given else "needs the devices that can train"
            raise UserError(field="--pool-devices", rule=rule, fix="give --trainer-devices N")
        return
    alone = next((name for name in _OF_CLUSTERS if getattr(args, name)), None)
    if alone is not None:
        rule = "is used with --pool-devices, for pools in several clusters"
        raise UserError(field=f"--{alone.replace('_', '-')}", rule=rule, fix="add --pool-devices POOL=N for each pool")
    two = (args.generator_devices is not None, args.trainer_devices is not None)
    if (args.devices is not None) == any(two) or any(two) != all(two):
        raise UserError(
            field="--optimize",
            rule="needs the devices that there are",
            fix="give --devices N, or --generator-devices M and --trainer-devices N where they are of two kinds",
        )


def optimise(job: RLJob, args: argparse.Namespace, *, config: Mapping[str, Any] | None) -> tuple[RLJob, list[str]]:
    """The job with the chosen sizes, and why. `config` is the model's config.json where it is at hand.

    Raises `UserError` or `UserErrors`: profile, job and devices do not fit together.
    """
    profile = measured_of(job, args)
    stages = _stages(job, profile=profile, args=args, config=config)
    cost, tolerance = stages.fixed_cost_per_hour, args.tolerance_percent / PERCENT
    both = (stages.generation, stages.training)
    if args.devices is not None:
        chosen = one_datacenter(*both, devices=args.devices, tolerance=tolerance, fixed_cost_per_hour=cost)
    else:
        devices = {"generator_devices": args.generator_devices, "trainer_devices": args.trainer_devices}
        chosen = two_datacenters(*both, **devices, tolerance=tolerance, fixed_cost_per_hour=cost)
    beside = neighbours(chosen, *both, fixed_cost_per_hour=cost)
    changes = _changes(job, stages=stages, chosen=chosen)
    told = _why(stages, chosen=chosen, beside=beside, args=args)
    beyond = extrapolated(stages.measured_processes, chosen.trainer_devices, file=args.file)
    return changed_job(job, changes), [*told, *beyond, f"to use it: {to_use(changes, file=args.file)}"]


def _pool(job: RLJob, args: argparse.Namespace) -> GeneratorPool:
    pools = {pool.name: pool for pool in job.spec.generators}
    if args.pool is None and len(pools) > 1:
        raise UserError(field="--pool", rule=f"must name one of {', '.join(pools)}", fix="the others keep their sizes")
    name = next(iter(pools)) if args.pool is None else args.pool
    if name not in pools:
        raise UserError(field="--pool", rule=f"must be one of {', '.join(pools)}", got=name)
    return pools[name]


def _stages(job: RLJob, *, profile: Profile, args: argparse.Namespace, config: Mapping[str, Any] | None) -> Stages:
    pool, file = _pool(job, args), args.file
    measured, trainer = pool_profile(profile, pool, file=file), trainer_profile(profile, job, file=file)
    replica_devices = max(gpus_of_any_maker(pool.pod.resources.limits), pool.engine.common.devices)
    factor = args.length_factor * measured.lengths.turns
    lengths = [tokens * factor for tokens in measured.lengths.tokens]
    samples = job.spec.pipeline.batch_groups * job.spec.task.group_size
    others = [other for other in job.spec.generators if other.name != pool.name]
    beside = [
        replica_of(other, pool_profile(profile, other, file=file))
        for other in others
        for _ in range(other.scaling.initial)
    ]
    sizes = replica_sizes(pool, devices=replica_devices)
    space = args.generator_devices if args.devices is None else args.devices
    replica = replica_of(pool, measured)
    most = max(1, min(sizes.most, space + replica_devices) // replica_devices)  # the neighbours of all devices, too
    generation = generation_curve(
        replica, lengths=lengths, samples=samples, most=most, devices=replica_devices, others=beside
    )
    tokens = samples * sum(lengths) / len(lengths)
    training = training_curve(((p.processes, p.tokens, p.seconds) for p in trainer.points), tokens=tokens)
    processes = job.spec.trainer.processes_per_node
    trainer_sizes = process_sizes(job, memory=args.device_memory, config=config)
    replica_cost, trainer_cost = float(pool.cost_per_hour), float(job.spec.trainer.cost_per_hour)
    return Stages(
        pool=pool,
        samples=samples,
        generation=Stage(seconds=generation.at, sizes=sizes, device_cost_per_hour=replica_cost / replica_devices),
        training=Stage(seconds=training.at, sizes=trainer_sizes, device_cost_per_hour=trainer_cost / processes),
        replica_devices=replica_devices,
        fixed_cost_per_hour=float(sum(Decimal(other.cost_per_hour) * other.scaling.initial for other in others)),
        floor_s=floor_seconds([replica, *beside], lengths=lengths),
        notes=_notes(replica, measured=measured, lengths=lengths, samples=samples),
        measured_processes=training.sizes,
    )


def _notes(replica: Replica, *, measured: PoolProfile, lengths: Sequence[float], samples: int) -> list[str]:
    mean = sum(lengths) / len(lengths)
    found = [f"a step: {samples} samples of {mean:.4g} tokens on average, the longest {max(lengths):.4g}"]
    if measured.lengths.unfinished:
        cut = f"{measured.lengths.unfinished} of {len(lengths)} measured answers were cut off"
        found.append(f"{cut}: real ones are longer, and generation takes longer than this")
    if replica.slots > replica.curve.batches[-1]:
        found.append(f"decoding was measured up to {replica.curve.batches[-1]} of {replica.slots} slots")
    return found


def _changes(job: RLJob, *, stages: Stages, chosen: Allocation) -> dict[str, Any]:
    """Path of each field that the choice sets -> its value."""
    pool, replicas = stages.pool, chosen.generator_devices // stages.replica_devices
    number = [one.name for one in job.spec.generators].index(pool.name)
    sized = {replicas_path(pool, number=number): replicas}
    return sized | trainer_changes(job, chosen.trainer_devices)


def _why(
    stages: Stages, *, chosen: Allocation, beside: Sequence[Allocation], args: argparse.Namespace
) -> Iterator[str]:
    """The choice beside its neighbours, and what bounds it."""
    replicas, processes = chosen.generator_devices // stages.replica_devices, chosen.trainer_devices
    yield f"WHY {count_of(replicas, 'generator')} in pool {stages.pool.name} and {count_of(processes, 'trainer process')}"
    rows = sorted([chosen, *beside], key=lambda one: (one.generator_devices, one.trainer_devices))
    remarks = ["<- chosen" if one == chosen else _TOO_MANY if not _fits(one, args) else "" for one in rows]
    table = [_row(one, stages, remark=remark) for one, remark in zip(rows, remarks, strict=True)]
    yield from (f"  {line}" for line in columns(_HEAD, table))
    yield f"  {bound_line(chosen, floor_s=stages.floor_s)}"
    longer = args.tolerance_percent / PERCENT
    yield f"  the cheapest step among those at most {longer:.0%} longer than the best; {_devices(chosen, args)}"
    yield from (f"  {note}" for note in stages.notes)


def _row(one: Allocation, stages: Stages, *, remark: str) -> tuple[str, ...]:
    times = (f"{seconds:.4g} s" for seconds in (one.generation_s, one.training_s, one.step_s))
    cost = one.cost_of(COSTED_SAMPLES, samples_per_step=stages.samples)
    sizes = (str(one.generator_devices // stages.replica_devices), str(one.trainer_devices))
    return (*sizes, *times, f"{one.cost_per_hour:.2f}", f"{cost:.4g}", remark)


def _fits(one: Allocation, args: argparse.Namespace) -> bool:
    if args.devices is not None:
        return bool(one.generator_devices + one.trainer_devices <= args.devices)
    return bool(one.generator_devices <= args.generator_devices and one.trainer_devices <= args.trainer_devices)


def _devices(chosen: Allocation, args: argparse.Namespace) -> str:
    generating, training = chosen.generator_devices, chosen.trainer_devices
    if args.devices is not None:
        return f"{generating + training} of {args.devices} devices"
    return f"{generating} of {args.generator_devices} devices generate, {training} of {args.trainer_devices} train"
