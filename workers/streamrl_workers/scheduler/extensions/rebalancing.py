"""Running samples continue, with their tokens, on an emptier generator if that saves time: an option of the job, off by default.

Looked at are the generator whose steps are slowest and the one that would run one sample more fastest. Both run what they hold to the
end, nothing joins. With lengths left L_1 >= .. >= L_n, PTL(b) seconds of a step:

    T = sum_j PTL(j) (L_j - L_{j+1})       before = max(T_source, T_target)
    after = max(T_source without the moved ones,  prefill + T_target with them)

What a sample has left are the run's lengths beyond what it has, at a level between 0 and 1. A trusted prediction counts for half of the level.
Times are means over four levels of each sample, and neighbours are at different ones: with one length for all, a full generator would look slow
to its end.

It looks while nothing waits for a slot and no evaluation runs, once the lengths of a batch and the speed of both generators
are known and the last move has shown a token. A sample moves within its length pool, to a version under which it may continue.

Owns the moment, the estimates and the choice. What a move does to sample, leases and messages is `rollout.py`'s.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from streamrl.latency import LatencyCurve, replica_seconds
from streamrl.spec.scheduling import Rebalance
from streamrl_workers.scheduler.evaluation import Evaluator
from streamrl_workers.scheduler.generators import Fleet, Generator, Lease
from streamrl_workers.scheduler.lengths.predictor import COMPLETIONS_WINDOW
from streamrl_workers.scheduler.lengths.quantiles import SlidingQuantiles
from streamrl_workers.scheduler.model import GroupTable
from streamrl_workers.scheduler.planning import WaitingGroups
from streamrl_workers.scheduler.rollout import SampleLifecycle
from streamrl_workers.scheduler.settings import SchedulerSettings

LOOK_INTERVAL_S = 1.0
"""Interval between looks, in seconds: that of reports about running samples. A move loses the tokens of one interval."""
MIN_COMPLETIONS = 64
"""Finished completions before anything moves, and a batch's worth if that is more: before, the long ones are missing."""
DRAWS = 4
"""Levels of each sample: enough to distinguish one long sample from many."""
OUTLIVED_SHARE = 0.1
"""A sample longer than all that were seen continues for this share of its tokens, on average."""
_LEAST_GAIN = 1e-6
"""Minimum gain; a smaller one is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSample:
    """One sample under way."""

    lease: int
    expected_tokens: float
    """Still to go: the longest move first."""
    left_tokens: tuple[float, ...]
    """Still to go, by draw."""
    prefix_tokens: int
    """Prompt and completion so far: what a new generator has to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A generator with what it runs."""

    generator_id: str
    curve: LatencyCurve
    slots: int
    running: tuple[RunningSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Samples that will move, and the seconds until both generators are done, without the move and after it."""

    target: str
    leases: tuple[int, ...]
    before_s: float
    after_s: float


def best_move(source: Host, target: Host, *, movable: Sequence[RunningSample], gain: float) -> Move | None:
    """Return the move of samples, longest first, that saves most time; None if no move saves this share of the time before."""
    before_s = _both_s(source, target, moved=())
    longest = sorted(movable, key=lambda running: (-running.expected_tokens, running.lease))
    best: Move | None = None
    for count in _counts(min(len(longest), target.slots - len(target.running))):
        after_s = _both_s(source, target, moved=longest[:count])
        if after_s < before_s * (1 - max(gain, _LEAST_GAIN)) and (best is None or after_s < best.after_s):
            leases = tuple(running.lease for running in longest[:count])
            best = Move(target=target.generator_id, leases=leases, before_s=before_s, after_s=after_s)
    return best


def tokens_left(seen: SlidingQuantiles, tokens: int, level: float, *, share: float | None, most: int) -> float:
    """Return the tokens that a sample still has, at this level of what is possible: 0 .. 1, low ones for early ends.

    Args:
        seen: lengths of completions that have finished.
        tokens: of the sample so far.
        level: which of the longer lengths.
        share: where its length is predicted to stand among all; None: nothing is known.
        most: tokens of one completion.
    """
    passed = seen.place(tokens)
    level = level if share is None else (level + share) / 2
    left = max(seen.at(passed + (1 - passed) * level) - tokens, 2 * OUTLIVED_SHARE * tokens * level, 1.0)
    return min(left, max(1.0, float(most - tokens)))


