"""Samples/s by where generators are: on devices of their own, in turn with the trainer, and one on the trainer's device beside others.

    python benchmarks/placement.py simulated    # by the scheduler's own core in virtual time: two to eight devices; ten minutes of a processor
    python benchmarks/placement.py modes        # `streamrl run` on two cores, engine hf: the README's job
    python benchmarks/placement.py stages       # the same: the skewed task of `learning.py`

    apart        one device for the trainer, a generator on each other one
    Colocated    a generator on each device, and all devices for the trainer, in turn
    lending      apart, and one more generator on the trainer's device while the trainer waits

Seeds are the outer loop, so a busy machine hurts all alike. Prints medians, and ratios to `apart` of the same mode and seed: median, least to most.
Colocated is beside StreamSync. `simulated`: a model of 7B on one device, 1024 samples a step, log-normal lengths up to 20,000 tokens. To train a step
takes `--shares` of what the generators of `apart` take for it with all slots full, and on n devices an nth.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from learning import EXPERIMENTS, Changes
from run_folders import run_job

from streamrl_cli.simulation.reading import parse_scenario
from streamrl_cli.simulation.results import steady_step_s
from streamrl_cli.simulation.world import simulate

CURVE = ((1, 8.3), (8, 9.0), (32, 10.2), (64, 11.7), (128, 15.2))
"""Milliseconds of a decoding step by samples."""
SLOTS, GROUPS, GROUP_SIZE = 128, 128, 8
TOKEN_S = CURVE[-1][1] / 1000 / SLOTS
"""Of a generator with all slots full."""
SYNC, ASYNC = "StreamSync", "StreamAsync"
VARIANTS = ((SYNC, "apart"), (SYNC, "Colocated"), (SYNC, "lending"), (ASYNC, "apart"), (ASYNC, "lending"))
BEHIND_STEP = 2


class Rate(NamedTuple):
    """Of one run."""

    per_s: float
    trainer_waits: float  # share of its wall


def scenario(mode: str, placement: str, *, devices: int, share: float, steps: int, seed: int) -> dict[str, Any]:
    """A simulation of so many devices."""
    colocated = placement == "Colocated"
    common = {"slots": SLOTS, "latency": [{"batch": b, "milliseconds": ms} for b, ms in CURVE]}
    own = {"name": "own", "scaling": {"static": {"replicas": devices - (not colocated)}}, **common}
    lent = [{"name": "lent", "devices": "Trainer", **common}] if placement == "lending" else []
    return {
        "seed": seed,
        "groupSize": GROUP_SIZE,
        "maxTokens": 20_000,
        "resolutionTokens": 16,
        "pipeline": {
            "mode": placement if colocated else mode,
            "maxStalenessSteps": int(mode == ASYNC),
            "batchGroups": GROUPS,
            "steps": steps,
        },
        "scheduling": {"maxBufferBytes": "4Gi"},
        "pools": [own, *lent],
        "lengths": {"logNormal": {"medianTokens": 2500, "sigma": 0.7}, "withinGroupPercent": 50},
        "trainer": {"secondsPerToken": share * TOKEN_S / (devices - 1) / (devices if colocated else 1)},
        "curvesKnown": True,
    }


def simulated(seed: int, mode: str, placement: str, *, devices: int, share: float, steps: int) -> Rate:
    """In virtual time."""
    found = simulate(parse_scenario(scenario(mode, placement, devices=devices, share=share, steps=steps, seed=seed)))
    step_s = steady_step_s(found.steps)
    assert step_s is not None, "one step says nothing"
    return Rate(GROUPS * GROUP_SIZE / step_s, found.ratios("trainer")["pipeline"])


def real(seed: int, mode: str, placement: str, *, task: str, steps: int) -> Rate:
    """In tokens: lengths change as a policy learns, not the same way in each run."""
    asked = EXPERIMENTS[task]
    never = "spec.task.evaluation.intervalSteps=1000000"
    changes = [f"spec.seed={seed}", *asked.fixed(), never, f"spec.pipeline.steps={steps}", *_placed(mode, placement)]
    run = run_job(asked.job, changes=changes)
    return Rate(run.tokens_per_s_behind(BEHIND_STEP), run.shares["trainer"]["pipeline"])


def _placed(mode: str, placement: str) -> Changes:
    if placement == "Colocated":
        two = ("spec.trainer.processesPerNode=2", "spec.generators[0].scaling={static: {replicas: 2}}")
        return ("spec.pipeline.mode=Colocated", "spec.pipeline.maxStalenessSteps=0", *two)
    order = (f"spec.pipeline.mode={mode}", f"spec.pipeline.maxStalenessSteps={int(mode == ASYNC)}")
    engine = "engine: {hf: {slots: 64}}"
    pools = f"spec.generators=[{{name: local, {engine}}}, {{name: lent, devices: Trainer, {engine}}}]"
    return (*order, pools) if placement == "lending" else order


def measure(title: str, rate: Callable[[int, str, str], Rate], *, seeds: Sequence[int]) -> None:
    """Run all, seed by seed, and print a line for each."""
    found: Mapping[tuple[str, str], list[Rate]] = {name: [] for name in VARIANTS}
    for seed in seeds:
        for (mode, placement), mine in found.items():
            mine.append(rate(seed, mode, placement))
            print(f"# {title}, seed {seed}, {mode} {placement}: {mine[-1].per_s:.1f} a second", flush=True)
    for (mode, placement), mine in found.items():
        ratios = [one.per_s / other.per_s for one, other in zip(mine, found[mode, "apart"], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        per_s = statistics.median(one.per_s for one in mine)
        waits = f"{100 * statistics.mean(one.trainer_waits for one in mine):.0f}"
        print(f"| {title} | `{mode}` | {placement} | {per_s:,.1f} | {ratio} | {waits} |", flush=True)


def main() -> None:
    """Run them, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", default=["simulated", "modes", "stages"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    args = parser.parse_args()
    print(
        "| task | mode | placement | samples/s; modes, stages: tokens/s | to apart | trainer waits, % |\n|---"
        + "|---" * 5
        + "|"
    )
    if "simulated" in args.tasks:
        for devices in args.devices:
            for share in args.shares:
                of = partial(simulated, devices=devices, share=share, steps=args.steps)
                measure(f"{devices} devices, {share:g}", of, seeds=args.seeds)
    for task in sorted({"modes", "stages"} & set(args.tasks)):
        measure(task, partial(real, task=task, steps=args.steps), seeds=args.seeds)


if __name__ == "__main__":
    main()
