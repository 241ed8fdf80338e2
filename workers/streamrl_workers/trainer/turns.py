"""Which tokens of a trajectory the model drew, and which an environment answered. Pure; no torch.

Owns: reading `Trajectory.segments`. Does not own: rewards of turns, losses.

Invariant: no segments means one turn of the model; segments cover all tokens.
"""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import count_32


def segments(trajectory: pb.Trajectory) -> list[pb.Segment]:
    """Turns and observations in order, covering all tokens."""
    total = count_32(trajectory.tokens)
    found = list(trajectory.segments) or [pb.Segment(tokens=total)]
    covered = sum(segment.tokens for segment in found)
    name = f"group {trajectory.group_id} sample {trajectory.sample_index}"
    assert covered == total, f"segments of {name} cover {covered} of {total} tokens"
    return found


def trained_tokens(trajectory: pb.Trajectory) -> int:
    """How many of its tokens the model drew."""
    if not trajectory.segments:
        return count_32(trajectory.tokens)
    return sum(segment.tokens for segment in segments(trajectory) if not segment.observation)


def trained_places(trajectory: pb.Trajectory) -> list[int]:
    """Where among its tokens those are that the model drew."""
    if not trajectory.segments:
        return list(range(count_32(trajectory.tokens)))
    places: list[int] = []
    begin = 0
    for segment in segments(trajectory):
        if not segment.observation:
            places += range(begin, begin + segment.tokens)
        begin += segment.tokens
    return places


def trained_spans(trajectory: pb.Trajectory) -> list[pb.VersionSpan]:
    """The version spans, with their tokens counted without observations."""
    if not trajectory.segments:
        return list(trajectory.spans)
    ends: list[int] = []
    for span in trajectory.spans:
        ends.append(span.tokens + (ends[-1] if ends else 0))
    places, done, found = trained_places(trajectory), 0, []
    for span, end in zip(trajectory.spans, ends, strict=True):
        upto = done
        while upto < len(places) and places[upto] < end:
            upto += 1
        found.append(pb.VersionSpan(tokens=upto - done, step=span.step, attempt=span.attempt))
        done = upto
    return [span for span in found if span.tokens]
