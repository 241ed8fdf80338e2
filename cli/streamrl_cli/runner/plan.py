"""Which processes a job becomes on one machine. Pure: values in, values out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from streamrl import keys
from streamrl.spec import RLJobSpec
from streamrl_cli.runner.gpus import generator_gpu, rank_gpus
from streamrl_cli.runner.placement import Placement, place
from streamrl_operator.autoscaler.observation import generator_name

Role = Literal["scheduler", "trainer", "generator"]
LOOPBACK = "127.0.0.1"
"""All processes of a local run meet here."""
PACKAGE = "streamrl_workers"
"""Each role is a package in it that `python -m` runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One worker process: its name in the run, its role, its module, its own environment."""

    name: str
    role: Role
    module: str
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The processes of a run; generators are planned one by one, since their number may change."""

    scheduler: ProcessPlan
    ranks: tuple[ProcessPlan, ...]
    """The trainer's processes by rank; they live and die together."""
    first_numbers: Mapping[str, int]
    """Pool -> number of its first generator, counted over all pools at their largest."""
    placement: Placement
    gpus: Sequence[str]
    colocated: bool

    def generator(self, pool: str, *, ordinal: int) -> ProcessPlan:
        """The generator with that ordinal in its pool."""
        number = self.first_numbers[pool] + ordinal
        gpu = generator_gpu(self.gpus, ranks=len(self.ranks), number=number, colocated=self.colocated)
        name = generator_name(pool, ordinal=ordinal)
        env = {**self.placement.generator(number).env(), **gpu, keys.ENV_POOL: pool}
        return _process(name, role="generator", env=env)


def plan_run(spec: RLJobSpec, *, cpus: Sequence[int], gpus: Sequence[str] = (), signals_port: int = 0) -> RunPlan:
    """Plan a run on the cores `cpus` and the GPUs `gpus`; `signals_port` is the scheduler's (0 = any)."""
    placement = place(spec, cpus=cpus)
    most = [pool.scaling.most for pool in spec.generators]
    return RunPlan(
        scheduler=_process("scheduler", role="scheduler", env={keys.ENV_SIGNALS_PORT: str(signals_port)}),
        ranks=_ranks(placement, gpus=gpus),
        first_numbers={pool.name: sum(most[:index]) for index, pool in enumerate(spec.generators)},
        placement=placement,
        gpus=gpus,
        colocated=spec.pipeline.mode == "Colocated",
    )


def _ranks(placement: Placement, *, gpus: Sequence[str]) -> tuple[ProcessPlan, ...]:
    """As torchrun would set them up on one node; the port to meet at is new for each attempt (`unit.py`)."""
    world = len(placement.ranks)
    return tuple(
        _process(
            f"trainer-{rank}",
            role="trainer",
            env={
                **share.env(),
                **rank_gpus(gpus, ranks=world),
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