class Rebalancer:
    """Moves samples: an `Extension`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        options: Rebalance,
        groups: GroupTable,
        fleet: Fleet,
        waiting: WaitingGroups,
        lifecycle: SampleLifecycle,
        evaluator: Evaluator,
    ) -> None:
        self._options = options
        self._lengths = lifecycle.lengths
        self._groups = groups
        self._fleet = fleet
        self._waiting = waiting
        self._lifecycle = lifecycle
        self._evaluator = evaluator
        self._most_tokens = settings.tasks.max_tokens
        self._enough = min(COMPLETIONS_WINDOW, max(MIN_COMPLETIONS, settings.batch_groups * settings.group_size))
        self._under_way: dict[int, int] = {}
        """Lease of a sample that was moved -> tokens that it had."""
        self._next_s = float("-inf")

    def settle(self) -> None:
        """Move samples if it pays now."""
        if self._waiting.samples or self._evaluator.version is not None or self._fleet.now_s < self._next_s:
            return
        if len(self._lengths.completions) < self._enough or self._is_under_way():
            return
        self._next_s = self._fleet.now_s + LOOK_INTERVAL_S
        if (move := self._move()) is not None:
            self._carry_out(move)

    def _is_under_way(self) -> bool:
        """Return whether a sample that was moved has no new token yet."""
        for number, tokens in list(self._under_way.items()):
            lease = self._fleet.leases.get(number)
            if lease is None or self._tokens(lease) > tokens:
                del self._under_way[number]
        return bool(self._under_way)

    def _move(self) -> Move | None:
        """Return a move from the generator with the slowest steps to the one of its length pool that would run one sample more fastest.

        A generator to which no sample may move, or whose move does not pay, is passed over for the best one of the next version.
        """
        fleet, long = self._fleet, self._waiting.order.long_generators
        busy = [one for one in fleet if one.leases and fleet.measured(one)]
        source = max(busy, key=lambda one: (fleet.curve(one).at(len(one.leases)), one.generator_id), default=None)
        if source is None:
            return None
        free = (one for one in fleet.free.values() if one.step is not None and fleet.measured(one))
        is_long = source.generator_id in long
        targets = (one for one in free if one is not source and (one.generator_id in long) is is_long)
        host = self._host(source)
        gain = self._options.gain_percent / 100
        for target in self._by_version(targets):
            movable = [running for running in host.running if self._may_move(running.lease, target)]
            if movable and (move := best_move(host, self._host(target), movable=movable, gain=gain)) is not None:
                return move
        return None

    def _by_version(self, targets: Iterable[Generator]) -> list[Generator]:
        """Return the best generator of each version, the best of all first: samples may continue with some versions alone."""
        best: dict[object, Generator] = {}
        for one in sorted(targets, key=self._fleet.offer):
            best.setdefault((one.weights.version, one.weights.is_loading), one)
        return list(best.values())

    def _may_move(self, number: int, target: Generator) -> bool:
        lease = self._fleet.leases.get(number)
        if lease is None or lease.moves >= self._options.max_moves:
            return False
        has_begun = bool(self._groups[lease.group_id].samples[lease.sample_index].spans)
        return has_begun and self._lifecycle.may_move(lease, to=target)

    def _carry_out(self, move: Move) -> None:
        target = self._fleet.connected.get(move.target)
        assert target is not None
        for number in move.leases:
            lease = self._fleet.leases.get(number)
            assert lease is not None
            if not self._lifecycle.fits(self._groups[lease.group_id], target, index=lease.sample_index):
                return
            moved = self._lifecycle.move(lease, to=target)
            self._under_way[moved.number] = self._tokens(moved)

    # ---- what they hold

    def _host(self, generator: Generator) -> Host:
        leases = [lease for lease in generator.leases.values() if lease.source is self._lifecycle]
        shares = {group_id: self._share(group_id) for group_id in dict.fromkeys(lease.group_id for lease in leases)}
        return Host(
            generator_id=generator.generator_id,
            curve=self._fleet.curve(generator),
            slots=generator.slots,
            running=tuple(self._running(lease, shares[lease.group_id]) for lease in leases),
        )

    def _running(self, lease: Lease, share: float | None) -> RunningSample:
        tokens = self._tokens(lease)
        first = lease.group_id + lease.sample_index
        levels = [((first + draw) % DRAWS + 0.5) / DRAWS for draw in range(DRAWS)]
        left = partial(tokens_left, self._lengths.completions, tokens, share=share, most=self._most_tokens)
        return RunningSample(
            lease=lease.number,
            expected_tokens=left(0.5),
            left_tokens=tuple(map(left, levels)),
            prefix_tokens=self._groups[lease.group_id].samples[lease.sample_index].read_tokens,
        )

    def _share(self, group_id: int) -> float | None:
        """Return where one more sample of the group is predicted to stand among all lengths; None: no prediction is trusted."""
        if not self._lengths.trusted:
            return None
        group = self._groups[group_id]
        finished = [sample.completion_tokens for sample in group.samples if sample.outcome.finish_reason]
        predicted = self._lengths.predict(group.prompt.key, siblings=finished)
        return None if predicted.source == "Nothing" else predicted.share

    def _tokens(self, lease: Lease) -> int:
        return self._groups[lease.group_id].samples[lease.sample_index].completion_tokens


# ---- inside


def _both_s(source: Host, target: Host, *, moved: Sequence[RunningSample]) -> float:
    """Return the seconds until both are done: the mean over the draws."""
    gone = {running.lease for running in moved}
    lost_tokens = LOOK_INTERVAL_S / source.curve.at(max(1, len(source.running)))
    # reading a token takes no longer than a full decoding step takes for each of its tokens
    prefill_s = target.curve.at(target.slots) / target.slots * sum(one.prefix_tokens for one in moved)

    def both_s(draw: int) -> float:
        stay = [one.left_tokens[draw] for one in source.running if one.lease not in gone]
        there = [one.left_tokens[draw] for one in target.running]
        there += [one.left_tokens[draw] + lost_tokens for one in moved]
        return max(replica_seconds(source.curve, stay), prefill_s + replica_seconds(target.curve, there))

    return fmean(map(both_s, range(DRAWS)))


def _counts(most: int) -> list[int]:
    """1, 2, 4 .. and `most`: enough to find about the best number at little cost."""
    doubled = [1 << power for power in range(most.bit_length())]
    return sorted({*doubled, most} - {0})
