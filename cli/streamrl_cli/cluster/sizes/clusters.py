"""`streamrl plan --optimize --pool-devices POOL=N ..`: sizes of pools in several clusters, which clusters to leave out, and why.

Owns the way from a job, a profile and links to the question of `streamrl_operator.allocation.over_clusters`, and from its answer to the
job and to a text. Pools differ in GPUs, clusters and prices; all serve one policy, so lengths of answers are those of all pools together.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamrl.errors import UserError
from streamrl.spec import RLJob, parse_bytes
from streamrl.spec.base import BYTES_PATTERN
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.gpus import gpus_of_any_maker
from streamrl_cli.cluster.output import columns
from streamrl_cli.cluster.sizes.optimize import COSTED_SAMPLES, PERCENT
from streamrl_cli.cluster.sizes.stages import (
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
from streamrl_cli.profiling.record import PoolProfile
from streamrl_operator.allocation.choice import Stage
from streamrl_operator.allocation.over_clusters import (
    MOST_PLANS,
    AllocationProblem,
    ClusterAllocation,
    ClusterPool,
    LinkTimes,
    over_clusters,
)
from streamrl_operator.allocation.stage_times import floor_seconds, generation_curve, training_curve
from streamrl_operator.planning.estimate import estimate
from streamrl_operator.planning.weight_times import link_bounds

_TOKEN_BYTES = 8
"""Of a completion on its way home: the token and its log-prob."""
_CLUSTERS_HEAD = ("CLUSTER", "GENERATORS", "SAMPLES OF A STEP", "SHARE OF THE LINK", "A VERSION TAKES")
_CHOICES_HEAD = (
    *("CLUSTERS", "GENERATORS", "PROCESSES", "GENERATION", "TRAINING", "STEP", "SAMPLES/S", "COST AN HOUR"),
    *(f"COST OF {COSTED_SAMPLES} SAMPLES", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """The ways to other clusters, in bytes a second."""

    own: Mapping[str, float]
    """Of each cluster's own link."""
    full: float
    """Of all together; where nothing bounds them together, the sum."""
    version_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A job as the choice sees it."""

    asked: AllocationProblem
    links: _Links
    replica_devices: Mapping[str, int]
    """Of one generator, by pool."""
    measured_processes: Sequence[int]
    notes: Sequence[str]

    def replicas(self, found: ClusterAllocation) -> dict[str, int]:
        return {name: count // self.replica_devices[name] for name, count in found.pool_devices.items()}


def optimise(job: RLJob, args: argparse.Namespace, *, config: Mapping[str, Any] | None) -> tuple[RLJob, list[str]]:
    """The job with the chosen sizes and without the pools that are left out, and why. `config` is the model's config.json.

    Raises `UserError` or `UserErrors`: profile, job, devices and links do not fit together.
    """
    known = _read(job, args, config=config)
    tolerance = args.tolerance_percent / PERCENT
    chosen = over_clusters(known.asked, tolerance=tolerance)
    replicas = known.replicas(chosen)
    taken = [pool for pool in job.spec.generators if replicas[pool.name]]
    left_out = [name for name, count in replicas.items() if not count]
    sizes = {replicas_path(pool, number=number): replicas[pool.name] for number, pool in enumerate(taken)}
    changes = sizes | trainer_changes(job, chosen.sizes.trainer_devices)
    take_out = f"take {_pools(left_out)} out of {args.file}, then " if left_out else ""
    return changed_job(job, changes, without=left_out), [
        *_why(known, chosen, beside=_beside(known.asked, chosen, tolerance=tolerance), tolerance=tolerance),
        *extrapolated(known.measured_processes, chosen.sizes.trainer_devices, file=args.file),
        f"to use it: {take_out}{to_use(changes, file=args.file)}",
    ]


def _read(job: RLJob, args: argparse.Namespace, *, config: Mapping[str, Any] | None) -> _Reading:
    profile, file = measured_of(job, args), args.file
    there = _numbers("--pool-devices", args.pool_devices, names=[pool.name for pool in job.spec.generators])
    measured = {pool.name: pool_profile(profile, pool, file=file) for pool in job.spec.generators}
    lengths = [tokens * args.length_factor for one in measured.values() for tokens in _answers(one)]
    samples = job.spec.pipeline.batch_groups * job.spec.task.group_size
    mean = sum(lengths) / len(lengths)
    training = training_curve(
        ((p.processes, p.tokens, p.seconds) for p in trainer_profile(profile, job, file=file).points),
        tokens=samples * mean,
    )
    links, trainer = _links(job, args, config=config), job.spec.trainer
    devices = {
        p.name: max(gpus_of_any_maker(p.pod.resources.limits), p.engine.common.devices) for p in job.spec.generators
    }
    question = AllocationProblem(
        pools=[
            _pool(
                pool,
                measured[pool.name],
                lengths,
                cluster=job.spec.cluster_apart(pool),
                samples=samples,
                devices=devices[pool.name],
                most=there[pool.name],
            )
            for pool in job.spec.generators
        ],
        links={
            name: LinkTimes(
                version_s=links.version_bytes / links.full,
                sample_bytes_s=mean * _TOKEN_BYTES / links.full,
                most_link=own / links.full,
            )
            for name, own in links.own.items()
        },
        training=Stage(
            seconds=training.at,
            sizes=process_sizes(job, memory=args.device_memory, config=config),
            device_cost_per_hour=float(trainer.cost_per_hour) / trainer.processes_per_node,
        ),
        trainer_devices=args.trainer_devices,
        samples=samples,
        is_overlapped=job.spec.pipeline.staleness > 0,
    )
    notes = [f"a step: {samples} samples of {mean:.4g} tokens on average, the longest {max(lengths):.4g}"]
    if links.own:
        notes.append(f"a version: {links.version_bytes:,} bytes to each other cluster")
    if job.spec.weights.has_deltas and args.version_bytes is None:
        notes.append("a version is counted whole: with deltas it is smaller, and --version-bytes says how much")
    if job.spec.weights.folder is not None and links.own:
        notes.append("a version is counted once for each cluster: from a folder each generator reads it for itself")
    return _Reading(
        asked=question, links=links, replica_devices=devices, measured_processes=training.sizes, notes=notes
    )


def _answers(measured: PoolProfile) -> Iterator[int]:
    return (tokens * measured.lengths.turns for tokens in measured.lengths.tokens)


def _pool(
    pool: GeneratorPool,
    measured: PoolProfile,
    lengths: Sequence[float],
    *,
    cluster: str,
    samples: int,
    devices: int,
    most: int,
) -> ClusterPool:
    sizes = replica_sizes(pool, devices=devices)
    sizes = replace(sizes, most=max(1, min(sizes.most, most)))
    curve = generation_curve(
        replica_of(pool, measured),
        lengths=lengths,
        samples=samples,
        most=max(1, sizes.most // devices),
        devices=devices,
    )
    stage = Stage(seconds=curve.at, sizes=sizes, device_cost_per_hour=float(pool.cost_per_hour) / devices)
    floor_s = floor_seconds([replica_of(pool, measured)], lengths=lengths)
    return ClusterPool(name=pool.name, cluster=cluster, generation=stage, floor_s=floor_s)


def _numbers(field: str, given: Iterable[str], *, names: Sequence[str]) -> dict[str, int]:
    """`NAME=N`, for each name."""
    found = {}
    for one in given:
        name, _, number = one.partition("=")
        if not number.isdecimal() or not 1 <= int(number) <= 2**31:
            raise UserError(field=field, rule="must be POOL=N, N a number of devices from 1 on", got=one)
        found[_among(field, name, names)] = int(number)
    missing = next((name for name in names if name not in found), None)
    if missing is not None:
        raise UserError(field=field, rule="must be given for each pool", fix=f"add {field} {missing}=N")
    return found


def _among(field: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise UserError(field=field, rule=f"must name one of {', '.join(names)}" if names else "has nobody", got=name)
    return name


def _bytes(field: str, quantity: str) -> int:
    if not re.fullmatch(BYTES_PATTERN, quantity) or parse_bytes(quantity) < 1:
        raise UserError(field=field, rule="must be a byte quantity above 0, such as 50M", got=quantity)
    return parse_bytes(quantity)


def _links(job: RLJob, args: argparse.Namespace, *, config: Mapping[str, Any] | None) -> _Links:
    """By `--link`, and by what the job lets the trainer send."""
    clusters = job.spec.other_clusters
    given = {}
    for one in args.link:
        name, _, quantity = one.partition("=")
        given[_among("--link", name, clusters)] = _bytes("--link", quantity)
    http = job.spec.weights.http
    uplink = None if http is None else http.uplink_bytes_per_second
    own = {}
    for name in clusters:
        bounds = [*([given[name]] if name in given else []), *link_bounds(job.spec)]
        if not bounds:
            fix = f"add --link {name}=BYTES" + ("" if http is None else ", or spec.weights.http.remoteBytesPerSecond")
            raise UserError(field="--link", rule=f"is not known of cluster {name}", fix=fix)
        own[name] = float(min(bounds))
    full = float(parse_bytes(uplink)) if uplink else sum(own.values())
    return _Links(own=own, full=full, version_bytes=_version_bytes(job, args, config=config) if own else 0)


def _version_bytes(job: RLJob, args: argparse.Namespace, *, config: Mapping[str, Any] | None) -> int:
    if args.version_bytes is not None:
        return _bytes("--version-bytes", args.version_bytes)
    known = estimate(job, config=config).version_bytes
    if known is None:
        rule = "is needed: the size of the model is not known (its config.json is not at hand)"
        raise UserError(field="--version-bytes", rule=rule, fix="give the bytes of a version, such as 15G")
    return known


def _beside(
    asked: AllocationProblem, chosen: ClusterAllocation, *, tolerance: float
) -> dict[tuple[str, ...], ClusterAllocation]:
    """The best with one cluster more or less than the chosen ones, by its clusters."""
    taken = set(_taken(asked, chosen))
    sets = [tuple(name for name in asked.clusters if name in taken ^ {one}) for one in asked.clusters]
    return {names: over_clusters(asked, tolerance=tolerance, exactly=names) for names in sets if _can(asked, names)}


def _can(asked: AllocationProblem, names: Sequence[str]) -> bool:
    """Whether there are devices for a generator in each of them."""
    sizes = [(pool.cluster, pool.generation.sizes) for pool in asked.pools]
    able = {cluster for cluster, size in sizes if size.upto(size.most)}
    return bool(names) and able.issuperset(names)


def _taken(asked: AllocationProblem, found: ClusterAllocation) -> list[str]:
    return [
        name
        for name in asked.clusters
        if any(found.pool_devices[pool.name] for pool in asked.pools if pool.cluster == name)
    ]


def _why(
    known: _Reading,
    chosen: ClusterAllocation,
    *,
    beside: Mapping[tuple[str, ...], ClusterAllocation],
    tolerance: float,
) -> Iterator[str]:
    asked, sizes = known.asked, chosen.sizes
    named = [
        f"{count_of(count, 'generator') if count else 'none'} in pool {name}"
        for name, count in known.replicas(chosen).items()
    ]
    yield f"WHY {', '.join(named)} and {count_of(sizes.trainer_devices, 'trainer process')}"
    yield from (f"  {line}" for line in columns(_CLUSTERS_HEAD, [_cluster(known, chosen, n) for n in asked.clusters]))
    yield ""
    taken = _taken(asked, chosen)
    rows = [_choice(known, taken, chosen, remark="<- chosen")]
    rows += [_choice(known, names, one, remark="") for names, one in beside.items()]
    yield from (f"  {line}" for line in columns(_CHOICES_HEAD, rows))
    for name in asked.clusters:
        one = next((found for names, found in beside.items() if {*names} == {*taken, name}), None)
        if name not in taken and one is not None:
            yield f"  {_left_out(known, name, chosen=chosen, beside=one)}"
    floor_s = min(pool.floor_s for pool in asked.pools if chosen.pool_devices[pool.name])
    yield f"  {bound_line(sizes, floor_s=floor_s)}"
    if not all(one.is_best for one in (chosen, *beside.values())):
        yield f"  best found so far: each search ends after {MOST_PLANS:,} plans, and a cheaper one may be left"
    yield f"  the cheapest step among those at most {tolerance:.0%} longer than the best"
    yield from (f"  {note}" for note in known.notes)


def _called(cluster: str) -> str:
    return cluster or "(home)"


def _pools(names: Sequence[str]) -> str:
    return f"pool{'s' if len(names) > 1 else ''} {' and '.join(names)}"


def _cluster(known: _Reading, found: ClusterAllocation, name: str) -> tuple[str, ...]:
    counts = known.replicas(found)
    sizes = [f"{counts[pool.name]} in {pool.name}" for pool in known.asked.pools if pool.cluster == name]
    share = found.link_plan.shares.get(name)
    if share is None or not share.samples:
        made, link = "left out", "-"
    else:
        made, link = f"{share.samples / known.asked.samples:.0%}", f"{share.link:.0%}" if name else "-"
    return _called(name), ", ".join(sizes), made, link, f"{_version_s(known, name):.4g} s" if name else "-"


def _version_s(known: _Reading, cluster: str) -> float:
    """Over the cluster's own link."""
    return known.links.version_bytes / known.links.own[cluster]


