"""Whole runs of one job, variant by variant: how much is learned, how fast, and where the wall time goes.

    python benchmarks/learning.py algorithms [--seeds 0 1 2] [--steps 80] [--only grpo ppo]
    python benchmarks/learning.py modes         # the four modes at equal samples; Colocated in two placements
    python benchmarks/learning.py staleness     # StreamSync beside StreamAsync with S = 1 and 4, and their curves
    python benchmarks/learning.py stages        # what each mechanism brings, on a task of skewed lengths

Seeds are the outer loop: all variants of a seed begin with the same warmed-up model, and a busy machine hurts them alike. Prints held-out
reward (greedy answers, mean ± standard deviation over the seeds), rates as medians, speeds as ratios of tokens/s to the first variant's of the
same seed, and shares of the wall: busy / pipeline / skew / weights, in percent. With curves also the reward at each evaluation, the
differences to the first variant paired by seed, and their t statistic: with five seeds one outside of ±2.8 is no chance at 5 %.

The skewed task counts down from a number that is mostly small and sometimes above a hundred (`peers/tasks.py`): most completions have some
tens of tokens, one of a hundred has 390 and more. Its policy changes lengths as it learns, which is why speeds are of tokens.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from run_folders import EXAMPLE, Run, run_job, spread

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from materials import HERE as PEERS
from materials import skewed_materials

Changes = tuple[str, ...]
_TWO = ("spec.trainer.processesPerNode=2", "spec.generators[0].scaling={static: {replicas: 2}}")
_FIFO = "spec.scheduling={dispatch: {fifo: {}}}"
_LONGEST_FIRST = "spec.scheduling={dispatch: {longestFirst: {}}, lengthSignals: [Ranker], ranker: {hashing: {}}}"


def _mode(name: str, *more: str, staleness: int = 0) -> Changes:
    return (f"spec.pipeline.mode={name}", f"spec.pipeline.maxStalenessSteps={staleness}", *more)


def _skewed() -> Changes:
    model, prompts = skewed_materials()
    return (f"spec.model.path.directory={model}", f"spec.task.dataset.jsonl.path={prompts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is compared."""

    variants: Mapping[str, Changes]
    """Name -> changes of the job; the first one is what the others are compared with."""
    job: Path = EXAMPLE
    fixed: Callable[[], Changes] = tuple
    """Changes of all."""
    seeds: int = 5
    steps: int = 80
    behind_step: int = 3
    """Rates are from its end on: first allocations, the filling of the pipeline."""
    every: int = 1_000_000
    """Steps between evaluations."""


EXPERIMENTS: Mapping[str, Experiment] = {
    "algorithms": Experiment(
        variants={name: (f"spec.algorithm={{{name}: {{}}}}",) for name in ("grpo", "drGrpo", "dapo", "rloo", "gspo", "reinforcePP")}
        | {"ppo": ("spec.algorithm={ppo: {critic: {learningRate: 1.0e-3}}}",)},
        seeds=3,
    ),
    "modes": Experiment(
        variants={
            "Colocated, two of each": _mode("Colocated", *_TWO),
            "Colocated, one of each": _mode("Colocated"),
            "Batch": _mode("Batch"),
            "StreamSync": _mode("StreamSync"),
            "StreamAsync": _mode("StreamAsync", staleness=1),
        },
    ),
    "staleness": Experiment(
        variants={"StreamSync": _mode("StreamSync")}
        | {f"StreamAsync, S = {bound}": _mode("StreamAsync", staleness=bound) for bound in (1, 4)},
        every=10,
    ),
    "stages": Experiment(
        variants={
            "colocated": _mode("Colocated", *_TWO, _FIFO),
            "+longest-first": _mode("Colocated", *_TWO, _LONGEST_FIRST),
            "+streaming": _mode("StreamSync", _LONGEST_FIRST),
            "+asynchronous": _mode("StreamAsync", _LONGEST_FIRST, staleness=1),
            "asynchronous, fifo": _mode("StreamAsync", _FIFO, staleness=1),
        },
        job=PEERS / "skewed.yaml",
        fixed=_skewed,
        steps=24,
        behind_step=10,  # a predictor is trusted from 256 groups on, eight steps of 32
    ),
}  # fmt: skip


