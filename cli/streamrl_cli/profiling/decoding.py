"""Times an engine's decoding steps at full batches, and the lengths of its answers. Imports no torch; any `Engine` will do.

What a step costs follows from the batch and from how much context its sequences have. So the batch is kept full: a
sequence that ends is replaced, and what replacing takes does not count as a step. Where answers are known, each request
begins somewhere within one, as sequences do in a run that has been going on for a while.

A window is a row of steps, long enough for the clock and for engines that give several tokens at once; its value is
seconds per token of each sequence. Clock and sleep are parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from random import Random
from statistics import median

from streamrl.errors import UserError
from streamrl_workers.generator.engine import Delta, Engine, Request, Sampling

WINDOW_STEPS = 16
WINDOW_S = 0.1
"""A window has at least so many steps and takes at least so long, unless the deadline comes first."""
WARM_STEPS = 2
"""Before the first window: the first step at a new batch size may allocate or compile."""
_TRIES = 1000
"""Requests in a row that end as they are admitted; then the prompts are at fault."""


class TooSlowError(Exception):
    """Not one step was done within the deadline."""


@dataclass(slots=True, kw_only=True)
class Source:
    """Requests without end: the prompts over and over, each time with another seed."""

    prompts: Sequence[str]
    sampling: Sampling
    seed: int
    beginnings: Sequence[tuple[int, ...]] = ()
    """Answers; a request begins with a random part of one of them. None: at the beginning."""
    _ids: Iterator[int] = field(default_factory=count)
    _random: Random = field(init=False)
    _turns: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._turns = cycle(self.prompts)

    def take(self, number: int) -> list[Request]:
        """The next ones."""
        return list(islice(iter(self._next, None), number))

    def starting_within(self, answers: Sequence[tuple[int, ...]]) -> "Source":
        """The same, in the midst of answers; ids go on."""
        return replace(self, beginnings=[answer for answer in answers if answer], _ids=self._ids)

    def _next(self) -> Request:
        number = next(self._ids)
        prefix: tuple[int, ...] = ()
        if self.beginnings:
            answer = self._random.choice(self.beginnings)
            prefix = answer[: self._random.randrange(len(answer))]
        return Request(
            request_id=number,
            group_id=number,
            prompt=next(self._turns),
            prefix_tokens=prefix,
            sampling=self.sampling,
            seed=self.seed + number,
            pinned=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Time as the measurement sees it."""

    now_s: Callable[[], float]
    sleep: Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
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


def measure_answers(engine: Engine, source: Source, *, samples: int, deadline_s: float, clock: Clock) -> Answers:
    """Generate so many answers, from their beginning to their end or to the deadline."""
    end_s = clock.now_s() + deadline_s
    waiting = source.take(samples)
    tokens: dict[int, list[int]] = {request.request_id: [] for request in waiting}
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
    return Answers(
        tokens=known,
        unfinished=sum(1 for number, one in tokens.items() if one and number in open_ids),
        fill_s=median(fills[1:] or fills),  # the first fills all slots at once; later ones come as slots free
    )


def measure_batch(
    engine: Engine, source: Source, *, batch: int, windows: int, deadline_s: float, clock: Clock
) -> Windows:
    """Steps with exactly `batch` active sequences; as many windows as the deadline allows, at most `windows`."""
    end_s = clock.now_s() + deadline_s
    found: list[float] = []
    active: set[int] = set()
    all_steps = 0
    for _ in range(WARM_STEPS):
        _refill(engine, source, batch=batch, active=active)
        active -= {delta.request_id for delta in _step(engine, clock=clock) if delta.finish_reason is not None}
    while len(found) < windows and clock.now_s() < end_s:
        elapsed_s, steps = 0.0, 0
        while (steps < WINDOW_STEPS or elapsed_s < WINDOW_S) and clock.now_s() < end_s:
            _refill(engine, source, batch=batch, active=active)
            began_s = clock.now_s()
            deltas = _step(engine, clock=clock)
            elapsed_s += clock.now_s() - began_s
            steps += max((len(delta.tokens) for delta in deltas), default=0)
            active -= {delta.request_id for delta in deltas if delta.finish_reason is not None}
        whole = steps >= WINDOW_STEPS and elapsed_s >= WINDOW_S
        if steps and (whole or not found):  # one that the deadline cut short counts where there is no other
            found.append(elapsed_s / steps)
            all_steps += steps
    engine.cancel(active)
    if not found:
        raise TooSlowError(f"no step of {batch} sequences within {deadline_s:g} s")
    return Windows(seconds=tuple(found), steps=all_steps)


def _refill(engine: Engine, source: Source, *, batch: int, active: set[int]) -> None:
    for _ in range(_TRIES):
        if engine.active() >= batch:
            return
        requests = source.take(batch - engine.active())
        ended = engine.add(requests)
        _refuse_errors(ended)
        active |= {request.request_id for request in requests} - {delta.request_id for delta in ended}
    raise UserError(field="prompts", rule="must leave room for an answer: all of them end at once", got=_TRIES)


def _step(engine: Engine, *, clock: Clock) -> list[Delta]:
    wait_s = engine.step_seconds()
    if wait_s > 0:
        clock.sleep(wait_s)
    deltas = engine.step()
    _refuse_errors(deltas)
    return deltas


def _collect(deltas: Sequence[Delta], *, tokens: dict[int, list[int]], open_ids: set[int]) -> None:
    _refuse_errors(deltas)
    for delta in deltas:
        tokens[delta.request_id].extend(delta.tokens)
        if delta.finish_reason is not None:
            open_ids.discard(delta.request_id)


def _refuse_errors(deltas: Sequence[Delta]) -> None:
    for delta in deltas:
        if delta.error is not None:
            raise UserError(field="prompts", rule=f"cannot be answered: {delta.error}")
