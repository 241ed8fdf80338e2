"""`streamrl plan --optimize`: numbers of generators and trainer processes by a profile, and why these.

Owns the way from a job and a profile to the two stages of Alg. 1, and from its choice back to the job and to a text. Does not
own the choice (`streamrl_operator.allocation`), nor the profile (`streamrl profile`). Asks no cluster, changes no file.

A device is what one trainer process runs on. A generator takes as many as its engine (`tensorParallelSize`) or its pod's limits name
GPUs, whichever is more.
"""

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import inf
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.spec import RLJob, parse_bytes, parse_job
from streamrl.spec.base import BYTES_PATTERN
from streamrl.spec.generators import AutoScaling, GeneratorPool
from streamrl_cli.cluster.output import columns
from streamrl_cli.jobfile import apply_overrides
from streamrl_cli.profiling.record import PoolProfile, Profile, TrainerProfile, model_of, read_profile
from streamrl_operator.allocation.choice import (
    TOLERANCE,
    Allocation,
    Sizes,
    Stage,
    neighbours,
    one_datacenter,
    two_datacenters,
)
from streamrl_operator.allocation.stage_times import Replica, floor_seconds, generation_curve, training_curve
from streamrl_operator.planning.estimate import estimate

MOST_REPLICAS, MOST_PROCESSES = 1024, 64
"""What a job may ask for (`scaling`, `trainer.processesPerNode`)."""
_OPTIONS = ("profile", "pool", "devices", "generator_devices", "trainer_devices", "device_memory")
_MEASURE = "measure one: streamrl profile {file}"
_COSTED_SAMPLES = 1000
_NEAR_FLOOR = 1.1
"""Generation within this of the longest answer's own time is not made faster by more generators."""
_HEAD = (
    *("GENERATORS", "PROCESSES", "GENERATION", "TRAINING", "STEP", "COST AN HOUR"),
    *(f"COST OF {_COSTED_SAMPLES} SAMPLES", ""),
)
_TOO_MANY = "more devices than there are"
_PERCENT = 100
_COST_DIGITS = Decimal("0.000001")
"""Digits of a cost in a job file."""


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
    group.add_argument("--pool", help="the pool whose size is chosen, where there are several")
    group.add_argument("--device-memory", metavar="BYTES", help="of one device, such as 80Gi: fewest trainer processes")
    group.add_argument(
        "--tolerance-percent",
        type=float,
        default=TOLERANCE * _PERCENT,
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
        given = next((name for name in _OPTIONS if getattr(args, name) is not None), None)
        if given is not None:
            raise UserError(field=f"--{given.replace('_', '-')}", rule="is used with --optimize", fix="add --optimize")
        return
    if args.profile is None:
        fix = f"{_MEASURE.format(file=args.file)}, then give --profile profile.json"
        raise UserError(field="--optimize", rule="needs a profile of the job", fix=fix)
    two = (args.generator_devices is not None, args.trainer_devices is not None)
    if (args.devices is not None) == any(two) or any(two) != all(two):
        raise UserError(
            field="--optimize",
            rule="needs the devices that there are",
            fix="give --devices N, or --generator-devices M and --trainer-devices N where they are of two kinds",
        )
    for field, value in (("--tolerance-percent", args.tolerance_percent), ("--length-factor", args.length_factor)):
        if not 0 <= value < inf or (field == "--length-factor" and value == 0):
            raise UserError(
                field=field, rule="must be above 0" if "factor" in field else "must be at least 0", got=value
            )


def optimise(job: RLJob, args: argparse.Namespace, *, config: Mapping[str, Any] | None) -> tuple[RLJob, list[str]]:
    """The job with the chosen sizes, and why. `config` is the model's config.json where it is at hand.

    Raises `UserError` or `UserErrors`: profile, job and devices do not fit together.
    """
    if job.spec.trainer.nodes > 1:
        rule = "must be 1 with --optimize: training was measured on one machine"
        raise UserError(field="spec.trainer.nodes", rule=rule, got=job.spec.trainer.nodes)
    profile = read_profile(args.profile)
    if profile.model != model_of(job):
        rule = f"was measured with another model, for job {profile.job}"
        raise UserError(field="--profile", rule=rule, got=str(args.profile), fix=_MEASURE.format(file=args.file))
    stages = _stages(job, profile=profile, args=args, config=config)
    cost, tolerance = stages.fixed_cost_per_hour, args.tolerance_percent / _PERCENT
    both = (stages.generation, stages.training)
    if args.devices is not None:
        chosen = one_datacenter(*both, devices=args.devices, tolerance=tolerance, fixed_cost_per_hour=cost)
    else:
        devices = {"generator_devices": args.generator_devices, "trainer_devices": args.trainer_devices}
        chosen = two_datacenters(*both, **devices, tolerance=tolerance, fixed_cost_per_hour=cost)
    beside = neighbours(chosen, *both, fixed_cost_per_hour=cost)
    changes = _changes(job, stages=stages, chosen=chosen)
    flags = " ".join(f"--set {shlex.quote(f'{path}={json.dumps(value)}')}" for path, value in changes.items())
    told = [*_why(stages, chosen=chosen, beside=beside, args=args), *_extrapolated(stages, chosen, file=args.file)]
    return _changed(job, changes), [*told, f"to use it: streamrl submit {args.file} {flags}"]


def _pool(job: RLJob, args: argparse.Namespace) -> GeneratorPool:
    pools = {pool.name: pool for pool in job.spec.generators}
    if args.pool is None and len(pools) > 1:
        raise UserError(field="--pool", rule=f"must name one of {', '.join(pools)}", fix="the others keep their sizes")
    name = next(iter(pools)) if args.pool is None else args.pool
    if name not in pools:
        raise UserError(field="--pool", rule=f"must be one of {', '.join(pools)}", got=name)
    return pools[name]


def _stages(job: RLJob, *, profile: Profile, args: argparse.Namespace, config: Mapping[str, Any] | None) -> Stages:
    _check_mode(job)
    pool, file = _pool(job, args), args.file
    measured, trainer = _pool_profile(profile, pool, file=file), _trainer_profile(profile, job, file=file)
    replica_devices = max(_gpus(pool.pod.resources.limits), pool.engine.common.devices)
    factor = args.length_factor * measured.lengths.turns
    lengths = [tokens * factor for tokens in measured.lengths.tokens]
    samples = job.spec.pipeline.batch_groups * job.spec.task.group_size
    others = [other for other in job.spec.generators if other.name != pool.name]
    beside = [
        _replica(other, _pool_profile(profile, other, file=file))
        for other in others
        for _ in range(other.scaling.initial)
    ]
    sizes = _replica_sizes(pool, devices=replica_devices)
    space = args.generator_devices if args.devices is None else args.devices
    replica = _replica(pool, measured)
    most = max(1, min(sizes.most, space + replica_devices) // replica_devices)  # the neighbours of all devices, too
    generation = generation_curve(
        replica, lengths=lengths, samples=samples, most=most, devices=replica_devices, others=beside
    )
    tokens = samples * sum(lengths) / len(lengths)
    training = training_curve(((p.processes, p.tokens, p.seconds) for p in trainer.points), tokens=tokens)
    processes = job.spec.trainer.processes_per_node
    process_sizes = _process_sizes(job, memory=args.device_memory, config=config)
    replica_cost, trainer_cost = float(pool.cost_per_hour), float(job.spec.trainer.cost_per_hour)
    return Stages(
        pool=pool,
        samples=samples,
        generation=Stage(seconds=generation.at, sizes=sizes, device_cost_per_hour=replica_cost / replica_devices),
        training=Stage(seconds=training.at, sizes=process_sizes, device_cost_per_hour=trainer_cost / processes),
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


def _extrapolated(stages: Stages, chosen: Allocation, *, file: Path) -> list[str]:
    """Whether the trainer's time at the choice lies beyond what was measured, and how to mend that."""
    known, processes = stages.measured_processes, chosen.trainer_devices
    if known[0] <= processes <= known[-1]:
        return []
    wanted = ",".join(map(str, sorted({*known, processes})))
    told = f"numbers of processes that training was measured with: {', '.join(map(str, known))}; {processes} is extrapolated"
    return [f"  {told} (streamrl profile {file} --trainer --processes {wanted})"]


def _check_mode(job: RLJob) -> None:
    mode = job.spec.pipeline.mode
    if mode == "Colocated" or (mode == "Batch" and job.spec.pipeline.staleness == 0):
        raise UserError(
            field="--optimize",
            rule=f"balances stages that work at the same time; with mode {mode} they take turns",
            fix="set spec.pipeline.mode to StreamAsync or StreamSync",
        )


def _pool_profile(profile: Profile, pool: GeneratorPool, *, file: Path) -> PoolProfile:
    found = profile.pool(pool.name)
    if found is None or (found.engine, found.devices) != (pool.engine.key, pool.engine.common.devices):
        on = f" on {_count(pool.engine.common.devices, 'device')}" if pool.engine.vllm is not None else ""
        raise _not_measured(f"pool {pool.name} with engine {pool.engine.key}{on}", file=file)
    return found


def _trainer_profile(profile: Profile, job: RLJob, *, file: Path) -> TrainerProfile:
    key = job.spec.trainer.engine.key
    if profile.trainer is None or profile.trainer.engine != key:
        raise _not_measured(f"the trainer with engine {key}", file=file)
    return profile.trainer


def _not_measured(what: str, *, file: Path) -> UserError:
    return UserError(field="--profile", rule=f"has nothing of {what}", fix=_MEASURE.format(file=file))


def _replica(pool: GeneratorPool, measured: PoolProfile) -> Replica:
    return Replica(curve=measured.curve, slots=pool.engine.value.slots, fill_s=measured.fill_milliseconds / 1e3)


def _replica_sizes(pool: GeneratorPool, *, devices: int) -> Sizes:
    scaling = pool.scaling.value
    least, most = 1, MOST_REPLICAS
    if isinstance(scaling, AutoScaling):
        least, most = scaling.min_replicas, scaling.max_replicas
    return Sizes(unit=devices, least=least * devices, most=most * devices)


def _process_sizes(job: RLJob, *, memory: str | None, config: Mapping[str, Any] | None) -> Sizes:
    """Numbers of trainer processes that the job may have and whose devices hold their part."""
    most = 1 if job.spec.trainer.engine.simulated is not None else MOST_PROCESSES
    if memory is None:
        return Sizes(most=most)
    if not re.fullmatch(BYTES_PATTERN, memory):
        raise UserError(field="--device-memory", rule="must be a byte quantity such as 80Gi", got=memory)
    for processes in range(1, most + 1):
        changed = _changed(job, {"spec.trainer.processesPerNode": processes})
        need = estimate(changed, config=config).device_bytes_per_rank
        if need is None:
            rule = "cannot be used: the size of the model is not known (its config.json is not at hand)"
            raise UserError(field="--device-memory", rule=rule, fix="leave it out")
        if need <= parse_bytes(memory):
            return Sizes(least=processes, most=most)
    raise UserError(
        field="--device-memory", rule=f"must hold a part of the trainer; {most} processes do not fit either", got=memory
    )


def _changes(job: RLJob, *, stages: Stages, chosen: Allocation) -> dict[str, Any]:
    """Path of each field that the choice sets -> its value."""
    trainer, processes, pool = job.spec.trainer, chosen.trainer_devices, stages.pool
    number = [one.name for one in job.spec.generators].index(pool.name)
    key = pool.scaling.key
    leaf = "replicas" if key == "static" else "initialReplicas"
    changes: dict[str, Any] = {
        f"spec.generators[{number}].scaling.{key}.{leaf}": chosen.generator_devices // stages.replica_devices,
        "spec.trainer.processesPerNode": processes,
    }
    if processes != trainer.processes_per_node:
        cost = Decimal(trainer.cost_per_hour) / trainer.processes_per_node * processes
        changes["spec.trainer.costPerHour"] = str(cost.quantize(_COST_DIGITS).normalize() + Decimal("0.00"))
        if _gpus(trainer.pod.resources.limits):
            resources = trainer.pod.resources.model_dump(mode="json", by_alias=True, exclude_unset=True)
            changes["spec.trainer.pod.resources"] = {
                kind: {name: str(processes) if _is_gpu(name) else amount for name, amount in amounts.items()}
                for kind, amounts in resources.items()
            }
    return changes


def _changed(job: RLJob, changes: Mapping[str, Any]) -> RLJob:
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    apply_overrides(document, [f"{path}={json.dumps(value)}" for path, value in changes.items()])
    return parse_job(document)


def _gpus(amounts: Mapping[str, str]) -> int:
    """GPUs among the amounts of a container."""
    return sum(int(amount) for name, amount in amounts.items() if _is_gpu(name) and amount.isdigit())


def _is_gpu(name: str) -> bool:
    """Whether it is a device plug-in's resource, such as nvidia.com/gpu."""
    return "/" in name and name.rpartition("/")[2].startswith("gpu")


def _why(
    stages: Stages, *, chosen: Allocation, beside: Sequence[Allocation], args: argparse.Namespace
) -> Iterator[str]:
    """The choice beside its neighbours, and what bounds it."""
    replicas, processes = chosen.generator_devices // stages.replica_devices, chosen.trainer_devices
    yield f"WHY {_count(replicas, 'generator')} in pool {stages.pool.name} and {_count(processes, 'trainer process')}"
    rows = sorted([chosen, *beside], key=lambda one: (one.generator_devices, one.trainer_devices))
    remarks = ["<- chosen" if one == chosen else _TOO_MANY if not _fits(one, args) else "" for one in rows]
    table = [_row(one, stages, remark=remark) for one, remark in zip(rows, remarks, strict=True)]
    yield from (f"  {line}" for line in columns(_HEAD, table))
    yield f"  {_bound(chosen, floor_s=stages.floor_s)}"
    longer = args.tolerance_percent / _PERCENT
    yield f"  the cheapest step among those at most {longer:.0%} longer than the best; {_devices(chosen, args)}"
    yield from (f"  {note}" for note in stages.notes)


def _row(one: Allocation, stages: Stages, *, remark: str) -> tuple[str, ...]:
    times = (f"{seconds:.4g} s" for seconds in (one.generation_s, one.training_s, one.step_s))
    cost = one.cost_of(_COSTED_SAMPLES, samples_per_step=stages.samples)
    sizes = (str(one.generator_devices // stages.replica_devices), str(one.trainer_devices))
    return (*sizes, *times, f"{one.cost_per_hour:.2f}", f"{cost:.4g}", remark)


def _fits(one: Allocation, args: argparse.Namespace) -> bool:
    if args.devices is not None:
        return bool(one.generator_devices + one.trainer_devices <= args.devices)
    return bool(one.generator_devices <= args.generator_devices and one.trainer_devices <= args.trainer_devices)


def _bound(chosen: Allocation, *, floor_s: float) -> str:
    times = f"generation {chosen.generation_s:.4g} s, training {chosen.training_s:.4g} s"
    if chosen.bound == "training":
        return f"training sets the time of a step: {times}"
    if chosen.generation_s <= _NEAR_FLOOR * floor_s:
        longest = f"the longest answer alone takes {floor_s:.4g} s, so more generators would not help"
        return f"generation sets the time of a step: {times}; {longest}"
    if chosen.bound == "generation":
        return f"generation sets the time of a step: {times}"
    return f"the stages are balanced: {times}"


def _devices(chosen: Allocation, args: argparse.Namespace) -> str:
    generating, training = chosen.generator_devices, chosen.trainer_devices
    if args.devices is not None:
        return f"{generating + training} of {args.devices} devices"
    return f"{generating} of {args.generator_devices} devices generate, {training} of {args.trainer_devices} train"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
