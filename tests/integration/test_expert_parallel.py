"""Models whose experts an expert group of ranks divides (torch's all-to-all and FSDP2 over gloo), against one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl_workers.models.published import as_tensor
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.torch_engine import create
from support import tensor_ranks
from support.rank0 import act
from support.rank_equality import CLIPPED, KL, PPO, check_equal, check_published, check_weights, run, save
from support.rank_team import RankTeam
from support.trainer_groups import trainer_spec

pytestmark = pytest.mark.timeout(600)  # every process loads torch

FIELD = "spec.trainer.parallelism.expert"


def test_two_ranks_of_an_expert_group_equal_one(tmp_path: Path) -> None:
    """Two micro-steps before each update; in the second one rank has no samples, and computes experts for the other."""
    models = [save("qwen3_moe", tmp_path / "moe", job=PPO), _lopsided(tmp_path / "lopsided")]
    refused = [save("qwen3", tmp_path / "dense"), save("qwen3_moe", tmp_path / "odd", num_experts=3)]
    found = run(tmp_path / "two", [*models, *refused], ranks=2, expert=2)
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
    found = run(tmp_path / "run", models, ranks=4, expert=expert, replicate=replicate)
    for model in models:
        check_equal(found[model.name], tensor_ranks.trained(model))
        check_published(found[model.name], replicas=replicate)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_checkpoints_move_between_expert_groups_and_shards(tmp_path: Path) -> None:
    """Each layout resumes after two updates of the one before it, and its third equals one rank's."""
    model = save("qwen3_moe", tmp_path / "ppo", job=PPO)
    expected = tensor_ranks.trained(model)
    before: Path | None = None
    layouts = {"expert": (2, 2), "shards": (2, 1), "both": (4, 2), "all": (4, 4), "back": (2, 2)}
    for name, (ranks, expert) in layouts.items():
        folder = tmp_path / name
        folder.mkdir()
        if before is not None:
            (before / "ppo-saved").rename(folder / "ppo-loaded")
        (found,) = run(folder, [model], ranks=ranks, expert=expert).values()
        check_weights(found, expected)
        before = folder


@pytest.mark.soak
def test_an_engine_trains_with_expert_groups_as_one_rank(tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path / "model")
    job: dict[str, Any] = {"microBatchTokens": 32, "algorithm": KL, **CLIPPED}
    one = create(EngineSetup(spec=trainer_spec(**job), model_path=str(model), threads=1))
    expected = [act(one, {"do": "step", "step": step, "groups": 3}) for step in range(3)]
    with RankTeam(tmp_path / "two", size=2, model=model, processesPerNode=2, parallelism={"expert": 2}, **job) as team:
        assert team.answer() == "ready"
        metrics = team.steps(3, groups=3)
        published = team.publish(3).tensors(of_rank_0=False)
        assert team.leave() == [0, 0], team.log(1)
    for found, wanted in zip(metrics, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(as_tensor(published[name]), as_tensor(tensor), rtol=1e-5, atol=1e-5)
