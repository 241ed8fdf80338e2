"""When a pool gives one replica back. The paper leaves it open; this is ours.

A replica goes when the others would still be done before the trainer, with a margin: T_gen(n - 1) ≤ (1 - m) T_train.
With the rule of growth (T_gen(n + 1) ≥ T_train) this leaves a dead band, since T_gen falls with n. After going to n - 1,
growing back needs T_gen(n) ≥ T_train, but T_gen(n) < T_gen(n - 1) ≤ (1 - m) T_train. After growing to n, going back
needs T_gen(n - 1) ≤ (1 - m) T_train, but T_gen(n - 1) > T_gen(n) ≥ T_train.
"""

from streamrl_operator.autoscaler.values import Curve, Pace

MARGIN = 0.1
"""Least lead of generation over training, as a share of T_train, that the remaining replicas must keep."""
PATIENCE_WINDOWS = 2
"""So many windows in a row must agree: one step of short answers is no reason to let a replica go."""


def has_slack(pace: Pace, *, curve: Curve) -> tuple[bool, str]:
    """Whether one replica less would be enough, and the numbers."""
    if pace.replicas < 2:  # noqa: PLR2004 - the last one stays
        return False, "the last replica stays"
    left_s = curve(pace.t_gen_s, pace.replicas, pace.replicas - 1)
    most_s = (1 - MARGIN) * pace.t_train_s
    enough = left_s <= most_s
    sign = "≤" if enough else ">"
    text = f"T_gen {left_s:.3g} s with {pace.replicas - 1} {sign} {most_s:.3g} s ({1 - MARGIN:.0%} of T_train {pace.t_train_s:.3g} s)"
    return enough, text
