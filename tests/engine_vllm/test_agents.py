"""Random conversations with tools, unicode and special tokens by the engine `vllm`: what is trained is what it sampled."""

from pathlib import Path

import pytest

from support.agent_exactness import check_conversations

VLLM = {"vllm": {"maxConcurrency": 64, "kvCacheBytes": "64Mi"}}


@pytest.mark.timeout(1200)
def test_what_is_trained_is_what_was_sampled(tmp_path: Path) -> None:
    check_conversations(tmp_path, engine=VLLM)
