"""Times an engine's decoding steps, the lengths of its answers, and whole training steps. Imports no torch; any `Engine` and `TrainEngine` will do.

Decoding: what a step costs follows from the batch and from how much context its sequences have. So the batch is kept full: a
sequence that ends is replaced, and what replacing takes does not count as a step; an engine that works by itself (vLLM) goes on
meanwhile, reads prompts within its steps, and there it counts. Where answers are known, each request begins somewhere within one,
as sequences do in a run that has been going on for a while. A window is a row of steps, long enough for the clock and for engines
that give several tokens at once; its value is seconds per token of each sequence.

Training: a step is timed from the first group to the end of the optimiser's step. The groups are made up: as long as the
job's, tokens at random, rewards that differ within each group, so that every sample has a gradient.

Clock and sleep are parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from math import log
from random import Random
from statistics import median

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_operator.allocation.stage_times import spread
from streamrl_workers.generator.engines.base import Delta, Engine
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.trainer.engines.engine import TrainEngine

WINDOW_STEPS = 16
WINDOW_S = 0.1
"""A window has at least so many steps and takes at least so long, unless the deadline comes first."""
WARM_STEPS = 2
"""Before the first window, tokens of each sequence on average: the first step at a new batch size may allocate or compile."""
_TRIES = 1000
"""Requests in a row that end as they are admitted; then the prompts are at fault."""
ATTEMPT = 1


class TooSlowError(Exception):
    """Not one step, or not one token, was done within the deadline."""


@dataclass(slots=True, kw_only=True)
class RequestSource:
    """Requests without end: the prompts over and over, each time with another seed."""

    prompts: Sequence[str]
    sampling: pb.Sampling
    seed: int
    beginnings: Sequence[tuple[int, ...]] = ()
    """Answers; a request begins with a random part of one of them. None: at the beginning."""
    _ids: Iterator[int] = field(default_factory=count)
    _random: Random = field(init=False)
    _turns: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._turns = cycle(self.prompts)

    def take(self, number: int) -> list[pb.SampleRequest]:
        """The next ones."""
        return list(islice(iter(self._next, None), number))

    def starting_within(self, answers: Sequence[tuple[int, ...]]) -> "RequestSource":
        """The same, in the midst of answers; ids go on."""
        return replace(self, beginnings=[answer for answer in answers if answer], _ids=self._ids)

    def _next(self) -> pb.SampleRequest:
        number = next(self._ids)
        prefix: tuple[int, ...] = ()
        if self.beginnings:
            answer = self._random.choice(self.beginnings)
            prefix = answer[: self._random.randrange(len(answer))]
        return pb.SampleRequest(
            lease=number,
            group_id=number,
            prompt=next(self._turns),
            prefix_tokens=pack_int32(prefix),
            sampling=self.sampling,
            seed=self.seed + number,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WallClock:
    """Time as the measurement sees it."""

    now_s: Callable[[], float]
    sleep: Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAnswers:
    """Whole answers, and what it took to admit a request."""

    tokens: tuple[tuple[int, ...], ...]
    """Of each answer, at least one token where the deadline let it."""
    unfinished: int
    fill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Seconds of a step, by window."""

    seconds: tuple[float, ...]
    steps: int


def measure_answers(
    engine: Engine, source: RequestSource, *, samples: int, deadline_s: float, clock: WallClock
) -> MeasuredAnswers:
    """Generate so many answers, from their beginning to their end or to the deadline."""
    end_s = clock.now_s() + deadline_s
    waiting = source.take(samples)
    tokens: dict[int, list[int]] = {request.lease: [] for request in waiting}
    open_ids = set(tokens)
    fills: list[float] = []
    while open_ids and clock.now_s() < end_s:
        admitted, waiting = waiting[: engine.free()], waiting[engine.free() :]
        if admitted:
            began_s = clock.now_s()
            ended = engine.add(admitted)
            fills.append((clock.now_s() - began_s) / len(admitted))
            _collect(ended, tokens=tokens, open_ids=open_ids)
        _collect(_step(engine, clock=clock), tokens=tokens, open_ids=open_ids)
    engine.cancel(open_ids)
    known = tuple(tuple(one) for one in tokens.values() if one)
    if not known:
        raise TooSlowError(f"no token within {deadline_s:g} s")
    return MeasuredAnswers(
        tokens=known,
        unfinished=sum(1 for number, one in tokens.items() if one and number in open_ids),
        fill_s=median(fills[1:] or fills),  # the first fills all slots at once; later ones come as slots free
    )


