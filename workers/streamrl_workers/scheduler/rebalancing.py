"""Running samples that go on, with their tokens, on an emptier generator, when that pays: an option of the job, off by default.

Both generators run what they hold to the end, nothing joins. With lengths left L_1 >= .. >= L_n, PTL(b) seconds of a step:

    T = sum_j PTL(j) (L_j - L_{j+1})       before = max(T_source, T_target)
    after = max(T_source without the moved ones,  prefill + T_target with them)

Lengths left are drawn, the same for a sample whenever it is asked, and times are means over the draws. u is even in 0 .. 1,
p0 the place of the sample's tokens so far in the run's lengths, s the place that is predicted for it, e standard normal:

    place = p0 + (1 - p0) u       predicted: Phi(r Phi^-1(s) + sqrt(1 - r^2) e), given that it is beyond p0

It looks while nothing waits for a slot and no evaluation runs, once the lengths of a batch and the speed of both generators
are known and the last move has shown a token. A sample moves within its length pool, to a version that it may go on with.

Owns the moment, the estimates and the choice. What a move does to sample, leases and messages is `groups/lifecycle.py`'s.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from math import sqrt
from statistics import NormalDist, fmean

from streamrl.latency import LatencyCurve, replica_seconds
from streamrl.spec.scheduling import Rebalance
from streamrl_workers.scheduler.components import SchedulerComponents
from streamrl_workers.scheduler.fleet import Generator, Lease
from streamrl_workers.scheduler.lengths import Lengths
from streamrl_workers.scheduler.lengths.predictor import COMPLETIONS_WINDOW
from streamrl_workers.scheduler.lengths.quantiles import SlidingQuantiles

LOOK_INTERVAL_S, MOST_INTERVAL_S = 1.0, 8.0
"""As often as generators tell of running samples; ever more seldom while no move is found. A move loses what is made in one interval."""
MIN_COMPLETIONS = 64
"""Finished completions before anything moves, and a batch's worth if that is more: before, the long ones are missing."""
SAMPLES_PER_LOOK = 128
"""So many running samples are estimated at a look; the others' generators keep their last estimate."""
SOURCES = TARGETS = 2
"""Generators compared in one look: those that end last, each with the emptiest of the fastest kinds."""
DRAWS = 4
"""Enough to tell a long one from many; each costs."""
KNOWN = 0.7
"""r: half of the variance of lengths is within a prompt's samples; a trusted prediction is nearly exact about the rest."""
OUTLIVED_SHARE = 0.1
"""A sample longer than all that were seen goes on for this share of what it has, on average."""
_MARGIN = 1e-6
"""Places are kept so far from 0 and 1, where the normal quantile has no end."""
_NORMAL = NormalDist()
_LEVELS = tuple((draw + 0.5) / DRAWS for draw in range(DRAWS))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSample:
    """One sample under way."""

    lease: int
    expected_tokens: float
    """Still to go: the longest move first."""
    drawn_tokens: tuple[float, ...]
    """Still to go, one value for each draw."""
    prefix_tokens: int
    """Prompt and completion so far: what a new generator has to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A generator with what it runs."""

    generator_id: str
    curve: LatencyCurve
    slots: int
    running: tuple[RunningSample, ...]

    def seconds(
        self, running: Iterable[RunningSample], *, more_tokens: Sequence[tuple[float, ...]] = ()
    ) -> list[float]:
        """Until these samples have ended, by draw."""
        drawn = [*(one.drawn_tokens for one in running), *more_tokens]
        return [replica_seconds(self.curve, lengths) for lengths in zip(*drawn, strict=True)] or [0.0] * DRAWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Samples that are to go on elsewhere, and the seconds until both generators are done, if nothing moves and behind the move."""

    target: str
    leases: tuple[int, ...]
    before_s: float
    after_s: float


def best_move(source: Host, target: Host, *, movable: Sequence[RunningSample], gain: float) -> Move | None:
    """The number of samples, longest first, whose move saves most time; None if none saves this share of the time before."""
    before_s = _later(source.seconds(source.running), target.seconds(target.running))
    longest = sorted(movable, key=lambda running: (-running.expected_tokens, running.lease))
    best: Move | None = None
    for count in _counts(min(len(longest), target.slots - len(target.running))):
        moved = longest[:count]
        after_s = _after_s(source, target, moved=moved)
        if after_s < before_s * (1 - max(gain, _MARGIN)) and (best is None or after_s < best.after_s):
            leases = tuple(running.lease for running in moved)
            best = Move(target=target.generator_id, leases=leases, before_s=before_s, after_s=after_s)
    return best


def lengths_left(
    seen: SlidingQuantiles, tokens: int, *, share: float | None, levels: Iterable[float], most: int
) -> Iterator[float]:
    """Tokens that a sample still has, at these levels of what may be.

    Args:
        seen: lengths of completions that have finished.
        tokens: of the sample so far.
        share: predicted place in the length distribution; None: nothing is known.
        levels: 0 .. 1, low ones for early ends.
        most: tokens of one completion.
    """
    place = _place(seen.place(tokens), share)
    for level in levels:
        left = max(seen.at(place(level)) - tokens, 2 * OUTLIVED_SHARE * tokens * level, 1.0)
        yield min(left, max(1.0, float(most - tokens)))


class Rebalancer:
    """Moves samples."""

    def __init__(self, parts: SchedulerComponents, *, options: Rebalance, lengths: Lengths) -> None:
        settings = parts.settings
        self._options = options
        self._lengths = lengths
        self._groups = parts.groups
        self._window = parts.window
        self._fleet = parts.fleet
        self._waiting = parts.waiting
        self._lifecycle = parts.lifecycle
        self._evaluator = parts.evaluator
        self._one_version = not settings.partial_rollouts
        self._most_tokens = settings.sampling.max_tokens
        self._enough = min(COMPLETIONS_WINDOW, max(MIN_COMPLETIONS, settings.batch_groups * settings.group_size))
        self._ends: dict[str, float] = {}
        """Generator -> when its last sample ends, as of its last estimate."""
        self._turn = 0
        self._under_way: dict[int, int] = {}
        """Lease of a sample that was moved -> tokens that it had."""
        self._next_s = float("-inf")
        self._pause_s = LOOK_INTERVAL_S

    def look(self) -> None:
        """Move samples if it pays now."""
        if self._waiting.samples:
            self._pause_s = LOOK_INTERVAL_S
            return
        if self._fleet.now_s < self._next_s or self._evaluator.version is not None or not self._fleet.free:
            return
        if len(self._lengths.completions) < self._enough or self._is_under_way():
            return
        self._estimate()
        move = self._best()
        self._pause_s = LOOK_INTERVAL_S if move is not None else min(2 * self._pause_s, MOST_INTERVAL_S)
        self._next_s = self._fleet.now_s + self._pause_s
        if move is not None:
            self._carry_out(move)

    def _is_under_way(self) -> bool:
        """Whether a sample that was moved has not had a token since."""
        for number, tokens in list(self._under_way.items()):
            lease = self._fleet.lease(number)
            if lease is None or self._tokens(lease) > tokens:
                del self._under_way[number]
        return bool(self._under_way)

    # ---- who

    def _estimate(self) -> None:
        """When some of the generators will have finished what they hold; the others at another look."""
        generators = list(self._fleet)
        self._ends = {one.generator_id: self._ends.get(one.generator_id, 0.0) for one in generators}
        samples = 0
        for _ in generators:
            self._turn = (self._turn + 1) % len(generators)
            generator = generators[self._turn]
            samples += len(generator.leases)
            lefts = [running.expected_tokens for running in self._host(generator).running]
            self._ends[generator.generator_id] = self._fleet.now_s + replica_seconds(
                self._fleet.curve(generator), lefts
            )
            if samples >= SAMPLES_PER_LOOK:
                return

    def _best(self) -> Move | None:
        """The move that saves most among the generators that end last and the emptiest."""
        last_first = sorted(self._fleet, key=lambda one: (-self._ends[one.generator_id], one.generator_id))
        moves = []
        for source in islice((one for one in last_first if one.leases and self._fleet.measured(one)), SOURCES):
            host = self._host(source)
            for target in nsmallest(TARGETS, self._targets(source), key=self._fleet.offer):
                movable = [running for running in host.running if self._may_move(running.lease, target)]
                moves.append(
                    best_move(host, self._host(target), movable=movable, gain=self._options.gain_percent / 100)
                )
        return max(filter(None, moves), key=lambda move: move.before_s - move.after_s, default=None)

    def _targets(self, source: Generator) -> Iterable[Generator]:
        """The emptiest generator of each kind in the source's length pool."""
        long = self._waiting.order.long_generators
        emptiest: dict[tuple[str, int], Generator] = {}
        for one in sorted(self._fleet.free.values(), key=lambda one: (len(one.leases), one.generator_id)):
            same = (one.generator_id in long) == (source.generator_id in long)
            if one is not source and one.step is not None and same and self._fleet.measured(one):
                emptiest.setdefault((one.pool, one.slots), one)
        return emptiest.values()

    def _may_move(self, number: int, target: Generator) -> bool:
        lease = self._fleet.lease(number)
        if lease is None or lease.moves >= self._options.max_moves:
            return False
        group = self._groups[lease.group_id]
        spans = group.samples[lease.sample_index].spans
        if not spans:
            return False  # without a token it would begin anew
        stays = target.version == (spans[-1][2], spans[-1][1]) and not target.is_loading
        if self._one_version and not stays:
            return False
        assert group.start_version is not None and target.step is not None
        return target.step <= self._window.step and self._window.may_go_on(group.start_version, at=target.step)

    def _carry_out(self, move: Move) -> None:
        target = self._fleet.get(move.target)
        assert target is not None
        for number in move.leases:
            lease = self._fleet.lease(number)
            assert lease is not None
            moved = self._lifecycle.move(lease, to=target)
            self._under_way[moved.number] = self._tokens(moved)

    # ---- what they hold

    def _host(self, generator: Generator) -> Host:
        leases = [lease for lease in generator.leases.values() if not lease.evaluation]
        shares = {group_id: self._share(group_id) for group_id in dict.fromkeys(lease.group_id for lease in leases)}
        return Host(
            generator_id=generator.generator_id,
            curve=self._fleet.curve(generator),
            slots=generator.slots,
            running=tuple(self._running(lease, shares[lease.group_id]) for lease in leases),
        )

    def _running(self, lease: Lease, share: float | None) -> RunningSample:
        sample, tokens = self._groups[lease.group_id].samples[lease.sample_index], self._tokens(lease)
        first = (
            lease.group_id + lease.sample_index
        ) % DRAWS  # samples of one generator are not all long in the same draw
        levels = (0.5, *_LEVELS[first:], *_LEVELS[:first])
        middle, *drawn = lengths_left(
            self._lengths.completions, tokens, share=share, levels=levels, most=self._most_tokens
        )
        return RunningSample(
            lease=lease.number,
            expected_tokens=middle,
            drawn_tokens=tuple(drawn),
            prefix_tokens=tokens + (len(sample.prompt_tokens) >> 2),
        )

    def _share(self, group_id: int) -> float | None:
        """Where one more sample of the group is predicted to stand among all lengths; None: nothing sure is known."""
        if not self._lengths.trusted:
            return None
        group = self._groups[group_id]
        finished = [len(sample.tokens) >> 2 for sample in group.samples if sample.finish_reason]
        predicted = self._lengths.predict(group.prompt_key, prompt=group.prompt, siblings=finished)
        return None if predicted.source == "Nothing" else predicted.share

    def _tokens(self, lease: Lease) -> int:
        return len(self._groups[lease.group_id].samples[lease.sample_index].tokens) >> 2


