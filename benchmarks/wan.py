"""Does a slow link to another datacenter cost time? Jobs on two real clusters, 40 ms apart.

```
    hub: operator, scheduler, trainer ──link of 40 ms, R Mbit/s── member: all generators        tests/cluster/harness/two_clusters.py
```
`python benchmarks/wan.py [--sizes 10,25,50,100] [--mbits 200] [--seconds 2] [--steps 12]`. Needs root and Debian's containerd (docs/testing-on-kubernetes.md).
`python benchmarks/wan.py --simulated` needs nothing: it prints the second table alone.

Simulated engines: a step takes its fixed time, samples are made in a tenth of it, so that weights' way is all that differs; bytes are real. For each size
of the weights a job with its generators at home, then one with them in the member for each rate. Printed: seconds a step (median of the later
half) of both, what the simulator says, what a version needs on the link, and the bytes that passed it for each step as copies of a version.
The second table is the simulator's alone, for models of real sizes.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]


from cluster.harness.two_clusters import TwoClusters  # noqa: E402 - found by the line above
from cluster.members import Pair, wait_gone  # noqa: E402
from cluster.operators import Operator  # noqa: E402
from e2e.conftest import in_both  # noqa: E402
from e2e.jobs import simulated  # noqa: E402
from e2e.stage import RUN_S, Stage  # noqa: E402
from streamrl import keys  # noqa: E402
from streamrl_cli.simulation.reading import parse_scenario  # noqa: E402
from streamrl_cli.simulation.results import steady_step_s  # noqa: E402
from streamrl_cli.simulation.world import simulate  # noqa: E402

RTT_MS = 40.0
JOB = "wan"
MEGABYTE = 1_000_000
VERSIONS = {"7B, delta of 3.4 %": 520.0, "7B": 15_200.0, "32B, delta of 3.4 %": 2_230.0, "32B": 65_500.0}
"""Megabytes in bfloat16."""
MBITS = (200.0, 1_000.0, 10_000.0)
STEPS_S = (30.0, 120.0, 600.0)


def job(*, megabytes: float, step_s: float, steps: int, cluster: str | None) -> dict[str, Any]:
    """All generators at home, or all in `cluster`."""
    made = simulated(JOB, step_s=step_s, steps=steps, replicas=2)
    made["spec"]["trainer"]["engine"]["simulated"]["weightBytes"] = round(megabytes * MEGABYTE)
    made["spec"]["storage"] = {"checkpoints": {"intervalSteps": steps, "size": "2Gi"}, "journal": {"size": "64Mi"}}
    (pool,) = made["spec"]["generators"]
    pool["engine"]["simulated"]["latency"] = [{"batch": 1, "milliseconds": 100 * step_s / 64}]
    if cluster is not None:
        pool["clusterName"] = cluster
    return made


def simulated_step_s(*, megabytes: float, mbit: float, step_s: float) -> float:
    """Seconds a step of such a job, says the simulator."""
    pool = {
        "name": "far",
        "clusterName": "member",
        "scaling": {"static": {"replicas": 2}},
        "latency": [{"batch": 1, "milliseconds": 100 * step_s / 64}],
        "bandwidth": str(round(mbit * 1e6 / 8)),
        "linkSeconds": RTT_MS / 2000,
    }
    scenario = {
        "groupSize": 4,
        "pipeline": {"mode": "StreamAsync", "batchGroups": 4, "steps": 40},
        "pools": [pool],
        "lengths": {"logNormal": {"medianTokens": 12, "sigma": 0.1}},
        "trainer": {"secondsPerStep": step_s, "weightBytes": round(megabytes * MEGABYTE)},
    }
    found = steady_step_s(simulate(parse_scenario(scenario)).measures.steps)
    assert found is not None
    return found


def print_simulated() -> None:
    """What a link does to models of real sizes: a step's time, over that without a link."""
    print("| a version | link | " + " | ".join(f"step {step_s:g} s" for step_s in STEPS_S) + " |")
    print("|---|---|" + "---|" * len(STEPS_S))
    for name, megabytes in VERSIONS.items():
        for mbit in MBITS:
            times = [simulated_step_s(megabytes=megabytes, mbit=mbit, step_s=step_s) / step_s for step_s in STEPS_S]
            print(f"| {name} | {mbit / 1000:g} Gbit/s | " + " | ".join(f"{time:.2f}" for time in times) + " |")


def seconds_a_step(run_dir: Path) -> float:
    """Median of the later half."""
    lines = (run_dir / keys.DIR_METRICS / "steps.jsonl").read_text().splitlines()
    ends = [float(json.loads(line)["time_s"]) for line in lines]
    taken = [after - before for before, after in itertools.pairwise(ends)]
    return statistics.median(taken[len(taken) // 2 :])


def measure(two: TwoClusters, place: tuple[Stage, Pair, Operator], document: dict[str, Any]) -> tuple[float, int]:
    """(seconds a step, bytes from home to the member) of a job."""
    stage, pair, operator = place
    before = two.link.shape().there.bytes
    stage.apply(document)
    stage.wait_succeeded(JOB, deadline_s=4 * RUN_S)
    found = seconds_a_step(stage.run_dir(JOB))
    stage.assert_exact(JOB)
    stage.delete("rljobs", JOB)
    stage.wait(lambda: stage.get("rljobs", JOB) is None, "the job to go", operator, deadline_s=RUN_S)
    wait_gone(pair.there, JOB, operator)
    return found, two.link.shape().there.bytes - before


def numbers(text: str) -> list[float]:
    """Of a list with commas."""
    return [float(one) for one in text.split(",")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a link to another datacenter costs.")
    parser.add_argument("--sizes", type=numbers, default=[10.0, 25.0, 50.0, 100.0], help="of a version, in megabytes")
    parser.add_argument("--mbits", type=numbers, default=[200.0], help="of the link")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--simulated", action="store_true", help="the simulator alone")
    args = parser.parse_args()
    if args.simulated:
        print_simulated()
        return
    print(
        "| weights MB | link Mbit/s | a version on the link, s | a step, s | at home, s | simulated, s | copies over the link for each step |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    common = {"step_s": args.seconds, "steps": args.steps}
    with TwoClusters() as two, in_both(two) as place:
        for megabytes in args.sizes:
            home, _ = measure(two, place, job(megabytes=megabytes, cluster=None, **common))
            for mbit in args.mbits:
                two.link.slow(rate_bps=mbit * 1e6, delay_s=RTT_MS / 2000)
                found, passed = measure(two, place, job(megabytes=megabytes, cluster=place[1].name, **common))
                copies = passed / (megabytes * MEGABYTE * args.steps)
                way_s = 8 * megabytes / mbit
                told = simulated_step_s(megabytes=megabytes, mbit=mbit, step_s=args.seconds)
                print(
                    f"| {megabytes:g} | {mbit:g} | {way_s:.1f} | {found:.2f} | {home:.2f} | {told:.2f} | {copies:.2f} |",
                    flush=True,
                )
    print_simulated()


if __name__ == "__main__":
    main()
