"""Starts a job and reads what its run folder holds: shared by the benchmarks, does nothing by itself."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "chain-sum.yaml"

_SKIPPED_STEPS = 3
"""Steps that belong to the start: first allocations, the filling of the pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a finished run left."""

    steps: list[dict[str, Any]]  # lines of steps.jsonl
    evaluations: list[dict[str, Any]]  # lines of evaluations.jsonl
    shares: Mapping[str, Mapping[str, float]]  # role -> busy | pipeline | skew | weights | other -> share of the wall

    @property
    def held_out(self) -> float:
        """Mean reward of greedy answers after the last step."""
        return float(self.evaluations[-1]["mean_reward"])

    @property
    def held_out_before(self) -> float:
        """The same before the first step."""
        return float(self.evaluations[0]["mean_reward"])

    @property
    def samples_per_s(self) -> float:
        """From the end of the third step to the end of the last."""
        return self.samples_per_s_behind(_SKIPPED_STEPS)

    def samples_per_s_behind(self, step: int) -> float:
        """From the end of the first `step` steps to the end of the last."""
        return self._rate_behind(step, "samples")

    def tokens_per_s_behind(self, step: int) -> float:
        """The same in tokens of completions: lengths change as a policy learns, not the same way in each run."""
        return self._rate_behind(step, "tokens")

    def _rate_behind(self, step: int, what: str) -> float:
        took_s = self.steps[-1]["elapsed_s"] - self.steps[step - 1]["elapsed_s"]
        return float(sum(line[what] for line in self.steps[step:]) / took_s)


def simulated_job(
    name: str, *, pipeline: Mapping[str, Any], engine: Mapping[str, Any] = MappingProxyType({}), **spec: object
) -> dict[str, Any]:
    """A job of simulated parts over `prompts.jsonl`, in groups of eight; `engine`: the generators'."""
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"scratch": {}},
            "task": {
                "dataset": {"jsonl": {"path": "prompts.jsonl"}},
                "groupSize": 8,
                "sampling": {"maxTokens": 4096},
                "rewards": [{"name": "answer", "exactMatch": {}}],
                "evaluation": {"maxPrompts": 1, "intervalSteps": 1_000_000},
            },
            "pipeline": {"mode": "StreamAsync", "maxStalenessSteps": 1, **pipeline},
            "generators": [{"name": "sim", "engine": {"simulated": {**engine}}}],
            "trainer": {"engine": {"simulated": {}}},
            **spec,
        },
    }


def arguments(description: str | None, *, seeds: int, only: Iterable[str] = ()) -> argparse.ArgumentParser:
    """What benchmarks of whole runs are asked: how many seeds and steps, of which job, and which of their variants."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(seeds)))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--job", type=Path, default=EXAMPLE)
    parser.add_argument("--only", nargs="+", choices=list(only), default=list(only))
    return parser


def run_in_turn(
    job: Path,
    variants: Mapping[str, Sequence[str]],
    *,
    seeds: Sequence[int],
    fixed: Sequence[str],
    tell: Callable[[Run], str],
) -> dict[str, list[Run]]:
    """Every variant (name -> changes of the job) with every seed, one after the other; seeds are the outer loop.

    So all variants start from the same warmed-up models, and a busy machine hurts them alike. `tell`: what a line says of a run.
    """
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for seed in seeds:
        for name, changes in variants.items():
            run = run_job(job, changes=[f"spec.seed={seed}", *fixed, *changes])
            runs[name].append(run)
            print(f"# seed {seed} {name}: {tell(run)}", flush=True)
    return runs


def run_job(job: Path, *, changes: Sequence[str]) -> Run:
    """`streamrl run` of a job with changes like `spec.seed=1`; the folder is removed afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        start(job, folder=folder, changes=changes)
        return read_run(folder)


def start(job: Path, *, folder: Path, changes: Sequence[str], **environ: str) -> None:
    """`streamrl run` of a job, until its end."""
    flags = [part for change in changes for part in ("--set", change)]
    command = [sys.executable, "-m", "streamrl_cli.main", "run", str(job), "--plain", "--run-dir", str(folder)]
    subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL, env=os.environ | environ)


def read_run(folder: Path) -> Run:
    """What a run folder holds."""
    metrics = folder / "metrics"
    return Run(
        steps=read_lines(metrics / "steps.jsonl"),
        evaluations=read_lines(metrics / "evaluations.jsonl"),
        shares={role: _shares(sorted(metrics.glob(f"{role}-*.jsonl"))) for role in ("generator", "trainer")},
    )


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def spread(values: Sequence[float], *, digits: int = 3) -> str:
    """`mean ± standard deviation`."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def parts_of_the_wall(runs: Sequence[Run], *, role: str) -> str:
    """Mean shares of a role's wall in percent: `busy / pipeline / skew / weights`."""
    names = ("busy", "pipeline", "skew", "weights")
    return " / ".join(f"{100 * statistics.mean(run.shares[role][name] for run in runs):.0f}" for name in names)


def _shares(files: Sequence[Path]) -> dict[str, float]:
    """Sums over the processes of a role, between each one's first use and its end: the start (`other`) is left out."""
    parts = [read_lines(file)[-1]["parts"] for file in files]
    sums = {
        name: sum(value for part in parts for key, value in part.items() if key.split("_")[0] == name)
        for name in ("busy", "pipeline", "skew", "weights")
    }
    total = sum(sums.values())
    return {name: value / total for name, value in sums.items()}
