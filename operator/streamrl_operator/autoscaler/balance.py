"""The policy `auto`: keeps generation as fast as training, one replica more or less at a time, at most once a cool-down.

What is decided, in this order: bounds; is everything known; has the cool-down passed; growth, if it is worth it; shrinking.
A window of measurement begins with the first end of a step that all wanted replicas have seen, and ends with each pace that could be measured.

Growth is the paper's (StreamRL, section 4): Δ = T_gen - T_train, Δ' = predicted fall of T_gen by one more unit; add it when Δ ≥ Δ'. Ours: what
is seen of the run must promise a part of an even split, and what was added before must have brought it (`pace.py`). The prediction: while
samples wait for a slot, n replicas of m do n/m of the work; while none waits, another number of replicas changes the batch alone:

    T_gen(m) = T_gen(n) (w n/m + (1 - w) PTL(a n/m) / PTL(a))

with w the share of the time in which samples wait, and a the mean batch of the rest. Where no PTL is known, all splits evenly.
"""

from dataclasses import replace

from streamrl.spec.generators import AutoScaling, Scaling
from streamrl_operator.autoscaler.pace import asked, blended, busy_share, has_begun_again, judged, measure
from streamrl_operator.autoscaler.values import Decision, Gains, PoolObservation, ScalingState, StagePace


def decide(
    scaling: Scaling, *, state: ScalingState, seen: PoolObservation | None, now_s: float
) -> tuple[Decision, ScalingState]:
    """The decision for a pool with `scaling.auto`; see `ScalingPolicy`."""
    auto = scaling.value
    assert isinstance(auto, AutoScaling), "the registry maps `auto` to this policy"
    bounded = min(max(state.wanted, auto.min_replicas), auto.max_replicas)
    if bounded != state.wanted:
        return _change(
            bounded, state=state, now_s=now_s, reason=f"bounds are {auto.min_replicas} to {auto.max_replicas}"
        )
    if seen is None:
        return _stay(state, "the scheduler's numbers are not known")
    if len(seen.replicas) != state.wanted:
        return _stay(_fresh(state), f"{len(seen.replicas)} of {state.wanted} replicas are connected")
    if seen.trainer is None:
        return _stay(_fresh(state), "no trainer is connected")
    base = state.base
    if base is None or has_begun_again(base, seen):
        return _stay(replace(_fresh(state), base=seen), "waits for the end of a step")
    if not state.aligned:
        if seen.step == base.step:
            return _stay(state, "waits for the end of a step")
        return _stay(replace(state, base=seen, aligned=True), "measuring begins")
    pace, state = _measured(base, seen, state=state)
    cooling_s = 0.0 if state.changed_s is None else state.changed_s + auto.cooldown_seconds - now_s
    if cooling_s > 0:
        after = state if pace is None else replace(state, slack_windows=0)
        return _stay(after, f"cool-down for another {cooling_s:.3g} s")
    if pace is None:
        last_s = None if state.pace is None else state.pace.interval_s
        wanted, reason = by_queue(base, seen, interval_s=last_s)
        return _grow(state, auto=auto, now_s=now_s, reason=reason) if wanted else _stay(state, reason)
    return _by_pace(pace, auto=auto, state=state, now_s=now_s)


def _measured(
    base: PoolObservation, seen: PoolObservation, *, state: ScalingState
) -> tuple[StagePace | None, ScalingState]:
    """The pace of the window if it ends now, and what is remembered of this reconcile."""
    looks, queued = state.looks + 1, state.queued + (seen.waiting > 0)
    pace = measure(base, seen, waits=(queued + 1) / (looks + 1))  # few looks are no proof that nothing waits
    if pace is None:
        return None, replace(state, looks=looks, queued=queued)
    return pace, replace(state, base=seen, pace=blended(state.pace, pace), looks=0, queued=0)


def _by_pace(pace: StagePace, *, auto: AutoScaling, state: ScalingState, now_s: float) -> tuple[Decision, ScalingState]:
    recent = state.pace or pace
    state = replace(state, gains=judged(state.gains, recent))
    wanted, why = by_pace(pace)
    held = (state.gains.why or too_little(recent)) if wanted else ""
    state = replace(state, held=held)
    if held:
        return _stay(replace(state, slack_windows=0), f"{why}, but {held}")
    if wanted:
        return _grow(replace(state, slack_windows=0), auto=auto, now_s=now_s, reason=why)
    enough, why_less = has_slack(pace)
    if not enough:
        return _stay(replace(state, slack_windows=0), f"{why}; {why_less}")
    if state.wanted <= auto.min_replicas:
        return _stay(state, f"{why_less}, but minReplicas is {auto.min_replicas}")
    windows = state.slack_windows + 1
    if windows < PATIENCE_WINDOWS:
        reported = f"{why_less}, in {windows} of {PATIENCE_WINDOWS} windows"
        return _stay(replace(state, slack_windows=windows), reported)
    return _change(state.wanted - 1, state=state, now_s=now_s, reason=why_less)


