"""Whether it pays that running samples of one generator go on at another, and which.

Both generators run what they hold to the end, nothing joins. With lengths left L_1 >= .. >= L_n and PTL(b) seconds
of a step with b samples active,

    T = sum_j PTL(j) (L_j - L_{j+1})                exact replica time (`streamrl.latency.replica_seconds`)
    before = max(T_source, T_target)
    after  = max(T_source without the moved ones,  prefill + T_target with them)

A sample that moves is read again by its new generator, which makes nothing meanwhile, and loses what it was given since
its generator last told of it. Lengths left are not known but drawn (`remaining.py`); times are means over the draws.

Owns the model and the choice. Pure. Invariant: `after` of a move is below `before`, by the gain that was asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from streamrl.latency import LatencyCurve, table_seconds

PROGRESS_INTERVAL_S = 1.0
"""A generator tells of running samples so often (`generator/link.py`): a move loses at most what is made in that time."""
_ROUNDING = 1e-9
"""Times that are equal but for rounding are no gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """One sample under way."""

    lease: int
    expected_tokens: float
    """Still to go: the longest move first."""
    drawn_tokens: tuple[float, ...]
    """Still to go, one value for each draw; the same number of draws for all samples."""
    prefix_tokens: int
    """Prompt and completion so far: what a new generator has to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A generator with what it runs."""

    generator_id: str
    curve: LatencyCurve
    """Seconds of a step by active samples."""
    slots: int
    running: tuple[Running, ...]

    @property
    def free(self) -> int:
        """Slots without a sample."""
        return self.slots - len(self.running)

    @property
    def prefill_s(self) -> float:
        """Seconds to read one token: no more than a full decoding step takes for each of its tokens, which also waits for the weights."""
        return self.curve.at(self.slots) / self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Samples that are to go on elsewhere."""

    source: str
    target: str
    leases: tuple[int, ...]
    before_s: float
    """Until the last of both generators' samples ends, if nothing moves."""
    after_s: float
    """The same behind the move, its cost included."""


def best_move(source: Host, target: Host, *, movable: Sequence[Running], gain: float) -> Move | None:
    """The number of samples, longest first, whose move saves most time; None if none saves enough.

    Args:
        source: who would give samples away.
        target: who would take them.
        movable: those of the source's samples that may go there.
        gain: least share of the time before to be saved, 0 .. 1.
    """
    if not movable or target.free < 1:
        return None
    before_s = makespan_s([source, target])
    order = sorted(movable, key=lambda running: (-running.expected_tokens, running.lease))
    best: Move | None = None
    for count in _counts(min(len(order), target.free)):
        after_s = _after_s(source, target, moved=order[:count])
        if after_s < before_s * (1 - max(gain, _ROUNDING)) and (best is None or after_s < best.after_s):
            leases = tuple(running.lease for running in order[:count])
            best = Move(
                source=source.generator_id,
                target=target.generator_id,
                leases=leases,
                before_s=before_s,
                after_s=after_s,
            )
    return best


def makespan_s(hosts: Sequence[Host]) -> float:
    """Until the last sample of all these generators ends, if nothing moves: the mean over the draws; 0 if nothing runs."""
    return _mean(_latest([_times(host, [running.drawn_tokens for running in host.running]) for host in hosts]))


# ---- inside


def _after_s(source: Host, target: Host, *, moved: Sequence[Running]) -> float:
    gone = {running.lease for running in moved}
    staying = [running.drawn_tokens for running in source.running if running.lease not in gone]
    held = [running.drawn_tokens for running in target.running]
    lost_tokens = PROGRESS_INTERVAL_S / source.curve.at(len(source.running))
    taken = [tuple(left + lost_tokens for left in running.drawn_tokens) for running in moved]
    prefill_s = target.prefill_s * sum(running.prefix_tokens for running in moved)
    target_s = [prefill_s + seconds for seconds in _times(target, held + taken)]
    return _mean(_latest([_times(source, staying), target_s]))


def _times(host: Host, drawn_tokens: Sequence[tuple[float, ...]]) -> list[float]:
    """Exact replica time of samples with these tokens left, for each draw; empty if there are none."""
    return [
        table_seconds(_step_seconds(host.curve, host.slots), lengths) for lengths in zip(*drawn_tokens, strict=True)
    ]


@lru_cache(maxsize=256)
def _step_seconds(curve: LatencyCurve, slots: int) -> tuple[float, ...]:
    """At 0 .. slots active samples."""
    return tuple(curve.at(active) for active in range(slots + 1))


def _latest(times: Sequence[list[float]]) -> list[float]:
    """The last of all, draw by draw; who runs nothing has no part in it."""
    return [max(draw) for draw in zip(*filter(None, times), strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _counts(most: int) -> list[int]:
    """1, 2, 4 .. and `most`: enough to find about the best number at little cost."""
    doubled = [1 << power for power in range(most.bit_length())]
    return doubled if doubled[-1] == most else [*doubled, most]
