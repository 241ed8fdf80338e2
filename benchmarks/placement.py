"""Samples/s by where generators are: on devices of their own, in turn with the trainer, and a pool on the trainer's devices beside another.

    python benchmarks/placement.py simulated    # two devices that only take time, by how long training takes beside generation
    python benchmarks/placement.py skewed       # two cores: the skewed task of `learning.py`, engine hf

    apart        one generator, one trainer, each on a device
    Colocated    two generators and two ranks on both devices, in turn
    lending      apart, and a second generator on the trainer's device while the trainer waits

Rounds are the outer loop, so a busy machine hurts all alike. Prints medians, and the ratio to `apart` of the same mode and round: median, least
to most. Colocated is beside StreamSync. With `simulated`, a step's tokens take the trainer `--shares` of what they take one generator with all
slots taken; both ranks of Colocated together take half of that, and lengths are log-normal with sigma 0.7.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learning import EXPERIMENTS, Changes
from run_folders import Run, run_job, simulated_job

CURVE = ((1, 8.3), (16, 9.4), (64, 11.7))
"""Milliseconds of a decoding step by samples: a model of 7B on one GPU."""
SLOTS, TIME_SCALE, MEDIAN_TOKENS, SIGMA = 64, 0.1, 200.0, 0.7
GENERATED_TOKEN_S = CURVE[-1][1] / 1000 * TIME_SCALE / SLOTS
BEHIND_STEP = 2

_LENT = "{{name: lent, devices: Trainer, engine: {engine}}}"
_SYNC, _ASYNC = "StreamSync", "StreamAsync"


def variants(*, pool: str, engine: str, colocated: Changes) -> Mapping[tuple[str, str], Changes]:
    """(Mode, placement) -> changes of the job; `pool`: the generators of both, `engine`: theirs."""
    lending = f"spec.generators=[{pool}, {_LENT.format(engine=engine)}]"
    found: dict[tuple[str, str], Changes] = {}
    for mode in (_SYNC, _ASYNC):
        order = (f"spec.pipeline.mode={mode}", f"spec.pipeline.maxStalenessSteps={int(mode == _ASYNC)}")
        found[mode, "apart"] = order
        if mode == _SYNC:
            found[mode, "Colocated"] = ("spec.pipeline.mode=Colocated", "spec.pipeline.maxStalenessSteps=0", *colocated)
        found[mode, "lending"] = (*order, lending)
    return found


def simulated(share: float, *, groups: int, steps: int, folder: Path) -> tuple[Path, Mapping[tuple[str, str], Changes]]:
    """A job that only takes time, and what it is changed by."""
    points = [{"batch": batch, "milliseconds": milliseconds} for batch, milliseconds in CURVE]
    engine = {"slots": SLOTS, "latency": points, "timeScale": TIME_SCALE, "meanTokens": MEDIAN_TOKENS, "sigma": SIGMA}
    job = simulated_job("placement", pipeline={"batchGroups": groups, "steps": steps}, engine=engine)
    job["spec"]["trainer"]["engine"]["simulated"]["secondsPerToken"] = share * GENERATED_TOKEN_S
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(4096)))
    file = folder / "job.yaml"
    file.write_text(json.dumps(job))
    colocated = (
        "spec.generators[0].scaling={static: {replicas: 2}}",
        f"spec.trainer.engine.simulated.secondsPerToken={share * GENERATED_TOKEN_S / 2}",
    )
    pool = job["spec"]["generators"][0]
    return file, variants(pool=json.dumps(pool), engine=json.dumps(pool["engine"]), colocated=colocated)


def skewed(*, steps: int) -> tuple[Path, Mapping[tuple[str, str], Changes]]:
    """The skewed task."""
    stages = EXPERIMENTS["stages"]
    engine = "{hf: {slots: 64}}"
    fixed = (*stages.fixed(), f"spec.pipeline.steps={steps}", "spec.scheduling={dispatch: {longestFirst: {}}}")
    colocated = ("spec.trainer.processesPerNode=2", "spec.generators[0].scaling={static: {replicas: 2}}")
    found = variants(pool=f"{{name: local, engine: {engine}}}", engine=engine, colocated=colocated)
    return stages.job, {name: (*fixed, *changes) for name, changes in found.items()}


def measure(title: str, job: Path, asked: Mapping[tuple[str, str], Changes], *, rounds: int) -> None:
    """Run all, round by round, and print a line for each."""
    runs: dict[tuple[str, str], list[Run]] = {name: [] for name in asked}
    for number in range(rounds):
        for name, changes in asked.items():
            runs[name].append(run := run_job(job, changes=[f"spec.seed={number}", *changes]))
            rate = run.samples_per_s_behind(BEHIND_STEP)
            print(f"# {title}, round {number}, {' '.join(name)}: {rate:.1f} samples/s", flush=True)
    for (mode, placement), mine in runs.items():
        rates, base = (_rates(some) for some in (mine, runs[mode, "apart"]))
        ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        waits = statistics.mean(run.shares["trainer"]["pipeline"] for run in mine)
        print(f"| {title} | `{mode}` | {placement} | {statistics.median(rates):.0f} | {ratio} | {100 * waits:.0f} |", flush=True)  # fmt: skip


def _rates(runs: Sequence[Run]) -> list[float]:
    """In tokens: lengths change as a policy learns, not the same way in each run."""
    return [run.tokens_per_s_behind(BEHIND_STEP) for run in runs]


def main() -> None:
    """Run them, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", default=["simulated", "skewed"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=128, help="a step, of the simulated task")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 1.0])
    args: Any = parser.parse_args()
    print("| task | mode | placement | tokens/s | to apart | trainer waits, % |\n|---" + "|---" * 5 + "|")
    if "simulated" in args.tasks:
        with tempfile.TemporaryDirectory() as scratch:
            for share in args.shares:
                job, asked = simulated(share, groups=args.groups, steps=args.steps, folder=Path(scratch))
                measure(f"simulated, {share:g}", job, asked, rounds=args.rounds)
    if "skewed" in args.tasks:
        job, asked = skewed(steps=args.steps)
        measure("skewed", job, asked, rounds=args.rounds)


if __name__ == "__main__":
    main()
