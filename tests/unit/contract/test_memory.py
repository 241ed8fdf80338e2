"""Memory of a rank of the trainer, part by part."""

from dataclasses import replace
from typing import Any

import pytest

from streamrl.memory import ModelSizes, RankMemory, published_bytes, rank_memory
from streamrl.spec.task import Task
from streamrl.spec.training import Trainer

GIB = 2**30
WEIGHTS = 7_615_616_512
QWEN25_7B = ModelSizes(
    parameters=WEIGHTS,
    trained=WEIGHTS,
    matrices=WEIGHTS - 2 * 152_064 * 3584,
    embeddings=2 * 152_064 * 3584,
    vocabulary=152_064,
    hidden=3584,
    feed_forward=18_944,
    layers=28,
)
SHORT = replace(QWEN25_7B, positions=8192)
MIXTURE = replace(QWEN25_7B, experts=28 * 3 * 3584 * 18_944)
"""As if the feed-forward layers were experts."""
ADAPTERS = 40_000_000
TURNS = {"python": {"function": "games:play"}, "maxTurns": 4}


def memory(
    *,
    frozen: int = 0,
    critic: bool = False,
    target: bool = False,
    sizes: ModelSizes = QWEN25_7B,
    task: dict[str, Any] | None = None,
    **trainer: Any,
) -> RankMemory:
    given = Trainer.model_validate(trainer)
    return rank_memory(
        sizes, trainer=given, task=task_of(**task or {}), frozen_parameters=frozen, critic=critic, target=target
    )


def task_of(*, tokens: int = 1024, **changes: Any) -> Task:
    return Task.model_validate(
        {
            "dataset": {"jsonl": {"path": "prompts.jsonl"}},
            "groupSize": 8,
            "sampling": {"maxTokens": tokens},
            "rewards": ({"name": "answer", "exactMatch": {}},),
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("trainer", "part", "gib"),
    [
        ({}, "parameters", 28.4),
        ({}, "gradients", 28.4),
        ({}, "optimiser", 56.7),
        ({"optimizer": "Muon"}, "optimiser", 32.4),
        ({}, "gathered", 0.0),
        ({}, "logits", 2.8),  # three copies of 256 MiB, the gradient of the head
        ({}, "publishing", 2.0),  # the head
        ({}, "activations", 203.0),  # 16,384 tokens, 28 layers of 464 KiB a token
        ({"precision": "BF16"}, "activations", 138.2),
        ({"precision": "BF16"}, "publishing", 1.0),
        ({"processesPerNode": 4}, "publishing", 0.5),
        ({"activationCheckpointing": True}, "activations", 13.4),
        ({"activationCheckpointing": True, "precision": "BF16"}, "activations", 8.0),
        ({"microBatchTokens": 4096}, "activations", 50.7),
        ({"processesPerNode": 4, "parallelism": {"context": 4}}, "activations", 50.7),
        ({"microBatchTokens": 4096}, "logits", 2.8),
        ({"microBatchTokens": 1_048_576}, "logits", 2.8),  # whatever the tokens
        ({"microBatchTokens": 4096, "task": {"tokens": 31 * 1024}}, "activations", 406.0),  # a sample, with its prompt
        ({"microBatchTokens": 4096, "task": {"tokens": 7 * 1024, "environment": TURNS}}, "activations", 367.9),
        ({"microBatchTokens": 4096, "sizes": SHORT, "task": {"tokens": 31 * 1024}}, "activations", 101.5),
        ({"microBatchTokens": 16, "sizes": replace(SHORT, positions=16)}, "logits", 2.1),
        ({"processesPerNode": 8}, "parameters", 3.5),
        ({"processesPerNode": 4, "nodes": 2}, "optimiser", 7.1),
        ({"processesPerNode": 8, "precision": "BF16"}, "gathered", 5.4),
        ({"cpuOffload": True, "precision": "BF16"}, "gathered", 5.4),
        ({"processesPerNode": 8, "parallelism": {"tensor": 2}}, "parameters", 3.5),
        ({"processesPerNode": 8, "parallelism": {"tensor": 2}, "precision": "BF16"}, "gathered", 3.7),
        ({"processesPerNode": 8, "precision": "BF16", "sizes": MIXTURE}, "gathered", 5.4),
        ({"processesPerNode": 8, "parallelism": {"expert": 8}, "precision": "BF16", "sizes": MIXTURE}, "gathered", 4.4),
        ({"processesPerNode": 2, "parallelism": {"tensor": 2}}, "logits", 1.8),
        ({"processesPerNode": 2, "parallelism": {"tensor": 2}}, "activations", 119.9),
        ({"critic": True}, "parameters", 56.7),
        ({"critic": True}, "optimiser", 113.5),
        ({"critic": True, "target": True}, "parameters", 85.1),
        ({"critic": True, "target": True}, "optimiser", 113.5),
        ({"frozen": WEIGHTS}, "parameters", 56.7),
        ({"frozen": WEIGHTS}, "gradients", 28.4),
    ],
)
def test_parts_of_a_7b_model(trainer: dict[str, Any], part: str, gib: float) -> None:
    assert getattr(memory(**trainer), part) / GIB == pytest.approx(gib, abs=0.06)


def test_with_cpu_offload_the_gpu_has_all_but_the_states() -> None:
    found = memory(cpuOffload=True)
    assert found.without_states().states == 0
    assert found.without_states().all == found.all - found.states


ADAPTED = replace(QWEN25_7B, parameters=WEIGHTS + ADAPTERS, trained=ADAPTERS)
LAST = 480_000_000
LATE = replace(QWEN25_7B, trained=LAST)


def test_adapters_alone_have_gradients() -> None:
    found = memory(sizes=ADAPTED, lora={})
    assert found.gradients == 4 * ADAPTERS
    assert found.optimiser == 8 * ADAPTERS
    assert found.parameters == 4 * (WEIGHTS + ADAPTERS)


def test_before_a_side_path_little_is_kept_and_the_critic_is_trained_like_the_policy() -> None:
    sherl, lora = memory(sizes=LATE, critic=True, sherl={}), memory(sizes=ADAPTED, critic=True, lora={})
    assert sherl.gradients == 2 * 4 * LAST < lora.gradients
    assert sherl.activations < 0.15 * lora.activations
    assert published_bytes(LATE, trainer=Trainer.model_validate({"sherl": {}})) == 4 * (WEIGHTS - LAST) + 2 * 4 * LAST


def test_the_first_part_that_does_not_fit_is_named() -> None:
    found = memory()
    ends = {"parameters": 28, "gradients": 56, "optimiser": 113, "logits": 116, "publishing": 118, "activations": 321}
    for part, gib in ends.items():
        assert found.shortage(gib * GIB) == part
    assert found.shortage(322 * GIB) is None


def test_two_versions_are_in_main_memory_a_share_on_each_rank() -> None:
    for ranks in (1, 4):
        trainer = Trainer.model_validate({"precision": "BF16", "processesPerNode": ranks})
        assert published_bytes(QWEN25_7B, trainer=trainer) == 2 * 2 * WEIGHTS // ranks


def test_replicas_need_what_the_ranks_of_one_need_alone() -> None:
    alone = memory(precision="BF16", processesPerNode=4)
    assert memory(precision="BF16", processesPerNode=8, parallelism={"replicate": 2}) == alone


def test_versions_share_the_base_of_adapters() -> None:
    trainer = Trainer.model_validate({"precision": "BF16", "lora": {}})
    assert published_bytes(ADAPTED, trainer=trainer) == 2 * WEIGHTS + 2 * 4 * ADAPTERS
