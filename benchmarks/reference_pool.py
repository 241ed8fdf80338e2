"""What a pool for the frozen model brings: the same job with the model in the trainer, and with `trainer.reference`.

    python benchmarks/reference_pool.py [--steps 20] [--rounds 3]

The README's job with a pull to its initial model, and a model of 1.7 M parameters, so that a pass of the frozen one counts. The variants
take turns. Prints for each run samples/s, and how busy trainer and generators were (`run_folders.py`).
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence

from run_folders import EXAMPLE, run_job

SIZES = ("hiddenSize=192", "layers=4", "intermediateSize=512", "warmUp.steps=200")
POOLS = "[{name: local, engine: {hf: {slots: 128}}}, {name: frozen, engine: {hf: {slots: 64}}}]"
VARIANTS: Mapping[str, Sequence[str]] = {
    "within the trainer": (),
    "a pool": (f"spec.generators={POOLS}", "spec.trainer.reference={pool: frozen}"),
}


def main() -> None:
    """Run them, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    fixed = (
        "spec.algorithm={grpo: {referenceKl: {coefficient: 0.001}}}",
        f"spec.pipeline.steps={args.steps}",
        *(f"spec.model.scratch.{size}" for size in SIZES),
    )
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(args.rounds):
        for name, changes in VARIANTS.items():
            run = run_job(EXAMPLE, changes=[*fixed, *changes])
            rates[name].append(run.samples_per_s)
            busy = " | ".join(f"{run.shares[role]['busy']:.0%}" for role in ("trainer", "generator"))
            print(f"| {number} | {name} | {run.samples_per_s:.0f} | {busy} |", flush=True)
    for name, some in rates.items():
        print(f"{name}: median {statistics.median(some):.0f} samples/s")


if __name__ == "__main__":
    main()
