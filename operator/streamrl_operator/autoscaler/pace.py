"""How long generation and training take for one step, from two observations.

With I the interval of a step and i a process's idle share: T_train = I (1 - i_trainer), T_gen = I · mean over the
replicas of (1 - i). In a stream both stages work at once and the slower one sets I; its idle share is near 0, so the
other one's T is what it would need alone.

Where the stages take turns (Colocated, Batch, StreamSync) a process is busy in one part of a step and idle in the other:
its share is right only over whole steps. Polls come seconds after a step's end, clocks with heartbeats, seconds late. So
a window counts once each clock has gone on by its whole steps, but for `BLUR_SHARE`; else it grows.

What added replicas have brought is measured too: one that was expected to speed up by I / (I - Δ') has by r_after / r_before, in tokens a
second. The logarithms of both are summed until a speed-up of `JUDGED_FROM` was expected. If less than `WORTH` of it came, no more are added
until T_gen has grown by `CHANGED`, or a step is overdue by the queue.
"""

from dataclasses import replace
from math import exp, log

from streamrl_operator.autoscaler.values import ConnectedReplica, Gains, PoolObservation, ProcessTimes, StagePace

BLUR_SHARE = 0.1
"""By so much of the window a clock may have gone on less or more: this bounds what a part of a step does to its share."""


def busy_share(before: ProcessTimes | None, now: ProcessTimes | None, *, window_s: float) -> float | None:
    """Share of its time in which the process was not idle; None if it started anew or has not told of just the window."""
    if before is None or now is None:
        return None
    wall_s, idle_s = now.wall_s - before.wall_s, now.idle_s - before.idle_s
    if wall_s <= 0 or idle_s < 0 or abs(wall_s - window_s) > BLUR_SHARE * window_s:
        return None
    return max(0.0, 1.0 - idle_s / wall_s)


def pool_share(before: PoolObservation, now: PoolObservation, *, window_s: float) -> float | None:
    """Mean of `busy_share` over the replicas; None if they are not the same ones, or one of them has no share."""
    if not now.replicas or [one.name for one in before.replicas] != [one.name for one in now.replicas]:
        return None
    shares = [busy_share(one.clock, later.clock, window_s=window_s) for one, later in _pairs(before, now)]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if len(known) == len(shares) else None


def has_begun_again(before: PoolObservation, now: PoolObservation) -> bool:
    """Whether a process started anew, or the trainer went back to its checkpoint: no measure spans that."""
    clocks = [(one.clock, other.clock) for one, other in zip(before.replicas, now.replicas, strict=False)]
    if before.trainer is not None and now.trainer is not None:
        clocks.append((before.trainer, now.trainer))
    return (
        now.attempt != before.attempt
        or now.step < before.step
        or any(later.wall_s < earlier.wall_s or later.idle_s < earlier.idle_s for earlier, later in clocks)
    )


def measure(before: PoolObservation, now: PoolObservation, *, waits: float = 1.0) -> StagePace | None:
    """The pace between the two; None while no whole step or not every process's clock is known.

    `waits`: share of the reconciles in between at which samples waited for a slot, or were to wait for another reason.
    """
    steps = now.step - before.step
    if steps < 1:
        return None
    whole_s = now.at_s - now.since_step_s - (before.at_s - before.since_step_s)
    generating = pool_share(before, now, window_s=whole_s)
    training = busy_share(before.trainer, now.trainer, window_s=whole_s)
    if generating is None or training is None:
        return None
    interval_s = whole_s / steps
    use = _slot_use(before, now)
    full = min(waits, use)
    slots = sum(one.slots for one in now.replicas) / len(now.replicas)
    return StagePace(
        replicas=len(now.replicas),
        interval_s=interval_s,
        t_gen_s=interval_s * generating,
        t_train_s=interval_s * training,
        tokens_per_s=_tokens_per_s(before, now),
        waits=full,
        batch=slots * (use - full) / (1 - full) if full < 1 else slots,
        latency=now.latency,
    )


def blended(before: StagePace | None, now: StagePace) -> StagePace:
    """The pace of the last windows, the newest as much as all before it: one step with a long answer is not the pace."""
    if before is None or before.replicas != now.replicas:
        return now
    return replace(
        now,
        interval_s=(before.interval_s + now.interval_s) / 2,
        t_gen_s=(before.t_gen_s + now.t_gen_s) / 2,
        t_train_s=(before.t_train_s + now.t_train_s) / 2,
        tokens_per_s=(before.tokens_per_s + now.tokens_per_s) / 2,
        waits=(before.waits + now.waits) / 2,
        batch=(before.batch + now.batch) / 2,
    )


def _pairs(before: PoolObservation, now: PoolObservation) -> list[tuple[ConnectedReplica, ConnectedReplica]]:
    return list(zip(before.replicas, now.replicas, strict=True))


def _tokens_per_s(before: PoolObservation, now: PoolObservation) -> float:
    return sum(
        (later.tokens - one.tokens) / (later.clock.wall_s - one.clock.wall_s) for one, later in _pairs(before, now)
    )


def _slot_use(before: PoolObservation, now: PoolObservation) -> float:
    """Share of the time of generating that slots were in use, or not but samples waited for one."""
    busy_s = sum(later.busy_s - one.busy_s for one, later in _pairs(before, now))
    skew_s = sum(later.skew_s - one.skew_s for one, later in _pairs(before, now))
    return busy_s / (busy_s + skew_s) if busy_s > 0 else 1.0


WORTH = 0.25
"""Least share of the expected that must come: the paper's elastic run had .8 to .5 of an even split, a step's noise takes some."""
JUDGED_FROM = 1.19
"""Expected speed-up: from 1 to 2, 2 to 3, 3 to 4 or 4 to 5 replicas, from 10 to 12, from 20 to 24."""
CHANGED = 1.5
"""T_gen by T_gen when it was judged; a step's noise is less, mostly."""
_MOST_FALL = 0.5
"""Of an interval: what a second replica takes off where all splits evenly."""


def asked(gains: Gains, *, pace: StagePace, fall_s: float) -> Gains:
    """A replica is added, and T_gen is predicted to fall by so much."""
    if not pace.tokens_per_s:
        return replace(gains, before=None)
    share = min(max(fall_s / pace.interval_s, 0.0), _MOST_FALL)
    return replace(gains, before=pace, newest=-log(1 - share), released_s=None, why="")


def judged(gains: Gains, pace: StagePace) -> Gains:
    """The pace with it is known, and whether it is still generation that sets it."""
    if gains.released_s is not None and pace.t_gen_s > gains.released_s:
        return Gains()
    if gains.before is None:
        return gains
    if not gains.before.tokens_per_s or not pace.tokens_per_s or pace.t_gen_s <= pace.t_train_s:
        return replace(gains, before=None)
    expected = gains.expected + gains.newest
    came = gains.came + log(pace.tokens_per_s / gains.before.tokens_per_s)
    if expected < log(JUDGED_FROM):
        return Gains(expected=expected, came=came)
    if came >= WORTH * expected:
        return Gains()
    released_s = CHANGED * pace.t_gen_s
    brought = f"{exp(expected) - 1:.0%} more tokens/s were expected of the last replicas, {exp(came) - 1:+.0%} came"
    return Gains(released_s=released_s, why=f"{brought}: none is added until T_gen exceeds {released_s:.3g} s")
