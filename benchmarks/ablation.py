"""What each mechanism brings, on real processes and a real engine: the skewed task, every stage of the way, in turn.

    python benchmarks/ablation.py [--repeats 5] [--steps 24] [--only colocated +longest-first ...]

The task counts down from a number that is mostly small and sometimes above a hundred (`peers/tasks.py`): most completions
have some tens of tokens, one of a hundred has 390 and more. Stages, each on the whole machine:

    colocated       two generators and two trainer ranks, in turn on both cores; `fifo`
    +longest-first  the same, and a free slot takes the longest predicted (a hashing ranker that begins knowing nothing)
    +streaming      one generator and one rank at the same time, samples stream (StreamSync)
    +asynchronous   StreamAsync, S = 1

Each repetition runs all stages once, one after the other. A predictor is trusted from 256 groups on, so rates are from the end of
step `_LEARNING_STEPS` on, and so are the bubbles of each step. Prints ratios to `colocated` of the same repetition, of tokens/s: answers
get shorter or longer as the policy learns, and not the same way in each run.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from run_folders import Run, parts_of_the_wall, run_in_turn

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from materials import HERE as PEERS
from materials import skewed_materials

_LEARNING_STEPS = 10
"""So many steps of 32 groups pass before a predictor can be trusted, with two to spare."""
_TWO = ("spec.trainer.processesPerNode=2", "spec.generators[0].scaling={static: {replicas: 2}}")
_FIFO = ("spec.scheduling={dispatch: {fifo: {}}}",)
_LONGEST_FIRST = ("spec.scheduling={dispatch: {longestFirst: {}}, lengthSignals: [Ranker], ranker: {hashing: {}}}",)
STAGES: Mapping[str, tuple[str, ...]] = {
    "colocated": ("spec.pipeline.mode=Colocated", "spec.pipeline.maxStalenessSteps=0", *_TWO, *_FIFO),
    "+longest-first": ("spec.pipeline.mode=Colocated", "spec.pipeline.maxStalenessSteps=0", *_TWO, *_LONGEST_FIRST),
    "+streaming": ("spec.pipeline.mode=StreamSync", "spec.pipeline.maxStalenessSteps=0", *_LONGEST_FIRST),
    "+asynchronous": ("spec.pipeline.mode=StreamAsync", "spec.pipeline.maxStalenessSteps=1", *_LONGEST_FIRST),
    "asynchronous, fifo": ("spec.pipeline.mode=StreamAsync", "spec.pipeline.maxStalenessSteps=1", *_FIFO),
}
"""Changes to the job; the last one tells what longest-first brings where the stages overlap."""


def main() -> None:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=list(STAGES), default=list(STAGES))
    args = parser.parse_args()
    model, prompts = skewed_materials()
    fixed = [
        f"spec.model.path.directory={model}",
        f"spec.task.dataset.jsonl.path={prompts}",
        f"spec.pipeline.steps={args.steps}",
    ]
    runs = run_in_turn(
        PEERS / "skewed.yaml",
        {stage: STAGES[stage] for stage in args.only},
        seeds=range(args.repeats),
        fixed=fixed,
        tell=lambda run: (
            f"{run.samples_per_s_behind(_LEARNING_STEPS):.1f} samples/s, {run.tokens_per_s_behind(_LEARNING_STEPS):.0f} tokens/s"
        ),
    )
    print_table(runs)


def print_table(runs: Mapping[str, list[Run]]) -> None:
    """One line a stage."""
    base = next(iter(runs))
    rates = {stage: [run.tokens_per_s_behind(_LEARNING_STEPS) for run in mine] for stage, mine in runs.items()}
    print(
        f"\nspeeds are ratios to {base}, in tokens; shares of the wall are busy / pipeline / skew / weights, in percent\n"
    )
    print("| stage | tokens/s | speed | generators | trainer |")
    print("|---|---|---|---|---|")
    for stage, mine in runs.items():
        ratios = [rate / other for rate, other in zip(rates[stage], rates[base], strict=True)]
        columns = [
            f"{statistics.median(rates[stage]):.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(parts_of_the_wall(mine, role=role) for role in ("generator", "trainer")),
        ]
        print(f"| {stage} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
