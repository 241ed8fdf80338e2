"""The README's job with five seeds: does it learn each time, and how long does it take?

    python benchmarks/main_job.py [--seeds 0 1 2 3 4] [--job examples/chain-sum.yaml]

Prints a table: held-out reward before the first and after the last step, their ratio and difference, the wall time of
the whole run (warm-up included: the cache is empty), steps a second, and the shares of the trainer's and generator's
wall that were busy.
"""

import argparse
import tempfile
import time
from pathlib import Path

from run_folders import EXAMPLE, read_lines, start


def main() -> None:
    """Run the seeds one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--job", type=Path, default=EXAMPLE)
    args = parser.parse_args()
    print("| seed | held-out before | after | ratio | gain | wall | steps/s | trainer busy | generator busy |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            print(row(args.job, seed=seed, scratch=Path(scratch)), flush=True)


def row(job: Path, *, seed: int, scratch: Path) -> str:
    """Run one seed in an empty cache; its line of the table."""
    folder, begun_s = scratch / f"seed-{seed}", time.monotonic()
    start(job, folder=folder, changes=[f"spec.seed={seed}"], XDG_CACHE_HOME=str(scratch / f"cache-{seed}"))
    wall_s, metrics = time.monotonic() - begun_s, folder / "metrics"
    steps = read_lines(metrics / "steps.jsonl")
    before, *_, after = (line["mean_reward"] for line in read_lines(metrics / "evaluations.jsonl"))
    steps_per_s = (len(steps) - 1) / (steps[-1]["time_s"] - steps[0]["time_s"])
    last = [read_lines(metrics / f"{process}.jsonl")[-1] for process in ("trainer-0", "generator-local-0")]
    busy = " | ".join(f"{line['parts']['busy'] / line['wall_s']:.0%}" for line in last)
    return (
        f"| {seed} | {before:.3f} | {after:.3f} | {after / before:.2f}× | {after - before:+.3f} "
        f"| {wall_s:.0f} s | {steps_per_s:.2f} | {busy} |"
    )


if __name__ == "__main__":
    main()
