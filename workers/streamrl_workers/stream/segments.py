"""What a sample's tokens are, by its `segments`: turns of the model, what it read in between, contexts. Pure.

A context is a conversation that the model saw as a whole: a prompt, and what stands behind it. A sample has one, and one more for
each time that its program went on otherwise (docs/decisions/0060-branches.md).

Invariant: no segments means one turn of the model; segments cover all tokens.
"""

from bisect import bisect_left
from itertools import pairwise

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import count_32


def segments(sample: pb.Sample) -> list[pb.Segment]:
    """Turns and observations in order, covering all tokens."""
    total = count_32(sample.tokens)
    found = list(sample.segments) or [pb.Segment(tokens=total)]
    covered = sum(segment.tokens for segment in found)
    name = f"group {sample.group_id} sample {sample.sample_index}"
    assert covered == total, f"segments of {name} cover {covered} of {total} tokens"
    return found


def trained_tokens(sample: pb.Sample) -> int:
    """How many of its tokens the model drew."""
    if not sample.segments:
        return count_32(sample.tokens)
    return sum(segment.tokens for segment in segments(sample) if not segment.observation)


def trained_places(sample: pb.Sample) -> list[int]:
    """Where among its tokens those are that the model drew."""
    if not sample.segments:
        return list(range(count_32(sample.tokens)))
    places: list[int] = []
    begin = 0
    for segment in segments(sample):
        if not segment.observation:
            places += range(begin, begin + segment.tokens)
        begin += segment.tokens
    return places


def completion_tokens(sample: pb.Sample) -> int:
    """Tokens of turns and observations: prompts of contexts are none."""
    return count_32(sample.tokens) - sum(segment.tokens for segment in sample.segments if segment.context)


def context_ranges(sample: pb.Sample) -> list[tuple[int, int]]:
    """Where each context begins and ends, its prompt included, in the sample's prompt and tokens as one sequence."""
    place = count_32(sample.prompt_tokens)
    begins = [0]
    for segment in segments(sample):
        if segment.context:
            begins.append(place)
        place += segment.tokens
    return list(pairwise([*begins, place]))


def trained_contexts(sample: pb.Sample) -> list[tuple[int, list[int]]]:
    """Of each context: where it begins, and where the tokens are that the model drew in it, in the same sequence; there may be none."""
    prompt = count_32(sample.prompt_tokens)
    places = [prompt + place for place in trained_places(sample)]
    return [
        (begin, places[bisect_left(places, begin) : bisect_left(places, end)]) for begin, end in context_ranges(sample)
    ]
