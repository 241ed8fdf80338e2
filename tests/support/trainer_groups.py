"""Groups and jobs for the trainer's tests."""

import random
from collections.abc import Callable, Sequence
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
    weights: dict[str, Any] | None = None,
    **trainer: Any,
) -> RLJobSpec:
    """A small job; `algorithm` are the constants of `rule`, `engine` is the generator's, `trainer` is in the words of the job file."""
    supervised = rule == "supervised"
    turns: dict[str, Any] = {"rewards": [{"name": "answer", "exactMatch": {}}]}
    if rule == "archer":
        environment = {"python": {"function": "game:make"}, "maxTurns": 4}
        turns = {"environment": environment, "rewards": [{"name": "game", "environment": {}}]}
    frozen = [{"name": trainer["reference"]["pool"], "engine": {"hf": {}}}] if "reference" in trainer else []
    return parse_job(
        {
            "apiVersion": "streamrl.io/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "trainer"},
            "spec": {
                "model": {"scratch": {}},
                "task": {
                    "dataset": {"jsonl": {"path": "prompts.jsonl"}},
                    "groupSize": 1 if supervised else 4,
                    "sampling": {"maxTokens": 64, "temperature": temperature},
                    **turns,
                },
                "algorithm": {rule: algorithm or {}, **({"correction": correction} if correction else {})},
                "pipeline": {"batchGroups": 4, "steps": steps, **({"mode": "StreamSync"} if supervised else {})},
                "generators": [{"name": "sim", "engine": engine or {"hf": {}}}, *frozen],
                "trainer": {"learningRate": 1e-3, **trainer},
                **({"weights": {"http": weights}} if weights else {}),
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


def multi_turn(group_id: int, rewards: Sequence[float | None]) -> pb.Group:
    """Turn, observation, turn, (for odd samples) observation at the end; tokens of two versions."""

    def segments(rng: random.Random, index: int) -> list[pb.Segment]:
        found = [_turn(rng), pb.Segment(tokens=rng.randint(1, 4), observation=True), _turn(rng)]
        return found + [pb.Segment(tokens=2, observation=True)] * (index % 2)

    return _of_segments(group_id, rewards, segments)


def branched(group_id: int, rewards: Sequence[float | None]) -> pb.Group:
    """Samples of one to three contexts, each of one or two turns."""

    def segments(rng: random.Random, index: int) -> list[pb.Segment]:
        found = [_turn(rng)]
        for number in range(index % 3):
            found += [pb.Segment(tokens=rng.randint(1, 9), observation=True, context=True), _turn(rng)]
            if number:
                found += [pb.Segment(tokens=rng.randint(1, 4), observation=True), _turn(rng)]
        return found

    return _of_segments(group_id, rewards, segments)


def _turn(rng: random.Random) -> pb.Segment:
    return pb.Segment(tokens=rng.randint(1, 6), reward=rng.uniform(-0.5, 0.5))


def _of_segments(
    group_id: int, rewards: Sequence[float | None], segments: Callable[[random.Random, int], list[pb.Segment]]
) -> pb.Group:
    rng = random.Random(f"turns/{group_id}")
    samples = []
    for index, reward in enumerate(rewards):
        parts = segments(rng, index)
        total = sum(segment.tokens for segment in parts)
        drawn = [rng.uniform(-5, -1) * (not segment.observation) for segment in parts for _ in range(segment.tokens)]
        samples.append(
            pb.Sample(
                group_id=group_id,
                sample_index=index,
                prompt_tokens=pack_int32([1, 2, 3]),
                tokens=pack_int32([rng.randrange(32) for _ in range(total)]),
                logprobs=pack_float32(drawn),
                spans=[
                    pb.VersionSpan(tokens=1, step=0, attempt=1),
                    pb.VersionSpan(tokens=total - 1, step=1, attempt=1),
                ],
                segments=parts,
                finish_reason="stop",
                reward=reward,
            )
        )
    return pb.Group(group_id=group_id, step=1, samples=samples)
