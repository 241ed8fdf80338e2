"""When running samples are looked at, and what follows when the model says that a move pays.

    nothing waits for a slot, and no evaluation runs             what waits is served first; an evaluation holds versions
    a batch's worth of completions has been seen                 before, the long ones are missing
    the speed of both pools has been measured                    a guessed curve is no reason to move
    the move before has shown its first token                    one decision at a time
    at most every LOOK_INTERVAL_S                                nothing new is known earlier; while no move is found, ever
                                                                 more seldom, up to MOST_INTERVAL_S

A sample moves within the plan's sides, to a generator whose version it may go on with (`staleness.py`), with its tokens, at most
`maxMoves` times; one without a token stays, as a move of it would begin it anew.

Whose samples end last is estimated for some generators at each look, in turn, so that a look costs hardly more with a
thousand of them; the last ones by that estimate are then compared with the emptiest generators.

Owns the moment, the candidates and the estimates. Decides nothing by itself (`decision.py`); what a move does to sample,
leases and messages is `production.py`'s.
"""

from collections.abc import Iterable
from dataclasses import replace
from heapq import nsmallest
from itertools import islice

from streamrl.latency import LatencyCurve, replica_seconds
from streamrl.spec.scheduling import Rebalance
from streamrl_workers.scheduler.fleet import Generator, Lease, Version
from streamrl_workers.scheduler.parts import Parts
from streamrl_workers.scheduler.rebalancing.decision import Host, Move, Running, best_move
from streamrl_workers.scheduler.rebalancing.remaining import WINDOW, Remaining

LOOK_INTERVAL_S = 1.0
"""As often as generators tell of running samples."""
MOST_INTERVAL_S = 8.0
MIN_COMPLETIONS = 64
"""Seen before anything moves, and a batch's worth if that is more."""
SAMPLES_PER_LOOK = 128
"""So many running samples are estimated at a look, and the rest of the generator that they end in."""
SOURCES = 2
TARGETS = 2
"""Generators compared in one look: those that end last, each with the emptiest of the fastest kinds."""


