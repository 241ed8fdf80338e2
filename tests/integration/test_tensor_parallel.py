"""Models that a tensor group of ranks shares (torch's tensor parallelism and FSDP2 over gloo), against one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl_workers.models.published import as_tensor
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.torch_engine import create
from support import tensor_ranks
from support.model_families import save_tiny
from support.rank0 import act
from support.rank_team import RankTeam
from support.trainer_groups import trainer_spec

pytestmark = pytest.mark.timeout(600)  # every process loads torch

TESTS = Path(__file__).parents[1]
EVEN = {"vocab_size": 48, "num_key_value_heads": 2}
"""Sizes that two ranks divide."""
CLIPPED = {"gradientClipNorm": 0.5, "learningRate": 1e-4}
"""Small steps: AdamW divides gradients of rounding noise by their own size."""
KL = {"referenceKl": {"coefficient": 0.1}}


def _save(family: str, folder: Path, *, job: dict[str, Any] | None = None, **changes: Any) -> Path:
    save_tiny(family, folder, **{**EVEN, **changes})
    (folder / "trainer.json").write_text(json.dumps({**CLIPPED, **(job or {})}))
    return folder


def _run(folder: Path, models: list[Path], *, shard: int, tensor: int) -> dict[str, Any]:
    """What rank 0 of a team writes of each model."""
    environ = {**os.environ, "PYTHONPATH": str(TESTS), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error", "-m", "support.tensor_ranks"]
    folder.mkdir(exist_ok=True)
    processes = [
        subprocess.Popen([*command, str(rank), str(shard), str(tensor), str(folder), *map(str, models)], env=environ)
        for rank in range(shard * tensor)
    ]
    assert {process.wait() for process in processes} == {0}
    return {model.name: torch.load(folder / f"{model.name}.pt", weights_only=False) for model in models}


def _check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for numbers, others in zip(found["numbers"], expected["numbers"], strict=True):
        assert numbers.pop("losses") == pytest.approx(others["losses"], rel=1e-5, abs=1e-6)
        assert numbers == pytest.approx({name: others[name] for name in numbers}, rel=1e-5)
        assert others["gradient_norm"] > CLIPPED["gradientClipNorm"], "nothing was clipped"
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(
            found["gradients"][name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())
        )
    _check_weights(found, expected)


def _check_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["weights"].keys() == expected["weights"].keys()
    for name, data in expected["weights"].items():
        one, other = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (found["weights"][name], data))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _check_published(found: dict[str, Any]) -> None:
    """Each rank copies its own rows; together they are what is gathered, each byte once."""
    parts = found["published"]
    slices = sorted((key, data) for part in parts for key, data in part.items() if data)
    for name, whole in found["weights"].items():
        assert b"".join(data for (tensor, _), data in slices if tensor == name) == whole, name
    total = sum(map(len, found["weights"].values()))
    assert max(sum(map(len, part.values())) for part in parts) < 1.2 * total / len(parts) + 4096


PPO = {"rule": "ppo", "algorithm": KL, "activationCheckpointing": True}
FIELD = "spec.trainer.parallelism.tensor"


def test_two_ranks_of_a_tensor_group_equal_one(tmp_path: Path) -> None:
    """Two micro-steps before each update: gradients of norms of queries and keys are parts on each rank, and are summed once."""
    tied = _save("qwen3", tmp_path / "tied", tie_word_embeddings=True, job=PPO)
    refused = [_save("qwen3_moe", tmp_path / "moe"), _save("qwen3", tmp_path / "heads", num_key_value_heads=1)]
    found = _run(tmp_path / "two", [tied, *refused], shard=1, tensor=2)
    _check_equal(found["tied"], tensor_ranks.trained(tied))
    _check_published(found["tied"])
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
    models = [_save(family, tmp_path / family) for family in families]
    models.append(_save("qwen3", tmp_path / "ppo", job=PPO, tie_word_embeddings=True))
    models.append(_save("qwen3", tmp_path / "archer", job={"rule": "archer"}))
    models.append(_save("llama", tmp_path / "padded", job={"microBatchLayout": "Padded"}))
    found = _run(tmp_path / "run", models, shard=shard, tensor=2)
    for model in models:
        _check_equal(found[model.name], tensor_ranks.trained(model))
        _check_published(found[model.name])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_checkpoints_move_between_tensor_groups_and_shards(tmp_path: Path) -> None:
    """Each layout resumes after two updates of the one before it, and its third equals one rank's."""
    model = _save("qwen3", tmp_path / "ppo", job=PPO, tie_word_embeddings=True)
    expected = tensor_ranks.trained(model)
    before: Path | None = None
    for name, shard, tensor in (("tensor", 1, 2), ("shards", 2, 1), ("both", 2, 2), ("back", 1, 2)):
        folder = tmp_path / name
        folder.mkdir()
        if before is not None:
            (before / "ppo-saved").rename(folder / "ppo-loaded")
        (found,) = _run(folder, [model], shard=shard, tensor=tensor).values()
        _check_weights(found, expected)
        before = folder


@pytest.mark.soak
def test_an_engine_deals_the_same_samples_to_a_tensor_group(tmp_path: Path) -> None:
    model = _save("qwen3", tmp_path / "model", tie_word_embeddings=True)
    job: dict[str, Any] = {"microBatchTokens": 32, "algorithm": KL, **CLIPPED}
    one = create(EngineSetup(spec=trainer_spec(**job), model_path=str(model), threads=1))
    expected = [act(one, {"do": "step", "step": step, "groups": 3}) for step in range(3)]
    with RankTeam(tmp_path / "two", size=2, model=model, processesPerNode=2, parallelism={"tensor": 2}, **job) as team:
        assert team.answer() == "ready"
        metrics = team.steps(3, groups=3)
        published = team.publish(3).tensors(of_rank_0=False)
        assert team.leave() == [0, 0], team.log(1)
    for found, wanted in zip(metrics, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(as_tensor(published[name]), as_tensor(tensor), rtol=1e-5, atol=1e-5)
