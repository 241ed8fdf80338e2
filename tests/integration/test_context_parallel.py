"""Rows whose tokens several ranks share (Ulysses over gloo), against one rank."""

from pathlib import Path
from typing import Any

import pytest

from support import tensor_ranks
from support.rank_equality import KL, check_equal, check_published, run, save

pytestmark = pytest.mark.timeout(600)  # every process loads torch

PPO = {"rule": "ppo", "algorithm": KL, "activationCheckpointing": True}
FIELD = "spec.trainer.parallelism.context"


def test_two_ranks_that_share_rows_equal_one(tmp_path: Path) -> None:
    """Rows of several samples, two micro-steps before each update; one key-value head, which both ranks need."""
    tied = save("qwen3", tmp_path / "tied", num_key_value_heads=1, tie_word_embeddings=True, job=PPO)
    window = save("gemma3", tmp_path / "window", sliding_window=5)
    state = save("qwen3_5", tmp_path / "state")
    found = run(tmp_path / "two", [tied, window, state], context=2)
    for model in (tied, window):
        check_equal(found[model.name], tensor_ranks.trained(model))
        check_published(found[model.name])
    assert found["state"]["refused"].startswith(
        f"{FIELD}: must be 1 for models of the family qwen3_5_text, which carries state"
    )
