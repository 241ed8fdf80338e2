"""What the benchmark of one GPU works on, made on the spot: models with random weights, jobs, groups. Does nothing by itself."""

import importlib.util
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import Qwen2Config
from vllm_engine import save_tokenizer

from streamrl.proto import stream_pb2 as pb
from streamrl_cli.runner.plan import visible_gpus
from streamrl_workers.models.load import DTYPES, load_structure
from streamrl_workers.models.published import Parameters
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.weights.hashing import TensorBytes

GPU = bool(visible_gpus())
DEVICE = torch.device("cuda" if GPU else "cpu")
PRECISION = "BF16" if GPU else "FP32"
VLLM = importlib.util.find_spec("vllm") is not None
GROUP, PROMPT_TOKENS = 8, 128
HF_SLOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and a load that suits it."""

    billions: float  # of parameters
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    tied: bool = True
    vocabulary: int = 151_936
    concurrency: int = 256
    tokens: int = 256  # of an answer: random weights hardly ever end one
    groups: int = 16  # of a training step


SHAPES = {
    "tiny": Shape(
        billions=0.0,
        **{"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "feed_forward": 128},
        **{"vocabulary": 256, "concurrency": 8, "tokens": 16, "groups": 4},
    ),
    "0.5B": Shape(billions=0.5, hidden=896, layers=24, heads=14, kv_heads=2, feed_forward=4864),
    "1.5B": Shape(billions=1.5, hidden=1536, layers=28, heads=12, kv_heads=2, feed_forward=8960),
    "8B-4-layers": Shape(
        billions=2.0, hidden=4096, layers=4, heads=32, kv_heads=8, feed_forward=12_288, tied=False, groups=32
    ),
    "3B": Shape(billions=3.1, hidden=2048, layers=36, heads=16, kv_heads=2, feed_forward=11_008),
    "7B": Shape(billions=7.6, hidden=3584, layers=28, heads=28, kv_heads=4, feed_forward=18_944, tied=False),
}


def save_structure(shape: Shape, folder: Path) -> None:
    """Configuration and tokenizer: all that a generator has before weights come."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=shape.tied,
        architectures=["Qwen2ForCausalLM"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    save_tokenizer(folder)
    config.save_pretrained(folder)


def random_model(folder: Path) -> Any:  # noqa: ANN401 - transformers'
    """Drawn on the device."""
    torch.manual_seed(0)
    with DEVICE:
        return load_structure(str(folder), dtype=DTYPES[PRECISION])


def published(folder: Path) -> dict[str, TensorBytes]:
    """Random weights in main memory, as a trainer publishes them; the device is empty again."""
    model = random_model(folder)
    tensors = Parameters(model).snapshot()
    del model
    empty_cache()
    return tensors


def empty_cache() -> None:
    """What torch holds of a GPU beyond its tensors goes back."""
    if GPU:
        torch.cuda.empty_cache()


def job(shape: Shape, folder: Path, **trainer: object) -> dict[str, Any]:
    """Of the model in `folder`; whatever is answered, rewards are drawn by chance: so there is something to learn from."""
    shared = {"maxConcurrency": shape.concurrency, "gpuMemoryPercent": 40, "kvCacheBytes": "8Gi" if GPU else "64Mi"}
    engine = {"vllm": shared} if VLLM else {"hf": {"slots": min(HF_SLOTS, shape.concurrency)}}
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "gpu"},
        "spec": {
            "model": {"path": {"directory": str(folder)}},
            "task": {
                "dataset": {"jsonl": {"path": "prompts.jsonl"}},
                "groupSize": GROUP,
                "sampling": {"maxTokens": shape.tokens},
                "rewards": [{"name": "chance", "python": {"function": "chance:reward"}}],
                "evaluation": {"maxPrompts": 1, "sampledAnswers": 0, "intervalSteps": 1_000_000},
            },
            "algorithm": {"grpo": {}},
            "pipeline": {"batchGroups": shape.groups, "steps": 8},
            "generators": [{"name": "one", "engine": engine}],
            "trainer": {"precision": PRECISION, "microBatchTokens": 8192, **trainer},
            "storage": {"checkpoints": {"intervalSteps": 1_000_000}},
        },
    }


def save_job(shape: Shape, folder: Path, *, model: Path) -> Path:
    """The job file, with its prompts and its reward beside it."""
    lines = ({"prompt": " ".join(str((7919 * i + k) % 100) for k in range(24)), "answer": ""} for i in range(512))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "chance.py").write_text(_CHANCE)
    (folder / "job.yaml").write_text(json.dumps(job(shape, model)))
    return folder / "job.yaml"


_CHANCE = """import random


def reward(*, prompt, completion, answer, metadata):
    return random.random()
"""
"""A reward of the user's own, beside the job."""


def drawn_groups(shape: Shape) -> Iterator[pb.Group]:
    """Groups as generators would have answered: random tokens."""
    random = Random(0)
    logprobs = pack_float32(array("f", [-5.0] * shape.tokens))
    for group in range(shape.groups):
        prompt = pack_int32(array("i", random.choices(range(shape.vocabulary), k=PROMPT_TOKENS)))
        samples = [
            pb.Sample(
                group_id=group,
                sample_index=index,
                prompt_tokens=prompt,
                tokens=pack_int32(array("i", random.choices(range(shape.vocabulary), k=shape.tokens))),
                logprobs=logprobs,
                spans=[pb.VersionSpan(tokens=shape.tokens, step=0, attempt=1)],
                finish_reason="length",
                reward=random.random(),
            )
            for index in range(GROUP)
        ]
        yield pb.Group(group_id=group, samples=samples)
