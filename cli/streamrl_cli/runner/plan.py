"""Which processes a job becomes on one machine, and which cores and GPUs each gets. Pure but for `usable_cpus` and `visible_gpus`.

Cores. Stream and Batch: trainer ranks and generators work at the same time, so they get cores of their own where there are
enough. Pools on the trainer's devices get its cores; where all are (Colocated) everyone gets all cores. The scheduler and the task pool are never pinned: they need
little, at moments that nobody knows. Cores cannot be dealt again to processes that run, so an elastic pool is dealt
for its `maxReplicas`: a new generator takes nothing away from those that are there.

GPUs. Rank r of the trainer takes the r-th GPU that it sees (torchrun's `LOCAL_RANK`), so all ranks see the first ones. A
generator uses as many GPUs as its engine says (`tensorParallelSize`), else one: the next of the rest, in turn, or of the
trainer's; with mode Colocated, and where these are too few, of all of them. Without GPUs nobody is told anything.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streamrl import keys, names
from streamrl.errors import UserError
from streamrl.spec import RLJobSpec
from streamrl_operator.autoscaler.values import generator_name

Role = Literal["scheduler", "trainer", "generator", "agent_link"]
LOOPBACK = "127.0.0.1"
"""All processes of a local run meet here."""
PACKAGE = "streamrl_workers"
"""Each role is a package in it that `python -m` runs."""
SMALL_PARAMETERS = 4_000_000
"""A scratch model below this computes with one thread: its operators are too short to be worth sharing."""
ENV_VISIBLE = "CUDA_VISIBLE_DEVICES"
"""As CUDA reads it: numbers or names of devices, by commas."""
_DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one process gets."""

    cpus: tuple[int, ...] = ()
    """CPU numbers that it is pinned to; none: it may run anywhere."""
    threads: int = 1
    """Of torch."""

    def env(self) -> dict[str, str]:
        """As the process is told.

        Threads of OpenMP wait passively: when one of them has lost its core to another process, those that spin for it
        burn what is left (docs/decisions/0010-autoscaler.md has the measurement).
        """
        pinned = {keys.ENV_CPUS: ",".join(map(str, self.cpus))} if self.cpus else {}
        threads = str(self.threads)
        return {**pinned, keys.ENV_THREADS: threads, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The shares of all processes of a run."""

    ranks: tuple[Share, ...]
    """By rank of the trainer."""
    generators: tuple[Share, ...]
    """Dealt in turn: the generator with number i over all pools of own devices gets share i modulo their number."""
    lent: tuple[Share, ...] = ()
    """The same for those on the trainer's devices."""

    def generator(self, number: int, *, lent: bool = False) -> Share:
        """The share of a generator."""
        shares = self.lent if lent else self.generators
        return shares[number % len(shares)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One worker process: its name in the run, its role, its module, its own environment."""

    name: str
    role: Role
    module: str
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlacement:
    """Where a pool's generators begin among those of all pools at their largest; those on the trainer's devices count by themselves."""

    first_number: int
    first_device: int
    devices: int
    """Of one generator."""
    lent: bool
    """Whether they are on the trainer's devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The processes of a run; those of pools are planned one by one, since their number may change."""

    scheduler: ProcessPlan
    ranks: tuple[ProcessPlan, ...]
    """The trainer's processes by rank; they live and die together."""
    pools: Mapping[str, "PoolPlacement"]
    placement: Placement
    gpus: Sequence[str]
    colocated: bool
    """Whether all pools are on the trainer's devices."""

    def member(self, pool: str, *, ordinal: int) -> ProcessPlan:
        """The process with that ordinal in its pool: a generator, or the link of an agent host."""
        if pool not in self.pools:
            return _process(f"{names.AGENTS}-{ordinal}", role="agent_link", env={keys.ENV_POOL: pool})
        planned = self.pools[pool]
        name = generator_name(pool, ordinal=ordinal)
        share = self.placement.generator(planned.first_number + ordinal, lent=planned.lent)
        return _process(
            name, role="generator", env={**share.env(), **self._gpus_of(planned, ordinal), keys.ENV_POOL: pool}
        )

    def _gpus_of(self, pool: "PoolPlacement", ordinal: int) -> dict[str, str]:
        ranks = len(self.ranks)
        mine = () if self.colocated else self.gpus[:ranks] if pool.lent else self.gpus[ranks:]
        free = mine if len(mine) >= pool.devices else self.gpus
        first = pool.first_device + ordinal * pool.devices
        return {ENV_VISIBLE: ",".join(free[(first + i) % len(free)] for i in range(pool.devices))} if free else {}


def plan_run(spec: RLJobSpec, *, cpus: Sequence[int], gpus: Sequence[str] = (), signals_port: int = 0) -> RunPlan:
    """Plan a run on the cores `cpus` and the GPUs `gpus`; `signals_port` is the scheduler's (0 = any).

    Raises:
        UserError: a generator needs more GPUs than there are.
    """
    placement = place(spec, cpus=cpus)
    return RunPlan(
        scheduler=_process("scheduler", role="scheduler", env={keys.ENV_SIGNALS_PORT: str(signals_port)}),
        ranks=_ranks(placement, gpus=gpus),
        pools=_pools(spec, gpus=gpus),
        placement=placement,
        gpus=gpus,
        colocated=len(spec.lent_pools) == len(spec.generators),
    )


def _pools(spec: RLJobSpec, *, gpus: Sequence[str]) -> dict[str, PoolPlacement]:
    plans: dict[str, PoolPlacement] = {}
    numbers, firsts = Counter[bool](), Counter[bool]()
    """By whether they are lent: generators, and devices, of the pools before."""
    for place, pool in enumerate(spec.generators):
        devices = pool.engine.common.devices
        if gpus and devices > len(gpus):
            field = f"spec.generators[{place}].engine.{pool.engine.key}.{pool.engine.common.devices_field}"
            raise UserError(field=field, rule=f"must be at most {len(gpus)}, the GPUs of this machine", got=devices)
        lent = pool.name in spec.lent_pools
        plans[pool.name] = PoolPlacement(
            first_number=numbers[lent], first_device=firsts[lent], devices=devices, lent=lent
        )
        numbers[lent] += pool.scaling.most
        firsts[lent] += pool.scaling.most * devices
    return plans


def _ranks(placement: Placement, *, gpus: Sequence[str]) -> tuple[ProcessPlan, ...]:
    """As torchrun would set them up on one node; the port to meet at is new for each attempt (`unit.py`)."""
    world = len(placement.ranks)
    visible = {ENV_VISIBLE: ",".join(gpus[:world])} if gpus else {}
    return tuple(
        _process(
            f"trainer-{rank}",
            role="trainer",
            env={
                **share.env(),
                **visible,
                keys.ENV_RANK: str(rank),
                keys.ENV_LOCAL_RANK: str(rank),
                keys.ENV_WORLD_SIZE: str(world),
                keys.ENV_MASTER_ADDR: LOOPBACK,
            },
        )
        for rank, share in enumerate(placement.ranks)
    )


def _process(name: str, *, role: Role, env: Mapping[str, str]) -> ProcessPlan:
    return ProcessPlan(name=name, role=role, module=f"{PACKAGE}.{role}", env={keys.ENV_PROCESS: name, **env})


def place(spec: RLJobSpec, *, cpus: Sequence[int]) -> Placement:
    """Deal `cpus` (at least one) to ranks and generators."""
    ranks, most = spec.trainer.processes_per_node, Counter[bool]()
    for pool in spec.generators:
        most[pool.name in spec.lent_pools] += pool.scaling.most
    generators, lent = most[False], most[True]
    small = _parameters(spec) < SMALL_PARAMETERS
    cores = 1 if small else len(cpus)
    if not generators and lent:
        return Placement(ranks=_all(cores, among=ranks) * ranks, generators=(), lent=_all(cores, among=lent))
    if not generators:
        return Placement(ranks=_slices(cpus, count=ranks, small=small), generators=())
    if len(cpus) <= ranks:  # not even one core for the generators: the system shares them more evenly than we
        shared = _all(cores, among=ranks + generators)
        return Placement(ranks=shared * ranks, generators=shared, lent=shared)
    a_rank = max(1, len(cpus) // (ranks + generators))
    trainers, rest = cpus[: ranks * a_rank], cpus[ranks * a_rank :]
    return Placement(
        ranks=_slices(trainers, count=ranks, small=small),
        generators=_slices(rest, count=generators, small=small),
        lent=_slices(trainers, count=lent, small=small) if lent else (),
    )


def usable_cpus() -> tuple[int, ...]:
    """The CPU numbers that this process may use: a container has fewer than its machine."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _parameters(spec: RLJobSpec) -> float:
    """Weights of the model's layers, as far as the job says; infinite if only the model's own files know."""
    scratch = spec.model.scratch
    if scratch is None:
        return float("inf")
    return scratch.layers * scratch.hidden_size * (4 * scratch.hidden_size + 3 * scratch.intermediate_size)


def _all(cores: int, *, among: int) -> tuple[Share, ...]:
    return (Share(threads=max(1, cores // among)),)


def _slices(cpus: Sequence[int], *, count: int, small: bool) -> tuple[Share, ...]:
    """Cores of their own for `count` processes; where there are too few, all of `cpus` for each."""
    each = len(cpus) // count
    if each == 0:
        return (Share(cpus=tuple(cpus)),)
    threads = 1 if small else each
    return tuple(Share(cpus=tuple(cpus[i * each : (i + 1) * each]), threads=threads) for i in range(count))


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA names them; found without loading CUDA."""
    given = os.environ.get(ENV_VISIBLE)
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip() and part.strip() != "-1")
    found = [path.name.removeprefix("nvidia") for path in _DEVICES.glob("nvidia[0-9]*")]
    return tuple(sorted(found, key=int))
