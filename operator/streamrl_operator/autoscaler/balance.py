"""Keeps generation as fast as training: one replica more or less at a time, at most once a cool-down.

What is decided, in this order: bounds; is everything known; has the cool-down passed; growth, if it is worth it; shrinking.
A window of measurement begins with the first end of a step that all wanted replicas have seen, and ends with each pace
that could be measured: whether the pool is too small or too large rests on newer steps alone. What a replica brings is
predicted and judged by the last windows together.
"""

from dataclasses import replace

from streamrl.spec.generators import AutoScaling, Scaling
from streamrl_operator.autoscaler import gains, growth, shrinking
from streamrl_operator.autoscaler.pace import blended, has_begun_again, measure
from streamrl_operator.autoscaler.splitting import curve_of
from streamrl_operator.autoscaler.values import Curve, Decision, Gains, Observation, Pace, State, inverse


def decide(
    scaling: Scaling, *, state: State, seen: Observation | None, now_s: float, curve: Curve = inverse
) -> tuple[Decision, State]:
    """The decision for a pool with `scaling.auto`; see `Policy`."""
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
        wanted, reason = growth.by_queue(base, seen, interval_s=last_s)
        return _grow(state, auto=auto, now_s=now_s, reason=reason) if wanted else _stay(state, reason)
    return _by_pace(pace, auto=auto, state=state, now_s=now_s, curve=curve)


def _measured(base: Observation, seen: Observation, *, state: State) -> tuple[Pace | None, State]:
    """The pace of the window if it ends now, and what is remembered of this look."""
    looks, queued = state.looks + 1, state.queued + (seen.waiting > 0)
    pace = measure(base, seen, waits=(queued + 1) / (looks + 1))  # few looks are no proof that nothing waits
    if pace is None:
        return None, replace(state, looks=looks, queued=queued)
    return pace, replace(state, base=seen, pace=blended(state.pace, pace), looks=0, queued=0)


def _by_pace(pace: Pace, *, auto: AutoScaling, state: State, now_s: float, curve: Curve) -> tuple[Decision, State]:
    recent = state.pace or pace
    state = replace(state, gains=gains.judged(state.gains, recent))
    wanted, why = growth.by_pace(pace, curve=curve)
    held = (state.gains.why or growth.too_little(recent, curve=curve_of(recent))) if wanted else ""
    state = replace(state, held=held)
    if held:
        return _stay(replace(state, slack_windows=0), f"{why}, but {held}")
    if wanted:
        return _grow(replace(state, slack_windows=0), auto=auto, now_s=now_s, reason=why)
    enough, why_less = shrinking.has_slack(pace, curve=curve)
    if not enough:
        return _stay(replace(state, slack_windows=0), f"{why}; {why_less}")
    if state.wanted <= auto.min_replicas:
        return _stay(state, f"{why_less}, but minReplicas is {auto.min_replicas}")
    windows = state.slack_windows + 1
    if windows < shrinking.PATIENCE_WINDOWS:
        told = f"{why_less}, in {windows} of {shrinking.PATIENCE_WINDOWS} windows"
        return _stay(replace(state, slack_windows=windows), told)
    return _change(state.wanted - 1, state=state, now_s=now_s, reason=why_less)


def _grow(state: State, *, auto: AutoScaling, now_s: float, reason: str) -> tuple[Decision, State]:
    if state.wanted >= auto.max_replicas:
        return _stay(state, f"{reason}, but maxReplicas is {auto.max_replicas}")
    expecting = state.gains
    if state.pace is not None:
        fall_s = growth.fall_s(state.pace, curve=curve_of(state.pace))
        expecting = gains.asked(state.gains, pace=state.pace, fall_s=fall_s)
    return _change(state.wanted + 1, state=state, now_s=now_s, reason=reason, expecting=expecting)


def _fresh(state: State) -> State:
    """Without a window: what was measured was of other replicas, or too old."""
    return replace(state, base=None, aligned=False, looks=0, queued=0, slack_windows=0)


def _stay(state: State, reason: str) -> tuple[Decision, State]:
    return Decision(replicas=state.wanted, reason=reason, held=state.held), state


def _change(
    replicas: int, *, state: State, now_s: float, reason: str, expecting: Gains | None = None
) -> tuple[Decision, State]:
    after = replace(_fresh(state), wanted=replicas, changed_s=now_s, gains=expecting or Gains(), held="")
    return Decision(replicas=replicas, reason=reason), after
