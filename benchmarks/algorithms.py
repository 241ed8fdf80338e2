"""Every algorithm on the README's job at equal samples: held-out reward over three seeds.

    python benchmarks/algorithms.py [--seeds 0 1 2] [--steps 80] [--only grpo ppo]

Seeds are the outer loop, so that each algorithm starts from the same three warmed-up models. Prints a table: held-out
reward before and after (mean ± standard deviation), the gain, samples a second.
"""

import statistics

from run_folders import arguments, run_in_turn, spread

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": ("spec.algorithm={grpo: {}}",),
    "drGrpo": ("spec.algorithm={drGrpo: {}}",),
    "dapo": ("spec.algorithm={dapo: {}}",),
    "rloo": ("spec.algorithm={rloo: {}}",),
    "reinforcePP": ("spec.algorithm={reinforcePP: {}}",),
    "ppo": ("spec.algorithm={ppo: {critic: {learningRate: 1.0e-3}}}",),
    "gspo": ("spec.algorithm={gspo: {}}",),
}
"""Changes to the job; the job's own learning rate unless a line says otherwise."""


def main() -> None:
    """Run all, print the table."""
    args = arguments(__doc__, seeds=3, only=ALGORITHMS).parse_args()
    variants = {name: ALGORITHMS[name] for name in args.only}
    fixed = [f"spec.pipeline.steps={args.steps}"]
    runs = run_in_turn(args.job, variants, seeds=args.seeds, fixed=fixed, tell=lambda run: f"{run.held_out:.3f}")
    print("\n| algorithm | held-out before | after | gain | samples/s |")
    print("|---|---|---|---|---|")
    for name, mine in runs.items():
        gains = [run.held_out - run.held_out_before for run in mine]
        rate = statistics.median(run.samples_per_s for run in mine)
        before, after = (spread([getattr(run, field) for run in mine]) for field in ("held_out_before", "held_out"))
        print(f"| {name} | {before} | {after} | {spread(gains)} | {rate:,.0f} |")


if __name__ == "__main__":
    main()
