"""What moving running samples gains or costs: random scenarios, each with and without `scheduling.rebalance`, paired.

`python benchmarks/rebalancing.py` simulates every scenario with `--draws` seeds, twice each: the same lengths, curves and
events, once with moves and once without. A draw's ratio is the virtual time until the last step with moves over that
without. Printed: a line for each scenario (mean and largest ratio, moves), and the mean over all. The simulator charges a
move with the tokens lost since the last progress and with reading the rest again (docs/rebalancing.md). Exit status 1
if the mean of a scenario is above `--bound`.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from streamrl_cli.simulation.reading import parse_scenario
from streamrl_cli.simulation.results import SimulationResult
from streamrl_cli.simulation.world import simulate

BOUND = 1.03
STEPS = 4
"""Of them the first is without moves: lengths and speeds are not known yet."""
DISPATCHES = ("fifo", "longestFirst", "skewAware", "longestFirst", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One pair of runs."""

    ratio: float
    """Time with moves over time without."""
    moves: int


def random_scenario(number: int) -> dict[str, Any]:
    """A scenario without its seed and without moves."""
    chance = Random(number)
    pools = [_pool(chance, name=name) for name in ("p", "q")[: chance.choice((1, 1, 2))]]
    places = sum(pool["slots"] * pool["scaling"]["static"]["replicas"] for pool in pools)
    group_size = chance.choice((2, 4, 8))
    groups = max(4, round(places * chance.choice((0.3, 0.7, 1.0, 1.5, 3.0)) / group_size))
    found = {
        "groupSize": group_size,
        "maxTokens": 8192,
        "partialProgress": True,
        "promptTokens": 200,
        "resolutionTokens": 16,
        "pipeline": {
            "mode": "StreamAsync",
            "maxStalenessSteps": chance.choice((1, 1, 2)),
            "batchGroups": groups,
            "steps": STEPS,
        },
        "scheduling": {"dispatch": {chance.choice(DISPATCHES): {}}, "maxBufferBytes": "4Gi"},
        "pools": pools,
        "lengths": {
            "logNormal": {"medianTokens": chance.choice((300, 1000)), "sigma": chance.choice((0.5, 0.9, 1.3))},
            "withinGroupPercent": chance.choice((10, 50, 90)),
            "promptsPerEpoch": chance.choice((2, 4)) * groups,
        },
        "trainer": {"secondsPerStep": chance.choice((0.1, 5.0))},
    }
    if chance.random() < 0.5:
        found["pipeline"] = found["pipeline"] | {"mode": "StreamSync", "maxStalenessSteps": 0}
    if chance.random() < 0.5:
        found["ranker"] = {"recallPercent": chance.choice((75, 87, 100)), "inverted": chance.random() < 0.2}
    return found


def _pool(chance: Random, *, name: str) -> dict[str, Any]:
    """Step times from flat to ten times as long with all slots taken."""
    slots, base_ms = chance.choice((8, 16, 32)), chance.choice((5.0, 8.0, 16.0))
    rise = chance.choice((0.0, 0.2, 1.0, 3.0, 9.0))
    batches = (1, max(2, slots // 4), slots)
    points = [{"batch": batch, "milliseconds": base_ms * (1 + rise * (batch / slots) ** 1.5)} for batch in batches]
    return {
        "name": name,
        "scaling": {"static": {"replicas": chance.choice((2, 3, 6))}},
        "slots": slots,
        "latency": points,
        "kvNanoseconds": chance.choice((0, 20)),
    }


def run(scenario: dict[str, Any], *, seed: int, moves: bool, gain_percent: float) -> SimulationResult:
    """One simulation."""
    scheduling = dict(scenario["scheduling"])
    if moves:
        scheduling["rebalance"] = {"gainPercent": gain_percent}
    return simulate(parse_scenario(scenario | {"seed": seed, "scheduling": scheduling}))


def compare(scenario: dict[str, Any], *, draws: int, gain_percent: float) -> list[Draw]:
    """A pair for each seed."""
    found = []
    for seed in range(draws):
        without, with_moves = (run(scenario, seed=seed, moves=on, gain_percent=gain_percent) for on in (False, True))
        found.append(Draw(ratio=with_moves.trained_s / without.trained_s, moves=with_moves.moved_samples))
    return found


def line(number: int, scenario: dict[str, Any], found: list[Draw]) -> str:
    """Of one scenario."""
    pools = " + ".join(f"{p['scaling']['static']['replicas']}x{p['slots']}" for p in scenario["pools"])
    (dispatch,) = scenario["scheduling"]["dispatch"]
    ratios = [draw.ratio for draw in found]
    return (
        f"{number:>4} {scenario['pipeline']['mode']:<11} {dispatch:<13} {pools:<12} "
        f"mean {mean(ratios):.4f}  least {min(ratios):.4f}  most {max(ratios):.4f}  moves {mean(d.moves for d in found):.1f}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--gain-percent", type=float, default=5.0)
    parser.add_argument("--bound", type=float, default=BOUND)
    parser.add_argument("--out", type=Path, help="file for all ratios, as JSON Lines")
    args = parser.parse_args()
    begun_s, means = time.process_time(), []
    for number in range(args.first, args.first + args.scenarios):
        scenario = random_scenario(number)
        found = compare(scenario, draws=args.draws, gain_percent=args.gain_percent)
        means.append(mean(draw.ratio for draw in found))
        print(line(number, scenario, found), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                row = {"scenario": number, "ratios": [d.ratio for d in found], "moves": [d.moves for d in found]}
                file.write(json.dumps(row) + "\n")
    took_s = time.process_time() - begun_s
    print(
        f"{len(means)} scenarios: mean {mean(means):.4f}, worst mean {max(means):.4f}; {took_s:.0f} s of processor time"
    )
    sys.exit(max(means) > args.bound)


if __name__ == "__main__":
    main()
