"""The four modes on the README's job at equal samples: held-out reward, speed, bubbles.

    python benchmarks/modes.py [--seeds 0 1 2 3 4] [--steps 80] [--only StreamAsync Colocated-1]

For each seed every mode runs once, one after the other (interleaved, so that a busy machine hurts all alike). Prints a
table: held-out reward over the seeds (mean ± standard deviation), speed as the median over the seeds of the ratio to
Colocated of the same seed, and where generators and trainer spent their wall time. Colocated is run in two placements;
the faster one is what the others are compared with. Models come warmed up from the cache; the first run of a seed
makes them.
"""

import statistics
from collections.abc import Mapping

from run_folders import Run, arguments, parts_of_the_wall, run_in_turn, spread

_TWO = ("spec.trainer.processesPerNode=2", "spec.generators[0].scaling={static: {replicas: 2}}")
MODES: dict[str, tuple[str, ...]] = {
    "Colocated-1": ("spec.pipeline.mode=Colocated", "spec.pipeline.maxStalenessSteps=0"),
    "Colocated-2": ("spec.pipeline.mode=Colocated", "spec.pipeline.maxStalenessSteps=0", *_TWO),
    "Batch": ("spec.pipeline.mode=Batch", "spec.pipeline.maxStalenessSteps=0"),
    "StreamSync": ("spec.pipeline.mode=StreamSync", "spec.pipeline.maxStalenessSteps=0"),
    "StreamAsync": ("spec.pipeline.mode=StreamAsync", "spec.pipeline.maxStalenessSteps=1"),
}
"""Changes to the job. Colocated-1: one generator and one trainer process with all cores each, in turn; Colocated-2: two of each."""
_NO_EVALUATION_BETWEEN = "spec.task.evaluation.intervalSteps=1000000"


def main() -> None:
    """Run all, print the table."""
    args = arguments(__doc__, seeds=5, only=MODES).parse_args()
    fixed = [f"spec.pipeline.steps={args.steps}", _NO_EVALUATION_BETWEEN]
    runs = run_in_turn(
        args.job,
        {mode: MODES[mode] for mode in args.only},
        seeds=args.seeds,
        fixed=fixed,
        tell=lambda run: f"{run.held_out:.3f}, {run.samples_per_s:.0f} samples/s",
    )
    print_table(runs)


def print_table(runs: Mapping[str, list[Run]]) -> None:
    """One line a mode."""
    colocated = [mode for mode in runs if mode.startswith("Colocated")] or list(runs)
    base = max(colocated, key=lambda mode: statistics.median(run.samples_per_s for run in runs[mode]))
    print(f"\nspeeds are ratios to {base}; shares of the wall are busy / pipeline / skew / weights, in percent\n")
    print("| mode | held-out before | after | samples/s | speed | generators | trainer |")
    print("|---|---|---|---|---|---|---|")
    for mode, mine in runs.items():
        ratios = [run.samples_per_s / other.samples_per_s for run, other in zip(mine, runs[base], strict=True)]
        columns = [
            spread([run.held_out_before for run in mine]),
            spread([run.held_out for run in mine]),
            f"{statistics.median(run.samples_per_s for run in mine):,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(parts_of_the_wall(mine, role=role) for role in ("generator", "trainer")),
        ]
        print(f"| {mode} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
