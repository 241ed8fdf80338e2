"""Do synchronous and asynchronous training learn alike? Held-out reward over the steps, five seeds of each.

    python benchmarks/reward_curves.py [--seeds 0 1 2 3 4] [--steps 80] [--every 10]

The README's job with StreamSync (S = 0), StreamAsync (S = 1) and StreamAsync (S = 4); a seed runs all of them, one after the other, from
the same warmed-up model. Prints the held-out reward (greedy answers) as mean and standard deviation over the seeds at each evaluation, the
differences to StreamSync of the same seed, and their t statistic: outside of ±2.8 (4 degrees of freedom, 5 %) they would not be chance.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from run_folders import Run, arguments, run_in_turn, spread

MODES: Mapping[str, tuple[str, ...]] = {
    "StreamSync": ("spec.pipeline.mode=StreamSync", "spec.pipeline.maxStalenessSteps=0"),
    "StreamAsync, S = 1": ("spec.pipeline.mode=StreamAsync", "spec.pipeline.maxStalenessSteps=1"),
    "StreamAsync, S = 4": ("spec.pipeline.mode=StreamAsync", "spec.pipeline.maxStalenessSteps=4"),
}


def main() -> None:
    """Run all, print the table."""
    parser = arguments(__doc__, seeds=5, only=MODES)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    args = parser.parse_args()
    fixed = [f"spec.pipeline.steps={args.steps}", f"spec.task.evaluation.intervalSteps={args.every}"]
    runs = run_in_turn(
        args.job,
        {mode: MODES[mode] for mode in args.only},
        seeds=args.seeds,
        fixed=fixed,
        tell=lambda run: " ".join(f"{step}:{reward:.3f}" for step, reward in _curve(run).items()),
    )
    print_table({mode: [_curve(run) for run in mine] for mode, mine in runs.items()})


def print_table(curves: Mapping[str, Sequence[Mapping[int, float]]]) -> None:
    """One line an evaluation that every run made."""
    base = next(iter(curves))
    steps = sorted(set.intersection(*(set(curve) for mine in curves.values() for curve in mine)))
    others = [mode for mode in curves if mode != base]
    print(f"\n| step | {' | '.join(curves)} | {' | '.join(f'{mode}: difference, t' for mode in others)} |")
    print("|---" * (1 + len(curves) + len(others)) + "|")
    for step in steps:
        rewards = {mode: [curve[step] for curve in mine] for mode, mine in curves.items()}
        apart = [_difference(rewards[mode], rewards[base]) for mode in others]
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


if __name__ == "__main__":
    main()
