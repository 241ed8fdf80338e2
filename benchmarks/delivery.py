"""What delivery in the order of the prompts costs: samples a second beside delivery as they are scored, in virtual time.

    python benchmarks/delivery.py [--seeds 3] [--steps 12]

Plays examples/simulations/skewed.yaml with mode StreamSync, the real scheduler and the same lengths, once for each delivery and dispatch.
In order, the trainer waits for the next group while it could work on those behind it.
"""

import argparse
from pathlib import Path
from typing import Any

from streamrl_cli.reporting.comparison import mean
from streamrl_cli.simulation.reading import parse_scenario
from streamrl_cli.simulation.results import summary
from streamrl_cli.simulation.world import simulate
from streamrl_cli.yaml_document import read_value

SCENARIO = Path(__file__).parents[1] / "examples" / "simulations" / "skewed.yaml"
DISPATCHES = ("fifo", "longestFirst")
DELIVERIES = ("Arrival", "Logical")


def main() -> None:
    """Simulate, and print a line for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    for dispatch in DISPATCHES:
        speeds = {
            delivery: [_samples_per_s(delivery, dispatch, seed=seed, steps=args.steps) for seed in range(args.seeds)]
            for delivery in DELIVERIES
        }
        ratio = mean([logical / arrival for arrival, logical in zip(*speeds.values(), strict=True)])
        assert ratio is not None, "there is a seed"
        said = ", ".join(f"{delivery} {sum(found) / len(found):.2f}" for delivery, found in speeds.items())
        print(f"{dispatch}: samples/s {said}; in order {ratio.value:.3f} ± {ratio.half_width or 0:.3f} of as they come")


def _samples_per_s(delivery: str, dispatch: str, *, seed: int, steps: int) -> float:
    document: dict[str, Any] = read_value(SCENARIO.read_text(encoding="utf-8"))
    document["seed"] = seed
    document["pipeline"] = {"mode": "StreamSync", "batchGroups": 128, "steps": steps, "delivery": delivery}
    document["scheduling"] = {"dispatch": {dispatch: {}}}
    found = summary(simulate(parse_scenario(document)))
    return float(found["samples_per_s"])


if __name__ == "__main__":
    main()
