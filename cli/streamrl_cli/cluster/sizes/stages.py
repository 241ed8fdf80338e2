"""What `streamrl plan --optimize` reads from a job and its profile, and writes into the job: the parts of a choice that know no cluster.

A device is what one trainer process runs on. A generator takes as many as its engine (`tensorParallelSize`) or its pod's limits name
GPUs, whichever is more.
"""

import argparse
import json
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.spec import RLJob, parse_bytes, parse_job
from streamrl.spec.base import BYTES_PATTERN
from streamrl.spec.generators import AutoScaling, GeneratorPool
from streamrl.spec.gpus import gpus_of_any_maker, names_gpus
from streamrl_cli.jobfile import apply_overrides
from streamrl_cli.profiling.record import PoolProfile, Profile, TrainerProfile, model_of, read_profile
from streamrl_operator.allocation.choice import Allocation, Sizes
from streamrl_operator.allocation.stage_times import Replica
from streamrl_operator.planning.estimate import estimate

MOST_REPLICAS, MOST_PROCESSES = 1024, 64
"""What a job may ask for (`scaling`, `trainer.processesPerNode`)."""
MEASURE = "measure one: streamrl profile {file}"
_NEAR_FLOOR = 1.1
"""Generation within this of the longest answer's own time is not made faster by more generators."""
_COST_DIGITS = Decimal("0.000001")
"""Digits of a cost in a job file."""


def measured_of(job: RLJob, args: argparse.Namespace) -> Profile:
    """The profile of `--profile`, if it is one of this job and the job can be planned by it."""
    if not job.spec.generators:
        raise UserError(field="--optimize", rule="balances generators with the trainer; the job has no generators")
    if job.spec.frozen_pool is not None:
        rule = "must be absent with --optimize: what its pool takes was not measured"
        raise UserError(field="spec.trainer.reference", rule=rule, got=job.spec.frozen_pool.name)
    if job.spec.trainer.nodes > 1:
        rule = "must be 1 with --optimize: training was measured on one machine"
        raise UserError(field="spec.trainer.nodes", rule=rule, got=job.spec.trainer.nodes)
    profile = read_profile(args.profile)
    if profile.model != model_of(job):
        rule = f"was measured with another model, for job {profile.job}"
        raise UserError(field="--profile", rule=rule, got=str(args.profile), fix=MEASURE.format(file=args.file))
    _check_mode(job)
    return profile


def _check_mode(job: RLJob) -> None:
    """Refuse modes, and pools, in which the stages take turns."""
    mode, lent = job.spec.pipeline.mode, sorted(job.spec.lent_pools)
    if mode == "Colocated" or (mode == "Batch" and job.spec.pipeline.staleness == 0):
        raise UserError(
            field="--optimize",
            rule=f"balances stages that work at the same time; with mode {mode} they take turns",
            fix="set spec.pipeline.mode to StreamAsync or StreamSync",
        )
    if lent:
        rule = f"balances stages that work at the same time; on the trainer's devices is {', '.join(lent)}"
        raise UserError(field="--optimize", rule=rule, fix="leave out generators[].devices")


def pool_profile(profile: Profile, pool: GeneratorPool, *, file: Path) -> PoolProfile:
    """What was measured of a pool, with the engine and the devices that it has now."""
    found = profile.pool(pool.name)
    if found is None or (found.engine, found.devices) != (pool.engine.key, pool.engine.common.devices):
        on = f" on {count_of(pool.engine.common.devices, 'device')}" if pool.engine.common.devices_field else ""
        raise _not_measured(f"pool {pool.name} with engine {pool.engine.key}{on}", file=file)
    return found


def trainer_profile(profile: Profile, job: RLJob, *, file: Path) -> TrainerProfile:
    """What was measured of the trainer, with the engine that it has now."""
    key = job.spec.trainer.engine.key
    if profile.trainer is None or profile.trainer.engine != key:
        raise _not_measured(f"the trainer with engine {key}", file=file)
    return profile.trainer


def _not_measured(what: str, *, file: Path) -> UserError:
    return UserError(field="--profile", rule=f"has nothing of {what}", fix=MEASURE.format(file=file))


def replica_of(pool: GeneratorPool, measured: PoolProfile) -> Replica:
    """One generator of a pool."""
    return Replica(curve=measured.curve, slots=pool.engine.value.slots, fill_s=measured.fill_milliseconds / 1e3)


