"""The README's job with five seeds: does it learn each time, and how long does it take?

    python benchmarks/main_job.py [--seeds 0 1 2 3 4] [--job examples/chain-sum.yaml]

Prints a table: held-out reward before the first and after the last step, their ratio and difference, the wall time of
the whole run (warm-up included: the cache is empty), steps a second, and the shares of the trainer's and generator's
wall that were busy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One seed."""

    seed: int
    before: float
    after: float
    wall_s: float
    steps_per_s: float
    busy: dict[str, float]

    def text(self) -> str:
        """A line of the table."""
        busy = " | ".join(f"{share:.0%}" for share in self.busy.values())
        ratio, gain = self.after / self.before, self.after - self.before
        return (
            f"| {self.seed} | {self.before:.3f} | {self.after:.3f} | {ratio:.2f}× | {gain:+.3f} "
            f"| {self.wall_s:.0f} s | {self.steps_per_s:.2f} | {busy} |"
        )


def main() -> None:
    """Run the seeds one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--job", type=Path, default=ROOT / "examples" / "chain-sum.yaml")
    args = parser.parse_args()
    print("| seed | held-out before | after | ratio | gain | wall | steps/s | trainer busy | generator busy |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            print(measure(args.job, seed=seed, scratch=Path(scratch)).text(), flush=True)


def measure(job: Path, *, seed: int, scratch: Path) -> Row:
    """Run one seed in an empty cache and read what it left."""
    folder = scratch / f"seed-{seed}"
    command = [sys.executable, "-m", "streamrl_cli.main", "run", str(job), "--plain", "--run-dir", str(folder)]
    started_s = time.monotonic()
    subprocess.run(
        [*command, "--set", f"spec.seed={seed}"],
        env={**os.environ, "XDG_CACHE_HOME": str(scratch / f"cache-{seed}")},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    evaluations, steps = read(folder, "evaluations"), read(folder, "steps")
    return Row(
        seed=seed,
        before=evaluations[0]["mean_reward"],
        after=evaluations[-1]["mean_reward"],
        wall_s=time.monotonic() - started_s,
        steps_per_s=(len(steps) - 1) / (steps[-1]["time_s"] - steps[0]["time_s"]),
        busy={name: busy_share(folder, name) for name in ("trainer-0", "generator-local-0")},
    )


def busy_share(folder: Path, process: str) -> float:
    """Share of the wall in which a process computed."""
    last = read(folder, process)[-1]
    return float(last["parts"]["busy"] / last["wall_s"])


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """Lines of a metrics file."""
    return [json.loads(line) for line in (folder / "metrics" / f"{name}.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
