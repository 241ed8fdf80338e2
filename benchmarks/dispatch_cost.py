"""What a decision costs: a dispatch with 10,000 samples waiting on 1,000 generators, and the order of a batch. Processor time.

    python benchmarks/dispatch_cost.py                 # the bound that docs/dispatch.md names
    python benchmarks/dispatch_cost.py --profile longestFirst

A dispatch is one event of the scheduler's core: a generator says that a sample has ended, and the answer holds the next request.
Of each run the first 1,000 are measured; 8,000 samples are out. An order is one call of a policy, of a batch that it may trust.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from dispatch.draws import draw, ranked, scores
from dispatch.models import CURVE, POPULATION, UNIT
from dispatch.world import Job, Pool, World

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.dispatch import policy
from streamrl_workers.scheduler.dispatch.makespan import Instance
from streamrl_workers.scheduler.dispatch.order import Candidate, PlannedBatch

POLICIES = ("fifo", "longestFirst", "skewAware", "auto")
GENERATORS, SLOTS, GROUP_SIZE, WAITING = 1000, 8, 8, 10_000
MEASURED = 1000
CORRELATION = 0.9
PLANS = (
    ("1,024 samples on 32, queueing", 1024, 32, 6),
    ("1,024 samples on 32, all fit", 1024, 32, 64),
    ("10,000 samples on 1,000, queueing", 10_000, 1000, 8),
    ("10,000 samples on 1,000, all fit", 10_000, 1000, 20),
    ("65,536 samples on 1,000, all fit", 65_536, 1000, 80),
)
"""Name, samples, instances, slots of each."""
GROUPS = replace(POPULATION, within=0.4, group_size=GROUP_SIZE)


class EnoughError(Exception):
    """As many dispatches as were to be measured."""


def watched(measured: list[float], profiler: cProfile.Profile | None) -> type[Core]:
    """A core whose dispatches are timed into `measured`, in seconds of processor time."""

    class Watched(Core):
        def generator_progress(
            self, generator_id: str, *, items: Sequence[pb.Progress], now_s: float
        ) -> list[fx.Effect]:
            call = super().generator_progress
            if profiler is not None:
                profiler.enable()
            begun_s = time.process_time()
            effects = call(generator_id, items=items, now_s=now_s)
            took_s = time.process_time() - begun_s
            if profiler is not None:
                profiler.disable()
            measured.append(took_s)
            if len(measured) == MEASURED:
                raise EnoughError
            return effects

    return Watched


def dispatches(name: str, *, profiler: cProfile.Profile | None = None) -> list[float]:
    """Seconds of each of the first dispatches of a batch."""
    chance = Random(name)
    count = (GENERATORS * SLOTS + WAITING) // GROUP_SIZE
    groups, past = draw(GROUPS, groups=count, chance=chance), draw(GROUPS, groups=512, chance=chance)
    said, past_said = (scores(part, correlation=CORRELATION, chance=chance) for part in (groups, past))
    job = Job(
        pools=[Pool(name="p", replicas=GENERATORS, slots=SLOTS, curve=CURVE)],
        batch_groups=count,
        group_size=GROUP_SIZE,
        dispatch=name,
        unit=UNIT,
    )
    measured: list[float] = []
    world = World(
        job,
        tokens=[group.tokens for group in groups],
        lengths=ranked(said, past=past, past_said=past_said, unit=UNIT),
        core=watched(measured, profiler),
    )
    try:
        world.run()
    except EnoughError:
        return measured
    raise AssertionError(f"only {len(measured)} dispatches")


def order_seconds(name: str, *, samples: int, instances: int, slots: int) -> float:
    """Of one order."""
    chance = Random(samples)
    groups = [
        Candidate(group_id=place, batch=0, place=place, predicted_tokens=float(group.tokens[0]))
        for place, group in enumerate(draw(GROUPS, groups=samples // GROUP_SIZE, chance=chance))
    ]
    fleet = [Instance(generator_id=f"{place:04}", slots=slots, curve=CURVE) for place in range(instances)]
    batch = PlannedBatch(trusted=True, groups=groups, samples=GROUP_SIZE, instances=fleet, rank_correlation=CORRELATION)
    return timed(lambda: policy(name).order(batch))


def timed(act: Callable[[], object]) -> float:
    """Seconds of processor time."""
    begun_s = time.process_time()
    act()
    return time.process_time() - begun_s


def share(values: Sequence[float], part: float) -> float:
    """A quantile."""
    return sorted(values)[round((len(values) - 1) * part)]


def main() -> None:
    """Two tables, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=POLICIES, help="where a dispatch of this policy spends its time")
    args = parser.parse_args()
    if args.profile:
        profiler = cProfile.Profile(time.process_time)
        dispatches(args.profile, profiler=profiler)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        return
    print("| dispatch, ms | p50 | p99 | largest |\n|---|---|---|---|")
    for name in POLICIES:
        values = [1e3 * seconds for seconds in dispatches(name)]
        print(f"| `{name}` | {share(values, 0.5):.2f} | {share(values, 0.99):.2f} | {max(values):.2f} |", flush=True)
    print(f"\n| order, s | {' | '.join(f'`{name}`' for name in POLICIES[1:])} |\n|---{'|---' * (len(POLICIES) - 1)}|")
    for title, samples, instances, slots in PLANS:
        cells = (order_seconds(name, samples=samples, instances=instances, slots=slots) for name in POLICIES[1:])
        print(f"| {title} | {' | '.join(f'{seconds:.2f}' for seconds in cells)} |", flush=True)


if __name__ == "__main__":
    main()
