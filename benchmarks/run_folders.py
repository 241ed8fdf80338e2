"""Starts a job and reads what its run folder holds: shared by the benchmarks, does nothing by itself."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
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


def _shares(files: Sequence[Path]) -> dict[str, float]:
    """Sums over the processes of a role, between each one's first use and its end: the start (`other`) is left out."""
    parts = [read_lines(file)[-1]["parts"] for file in files]
    sums = {
        name: sum(value for part in parts for key, value in part.items() if key.split("_")[0] == name)
        for name in ("busy", "pipeline", "skew", "weights")
    }
    total = sum(sums.values())
    return {name: value / total for name, value in sums.items()}