def _choice(known: _Reading, clusters: Sequence[str], found: ClusterAllocation, *, remark: str) -> tuple[str, ...]:
    sizes, samples = found.sizes, known.asked.samples
    times = (f"{seconds:.4g} s" for seconds in (sizes.generation_s, sizes.training_s, sizes.step_s))
    generators = str(sum(known.replicas(found).values()))
    costs = (f"{sizes.cost_per_hour:.2f}", f"{sizes.cost_of(COSTED_SAMPLES, samples_per_step=samples):.4g}")
    names = ", ".join(map(_called, clusters))
    return names, generators, str(sizes.trainer_devices), *times, f"{samples / sizes.step_s:.4g}", *costs, remark


def _left_out(known: _Reading, name: str, *, chosen: ClusterAllocation, beside: ClusterAllocation) -> str:
    version_s, step_s = _version_s(known, name) if name else 0.0, chosen.sizes.step_s
    if version_s >= step_s:
        return f"{_called(name)} is left out: a version takes it {version_s:.4g} s, a step {step_s:.4g} s"
    samples = known.asked.samples
    costs = [one.sizes.cost_of(COSTED_SAMPLES, samples_per_step=samples) for one in (beside, chosen)]
    dearer = f"{COSTED_SAMPLES} samples would cost {costs[0]:.4g} instead of {costs[1]:.4g}"
    return f"{_called(name)} is left out: with it {dearer}, and a step would take {beside.sizes.step_s:.4g} instead of {step_s:.4g} s"
