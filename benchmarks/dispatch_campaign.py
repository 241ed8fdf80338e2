"""Dispatch is never worse: random scenarios, each policy against speed-aware `fifo` on the same draws.

    python benchmarks/dispatch_campaign.py --scenarios 1000 --draws 16 --out campaign.jsonl
    python benchmarks/dispatch_campaign.py --only 17              # one scenario, every draw

For each scenario and policy: the mean over the draws of (time of the run / time under `fifo`). The claim: at most 1.10 in
every scenario, below 1 on average, for `longestFirst` and `auto`; `skewAware` is there for comparison.
A mean above `--doubt` is asked again: the same scenario with `--more` draws in all, and that mean counts.
Interrupted, it goes on with what `--out` has. Prints the distribution of means and of single draws, the worst scenarios, and how far a
run falls behind after a flip: the most that the time until the end of a step was behind `fifo`'s until the end of that step.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import Pool as Processes
from pathlib import Path
from statistics import mean, stdev
from time import process_time

from dispatch.scenarios import Scenario, drawn, predictions, scenario
from dispatch.world import World

POLICIES = ("longestFirst", "auto", "skewAware")
HELD = ("longestFirst", "auto")
"""Those that the claim is about."""
LIMIT = 1.10
PERCENTS = (0, 1, 5, 25, 50, 75, 95, 99, 100)
WORST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scenario."""

    number: int
    kind: str
    text: str
    ratios: dict[str, list[float]]
    """Policy -> time / time under fifo, by draw."""
    behind: dict[str, list[float]]
    """The same until the end of the step at which it was largest."""
    seconds: float
    """Of processor time."""

    def mean(self, policy: str) -> float:
        """Over the draws."""
        return mean(self.ratios[policy])


def measure(number: int, *, seed: int, draws: int, more: int, doubt: float, policies: Sequence[str]) -> Row:
    """All policies on all draws of one scenario."""
    begun_s = process_time()
    found = scenario(number, seed=seed)
    ratios: dict[str, list[float]] = {policy: [] for policy in policies}
    behind: dict[str, list[float]] = {policy: [] for policy in policies}
    for draw in range(max(draws, more)):
        if draw == draws and not any(mean(ratios[policy]) > doubt for policy in policies if policy in HELD):
            break
        for policy, (whole, most) in _ratios(found, draw, seed=seed, policies=policies):
            ratios[policy].append(whole)
            behind[policy].append(most)
    return Row(
        number=number, kind=found.kind, text=found.text, ratios=ratios, behind=behind, seconds=process_time() - begun_s
    )


def _ratios(
    found: Scenario, draw: int, *, seed: int, policies: Sequence[str]
) -> Iterator[tuple[str, tuple[float, float]]]:
    groups, past, said = drawn(found, draw, seed=seed)
    tokens = [group.tokens for group in groups]
    known = predictions(found, groups, past, said, number=draw)

    def steps(policy: str) -> tuple[float, ...]:
        job = replace(found.job, dispatch=policy)
        return World(job, tokens=tokens, lengths=deepcopy(known)).run().step_s

    base = steps("fifo")
    for policy in policies:
        ran = steps(policy)
        yield policy, (ran[-1] / base[-1], max(ours / theirs for ours, theirs in zip(ran, base, strict=True)))


# ---- what is printed


def spread(values: Sequence[float]) -> str:
    """Percentiles."""
    ordered = sorted(values)
    places = (ordered[round((len(ordered) - 1) * percent / 100)] for percent in PERCENTS)
    return "  ".join(f"{value:.3f}" for value in places)


def report(rows: Sequence[Row], *, policies: Sequence[str]) -> None:
    """The distribution, the worst, the flips."""
    print(f"{'':<24}   mean  " + "  ".join(f"{f'p{percent}':>5}" for percent in PERCENTS) + f"   above {LIMIT}")
    for policy in policies:
        means = [row.mean(policy) for row in rows]
        singles = [ratio for row in rows for ratio in row.ratios[policy]]
        for name, values in (("means", means), ("single draws", singles)):
            above = sum(value > LIMIT for value in values)
            print(f"{policy:<13} {name:<12} {mean(values):.3f}  {spread(values)}   {above} of {len(values)}")
    kinds = sorted({row.kind for row in rows})
    print("\nmean by predictor: scenarios, then each policy, mean (worst)")
    for kind in kinds:
        of_kind = [row for row in rows if row.kind == kind]
        cells = (
            f"{p} {mean(r.mean(p) for r in of_kind):.3f} ({max(r.mean(p) for r in of_kind):.3f})" for p in policies
        )
        print(f"  {kind:<9} {len(of_kind):>4}  " + "  ".join(cells))
    flips = [row for row in rows if row.kind == "flip"]
    if flips:
        print("\nfurthest behind after a flip, at the end of any step: mean over scenarios, worst scenario, worst draw")
        for policy in policies:
            means = [mean(row.behind[policy]) for row in flips]
            worst = max(max(row.behind[policy]) for row in flips)
            print(f"  {policy:<13} {mean(means):.3f}  {max(means):.3f}  {worst:.3f}")
    for policy in policies:
        print(f"\nworst of {policy}: mean (standard error, draws), scenario")
        for row in sorted(rows, key=lambda row: -row.mean(policy))[:WORST]:
            _show(row, policy)


def _show(row: Row, policy: str) -> None:
    values = row.ratios[policy]
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    print(f"  {row.mean(policy):.4f} ({error:.4f}, {len(values)})  --only {row.number}: {row.text}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--more", type=int, default=64, help="draws of a scenario that is in doubt")
    parser.add_argument("--doubt", type=float, default=1.02, help="mean above which a scenario is in doubt")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--only", type=int, help="number of one scenario")
    parser.add_argument(
        "--out", type=Path, help="JSON Lines, one scenario each; those that are there are not measured again"
    )
    args = parser.parse_args()
    rows = read(args.out)
    known = {row.number for row in rows}
    numbers = range(args.scenarios) if args.only is None else [args.only]
    one = partial(
        measure, seed=args.seed, draws=args.draws, more=args.more, doubt=args.doubt, policies=tuple(args.policies)
    )
    with Processes(args.processes) as processes:
        for row in processes.imap_unordered(one, [number for number in numbers if number not in known]):
            rows.append(row)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(row)) + "\n")
    rows.sort(key=lambda row: row.number)
    print(f"{len(rows)} scenarios, {sum(row.seconds for row in rows):.0f} s of processor time\n")
    report(rows, policies=args.policies)


def read(path: Path | None) -> list[Row]:
    """What an earlier run wrote."""
    if path is None or not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