def measure_batch(
    engine: Engine,
    source: RequestSource,
    *,
    batch: int,
    windows: int,
    deadline_s: float,
    clock: WallClock,
    by_itself: bool = False,
) -> Windows:
    """Steps with exactly `batch` active sequences; as many windows as the deadline allows, at most `windows`.

    `by_itself`: the engine generates between two calls too.
    """
    end_s = clock.now_s() + deadline_s
    found: list[float] = []
    active: set[int] = set()
    all_steps = 0.0

    def window(steps_wanted: int, least_s: float) -> tuple[float, float]:
        """Steps and seconds, at least so many unless the deadline comes first."""
        elapsed_s, steps = 0.0, 0.0
        while (steps < steps_wanted or elapsed_s < least_s) and clock.now_s() < end_s:
            filling_s = clock.now_s()
            _refill(engine, source, batch=batch, active=active)
            began_s = filling_s if by_itself else clock.now_s()
            deltas = _step(engine, clock=clock)
            elapsed_s += clock.now_s() - began_s
            steps += sum(len(delta.tokens) for delta in deltas) / batch
            active.difference_update(delta.lease for delta in deltas if delta.finish_reason is not None)
        return steps, elapsed_s

    window(WARM_STEPS, 0.0)
    while len(found) < windows and clock.now_s() < end_s:
        steps, elapsed_s = window(WINDOW_STEPS, WINDOW_S)
        whole = steps >= WINDOW_STEPS and elapsed_s >= WINDOW_S
        if steps and (whole or not found):  # one that the deadline cut short counts where there is no other
            found.append(elapsed_s / steps)
            all_steps += steps
    engine.cancel(active)
    if not found:
        raise TooSlowError(f"no step of {batch} sequences within {deadline_s:g} s")
    return Windows(seconds=tuple(found), steps=max(1, round(all_steps)))


def _refill(engine: Engine, source: RequestSource, *, batch: int, active: set[int]) -> None:
    for _ in range(_TRIES):
        if engine.active() >= batch:
            return
        requests = source.take(batch - engine.active())
        ended = engine.add(requests)
        _refuse_errors(ended)
        active |= {request.lease for request in requests} - {delta.lease for delta in ended}
    raise UserError(field="prompts", rule="must leave room for an answer: all of them end at once", got=_TRIES)


def _step(engine: Engine, *, clock: WallClock) -> list[Delta]:
    wait_s = engine.step_seconds()
    if wait_s > 0:
        clock.sleep(wait_s)
    deltas = engine.step()
    _refuse_errors(deltas)
    return deltas


def _collect(deltas: Sequence[Delta], *, tokens: dict[int, list[int]], open_ids: set[int]) -> None:
    _refuse_errors(deltas)
    for delta in deltas:
        tokens[delta.lease].extend(delta.tokens)
        if delta.finish_reason is not None:
            open_ids.discard(delta.lease)


def _refuse_errors(deltas: Sequence[Delta]) -> None:
    for delta in deltas:
        if delta.error is not None:
            raise UserError(field="prompts", rule=f"cannot be answered: {delta.error}")


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
class MeasuredSteps:
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
) -> Iterator[MeasuredSteps]:
    """Steps of each number of groups, rising; those that would overrun the deadline, as smaller ones took, are left out.

    One step of the first number warms up and is not counted.

    Raises:
        TooSlowError: not even the smallest step is done within the deadline.
    """
    first, step, last = counts[0], 0, None
    _timed(engine, make_groups(shape, groups=first, step=step), step=step, deadline_s=deadline_s, now_s=now_s)
    for number in sorted(counts):
        if last is not None and last.typical_s * number / last.groups > deadline_s:
            return
        seconds: list[float] = []
        end_s = now_s() + deadline_s
        while len(seconds) < repeats and (not seconds or now_s() + median(seconds) <= end_s):
            step += 1
            groups = make_groups(shape, groups=number, step=step)
            seconds.append(_timed(engine, groups, step=step, deadline_s=deadline_s, now_s=now_s))
        tokens = sum(sum(span.tokens for span in one.spans) for group in groups for one in group.samples)
        last = MeasuredSteps(groups=number, samples=number * shape.group_size, tokens=tokens, seconds=tuple(seconds))
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
    samples = [
        pb.Sample(
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
    size_bytes = sum(one.ByteSize() for one in samples)
    return pb.Group(group_id=number, step=step, samples=samples, size_bytes=size_bytes)
