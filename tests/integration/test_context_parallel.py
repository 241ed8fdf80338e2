"""Rows whose tokens several ranks share (Ulysses over gloo), against one rank."""

from pathlib import Path

import pytest

from support import tensor_ranks
from support.model_families import LONGROPE
from support.rank_equality import KL, check_equal, check_published, check_resumed, run, save

pytestmark = pytest.mark.timeout(600)  # every process loads torch

PPO = {"rule": "ppo", "algorithm": KL, "activationCheckpointing": True}
FIELD = "spec.trainer.parallelism.context"


def test_two_ranks_that_share_rows_equal_one(tmp_path: Path) -> None:
    """Rows of several samples, two micro-steps before each update; one key-value head, which both ranks need."""
    tied = save("qwen3", tmp_path / "tied", num_key_value_heads=1, tie_word_embeddings=True, job=PPO)
    window = save("gemma3", tmp_path / "window", sliding_window=5)
    refused = [save(family, tmp_path / family) for family in ("qwen3_5", LONGROPE)]
    found = run(tmp_path / "two", [tied, window, *refused], context=2)
    for model in (tied, window):
        check_equal(found[model.name], tensor_ranks.trained(model))
        check_published(found[model.name])
    state, switches = (found[model.name]["refused"] for model in refused)
    assert state.startswith(
        f"{FIELD}: must be 1 for models of the family qwen3_5_text, which carries state from token to token"
    )
    assert switches.startswith(
        f"{FIELD}: must be 1 for this model of the family phi3, whose rotary factors change with the length (longrope), got 2; "
    )


FAMILIES = ["llama", "qwen2", "gemma2", "gemma3", "mistral_window", "olmo2", "gpt_oss", "qwen3_moe", "deepseek_v3"]
"""With windows, soft caps, sinks, experts, heads of two sizes."""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [{"context": 2}, {"shard": 2, "context": 2}], ids=str)
def test_families_and_copies_share_rows_alike(tmp_path: Path, layout: dict[str, int]) -> None:
    models = [save(family, tmp_path / family) for family in FAMILIES]
    models.append(save("qwen3", tmp_path / "ppo", job=PPO, tie_word_embeddings=True))
    models.append(save("qwen3", tmp_path / "lora", job={"lora": {}, **PPO}))
    models.append(save("qwen3", tmp_path / "archer", job={"rule": "archer"}))
    models.append(save("llama", tmp_path / "gspo", job={"rule": "gspo"}))
    found = run(tmp_path / "run", models, **layout)
    for model in models:
        check_equal(found[model.name], tensor_ranks.trained(model))
        check_published(found[model.name])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "layout", [{"context": 2, "tensor": 2}, {"replicate": 2, "context": 2}, {"context": 4}], ids=str
)
def test_context_goes_with_the_other_dimensions(tmp_path: Path, layout: dict[str, int]) -> None:
    heads = {"num_attention_heads": 4}
    models = [save(family, tmp_path / family, **heads) for family in ("llama", "gemma3")]
    models.append(save("qwen3", tmp_path / "ppo", job=PPO, tie_word_embeddings=True, **heads))
    models.append(save("llama", tmp_path / "two-heads"))
    found = run(tmp_path / "run", models, **layout)
    for model in models[:-1]:
        check_equal(found[model.name], tensor_ranks.trained(model))
    if "replicate" not in layout:
        refused = f"{FIELD}: times parallelism.tensor must divide the model's num_attention_heads, 2, got {layout['context']}; "
        assert found["two-heads"]["refused"].startswith(refused)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_checkpoints_move_between_context_groups_and_shards(tmp_path: Path) -> None:
    model = save("qwen3", tmp_path / "ppo", job=PPO, tie_word_embeddings=True)
    layouts = ({"context": 2}, {"shard": 2}, {"shard": 2, "context": 2}, {"tensor": 2}, {"context": 2})
    check_resumed(model, layouts, folder=tmp_path)
