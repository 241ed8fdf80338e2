"""Times whole training steps, from the first group to the end of the optimiser's step. Imports no torch; any `TrainEngine` will do.

The groups are made up: prompts and completions as long as the job's, tokens at random, rewards that differ within each
group, so that every sample has a gradient. What is learned from them is thrown away with the process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from random import Random
from statistics import median

from streamrl.proto import stream_pb2 as pb
from streamrl_operator.allocation.generation import spread
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.trainer.engine import TrainEngine

ATTEMPT = 1


class TooSlowError(Exception):
    """A step was not done within the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the job's groups look like."""

    group_size: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Of completions, in tokens; their distribution counts."""
    vocabulary: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of so many groups."""

    groups: int
    samples: int
    tokens: int
    """Of completions."""
    seconds: tuple[float, ...]

    @property
    def typical_s(self) -> float:
        """The median."""
        return median(self.seconds)


def make_groups(shape: Shape, *, groups: int, step: int) -> list[pb.Group]:
    """Groups of one step, the same for the same arguments but for their tokens."""
    random = Random(f"{shape.seed}/{step}")
    lengths = [max(1, round(length)) for length in spread(shape.lengths, count=groups * shape.group_size)]
    Random(shape.seed).shuffle(lengths)
    size = shape.group_size
    return [
        _group(shape, number=number, step=step, lengths=lengths[number * size : (number + 1) * size], random=random)
        for number in range(groups)
    ]


def measure_steps(
    engine: TrainEngine,
    shape: Shape,
    *,
    counts: Sequence[int],
    repeats: int,
    deadline_s: float,
    now_s: Callable[[], float],
) -> Iterator[Steps]:
    """Steps of each number of groups, rising; those that would overrun the deadline, as smaller ones took, are left out.

    One step of the first number warms up and is not counted.

    Raises:
        TooSlowError: not even the smallest step is done within the deadline.
    """
    first, step, last = counts[0], 0, None
    _timed(engine, make_groups(shape, groups=first, step=step), step=step, deadline_s=deadline_s, now_s=now_s)
    for count in sorted(counts):
        if last is not None and last.typical_s * count / last.groups > deadline_s:
            return
        seconds: list[float] = []
        end_s = now_s() + deadline_s
        while len(seconds) < repeats and (not seconds or now_s() + median(seconds) <= end_s):
            step += 1
            groups = make_groups(shape, groups=count, step=step)
            seconds.append(_timed(engine, groups, step=step, deadline_s=deadline_s, now_s=now_s))
        tokens = sum(sum(span.tokens for span in one.spans) for group in groups for one in group.trajectories)
        last = Steps(groups=count, samples=count * shape.group_size, tokens=tokens, seconds=tuple(seconds))
        yield last


def _timed(
    engine: TrainEngine, groups: Sequence[pb.Group], *, step: int, deadline_s: float, now_s: Callable[[], float]
) -> float:
    began_s = now_s()
    engine.begin_step(step, attempt=ATTEMPT)
    for group in groups:
        engine.add([group])
        while engine.advance(idle=False):
            if now_s() - began_s > deadline_s:
                raise TooSlowError(f"a step of {len(groups)} groups takes more than {deadline_s:g} s")
    engine.finish_step()
    return now_s() - began_s


def _group(shape: Shape, *, number: int, step: int, lengths: Sequence[int], random: Random) -> pb.Group:
    prompt = pack_int32(random.choices(range(shape.vocabulary), k=shape.prompt_tokens))
    trajectories = [
        pb.Trajectory(
            group_id=number,
            sample_index=index,
            prompt_tokens=prompt,
            tokens=pack_int32(random.choices(range(shape.vocabulary), k=length)),
            logprobs=pack_float32([-log(shape.vocabulary)] * length),
            spans=[pb.VersionSpan(tokens=length, step=step, attempt=ATTEMPT)],
            finish_reason="stop",
            reward=float(index % 2),
        )
        for index, length in enumerate(lengths)
    ]
    size_bytes = sum(one.ByteSize() for one in trajectories)
    return pb.Group(group_id=number, step=step, trajectories=trajectories, size_bytes=size_bytes)