def replica_sizes(pool: GeneratorPool, *, devices: int) -> Sizes:
    """Numbers of devices that a pool may have, a replica taking so many."""
    scaling = pool.scaling.value
    least, most = 1, MOST_REPLICAS
    if isinstance(scaling, AutoScaling):
        least, most = scaling.min_replicas, scaling.max_replicas
    return Sizes(unit=devices, least=least * devices, most=most * devices)


def process_sizes(job: RLJob, *, memory: str | None, config: Mapping[str, Any] | None) -> Sizes:
    """Numbers of trainer processes that the job may have and whose devices hold their part."""
    most = MOST_PROCESSES if job.spec.trainer.engine.common.several_ranks else 1
    parallelism = job.spec.trainer.parallelism
    unit = parallelism.replicate * math.lcm(parallelism.copies, parallelism.expert)
    if memory is None:
        return Sizes(unit=unit, least=unit, most=most)
    if not re.fullmatch(BYTES_PATTERN, memory):
        raise UserError(field="--device-memory", rule="must be a byte quantity such as 80Gi", got=memory)
    for processes in range(unit, most + 1, unit):
        changed = changed_job(job, {"spec.trainer.processesPerNode": processes})
        need = estimate(changed, config=config).device_bytes_per_rank
        if need is None:
            rule = "cannot be used: the size of the model is not known (its config.json is not at hand)"
            raise UserError(field="--device-memory", rule=rule, fix="leave it out")
        if need <= parse_bytes(memory):
            return Sizes(unit=unit, least=processes, most=most)
    raise UserError(
        field="--device-memory", rule=f"must hold a part of the trainer; {most} processes do not fit either", got=memory
    )


def trainer_changes(job: RLJob, processes: int) -> dict[str, Any]:
    """Path of each field of the trainer that so many processes set -> its value."""
    trainer = job.spec.trainer
    changes: dict[str, Any] = {"spec.trainer.processesPerNode": processes}
    if processes != trainer.processes_per_node:
        cost = Decimal(trainer.cost_per_hour) / trainer.processes_per_node * processes
        changes["spec.trainer.costPerHour"] = str(cost.quantize(_COST_DIGITS).normalize() + Decimal("0.00"))
        if gpus_of_any_maker(trainer.pod.resources.limits):
            resources = trainer.pod.resources.model_dump(mode="json", by_alias=True, exclude_unset=True)
            changes["spec.trainer.pod.resources"] = {
                kind: {name: str(processes) if names_gpus(name) else amount for name, amount in amounts.items()}
                for kind, amounts in resources.items()
            }
    return changes


def replicas_path(pool: GeneratorPool, *, number: int) -> str:
    """Of the pool's replicas at the start, it being the so many-th of its job."""
    key = pool.scaling.key
    return f"spec.generators[{number}].scaling.{key}.{'replicas' if key == 'static' else 'initialReplicas'}"


def changed_job(job: RLJob, changes: Mapping[str, Any], *, without: Collection[str] = ()) -> RLJob:
    """The job with these values, by path, and without these pools."""
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["spec"]["generators"] = [one for one in document["spec"]["generators"] if one["name"] not in without]
    apply_overrides(document, [f"{path}={json.dumps(value)}" for path, value in changes.items()])
    return parse_job(document)


def bound_line(chosen: Allocation, *, floor_s: float) -> str:
    """What sets the time of a step."""
    times = f"generation {chosen.generation_s:.4g} s, training {chosen.training_s:.4g} s"
    if chosen.bound == "training":
        return f"training sets the time of a step: {times}"
    if chosen.generation_s <= _NEAR_FLOOR * floor_s:
        longest = f"the longest answer alone takes {floor_s:.4g} s, so more generators would not help"
        return f"generation sets the time of a step: {times}; {longest}"
    if chosen.bound == "generation":
        return f"generation sets the time of a step: {times}"
    return f"the stages are balanced: {times}"


def count_of(number: int, noun: str) -> str:
    """`3 generators`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def extrapolated(known: Sequence[int], processes: int, *, file: Path) -> list[str]:
    """Whether training was measured up to so many processes, and how to mend that."""
    if known[0] <= processes <= known[-1]:
        return []
    wanted = ",".join(map(str, sorted({*known, processes})))
    told = f"numbers of processes that training was measured with: {', '.join(map(str, known))}; {processes} is extrapolated"
    return [f"  {told} (streamrl profile {file} --trainer --processes {wanted})"]


def to_use(changes: Mapping[str, Any], *, file: Path) -> str:
    """The command that submits the job so."""
    flags = " ".join(f"--set {shlex.quote(f'{path}={json.dumps(value)}')}" for path, value in changes.items())
    return f"streamrl submit {file} {flags}"
