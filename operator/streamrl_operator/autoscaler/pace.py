"""How long generation and training take for one step, from two observations.

With I the interval of a step and i a process's idle share: T_train = I (1 - i_trainer), T_gen = I · mean over the
replicas of (1 - i). In a stream both stages work at once and the slower one sets I; its idle share is near 0, so the
other one's T is what it would need alone.

Where the stages take turns (Colocated, Batch, StreamSync) a process is busy in one part of a step and idle in the other:
its share is right only over whole steps. Polls come seconds after a step's end, clocks with heartbeats, seconds late. So
a window counts once each clock has gone on by its whole steps, but for `BLUR_SHARE`; else it grows.
"""

from collections.abc import Sequence
from dataclasses import replace

from streamrl_operator.autoscaler.values import Clock, Observation, Pace, Replica

BLUR_SHARE = 0.1
"""By so much of the window a clock may have gone on less or more: this bounds what a part of a step does to its share."""


def busy_share(before: Clock | None, now: Clock | None, *, window_s: float) -> float | None:
    """Share of its time in which the process was not idle; None if it started anew or has not told of just the window."""
    if before is None or now is None:
        return None
    wall_s, idle_s = now.wall_s - before.wall_s, now.idle_s - before.idle_s
    if wall_s <= 0 or idle_s < 0 or abs(wall_s - window_s) > BLUR_SHARE * window_s:
        return None
    return max(0.0, 1.0 - idle_s / wall_s)


def pool_share(before: Observation, now: Observation, *, window_s: float) -> float | None:
    """Mean of `busy_share` over the replicas; None if they are not the same ones, or one of them has no share."""
    if not now.replicas or [one.name for one in before.replicas] != [one.name for one in now.replicas]:
        return None
    pairs = zip(before.replicas, now.replicas, strict=True)
    return _mean([busy_share(one.clock, other.clock, window_s=window_s) for one, other in pairs])


def has_begun_again(before: Observation, now: Observation) -> bool:
    """Whether a process started anew, or the trainer went back to its checkpoint: no measure spans that."""
    clocks = [(one.clock, other.clock) for one, other in zip(before.replicas, now.replicas, strict=False)]
    if before.trainer is not None and now.trainer is not None:
        clocks.append((before.trainer, now.trainer))
    return (
        now.attempt != before.attempt
        or now.step < before.step
        or any(later.wall_s < earlier.wall_s or later.idle_s < earlier.idle_s for earlier, later in clocks)
    )


def measure(before: Observation, now: Observation, *, waits: float = 1.0) -> Pace | None:
    """The pace between the two; None while no whole step or not every process's clock is known.

    `waits`: share of the looks in between at which samples waited for a slot, or were to wait for another reason.
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
    return Pace(
        replicas=len(now.replicas),
        interval_s=interval_s,
        t_gen_s=interval_s * generating,
        t_train_s=interval_s * training,
        tokens_per_s=_tokens_per_s(before, now),
        waits=full,
        batch=slots * (use - full) / (1 - full) if full < 1 else slots,
        latency=now.latency,
    )


def blended(before: Pace | None, now: Pace) -> Pace:
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


def _pairs(before: Observation, now: Observation) -> list[tuple[Replica, Replica]]:
    return list(zip(before.replicas, now.replicas, strict=True))


def _tokens_per_s(before: Observation, now: Observation) -> float:
    return sum(
        (later.tokens - one.tokens) / (later.clock.wall_s - one.clock.wall_s) for one, later in _pairs(before, now)
    )


def _slot_use(before: Observation, now: Observation) -> float:
    """Share of the time of generating that slots were in use, or not but samples waited for one."""
    busy_s = sum(later.busy_s - one.busy_s for one, later in _pairs(before, now))
    skew_s = sum(later.skew_s - one.skew_s for one, later in _pairs(before, now))
    return busy_s / (busy_s + skew_s) if busy_s > 0 else 1.0


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known and len(known) == len(shares) else None
