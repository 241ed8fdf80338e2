"""Which cores a run's computing processes get. Pure: values in, values out.

Stream and Batch: trainer ranks and generators work at the same time, so they get cores of their own where there are
enough. Colocated: they take turns, so each gets them all. The scheduler and the task pool are never pinned: they need
little, at moments that nobody knows. Cores cannot be dealt again to processes that run, so an elastic pool is dealt
for its `maxReplicas`: a new generator takes nothing away from those that are there.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl import keys
from streamrl.spec import RLJobSpec

SMALL_PARAMETERS = 4_000_000
"""A scratch model below this computes with one thread: its operators are too short to be worth sharing."""


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
    """Dealt in turn: the generator with number i over all pools gets share i modulo their number."""

    def generator(self, number: int) -> Share:
        """The share of a generator."""
        return self.generators[number % len(self.generators)]


def place(spec: RLJobSpec, *, cpus: Sequence[int]) -> Placement:
    """Deal `cpus` (at least one) to ranks and generators."""
    ranks, generators = spec.trainer.processes_per_node, sum(pool.scaling.most for pool in spec.generators)
    small = _parameters(spec) < SMALL_PARAMETERS
    cores = 1 if small else len(cpus)
    if spec.pipeline.mode == "Colocated":
        return Placement(ranks=_all(cores, among=ranks) * ranks, generators=_all(cores, among=generators))
    if len(cpus) <= ranks:  # not even one core for the generators: the system shares them more evenly than we
        shared = _all(cores, among=ranks + generators)
        return Placement(ranks=shared * ranks, generators=shared)
    a_rank = max(1, len(cpus) // (ranks + generators))
    trainers, rest = cpus[: ranks * a_rank], cpus[ranks * a_rank :]
    return Placement(
        ranks=_slices(trainers, count=ranks, small=small), generators=_slices(rest, count=generators, small=small)
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
