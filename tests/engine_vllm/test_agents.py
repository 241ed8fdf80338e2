"""Random conversations with tools, unicode, special tokens and edits by the engine `vllm`: what is trained is what it sampled."""

from pathlib import Path

import pytest

from support.agent_exactness import check_conversations, check_edits

VLLM = {"vllm": {"maxConcurrency": 64, "kvCacheBytes": "64Mi"}}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_what_is_trained_is_what_was_sampled(tmp_path: Path) -> None:
    check_conversations(tmp_path, engine=VLLM)


@pytest.mark.timeout(1200)
def test_each_trained_token_stands_behind_what_its_engine_had(tmp_path: Path) -> None:
    check_edits(tmp_path, engine=VLLM)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_ten_thousand_turns(tmp_path: Path) -> None:
    check_conversations(tmp_path, engine=VLLM, steps=32, batch_groups=32, least=10_000, deadline_s=2400.0)
