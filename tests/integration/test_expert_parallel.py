"""Models whose experts an expert group of ranks divides (torch's all-to-all and FSDP2 over gloo), against one rank."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import tensor_ranks
from support.rank_equality import KL, check_equal, check_published, check_resumed, run, save

pytestmark = pytest.mark.timeout(600)  # every process loads torch

PPO = {"rule": "ppo", "algorithm": KL, "activationCheckpointing": True}
FIELD = "spec.trainer.parallelism.expert"


def test_two_ranks_of_an_expert_group_equal_one(tmp_path: Path) -> None:
    """Two micro-steps before each update; in the second one rank has no samples, and computes experts for the other."""
    models = [save("qwen3_moe", tmp_path / "moe", job=PPO), _lopsided(tmp_path / "lopsided")]
    refused = [save("qwen3", tmp_path / "dense"), save("qwen3_moe", tmp_path / "odd", num_experts=3)]
    found = run(tmp_path / "two", [*models, *refused], expert=2)
    for model in models:
        check_equal(found[model.name], tensor_ranks.trained(model))
        check_published(found[model.name])
    dense, odd = (found[model.name]["refused"] for model in refused)
    assert dense.startswith(
        f"{FIELD}: must be 1 for models of the family qwen3, which has no plan for experts, got 2; "
    )
    assert odd.startswith(f"{FIELD}: must divide the model's number of experts, 3, got 2; ")


def _lopsided(folder: Path) -> Path:
    """A model whose tokens all choose the first two of four experts: the ranks with the others get no token."""
    save("gpt_oss", folder)
    weights = load_file(folder / "model.safetensors")
    biases = [bias for name, bias in weights.items() if name.endswith("router.bias")]
    assert biases
    for bias in biases:
        bias.copy_(torch.tensor([100.0, 100.0, 0.0, 0.0]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("expert", "replicate"), [(2, 1), (2, 2), (4, 1)], ids=["shards", "replicas", "all"])
def test_families_divide_their_experts_alike(tmp_path: Path, expert: int, replicate: int) -> None:
    families = ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "glm4_moe"]
    models = [save(family, tmp_path / family) for family in families]
    models.append(save("qwen3_moe", tmp_path / "ppo", job=PPO))
    models.append(save("qwen3_moe", tmp_path / "archer", job={"rule": "archer"}))
    models.append(save("qwen3_moe", tmp_path / "muon", job={"optimizer": "Muon"}))
    models.append(save("qwen3_moe", tmp_path / "padded", job={"microBatchLayout": "Padded"}))
    models.append(_lopsided(tmp_path / "lopsided"))
    found = run(tmp_path / "run", models, shard=4 // (expert * replicate), expert=expert, replicate=replicate)
    for model in models:
        check_equal(found[model.name], tensor_ranks.trained(model))
        check_published(found[model.name], replicas=replicate)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_checkpoints_move_between_expert_groups_and_shards(tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path / "ppo", job=PPO)
    layouts = ({"expert": 2}, {"shard": 2}, {"shard": 2, "expert": 2}, {"expert": 4}, {"expert": 2})
    check_resumed(model, layouts, folder=tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ranks_that_share_rows_divide_experts_too(tmp_path: Path) -> None:
    models = [save("qwen3_moe", tmp_path / "ppo", job=PPO), save("gpt_oss", tmp_path / "sinks")]
    found = run(tmp_path / "run", models, context=2, expert=2)
    for model in models:
        check_equal(found[model.name], tensor_ranks.trained(model))
        check_published(found[model.name])
