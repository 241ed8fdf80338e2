"""Which processes a job becomes on one machine. Pure: values in, values out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from streamrl import keys
from streamrl.spec import RLJobSpec

Role = Literal["scheduler", "trainer", "generator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One worker process: its name in the run, its role, its module, its own environment."""

    name: str
    role: Role
    module: str
    env: Mapping[str, str]


def plan_processes(spec: RLJobSpec, *, cores: int, signals_port: int = 0) -> tuple[ProcessPlan, ...]:
    """The scheduler first, then the trainer, then every generator.

    `signals_port` is the scheduler's (0 = any). torch gets an equal share of the `cores` in every process that computes, at least one thread.
    """
    generators = [(pool.name, ordinal) for pool in spec.generators for ordinal in range(pool.scaling.initial)]
    threads = str(max(1, cores // (1 + len(generators))))
    compute = {keys.ENV_THREADS: threads, "OMP_NUM_THREADS": threads}
    return (
        _process("scheduler", role="scheduler", env={keys.ENV_SIGNALS_PORT: str(signals_port)}),
        _process("trainer-0", role="trainer", env=compute),
        *(
            _process(f"generator-{pool}-{ordinal}", role="generator", env={**compute, keys.ENV_POOL: pool})
            for pool, ordinal in generators
        ),
    )


def _process(name: str, *, role: Role, env: Mapping[str, str]) -> ProcessPlan:
    return ProcessPlan(name=name, role=role, module=f"streamrl_workers.{role}", env={keys.ENV_PROCESS: name, **env})