# ---- inside


def _after_s(source: Host, target: Host, *, moved: Sequence[RunningSample]) -> float:
    gone = {running.lease for running in moved}
    lost_tokens = LOOK_INTERVAL_S / source.curve.at(len(source.running))
    taken = [tuple(left + lost_tokens for left in running.drawn_tokens) for running in moved]
    # reading a token takes no longer than a full decoding step takes for each of its tokens
    prefill_s = target.curve.at(target.slots) / target.slots * sum(running.prefix_tokens for running in moved)
    source_s = source.seconds(running for running in source.running if running.lease not in gone)
    target_s = target.seconds(target.running, more_tokens=taken)
    return _later(source_s, [prefill_s + seconds for seconds in target_s])


def _later(one_s: Sequence[float], other_s: Sequence[float]) -> float:
    """When both are done: the mean over the draws."""
    return fmean(map(max, one_s, other_s))


def _place(passed: float, share: float | None) -> Callable[[float], float]:
    """From a level to the place of the whole completion, given that it is beyond its tokens and was predicted at `share`."""
    if share is None:
        return lambda level: passed + (1 - passed) * level
    mean, rest = KNOWN * _NORMAL.inv_cdf(_inside(share)), sqrt(1 - KNOWN**2)
    least = _NORMAL.cdf((_NORMAL.inv_cdf(_inside(passed)) - mean) / rest)
    return lambda level: _NORMAL.cdf(mean + rest * _NORMAL.inv_cdf(_inside(least + (1 - least) * level)))


def _inside(place: float) -> float:
    return min(max(place, _MARGIN), 1 - _MARGIN)


def _counts(most: int) -> list[int]:
    """1, 2, 4 .. and `most`: enough to find about the best number at little cost."""
    doubled = [1 << power for power in range(most.bit_length())]
    return sorted({*doubled, most} - {0})