def _grow(state: ScalingState, *, auto: AutoScaling, now_s: float, reason: str) -> tuple[Decision, ScalingState]:
    if state.wanted >= auto.max_replicas:
        return _stay(state, f"{reason}, but maxReplicas is {auto.max_replicas}")
    expecting = state.gains
    if state.pace is not None:
        fall_s = state.pace.t_gen_s - predicted_s(state.pace, replicas=state.pace.replicas + 1)
        expecting = asked(state.gains, pace=state.pace, fall_s=fall_s)
    return _change(state.wanted + 1, state=state, now_s=now_s, reason=reason, expecting=expecting)


def _fresh(state: ScalingState) -> ScalingState:
    """Without a window: what was measured was of other replicas, or too old."""
    return replace(state, base=None, aligned=False, looks=0, queued=0, slack_windows=0)


def _stay(state: ScalingState, reason: str) -> tuple[Decision, ScalingState]:
    return Decision(replicas=state.wanted, reason=reason, held=state.held), state


def _change(
    replicas: int, *, state: ScalingState, now_s: float, reason: str, expecting: Gains | None = None
) -> tuple[Decision, ScalingState]:
    after = replace(_fresh(state), wanted=replicas, changed_s=now_s, gains=expecting or Gains(), held="")
    return Decision(replicas=replicas, reason=reason), after


OVERDUE_INTERVALS = 2.0
"""A step that takes so many times the last interval is overdue: the queue decides before its pace is known."""
WAITING_SHARE = 0.5
"""Of an overdue step: the trainer must have stood idle for more than this share of it."""

LEAST_SHARE = 1 / 3
"""Of what a replica would bring if all work split evenly: with less, its answers cost three times as much as the others'."""


def even_s(pace: StagePace, *, replicas: int) -> float:
    """T_gen with so many replicas where all work splits evenly: the most that another can bring."""
    return pace.t_gen_s * pace.replicas / replicas


def predicted_s(pace: StagePace, *, replicas: int) -> float:
    """T_gen with so many replicas, by what was seen of the slots."""
    if pace.latency is None:
        return even_s(pace, replicas=replicas)
    share, batch = pace.replicas / replicas, max(pace.batch, 1.0)
    slower = pace.latency.at(batch * share) / pace.latency.at(batch)
    return pace.t_gen_s * (pace.waits * share + (1 - pace.waits) * slower)


def by_pace(pace: StagePace) -> tuple[bool, str]:
    """Whether Δ ≥ Δ', and the numbers."""
    gap_s, falls_s = pace.t_gen_s - pace.t_train_s, pace.t_gen_s - even_s(pace, replicas=pace.replicas + 1)
    wanted = gap_s > 0 and gap_s >= falls_s
    sign = "≥" if gap_s >= falls_s else "<"
    times = f"T_gen {pace.t_gen_s:.3g} s, T_train {pace.t_train_s:.3g} s"
    return wanted, f"{times}: Δ {gap_s:.3g} s {sign} Δ' {falls_s:.3g} s of replica {pace.replicas + 1}"


def too_little(pace: StagePace) -> str:
    """Why one more replica is not worth its cost although generation is the slower stage; empty: it is."""
    more = pace.replicas + 1
    if pace.t_gen_s - predicted_s(pace, replicas=more) >= LEAST_SHARE * (pace.t_gen_s - even_s(pace, replicas=more)):
        return ""
    return "one more would bring less than a third of an even split: few samples wait for a slot, the longest answers set the time"


def by_queue(before: PoolObservation, now: PoolObservation, *, interval_s: float | None) -> tuple[bool, str]:
    """Whether the step is overdue, a whole replica's samples wait, and the trainer has little to do.

    Not sooner: each step begins with a full queue and an idle trainer, also where training is the slower stage.
    """
    window_s, slots = now.at_s - before.at_s, max((one.slots for one in now.replicas), default=0)
    training = busy_share(before.trainer, now.trainer, window_s=window_s)
    since_s = window_s if now.step == before.step else now.since_step_s
    overdue = interval_s is not None and since_s >= OVERDUE_INTERVALS * interval_s
    if training is None or not overdue:
        return False, "the pace is not known yet"
    waits = 1 - training
    wanted = slots > 0 and now.backlog >= slots and waits > WAITING_SHARE
    last = f"the step takes {since_s:.3g} s, steps took {interval_s:.3g} s"
    return (
        wanted,
        f"{last}; {now.backlog} samples wait for a slot (a replica has {slots}), the trainer idle {waits:.0%}",
    )


MARGIN = 0.1
"""Least lead of generation over training, as a share of T_train, that the remaining replicas must keep."""
PATIENCE_WINDOWS = 2
"""So many windows in a row must agree: one step of short answers is no reason to let a replica go."""


def has_slack(pace: StagePace) -> tuple[bool, str]:
    """Whether one replica less would be enough, and the numbers."""
    if pace.replicas < 2:  # noqa: PLR2004 - the last one stays
        return False, "the last replica stays"
    left_s = even_s(pace, replicas=pace.replicas - 1)
    most_s = (1 - MARGIN) * pace.t_train_s
    enough = left_s <= most_s
    sign = "≤" if enough else ">"
    text = f"T_gen {left_s:.3g} s with {pace.replicas - 1} {sign} {most_s:.3g} s ({1 - MARGIN:.0%} of T_train {pace.t_train_s:.3g} s)"
    return enough, text
