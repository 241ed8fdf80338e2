"""Random conversations with tools, unicode and special tokens by a real model: what is stored is what the engine sampled.

Stored log-probs are the engine's, of the tokens that it drew; the trainer's are of a forward over the stored tokens. The model's
distribution is far from uniform, so a single other token would show in both. A gateway that tokenizes the history again is
computed beside it: its contexts are others.
"""

from pathlib import Path

import pytest

from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.stream.packing import unpack_int32
from support.agent_runs import END, piece_tokenizer, stored_samples, stored_turns, traffic_job
from support.runs import LocalRun

STEPS = 4
MAX_DIFF_NATS = 1e-4
"""Of the same token's log-prob in float32, with caches and in one forward."""


@pytest.mark.timeout(400)
def test_what_is_trained_is_what_was_sampled(tmp_path: Path) -> None:
    run = LocalRun.start(traffic_job(tmp_path, steps=STEPS, batch_groups=8), folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(1)  # a busy machine takes a minute to import what trains
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    for line in read_jsonl(run.folder / "metrics" / "steps.jsonl"):
        assert line["reward_failed"] == 0
        assert line["trainer"]["train_infer_logprob_diff_max"] < MAX_DIFF_NATS
    tokenizer = piece_tokenizer()
    for sample, texts in stored_samples(run.folder):
        assert list(unpack_int32(sample.prompt_tokens)) == tokenizer(texts.prompt)["input_ids"]
        assert sum(segment.tokens for segment in sample.segments) == len(sample.tokens) // 4
    turns = list(stored_turns(run.folder, end=tokenizer.eos_token_id))
    assert len(turns) > 200
    for turn in turns:
        assert tokenizer.decode(turn.tokens, skip_special_tokens=True) == turn.text
    later = [turn for turn in turns if turn.context_text.endswith("assistant\n") and turn.context_text.count(END) > 2]
    other = [turn for turn in later if tokenizer(turn.context_text)["input_ids"] != turn.context]
    assert len(other) > len(later) / 2, "a gateway would have trained on other tokens"
