"""Models that a tensor group of ranks shares (torch's tensor parallelism and FSDP2 over gloo), against one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl_workers.models.published import as_tensor
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.torch_engine import create
from support import tensor_ranks
from support.rank0 import act
from support.rank_equality import CLIPPED, KL, check_equal, check_published, check_resumed, run, save
from support.rank_team import RankTeam
from support.trainer_groups import trainer_spec

pytestmark = pytest.mark.timeout(600)  # every process loads torch

PPO = {"rule": "ppo", "algorithm": KL, "activationCheckpointing": True}
FIELD = "spec.trainer.parallelism.tensor"


def test_two_ranks_of_a_tensor_group_equal_one(tmp_path: Path) -> None:
    """Two micro-steps before each update: gradients of norms of queries and keys are parts on each rank, and are summed once."""
    tied = save("qwen3", tmp_path / "tied", tie_word_embeddings=True, job=PPO)
    refused = [save("qwen3_moe", tmp_path / "moe"), save("qwen3", tmp_path / "heads", num_key_value_heads=1)]
    found = run(tmp_path / "two", [tied, *refused], shard=1, tensor=2)
    check_equal(found["tied"], tensor_ranks.trained(tied))
    check_published(found["tied"])
    moe, heads = (found[model.name]["refused"] for model in refused)
    assert moe.startswith(
        f"{FIELD}: must be 1 for models of the family qwen3_moe, whose plan has moe_tp_experts, got 2; "
    )
    assert heads.startswith(f"{FIELD}: must divide the model's num_key_value_heads, 1, got 2; ")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", [1, 2])
def test_families_and_copies_are_cut_alike(tmp_path: Path, shard: int) -> None:
    families = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2"]
    models = [save(family, tmp_path / family) for family in families]
    models.append(save("qwen3", tmp_path / "ppo", job=PPO, tie_word_embeddings=True))
    models.append(save("qwen3", tmp_path / "archer", job={"rule": "archer"}))
    models.append(save("llama", tmp_path / "padded", job={"microBatchLayout": "Padded"}))
    found = run(tmp_path / "run", models, shard=shard, tensor=2)
    for model in models:
        check_equal(found[model.name], tensor_ranks.trained(model))
        check_published(found[model.name])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_checkpoints_move_between_tensor_groups_and_shards(tmp_path: Path) -> None:
    model = save("qwen3", tmp_path / "ppo", job=PPO, tie_word_embeddings=True)
    layouts = ({"tensor": 2}, {"shard": 2}, {"shard": 2, "tensor": 2}, {"tensor": 2})
    check_resumed(model, layouts, folder=tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("axis", "family"), [("tensor", "qwen3"), ("context", "qwen3"), ("expert", "qwen3_moe")])
def test_an_engine_trains_with_a_group_as_one_rank(tmp_path: Path, axis: str, family: str) -> None:
    model = save(family, tmp_path / "model", tie_word_embeddings=True)
    job: dict[str, Any] = {"microBatchTokens": 32, "algorithm": KL, **CLIPPED}
    one = create(EngineSetup(spec=trainer_spec(**job), model_path=str(model), threads=1))
    expected = [act(one, {"do": "step", "step": step, "groups": 3}) for step in range(3)]
    with RankTeam(tmp_path / "two", size=2, model=model, processesPerNode=2, parallelism={axis: 2}, **job) as team:
        assert team.answer() == "ready"
        metrics = team.steps(3, groups=3)
        published = team.publish(3).tensors(of_rank_0=False)
        assert team.leave() == [0, 0], team.log(1)
    for found, wanted in zip(metrics, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(as_tensor(published[name]), as_tensor(tensor), rtol=1e-5, atol=1e-5)
