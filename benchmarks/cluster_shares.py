"""Step times of a job over several clusters, by the scheduler's own core in virtual time, beside the plan of `streamrl.link_shares`.

    python benchmarks/cluster_shares.py            # the table of docs/decisions/0056; a minute of one processor

`plan`: the shortest step that fixed shares of samples and link allow, from each cluster's seconds a sample as it runs alone. Columns:
all clusters told of a version at once; the best choice of clusters, told at once; those of the plan, told at once; all of them, in turn
(`weights.http.uplinkBytesPerSecond`). Each cluster has one generator with 32 slots, a version has 15 GB.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from streamrl.link_shares import ClusterRates, best_plan
from streamrl_cli.simulation.reading import parse_scenario
from streamrl_cli.simulation.results import steady_step_s
from streamrl_cli.simulation.world import simulate

CURVE = [{"batch": 1, "milliseconds": 8.3}, {"batch": 16, "milliseconds": 9.4}, {"batch": 64, "milliseconds": 11.7}]
GROUPS, GROUP_SIZE, SLOTS = 32, 8, 32
SAMPLES = GROUPS * GROUP_SIZE
WEIGHT_BYTES = 15_000_000_000
HOME = "home"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row for each mode."""

    name: str
    links: Mapping[str, float]
    """Other cluster -> bytes a second that its own link takes."""
    uplink: float
    """Bytes a second of all together."""


WIDE = 100e9
EQUAL = {"a": WIDE, "b": WIDE, "c": WIDE}
CASES = (
    Case(name="two clusters, link plentiful", links={"a": WIDE}, uplink=WIDE),
    Case(name="three, one behind 0.05 GB/s", links={"a": 2e9, "b": 0.05e9}, uplink=WIDE),
    Case(name="three, one behind 0.05 GB/s, uplink 0.5", links={"a": 2e9, "b": 0.05e9}, uplink=0.5e9),
    *(Case(name=f"four, uplink {gb:g}", links=EQUAL, uplink=gb * 1e9) for gb in (1.0, 0.5, 0.3, 0.15)),
)


def step_seconds(case: Case, members: Iterable[str], *, mode: str, in_turn: bool, steps: int) -> float:
    """Of a simulated run with home and these clusters."""
    common: dict[str, Any] = {
        "scaling": {"static": {"replicas": 1}},
        "slots": SLOTS,
        "latency": CURVE,
        "loadSeconds": 1,
    }
    others = [
        common | {"name": name, "clusterName": name, "linkSeconds": 0.02, "bandwidth": f"{case.links[name]:.0f}"}
        for name in members
    ]
    trainer = {"secondsPerStep": 2, "secondsPerToken": 1e-6, "weightBytes": WEIGHT_BYTES}
    found = parse_scenario(
        {
            "groupSize": GROUP_SIZE,
            "maxTokens": 8192,
            "resolutionTokens": 32,
            "pipeline": {"mode": mode, "batchGroups": GROUPS, "steps": steps},
            "scheduling": {"maxBufferBytes": "4Gi"},
            "pools": [common | {"name": HOME}, *others],
            "lengths": {"logNormal": {"medianTokens": 1500, "sigma": 0.7}},
            "trainer": trainer | {"uplink": f"{case.uplink:.0f}", "uplinkInTurn": in_turn},
            "curvesKnown": True,
        }
    )
    return steady_step_s(simulate(found).steps) or 0.0


def choices(case: Case) -> Iterator[tuple[str, ...]]:
    """Which clusters may be taken; of equal ones not each choice."""
    if len(set(case.links.values())) == 1:
        yield from (tuple(case.links)[:size] for size in range(len(case.links) + 1))
    else:
        yield from (chosen for size in range(len(case.links) + 1) for chosen in combinations(case.links, size))


def row(case: Case, *, mode: str, steps: int) -> str:
    """One line of the table."""
    at_once = {chosen: step_seconds(case, chosen, mode=mode, in_turn=False, steps=steps) for chosen in choices(case)}
    sample_s = at_once[()] / SAMPLES
    clusters = {HOME: ClusterRates(sample_s=sample_s)} | {
        name: ClusterRates(
            sample_s=sample_s, version_s=WEIGHT_BYTES / case.uplink, most_link=min(1.0, link / case.uplink)
        )
        for name, link in case.links.items()
    }
    plan = best_plan(clusters, samples=SAMPLES, is_overlapped=mode == "StreamAsync")
    planned = sum(share.samples > 0 for name, share in plan.shares.items() if name != HOME)
    members = tuple(name for name, share in plan.shares.items() if share.samples and name != HOME)
    if members not in at_once:  # of equal ones the plan may name others
        members = tuple(case.links)[:planned]
    best = min(at_once, key=lambda chosen: at_once[chosen])
    in_turn = step_seconds(case, case.links, mode=mode, in_turn=True, steps=steps)
    cells = [
        case.name,
        mode.removeprefix("Stream"),
        f"{at_once[()]:.0f}",
        f"{plan.step_s:.0f} ({len(members)})",
        f"{at_once[tuple(case.links)]:.1f}",
        f"{at_once[best]:.1f} ({len(best)})",
        f"{at_once[members]:.1f}",
        f"{in_turn:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args(argv)
    print(
        "| case (GB/s) | mode | home alone | plan (clusters) | all at once | best choice | the plan's | all in turn |"
    )
    print(f"|{'---|' * 8}")
    for case in CASES:
        for mode in ("StreamSync", "StreamAsync"):
            print(row(case, mode=mode, steps=args.steps), flush=True)


if __name__ == "__main__":
    main()
