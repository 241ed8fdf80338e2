"""Job documents for tests of tasks and rewards."""

from pathlib import Path
from typing import Any

from streamrl.spec import RLJob, parse_job
from streamrl.spec.task import Task

CHAIN_SUM = {
    "reasoningGym": {
        "name": "chain_sum",
        "parameters": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    }
}
VERIFIER = {"name": "right", "verifier": {}}


def make_job(
    *, dataset: dict[str, Any] = CHAIN_SUM, rewards: Any = (VERIFIER,), algorithm: Any = None, **task: Any
) -> RLJob:
    """A small valid job around a data set and rewards, or a mixture."""
    alone = {} if "mixture" in task else {"dataset": dataset, "rewards": list(rewards)}
    spec = {
        "model": {"scratch": {}},
        "task": {**alone, "sampling": {"maxTokens": 16}, "processes": 1, **task},
        "algorithm": algorithm or {"grpo": {}},
        "pipeline": {"batchGroups": 2, "steps": 2},
        "generators": [{"name": "local", "engine": {"hf": {}}, "scaling": {"static": {"replicas": 1}}}],
    }
    return parse_job(
        {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "test"}, "spec": spec}
    )


def make_task(**parts: Any) -> Task:
    """The task of such a job."""
    return make_job(**parts).spec.task


def write_lines(path: Path, *, count: int) -> dict[str, Any]:
    """A JSONL file of sums; returns the data set that names it."""
    lines = [f'{{"prompt": "{i}+1=", "answer": "{i + 1}", "level": {i % 3}}}' for i in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"jsonl": {"path": path.name}}
