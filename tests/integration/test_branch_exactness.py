"""Programs that edit their history by chance, and a real model: every trained token stands behind what its engine had, and nothing else.

Three independent looks at what is stored: the program's own notes of what it asked and was told; a forward of each context alone,
by the model itself; the trainer's log-prob of each token against the engine's.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from streamrl.spec.task import Chat
from streamrl_workers.agents.transcript import parse_chat
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.tasks.chat import ChatTemplate
from support.agent_runs import BRANCHES, END, Turn, piece_tokenizer, stored_samples, stored_turns, traffic_job
from support.runs import LocalRun

MAX_DIFF_NATS = 1e-4
"""Of the same token's log-prob in float32, with caches and in one forward."""
LOOKED_AT = 300
"""Turns of which a forward of their own is made."""


@pytest.mark.timeout(400)
def test_each_trained_token_stands_behind_what_its_engine_had(tmp_path: Path) -> None:
    job = traffic_job(tmp_path, steps=4, batch_groups=8, program=BRANCHES)
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(1)  # a busy machine takes a minute to import what trains
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    for line in read_jsonl(run.folder / "metrics" / "steps.jsonl"):
        assert line["reward_failed"] == 0
        told = line["trainer"]
        compared = [value for name, value in told.items() if name.startswith("train_infer_logprob_diff_tokens/")]
        assert sum(compared) == told["tokens"], "those of earlier versions too"
        assert max(value for name, value in told.items() if "logprob_diff_max" in name) < MAX_DIFF_NATS
    tokenizer = piece_tokenizer()
    turns = list(stored_turns(run.folder, end=tokenizer.eos_token_id))
    branched = [s for s, _ in stored_samples(run.folder) if any(segment.context for segment in s.segments)]
    assert len(branched) > 50
    for turn in turns:
        assert tokenizer.decode(turn.tokens, skip_special_tokens=True) == turn.text
        prompt = tokenizer(turn.prompt, add_special_tokens=False)["input_ids"]
        assert turn.context[: len(prompt)] == prompt
        assert turn.number or turn.context == prompt, "a context begins with its prompt and nothing else"
    template = ChatTemplate(tokenizer, chat=Chat(), ends={tokenizer.eos_token_id: END})
    assert {turn.prompt for turn in turns} <= _asked(tmp_path / "asked.jsonl", template)
    _assert_logprobs(turns[:: max(1, len(turns) // LOOKED_AT)], model=tmp_path / "model")


def _asked(notes: Path, template: ChatTemplate) -> set[str]:
    """The text of each whole conversation that a program has asked about."""
    found = set()
    for line in notes.read_text().splitlines():
        messages, tools, _ = json.loads(line)
        ask = parse_chat(json.dumps({"messages": messages, "tools": tools}).encode())
        found.add(template.conversation(ask.messages, tools=ask.tools))
    return found


@torch.no_grad()
def _assert_logprobs(turns: list[Turn], *, model: Path) -> None:
    policy = Qwen3ForCausalLM.from_pretrained(model).eval()
    for turn in turns:
        logits = policy(input_ids=torch.tensor([turn.context + turn.tokens])).logits[0, len(turn.context) - 1 : -1]
        found = torch.log_softmax(logits, -1).gather(1, torch.tensor(turn.tokens)[:, None])[:, 0]
        assert float((found - torch.tensor(turn.logprobs)).abs().max()) < MAX_DIFF_NATS
