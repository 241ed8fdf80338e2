"""Job documents for tests, small and valid."""

from typing import Any

from streamrl.spec import RLJob, parse_job

LINES = 200
"""Prompts in the data set of `simulated_job`."""


def simulated_job(
    *,
    replicas: int = 2,
    steps: int = 20,
    staleness: int = 1,
    batch_groups: int = 4,
    dataset: str = "prompts.jsonl",
    **pool: Any,
) -> dict[str, Any]:
    """A job of simulated engines and trainer over a JSONL file. `pool` adds to the simulated engine."""
    engine = {"slots": 8, "latency": [{"batch": 1, "milliseconds": 0.5}], "meanTokens": 12.0, **pool}
    pipeline = {"batchGroups": batch_groups, "steps": steps, "mode": "StreamSync" if staleness == 0 else "StreamAsync"}
    if staleness:
        pipeline["maxStalenessSteps"] = staleness
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "simulated"},
        "spec": {
            "model": {"scratch": {}},
            "task": {
                "dataset": {"jsonl": {"path": dataset}},
                "groupSize": 4,
                "sampling": {"maxTokens": 64},
                "rewards": [{"name": "answer", "exactMatch": {}}],
                "evaluation": {"maxPrompts": 8, "intervalSteps": 10},
            },
            "pipeline": pipeline,
            "scheduling": {"leaseSeconds": 2.0},
            "generators": [
                {"name": "sim", "engine": {"simulated": engine}, "scaling": {"static": {"replicas": replicas}}}
            ],
            "trainer": {"engine": {"simulated": {}}},
            "storage": {"checkpoints": {"intervalSteps": 5}},
            "failurePolicy": {"maxRestarts": 100},
        },
    }


def tiny_job(*, dataset: str = "prompts.jsonl", steps: int = 20, replicas: int = 1) -> dict[str, Any]:
    """The smallest that trains a model: rewards that differ, so that there is a gradient, an entropy, a clip."""
    sizes = {"hiddenSize": 32, "layers": 1, "heads": 2, "intermediateSize": 64, "maxPositions": 64}
    task = {
        "dataset": {"jsonl": {"path": dataset}},
        "groupSize": 4,
        "sampling": {"maxTokens": 24},
        "rewards": [{"name": "digit", "regex": {"pattern": "[05]"}}],
        "evaluation": {"maxPrompts": 4, "intervalSteps": 4},
    }
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"scratch": {**sizes, "warmUp": {"steps": 20, "batchSize": 8}}},
            "task": task,
            "pipeline": {"mode": "StreamAsync", "maxStalenessSteps": 1, "batchGroups": 4, "steps": steps},
            "scheduling": {"lengthSignals": ["History"]},
            "generators": [
                {"name": "tiny", "engine": {"hf": {"slots": 8}}, "scaling": {"static": {"replicas": replicas}}}
            ],
        },
    }


def parsed_job(**changes: Any) -> RLJob:
    """The same, validated."""
    return parse_job(simulated_job(**changes))


def with_ranks(job: RLJob, ranks: int) -> RLJob:
    """With so many processes of the trainer on its node."""
    trainer = job.spec.trainer.model_copy(update={"processes_per_node": ranks})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"trainer": trainer})})


def write_prompts(path: Any) -> None:
    """The data set that `simulated_job` names; the simulated engine is right when it answers with the prompt."""
    path.write_text("".join(f'{{"prompt": "question {n}", "answer": "question {n}"}}\n' for n in range(LINES)))
