"""Keeps generation as fast as training: one replica more or less at a time, at most once a cool-down.

What is decided, in this order: bounds; is everything known; has the cool-down passed; growth; shrinking. A window of
measurement begins with the first end of a step that all wanted replicas have seen, and ends with each pace that could
be measured: the next decision rests on newer steps alone.
"""

from dataclasses import replace

from streamrl.spec.generators import AutoScaling, Scaling
from streamrl_operator.autoscaler import growth, shrinking
from streamrl_operator.autoscaler.pace import has_begun_again, measure
from streamrl_operator.autoscaler.values import Curve, Decision, Observation, Pace, State, inverse


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
    if state.base is None or has_begun_again(state.base, seen):
        return _stay(replace(_fresh(state), base=seen), "waits for the end of a step")
    if not state.aligned:
        if seen.step == state.base.step:
            return _stay(state, "waits for the end of a step")
        return _stay(replace(state, base=seen, aligned=True), "measuring begins")
    pace = measure(state.base, seen)
    cooling_s = 0.0 if state.changed_s is None else state.changed_s + auto.cooldown_seconds - now_s
    if cooling_s > 0:
        after = state if pace is None else replace(state, base=seen, interval_s=pace.interval_s, slack_windows=0)
        return _stay(after, f"cool-down for another {cooling_s:.3g} s")
    if pace is None:
        wanted, reason = growth.by_queue(state.base, seen, interval_s=state.interval_s)
        return _grow(state, auto=auto, now_s=now_s, reason=reason) if wanted else _stay(state, reason)
    measured = replace(state, base=seen, interval_s=pace.interval_s)
    return _by_pace(pace, auto=auto, state=measured, now_s=now_s, curve=curve)


def _by_pace(pace: Pace, *, auto: AutoScaling, state: State, now_s: float, curve: Curve) -> tuple[Decision, State]:
    wanted, why = growth.by_pace(pace, curve=curve)
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
    return _change(state.wanted + 1, state=state, now_s=now_s, reason=reason)


def _fresh(state: State) -> State:
    """Without a window: what was measured was of other replicas, or too old."""
    return replace(state, base=None, aligned=False, slack_windows=0)


def _stay(state: State, reason: str) -> tuple[Decision, State]:
    return Decision(replicas=state.wanted, reason=reason), state


def _change(replicas: int, *, state: State, now_s: float, reason: str) -> tuple[Decision, State]:
    return Decision(replicas=replicas, reason=reason), replace(_fresh(state), wanted=replicas, changed_s=now_s)