class Rebalancer:
    """Moves samples, if the job wants it."""

    def __init__(self, parts: Parts) -> None:
        settings = parts.settings
        self._options: Rebalance | None = settings.rebalance
        self._groups = parts.groups
        self._window = parts.window
        self._fleet = parts.fleet
        self._waiting = parts.waiting
        self._production = parts.production
        self._evaluator = parts.evaluator
        self._group_size = settings.group_size
        self._one_version = not settings.partial_rollouts
        self._remaining = Remaining(most_tokens=settings.sampling.max_tokens)
        self._enough = min(WINDOW, max(MIN_COMPLETIONS, settings.batch_groups * settings.group_size))
        self._ends: dict[str, float] = {}
        """Generator -> when its last sample ends, as of its last estimate."""
        self._hosts: dict[str, Host] = {}
        """Generators as this look finds them."""
        self._turn = 0
        self._under_way: dict[int, int] = {}
        """Lease of a sample that was moved -> tokens that it had."""
        self._next_s = float("-inf")
        self._pause_s = LOOK_INTERVAL_S
        if self._options is not None:
            parts.production.on_lengths = self._learn

    def look(self) -> None:
        """Move samples if it pays now."""
        if self._options is None:
            return
        if self._waiting.samples:
            self._pause_s = LOOK_INTERVAL_S
            return
        if self._fleet.now_s < self._next_s or not self._may_look():
            return
        self._hosts.clear()
        self._estimate()
        move = self._best(self._options)
        self._pause_s = LOOK_INTERVAL_S if move is not None else min(2 * self._pause_s, MOST_INTERVAL_S)
        self._next_s = self._fleet.now_s + self._pause_s
        if move is not None:
            self._carry_out(move)

    # ---- when

    def _may_look(self) -> bool:
        if self._evaluator.version is not None or not self._fleet.free:
            return False
        return self._remaining.seen >= self._enough and not self._is_under_way()

    def _is_under_way(self) -> bool:
        """Whether a sample that was moved has not had a token since."""
        for number, tokens in list(self._under_way.items()):
            lease = self._fleet.lease(number)
            if lease is None or self._tokens(lease) > tokens:
                del self._under_way[number]
        return bool(self._under_way)

    def _learn(self, tokens: Iterable[int]) -> None:
        for count in tokens:
            self._remaining.learn(count)

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
            self._ends[generator.generator_id] = self._fleet.now_s + self._left_s(generator)
            if samples >= SAMPLES_PER_LOOK:
                return

    def _left_s(self, generator: Generator) -> float:
        """Until its last sample ends, by the middle of what may be."""
        shares: dict[int, float | None] = {}
        leases = [lease for lease in generator.leases.values() if not lease.evaluation]
        lefts = [self._remaining.expected(self._tokens(lease), share=self._share(lease, shares)) for lease in leases]
        return replica_seconds(self._fleet.curve(generator), lefts)

    def _best(self, options: Rebalance) -> Move | None:
        """The move that saves most among the generators that end last and the emptiest."""
        last_first = sorted(self._fleet, key=lambda one: (-self._ends[one.generator_id], one.generator_id))
        moves = []
        for source in islice(filter(self._is_known, last_first), SOURCES):
            host = self._host(source)
            for target in nsmallest(TARGETS, self._targets(source), key=self._fleet.offer):
                movable = [running for running in host.running if self._may_move(running.lease, target, options)]
                taker = _without_guess(self._host(target))
                move = best_move(host, taker, movable=movable, gain=options.gain_percent / 100)
                if move is not None:
                    moves.append(move)
        return max(moves, key=lambda move: move.before_s - move.after_s, default=None)

    def _is_known(self, generator: Generator) -> bool:
        """Whether it is known how fast the generator is with what it holds; with less it is taken to be as fast as may be."""
        held = len(generator.leases)
        return held > 0 and self._fleet.measured(generator) and held >= _least_measured(self._fleet.curve(generator))

    def _targets(self, source: Generator) -> Iterable[Generator]:
        """The emptiest generator of each kind on the source's side."""
        tail = self._waiting.plan.tail_generators
        side = source.generator_id in tail
        emptiest: dict[tuple[str, int], Generator] = {}
        for one in self._fleet.free.values():
            if one is source or one.step is None or (one.generator_id in tail) != side:
                continue
            kind = (one.pool, one.slots)
            known = emptiest.get(kind)
            if known is None or _emptier(one, known):
                emptiest[kind] = one
        return filter(self._fleet.measured, emptiest.values())

    def _may_move(self, number: int, target: Generator, options: Rebalance) -> bool:
        lease = self._fleet.lease(number)
        if lease is None or lease.moves >= options.max_moves:
            return False
        group = self._groups[lease.group_id]
        spans = group.samples[lease.sample_index].spans
        if not spans or (self._one_version and not _stays_at(target, (spans[-1][2], spans[-1][1]))):
            return False
        assert group.begun is not None and target.step is not None
        if target.step > self._window.step:
            return False
        return self._window.may_go_on(group.begun, at=target.step)

    def _carry_out(self, move: Move) -> None:
        target = self._fleet.get(move.target)
        assert target is not None
        for number in move.leases:
            lease = self._fleet.lease(number)
            assert lease is not None
            moved = self._production.move(lease, to=target)
            self._under_way[moved.number] = self._tokens(moved)

    # ---- what they hold

    def _host(self, generator: Generator) -> Host:
        found = self._hosts.get(generator.generator_id)
        if found is None:
            found = self._hosts[generator.generator_id] = self._see(generator)
        return found

    def _see(self, generator: Generator) -> Host:
        shares: dict[int, float | None] = {}
        return Host(
            generator_id=generator.generator_id,
            curve=self._fleet.curve(generator),
            slots=generator.slots,
            running=tuple(self._running(lease, shares) for lease in generator.leases.values() if not lease.evaluation),
        )

    def _running(self, lease: Lease, shares: dict[int, float | None]) -> Running:
        share, tokens = self._share(lease, shares), self._tokens(lease)
        sample = self._groups[lease.group_id].samples[lease.sample_index]
        number = lease.group_id * self._group_size + lease.sample_index
        return Running(
            lease=lease.number,
            expected_tokens=self._remaining.expected(tokens, share=share),
            drawn_tokens=self._remaining.drawn(tokens, share=share, number=number),
            prefix_tokens=tokens + (len(sample.prompt_tokens) >> 2),
        )

    def _share(self, lease: Lease, shares: dict[int, float | None]) -> float | None:
        """Where a sample is predicted to stand among all lengths; None: nothing sure is known. `shares`: by group, as far as asked."""
        if lease.group_id not in shares:
            group = self._groups[lease.group_id]
            finished = [len(sample.tokens) >> 2 for sample in group.samples if sample.finish_reason]
            shares[lease.group_id] = self._waiting.expected_share(group, siblings=finished)
        return shares[lease.group_id]

    def _tokens(self, lease: Lease) -> int:
        return len(self._groups[lease.group_id].samples[lease.sample_index].tokens) >> 2


def _without_guess(host: Host) -> Host:
    """As one that would take samples: nothing is hoped for from smaller batches than were seen."""
    place = host.curve.batches.index(_least_measured(host.curve))
    return replace(host, curve=LatencyCurve(host.curve.batches[place:], host.curve.seconds[place:]))


def _least_measured(curve: LatencyCurve) -> int:
    """Smallest batch that was seen for sure: the point at 1 may be a guess (`dispatch/measured.py`)."""
    return curve.batches[0] if curve.batches[0] > 1 or len(curve.batches) == 1 else curve.batches[1]


def _emptier(one: Generator, other: Generator) -> bool:
    return (len(one.leases), one.generator_id) < (len(other.leases), other.generator_id)


def _stays_at(generator: Generator, version: Version) -> bool:
    """Whether what goes to the generator now is made under this version."""
    return generator.version == version and not generator.is_loading
