"""The four modes on the README's job at equal samples: held-out reward, speed, bubbles.

    python benchmarks/modes.py [--seeds 0 1 2 3 4] [--steps 80] [--only StreamAsync Colocated-1]

For each seed every mode runs once, one after the other (interleaved, so that a busy machine hurts all alike). Prints a
table: held-out reward over the seeds (mean ± standard deviation), speed as the median over the seeds of the ratio to
Colocated of the same seed, and where generators and trainer spent their wall time. Colocated is run in two placements;
the faster one is what the others are compared with. Models come warmed up from the cache; the first run of a seed
makes them.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path

from run_folders import EXAMPLE, Run, parts_of_the_wall, run_job, spread

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--job", type=Path, default=EXAMPLE)
    parser.add_argument("--only", nargs="+", choices=list(MODES), default=list(MODES))
    args = parser.parse_args()
    runs: dict[str, list[Run]] = {mode: [] for mode in args.only}
    for seed in args.seeds:
        for mode in args.only:
            fixed = [f"spec.seed={seed}", f"spec.pipeline.steps={args.steps}", _NO_EVALUATION_BETWEEN]
            run = run_job(args.job, changes=[*fixed, *MODES[mode]])
            runs[mode].append(run)
            print(f"# seed {seed} {mode}: {run.held_out:.3f}, {run.samples_per_s:.0f} samples/s", flush=True)
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
