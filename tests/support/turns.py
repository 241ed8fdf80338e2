"""Turns in the scheduler's small world (`core_world.py`): what generators make of a request, what a trajectory must be."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, takewhile
from zlib import crc32

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.settings import SchedulerSettings
from streamrl_workers.stream.packing import pack_float32, tokens_hash, unpack_float32, unpack_int32

TURN_TOKEN, OBSERVED_TOKEN, CONTEXT_TOKEN = (number.to_bytes(4, "little") for number in (1, 2, 3))
"""The world's models say 1, its environments say 2, and the prompts of later contexts are of 3."""
CONTEXT_CHAR = "c"
"""Of the text of such a prompt."""


def drawn_logprob(before: bytes) -> float:
    """Of a token behind these: it tells what the engine had."""
    return -1.0 - (crc32(before) & 0xFFFF) / 0x10000


def _prompt_tokens(request: pb.SampleRequest) -> bytes:
    is_context = set(request.prompt) == {CONTEXT_CHAR}
    return CONTEXT_TOKEN * len(request.prompt) if is_context else tokens_of(request.prompt)


def tokens_of(prompt: str) -> bytes:
    """Two, which tell texts apart."""
    return bytes(4) + (crc32(prompt.encode()) >> 1).to_bytes(4, "little")


def frozen_logprobs(sample: pb.Sample) -> bytes:
    """Of the world's frozen model: they tell what it was shown."""
    shown = crc32(sample.prompt_tokens + sample.tokens) & 0xFFFF
    return pack_float32([-2.0 - shown / 0x10000] * (len(sample.tokens) >> 2))


def next_token(request: pb.SampleRequest, *, version: tuple[int, int], finish: str) -> pb.Progress:
    """One token more for `request`, which becomes what a generator then has of it; an observation is tokenized first."""
    if request.HasField("finished"):
        return pb.Progress(
            lease=request.lease, logprobs=frozen_logprobs(request.finished), finish_reason=finish or "stop"
        )
    prefix = len(request.prefix_tokens) >> 2
    assert request.context_tokens <= prefix
    assert not request.observation or request.context_tokens == prefix, "behind an observation all is context"
    observation = OBSERVED_TOKEN * len(request.observation)
    request.context_tokens += len(request.observation)
    request.observation = ""
    prompt = _prompt_tokens(request)
    logprob = drawn_logprob(prompt + request.prefix_tokens + observation)
    request.prefix_tokens += observation + TURN_TOKEN
    attempt, step = version
    return pb.Progress(
        lease=request.lease,
        tokens=TURN_TOKEN,
        logprobs=pack_float32([logprob]),
        spans=[pb.VersionSpan(tokens=1, step=step, attempt=attempt)],
        finish_reason=finish,
        text="t" * ((len(request.prefix_tokens) >> 2) - request.context_tokens) if finish else "",
        prompt_tokens=prompt,
        observation_tokens=observation,
    )


def check_trajectory(trajectory: pb.Sample, *, job: SchedulerSettings, ours: bool = True) -> None:
    """Segments cover the tokens and tell turns, observations and contexts apart; each drawn token stands behind what its engine had.
    Without partial rollouts each turn is of one version. `ours`: tokens are by `next_token`, which tells what the engine had."""
    assert trajectory.reference_logprobs == (frozen_logprobs(trajectory) if job.extensions.reference_pool else b"")
    max_turns, tokens = job.tasks.of(trajectory.group_id).max_turns, unpack_int32(trajectory.tokens)
    if trajectory.resampled:
        assert job.extensions.resampled_percent
        assert not trajectory.HasField("reward")
        max_turns = None
    assert len(tokens) == sum(span.tokens for span in trajectory.spans)
    assert bool(trajectory.segments) == (max_turns is not None)
    segments = trajectory.segments or [pb.Segment(tokens=len(tokens))]
    kinds = [segment.observation + segment.context for segment in segments for _ in range(segment.tokens)]
    assert [1 + kind for kind in kinds] == list(tokens)
    assert not ours or list(unpack_float32(trajectory.logprobs)) == list(_expected_logprobs(trajectory, segments))
    assert job.partial_rollouts or all(len(versions) <= 1 for versions in _versions(trajectory, segments))
    if max_turns is None:
        return
    turns = [segment for segment in trajectory.segments if not segment.observation]
    assert 1 <= len(turns) <= max_turns
    assert all(turn.HasField("reward") for turn in turns[:-1])
    assert turns[-1].HasField("reward") or trajectory.reward_error


def states_of(held: Mapping[int, pb.Group], *, job: SchedulerSettings) -> list[pb.TurnState]:
    """What a trainer asks for: the last turn of the first context of a sample that was played, for each group of a step."""
    played = [sample for group in held.values() for sample in group.samples if not sample.resampled]
    return [_last_turn(sample) for sample in played[: job.batch_groups] if job.extensions.resampled_percent]


def _last_turn(sample: pb.Sample) -> pb.TurnState:
    places, place = [0], 0
    for segment in takewhile(lambda one: not one.context, sample.segments):
        places += [place] * (not segment.observation)
        place += segment.tokens
    tokens, is_of = sample.tokens[: 4 * places[-1]], tokens_hash(sample.prompt_tokens)
    return pb.TurnState(prompt_index=sample.group_id, tokens=tokens, prompt_hash=is_of)


def _versions(trajectory: pb.Sample, segments: Iterable[pb.Segment]) -> Iterator[set[int]]:
    """Of each turn."""
    of_tokens = iter([span.step for span in trajectory.spans for _ in range(span.tokens)])
    for segment in segments:
        versions = set(islice(of_tokens, segment.tokens))
        yield set() if segment.observation else versions


def _expected_logprobs(trajectory: pb.Sample, segments: Iterable[pb.Segment]) -> Iterator[float]:
    before, place = trajectory.prompt_tokens, 0
    for segment in segments:
        if segment.context:
            before = b""
        for _ in range(segment.tokens):
            yield 0.0 if segment.observation else drawn_logprob(before)
            before += trajectory.tokens[place : place + 4]
            place += 4