def main() -> None:
    """Run them, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"default: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, help="steps between evaluations: prints curves")
    parser.add_argument("--only", nargs="+", help="these variants")
    args = parser.parse_args()
    for name in args.experiments or EXPERIMENTS:
        measure(EXPERIMENTS[name], args)


def measure(asked: Experiment, args: argparse.Namespace) -> None:
    """One experiment."""
    every = args.every or asked.every
    steps = f"spec.pipeline.steps={args.steps or asked.steps}"
    fixed = (*asked.fixed(), steps, f"spec.task.evaluation.intervalSteps={every}")
    runs: dict[str, list[Run]] = {name: [] for name in args.only or asked.variants}
    for seed in args.seeds or range(asked.seeds):
        for name, mine in runs.items():
            mine.append(run := run_job(asked.job, changes=[f"spec.seed={seed}", *fixed, *asked.variants[name]]))
            print(f"# seed {seed} {name}: {run.held_out:.3f}, {run.samples_per_s_behind(asked.behind_step):.1f} samples/s", flush=True)  # fmt: skip
    print_speeds(runs, behind_step=asked.behind_step)
    if len(next(iter(runs.values()))[0].evaluations) > 2:
        print_curves({name: [_curve(run) for run in mine] for name, mine in runs.items()})


def print_speeds(runs: Mapping[str, Sequence[Run]], *, behind_step: int) -> None:
    """One line a variant."""
    rates = {name: [run.tokens_per_s_behind(behind_step) for run in mine] for name, mine in runs.items()}
    print("\n| | held-out before | after | gain | samples/s | speed | generators | trainer |\n|---" + "|---" * 7 + "|")
    base = next(iter(rates.values()))
    for name, mine in runs.items():
        ratios = [rate / other for rate, other in zip(rates[name], base, strict=True)]
        columns = [
            spread([run.held_out_before for run in mine]),
            spread([run.held_out for run in mine]),
            spread([run.held_out - run.held_out_before for run in mine]),
            f"{statistics.median(run.samples_per_s_behind(behind_step) for run in mine):,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(_parts_of_the_wall(mine, role=role) for role in ("generator", "trainer")),
        ]
        print(f"| {name} | {' | '.join(columns)} |")


def print_curves(curves: Mapping[str, Sequence[Mapping[int, float]]]) -> None:
    """One line an evaluation that every run made."""
    base, *others = curves
    steps = sorted(set.intersection(*(set(curve) for mine in curves.values() for curve in mine)))
    print(f"\n| step | {' | '.join(curves)} | {' | '.join(f'{name}: difference, t' for name in others)} |")
    print("|---" * (1 + len(curves) + len(others)) + "|")
    for step in steps:
        rewards = {name: [curve[step] for curve in mine] for name, mine in curves.items()}
        apart = [_difference(rewards[name], rewards[base]) for name in others]
        print(f"| {step} | {' | '.join(spread(values) for values in rewards.values())} | {' | '.join(apart)} |")


def _difference(mine: Sequence[float], others: Sequence[float]) -> str:
    """Paired by seed."""
    differences = [one - other for one, other in zip(mine, others, strict=True)]
    mean = statistics.mean(differences)
    if len(differences) < 2 or not (deviation := statistics.stdev(differences)):
        return f"{mean:+.3f}"
    return f"{mean:+.3f}, {mean / (deviation / math.sqrt(len(differences))):+.1f}"


def _curve(run: Run) -> Mapping[int, float]:
    return {int(line["step"]): float(line["mean_reward"]) for line in run.evaluations}


def _parts_of_the_wall(runs: Sequence[Run], *, role: str) -> str:
    """Means in percent: `busy / pipeline / skew / weights`."""
    names = ("busy", "pipeline", "skew", "weights")
    return " / ".join(f"{100 * statistics.mean(run.shares[role][name] for run in runs):.0f}" for name in names)


if __name__ == "__main__":
    main()
