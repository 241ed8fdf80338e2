"""Turns in the scheduler's small world (`core_world.py`): what generators make of a request, what a trajectory must be."""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import pack_float32, unpack_float32, unpack_int32

TURN_TOKEN, OBSERVED_TOKEN = (1).to_bytes(4, "little"), (2).to_bytes(4, "little")
"""The world's models say 1, its environments say 2."""


def next_token(request: pb.SampleRequest, *, version: tuple[int, int], finish: str) -> pb.Progress:
    """One token more for `request`, which becomes what a generator then has of it; an observation is tokenized first."""
    prefix = len(request.prefix_tokens) >> 2
    assert request.context_tokens <= prefix
    assert not request.observation or request.context_tokens == prefix, "behind an observation all is context"
    observation = OBSERVED_TOKEN * len(request.observation)
    request.context_tokens += len(request.observation)
    request.observation = ""
    request.prefix_tokens += observation + TURN_TOKEN
    attempt, step = version
    return pb.Progress(
        lease=request.lease,
        tokens=TURN_TOKEN,
        logprobs=pack_float32([-1.0]),
        spans=[pb.VersionSpan(tokens=1, step=step, attempt=attempt)],
        finish_reason=finish,
        text="t" * ((len(request.prefix_tokens) >> 2) - request.context_tokens) if finish else "",
        prompt_tokens=bytes(8),
        observation_tokens=observation,
    )


def check_trajectory(trajectory: pb.Sample, *, max_turns: int | None) -> None:
    """Segments cover the tokens and tell turns from observations; log-probs of the environment's tokens are 0."""
    tokens = unpack_int32(trajectory.tokens)
    logprobs = unpack_float32(trajectory.logprobs)
    assert len(tokens) == len(logprobs) == sum(span.tokens for span in trajectory.spans)
    if max_turns is None:
        assert not trajectory.segments
        return
    said = [2 if segment.observation else 1 for segment in trajectory.segments for _ in range(segment.tokens)]
    assert said == list(tokens)
    assert [token == 1 for token in tokens] == [logprob == -1.0 for logprob in logprobs]
    turns = [segment for segment in trajectory.segments if not segment.observation]
    assert 1 <= len(turns) <= max_turns
    assert all(turn.HasField("reward") for turn in turns[:-1])
    assert turns[-1].HasField("reward") or trajectory.reward_error
