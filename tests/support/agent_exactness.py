"""Runs of agents by a real model: what is stored is what the engine sampled, and what the trainer saw.

Four independent looks: the trainer's log-prob of each token against the engine's; texts against tokens; what the programs wrote down
of what they asked and were told; a forward of each context alone. The model's distribution is far from uniform, so a single other
token would show in the log-probs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from streamrl.proto.literals import unmarked
from streamrl.spec.task import Chat
from streamrl_workers.agents.transcript import parse_chat
from streamrl_workers.generator.engines.requests import PromptTokens
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.stream.packing import unpack_int32
from streamrl_workers.tasks.chat import ChatTemplate
from support.agent_runs import BRANCHES, END, PROGRAM, Turn, piece_tokenizer, stored_samples, stored_turns, traffic_job
from support.runs import LocalRun, wait_for

HF = {"hf": {"slots": 64}}
MAX_DIFF_NATS = 1e-4
"""Of the same token's log-prob in float32, with caches and in one forward."""
RUN_S = 1000.0
"""Of a run: a busy machine takes minutes to import what trains."""
LOOKED_AT = 300
"""Turns of which a forward of their own is made."""


def run_traffic(
    folder: Path, program: str, *, steps: int = 4, batch_groups: int = 8, engine: Any = None, deadline_s: float = RUN_S
) -> list[Turn]:
    """Run such a job to its end; every turn that it has stored, after the looks that hold for any program."""
    job = traffic_job(folder, steps=steps, batch_groups=batch_groups, program=program)
    job["spec"]["generators"][0]["engine"] = engine or HF
    run = LocalRun.start(job, folder=folder / "run", base_dir=folder)
    wait_for(lambda: run.process.poll() is not None, what=f"the run's end in {folder}", deadline_s=deadline_s)
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    for line in read_jsonl(run.folder / "metrics" / "steps.jsonl"):
        assert line["reward_failed"] == 0
        told = line["trainer"]
        compared = [value for name, value in told.items() if name.startswith("train_infer_logprob_diff_tokens/")]
        assert sum(compared) == told["forward_tokens"], "all but groups of equal rewards"
        assert max(value for name, value in told.items() if "logprob_diff_max" in name) < MAX_DIFF_NATS
    tokenizer = piece_tokenizer()
    for sample, texts in stored_samples(run.folder):
        assert list(unpack_int32(sample.prompt_tokens)) == tokenizer(texts.prompt)["input_ids"]
        assert sum(segment.tokens for segment in sample.segments) == len(sample.tokens) // 4
    turns = list(stored_turns(run.folder, end=tokenizer.eos_token_id))
    for turn in turns:
        assert tokenizer.decode(turn.tokens, skip_special_tokens=True) == turn.text
    return turns


def check_conversations(folder: Path, *, engine: Any = None, least: int = 200, **sizes: Any) -> tuple[int, int, int]:
    """Random conversations that go on. Turns, later ones, and those of them that a gateway which tokenizes again would change."""
    turns = run_traffic(folder, PROGRAM, engine=engine, **sizes)
    assert len(turns) > least
    tokenizer = piece_tokenizer()
    later = [turn for turn in turns if turn.context_text.endswith("assistant\n") and turn.context_text.count(END) > 2]
    other = [turn for turn in later if tokenizer(turn.context_text)["input_ids"] != turn.context]
    assert len(other) > len(later) / 2, "a gateway would have trained on other tokens"
    return len(turns), len(later), len(other)


def check_edits(folder: Path, *, engine: Any = None) -> None:
    """Random conversations whose programs edit their history."""
    turns = run_traffic(folder, BRANCHES, engine=engine)
    branched = [s for s, _ in stored_samples(folder / "run") if any(segment.context for segment in s.segments)]
    assert len(branched) > 50
    tokenizer = piece_tokenizer()
    template = ChatTemplate(tokenizer, chat=Chat(), ends={tokenizer.eos_token_id: END})
    asked = {unmarked(text): text for text in _asked(folder / "asked.jsonl", template)}
    prompts = PromptTokens(tokenizer, add_special_tokens=False)
    for turn in turns:
        prompt = list(prompts.of(asked[turn.prompt]))
        assert turn.context[: len(prompt)] == prompt
        assert turn.number or turn.context == prompt, "a context begins with its prompt and nothing else"
    _assert_logprobs(turns[:: max(1, len(turns) // LOOKED_AT)], model=folder / "model")


def _asked(notes: Path, template: ChatTemplate) -> set[str]:
    """The text of each whole conversation that a program has asked about."""
    found = set()
    for line in notes.read_text().splitlines():
        messages, tools, _ = json.loads(line)
        ask = parse_chat(json.dumps({"messages": messages, "tools": tools}).encode())
        found.add(template.conversation(ask.messages, tools=ask.tools))
    return found


@torch.no_grad()
def _assert_logprobs(turns: Sequence[Turn], *, model: Path) -> None:
    policy = Qwen3ForCausalLM.from_pretrained(model).eval()
    for turn in turns:
        logits = policy(input_ids=torch.tensor([turn.context + turn.tokens])).logits[0, len(turn.context) - 1 : -1]
        found = torch.log_softmax(logits, -1).gather(1, torch.tensor(turn.tokens)[:, None])[:, 0]
        assert float((found - torch.tensor(turn.logprobs)).abs().max()) < MAX_DIFF_NATS
