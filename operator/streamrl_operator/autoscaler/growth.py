"""When a pool gets one more replica.

Paper (StreamRL, section 4): Δ = T_gen - T_train, Δ' = predicted fall of T_gen by one more unit; add it when Δ ≥ Δ',
that is when generation would still not be the faster stage with it. Δ' is that of work which splits evenly, the most that it can be.
Ours: what is seen of the run (`splitting.py`) must promise a part of that, and what was added before must have brought it (`gains.py`).
"""

from streamrl_operator.autoscaler.pace import busy_share
from streamrl_operator.autoscaler.values import Curve, Observation, Pace, inverse

OVERDUE_INTERVALS = 2.0
"""A step that takes so many times the last interval is overdue: the queue decides before its pace is known."""
WAITING_SHARE = 0.5
"""Of an overdue step: the trainer must have stood idle for more than this share of it."""

LEAST_SHARE = 1 / 3
"""Of what a replica would bring if all work split evenly: with less, its answers cost three times as much as the others'."""


def fall_s(pace: Pace, *, curve: Curve) -> float:
    """Δ': what one more replica is predicted to take off T_gen."""
    return pace.t_gen_s - curve(pace.t_gen_s, pace.replicas, pace.replicas + 1)


def by_pace(pace: Pace, *, curve: Curve) -> tuple[bool, str]:
    """Whether Δ ≥ Δ', and the numbers."""
    gap_s, falls_s = pace.t_gen_s - pace.t_train_s, fall_s(pace, curve=curve)
    wanted = gap_s > 0 and gap_s >= falls_s
    sign = "≥" if gap_s >= falls_s else "<"
    times = f"T_gen {pace.t_gen_s:.3g} s, T_train {pace.t_train_s:.3g} s"
    return wanted, f"{times}: Δ {gap_s:.3g} s {sign} Δ' {falls_s:.3g} s of replica {pace.replicas + 1}"


def too_little(pace: Pace, *, curve: Curve) -> str:
    """Why one more replica is not worth its cost although generation is the slower stage; empty: it is."""
    even_s = fall_s(pace, curve=inverse)
    if fall_s(pace, curve=curve) >= LEAST_SHARE * even_s:
        return ""
    return "one more would bring less than a third of an even split: few samples wait for a slot, the longest answers set the time"


def by_queue(before: Observation, now: Observation, *, interval_s: float | None) -> tuple[bool, str]:
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
