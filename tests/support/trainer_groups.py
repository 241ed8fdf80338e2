"""Groups and jobs for the trainer's tests."""

import random
from collections.abc import Sequence
from typing import Any

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec, parse_job
from streamrl_workers.stream.packing import pack_float32, pack_int32


def trainer_spec(
    *,
    steps: int = 10,
    algorithm: dict[str, Any] | None = None,
    rule: str = "grpo",
    correction: dict[str, Any] | None = None,
    temperature: float = 1.0,
    engine: dict[str, Any] | None = None,
    **trainer: Any,
) -> RLJobSpec:
    """A small job; `algorithm` are the constants of `rule`, `engine` is the generator's, `trainer` is in the words of the job file."""
    return parse_job(
        {
            "apiVersion": "streamrl.io/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "trainer"},
            "spec": {
                "model": {"scratch": {}},
                "task": {
                    "dataset": {"jsonl": {"path": "prompts.jsonl"}},
                    "groupSize": 4,
                    "sampling": {"maxTokens": 64, "temperature": temperature},
                    "rewards": [{"name": "answer", "exactMatch": {}}],
                },
                "algorithm": {rule: algorithm or {}, **({"correction": correction} if correction else {})},
                "pipeline": {"batchGroups": 4, "steps": steps},
                "generators": [{"name": "sim", "engine": engine or {"hf": {}}}],
                "trainer": {"learningRate": 1e-3, **trainer},
            },
        }
    ).spec


def make_group(
    group_id: int,
    *,
    step: int = 0,
    rewards: Sequence[float | None] = (0.0, 1.0, 1.0, 0.5),
    seed: int = 0,
    vocabulary: int = 32,
) -> pb.Group:
    """A group with random prompt and completions; None: the sample's scoring failed."""
    rng = random.Random(f"{seed}/{group_id}")
    prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 8))]
    trajectories = []
    for index, reward in enumerate(rewards):
        tokens = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 20))]
        logprobs = [rng.uniform(-6.0, -1.0) for _ in tokens]
        trajectories.append(
            pb.Sample(
                group_id=group_id,
                sample_index=index,
                prompt_tokens=pack_int32(prompt),
                tokens=pack_int32(tokens),
                logprobs=pack_float32(logprobs),
                spans=[pb.VersionSpan(tokens=len(tokens), step=step, attempt=1)],
                finish_reason="stop",
                reward=reward,
            )
        )
    size_bytes = sum(t.ByteSize() for t in trajectories)
    return pb.Group(group_id=group_id, step=step, samples=trajectories, size_bytes=size_bytes)
