"""The simulator alone: sample events/s with the real decisions in it, beside a bare heap loop in the same process.

`python benchmarks/simulator.py` runs each scenario below `--repeats` times and prints the median, a second being one of processor
time; `--profile` shows what takes it: the core, protobuf, the simulator itself. A sample event is an issue, an end or a score.
"""

import argparse
import cProfile
import pstats
import time
from collections import defaultdict
from heapq import heapify, heapreplace
from statistics import median

from streamrl_cli.simulation.reading import parse_scenario
from streamrl_cli.simulation.results import SimulationResult
from streamrl_cli.simulation.scenario import Scenario
from streamrl_cli.simulation.world import simulate

HEAP_EVENTS = 1_000_000
HEAP_SIZE = 1024
CURVE = [{"batch": 1, "milliseconds": 8.3}, {"batch": 16, "milliseconds": 9.4}, {"batch": 64, "milliseconds": 11.7}]
SIZES = {"8 generators": (8, 64, 64), "64 generators": (64, 64, 512), "512 generators": (512, 16, 1024)}
"""Name -> generators, slots, groups of a step."""
LAYERS = {
    "simulator": ("streamrl_cli/simulation",),
    "core": ("streamrl_workers/scheduler",),
    "bubble clock": ("streamrl_workers/metrics", "streamrl_workers/generator"),
}


def scenario(name: str, *, dispatch: str, samples: int) -> Scenario:
    """About so many samples in all."""
    generators, slots, groups = SIZES[name]
    return parse_scenario(
        {
            "groupSize": 8,
            "resolutionTokens": 64,
            "pipeline": {"mode": "StreamAsync", "batchGroups": groups, "steps": max(2, samples // (8 * groups))},
            "scheduling": {"dispatch": {dispatch: {}}, "maxBufferBytes": "4Gi"},
            "pools": [{"name": "p", "scaling": {"static": {"replicas": generators}}, "slots": slots, "latency": CURVE}],
            "lengths": {"logNormal": {"medianTokens": 3000, "sigma": 0.8}, "promptsPerEpoch": 4 * groups},
            "trainer": {"secondsPerStep": 1},
            "rewards": {"seconds": 0.5},
        }
    )


def heap_loop() -> float:
    """Events/s of a loop that only takes the next event of a heap and puts another one in."""
    heap = [(float(place), place) for place in range(HEAP_SIZE)]
    heapify(heap)
    begun_s = time.process_time()
    for serial in range(HEAP_EVENTS):
        at_s, _ = heap[0]
        heapreplace(heap, (at_s + 1 + serial % 7, serial))
    return HEAP_EVENTS / (time.process_time() - begun_s)


def measure(found: Scenario) -> tuple[SimulationResult, float]:
    """The outcome, and the processor time that it took in seconds."""
    begun_s = time.process_time()
    outcome = simulate(found)
    return outcome, time.process_time() - begun_s


def show(name: str, *, dispatch: str, samples: int, repeats: int) -> None:
    """One line."""
    runs = [measure(scenario(name, dispatch=dispatch, samples=samples)) for _ in range(repeats)]
    outcome, took_s = runs[0][0], median(seconds for _, seconds in runs)
    events = outcome.measures.sample_events
    print(
        f"{name:<15} {dispatch:<12} {events / took_s:>9,.0f} sample events/s  {outcome.events / took_s:>8,.0f} heap events/s  "
        f"{outcome.core_calls / took_s:>8,.0f} core calls/s  {events // 3:>7,} samples in {took_s:.2f} s"
    )


def profile(found: Scenario, *, top: int) -> None:
    """Own time by layer, and the functions that take most."""
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(simulate, found)
    stats = pstats.Stats(profiler)
    layers: dict[str, float] = defaultdict(float)
    for (path, _, _), (_, _, own_s, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        layer = next((name for name, parts in LAYERS.items() if any(part in path for part in parts)), "built in, other")
        layers[layer] += own_s
    total_s = sum(layers.values())
    for name, own_s in sorted(layers.items(), key=lambda item: -item[1]):
        print(f"{name:<16} {own_s / total_s:.0%} of the time (own)")
    stats.sort_stats("tottime").print_stats(top)


def main() -> None:
    """Measure, or profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dispatch", nargs="+", default=["fifo", "longestFirst", "auto"])
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.profile:
        profile(scenario("64 generators", dispatch=args.dispatch[0], samples=args.samples), top=30)
        return
    print(f"bare heap loop  {heap_loop():,.0f} events/s")
    for name in SIZES:
        for dispatch in args.dispatch:
            show(name, dispatch=dispatch, samples=args.samples, repeats=args.repeats)


if __name__ == "__main__":
    main()
