"""Runs of agents with a small real model, whose tokens are pieces of bytes: text alone does not say which they were."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.journal.sample_store import open_samples
from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from support.chat_models import TOOL_TEMPLATE
from support.jobs import tiny_job, write_prompts

START, END = "<|im_start|>", "<|im_end|>"
VOCABULARY = 420
TRAFFIC = (
    "Grüße, naïve café! 日本語 🙂 def f(x): return x + 1\n{'name': 'add', 'arguments': {'of': [1, 2]}} the then there "
)

PROGRAM = """
import json, os, sys, threading, urllib.request
from random import Random

PIECES = ["", "ok", "Grüße ", "日本語", "🙂\\U0001f469\\u200d\\U0001f680", "<|im_end|>", "<|im_start|>user\\n", "<tool_call>", "\\x00\\t", " the the", "{}"]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

def serve(item):
    def call(path, **body):
        headers = {"authorization": "Bearer " + item["api_key"]}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))

    random = Random(item["seed"])
    tools = [TOOL] if random.random() < 0.5 else []
    messages = [{"role": "user", "content": item["question"]}]
    for turn in range(random.randint(1, 6)):
        message = call("/chat/completions", messages=messages, tools=tools)["choices"][0]["message"]
        messages.append(message)
        for _ in range(random.randint(1, 2)):
            role = random.choice(["user", "tool", "system"])
            messages.append({"role": role, "content": "".join(random.choices(PIECES, k=random.randint(0, 4)))})
        call("/reward", reward=float(len(message["content"] or "") % 3))
    call("/end")

for line in sys.stdin:
    threading.Thread(target=serve, args=[json.loads(line)], daemon=True).start()
"""


BRANCHES = """
import json, os, sys, threading, urllib.request
from random import Random

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SAID = ["", "ok", "Grüße ", "日本語", "🙂", "<|im_end|>", "the there "]

def edited(random, messages, question):
    kind = random.choice(["go on", "go on", "drop", "shorten", "system", "second", "again", "reworded"])
    if kind == "drop":
        del messages[1:3]
    elif kind == "shorten":
        del messages[random.randint(1, len(messages)):]
    elif kind == "system":
        messages.insert(0, {"role": "system", "content": random.choice(SAID)})
    elif kind == "second":
        messages[:] = [{"role": "user", "content": "sum up: " + str(messages[-1]["content"])}]
    elif kind == "again":
        messages[:] = [{"role": "user", "content": question}]
    elif kind == "reworded":
        place = random.randrange(len(messages))
        messages[place] = {"role": messages[place]["role"], "content": random.choice(SAID)}

def serve(item):
    def call(path, **body):
        headers = {"authorization": "Bearer " + item["api_key"]}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))

    random = Random(item["seed"])
    tools, messages = [], [{"role": "user", "content": item["question"]}]
    for turn in range(random.randint(2, 8)):
        message = call("/chat/completions", messages=messages, tools=tools)["choices"][0]["message"]
        with open("asked.jsonl", "a") as file:
            file.write(json.dumps([messages, tools, message]) + "\\n")
        messages.append(message)
        messages.append({"role": random.choice(["user", "tool"]), "content": "".join(random.choices(SAID, k=3))})
        edited(random, messages, item["question"])
        if random.random() < 0.1:
            tools = [] if tools else [TOOL]
        call("/reward", reward=float(len(message["content"] or "") % 3))
    call("/end")

for line in sys.stdin:
    threading.Thread(target=serve, args=[json.loads(line)], daemon=True).start()
"""
"""Edits its history by chance, and writes down what it asked and was told."""


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT's and Qwen's are, of few pieces."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [TRAFFIC] * 8,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[START, END]
        ),
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, additional_special_tokens=[START], clean_up_tokenization_spaces=False
    )
    made.chat_template = TOOL_TEMPLATE
    return made


def piece_model(folder: Path) -> Path:
    """A Qwen3 of two small layers with such a tokenizer."""
    torch.manual_seed(0)
    tokenizer = piece_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 values: vLLM's attention on CPUs takes no fewer
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.3,  # far from uniform: a wrong context shows
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def traffic_job(folder: Path, *, steps: int, batch_groups: int, program: str = PROGRAM) -> dict[str, Any]:
    """A job of random conversations by that model, its files beside it."""
    write_prompts(folder / "prompts.jsonl")
    (folder / "agent.py").write_text(program)
    piece_model(folder / "model")
    job = tiny_job(steps=steps)
    spec = job["spec"]
    spec["model"] = {"path": {"directory": "model"}}
    spec["task"] |= {
        "chat": {},
        "agent": {"command": ["python", "-S", "agent.py"], "sessionsPerProgram": 256, "sessions": 256},
        "sampling": {"maxTokens": 12},
        "rewards": [{"name": "game", "environment": {}}],
        "evaluation": {"maxPrompts": 1, "intervalSteps": 1000},
    }
    spec["pipeline"]["batchGroups"] = batch_groups
    spec["generators"][0]["engine"] = {"hf": {"slots": 64}}
    spec["trainer"] = {"learningRate": 1e-9}  # the weights stay: all tokens are compared under those that drew them
    return json.loads(json.dumps(job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of a stored sample."""

    context: list[int]
    """Tokens before it, from the beginning of its context."""
    tokens: list[int]
    logprobs: list[float]
    text: str
    context_text: str
    """As a gateway has it: prompt, earlier texts, observations."""
    prompt: str
    """Text of its context's prompt."""
    number: int
    """In its context."""


def stored_samples(run_dir: Path) -> Iterator[tuple[pb.Sample, pb.GroupTexts]]:
    """Every sample that the journal or the archive has."""
    with open_samples(run_dir) as store:
        for group in store.groups():
            archived = group.read()
            for sample in archived.samples:
                yield sample, archived.texts


def stored_turns(run_dir: Path, *, end: int) -> Iterator[Turn]:
    """Every turn of every stored sample; `end`: the end token."""
    for sample, texts in stored_samples(run_dir):
        said, tokens = texts.samples[sample.sample_index], list(unpack_int32(sample.tokens))
        logprobs = list(unpack_float32(sample.logprobs))
        before, place, turns, in_context = list(unpack_int32(sample.prompt_tokens)), 0, 0, 0
        text = prompt = texts.prompt
        for segment in sample.segments:
            own, drawn = (row[place : place + segment.tokens] for row in (tokens, logprobs))
            place += segment.tokens
            if segment.context:
                before, in_context = [], 0
                text = prompt = said.observations[turns - 1]
                assert turns - 1 in said.contexts
            if not segment.observation:
                yield Turn(
                    context=list(before),
                    tokens=own,
                    logprobs=drawn,
                    text=said.turns[turns],
                    context_text=text,
                    prompt=prompt,
                    number=in_context,
                )
                text += said.turns[turns] + (END if own[-1] == end else "")
                text += said.observations[turns] if turns < len(said.observations) else ""
                turns, in_context = turns + 1, in_context + 1
            before += own
